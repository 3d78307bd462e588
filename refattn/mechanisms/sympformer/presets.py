"""The authors' variants by the names that they have there, with the settings of their published runs.

Sixteen are those of their first program, two the reduced linear attention of their second, ten the methods of their
later manuscript, and eight those of its study of looped layers, where ``_tied`` is two layers passed four times and
``_untied`` eight layers. ``refattn train sympformer --set
preset=presymp_euler`` takes one, and further settings change it. What the program gets wrong stays right: forces are
those of the prefix, sums are divided by the tokens that are attended, steps of several layers have their ratio, and
Strang's potential attracts. Their text is cut into 50,304 tokens, that of the trainer into bytes; their eight layers
start as copies of two, here each for itself.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), their program of March 2026 with its jobs, that of autumn 2026 with
the configuration of its linear screen, and the configurations of the manuscript of October 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST, SECOND = 0.3, 0.01
"""Where the steps start: of Euler's methods, and of all others and of linear attention."""

RUN: Mapping[str, Any] = {
    "context": 128,
    "width": 64,
    "heads": 4,
    "layers": 4,
    "steps": 1001,
    "batch": 72,
    "accumulate": 12,
    "learning_rate": 3e-4,
    "warmup": 150,
    "floor": 0.4,
    "weight_decay": 0.1,
    "decayed": "embeddings",
    "scalar_rate": 100.0,
}
BLOCK: Mapping[str, Any] = {
    "damping": "loglin(c_log=3.0, c_lin=0.0001, clip=12.0)",
    "mlp": "attention_velocity",
    "spread": 0.02,
    "detach": True,
}
SOFTMAX = {"look_ahead": True}
LINEAR = {"oracle": "linear", "start": "table"}
YURII = {"look_ahead": True, "start": "table", "mlp": "momentum(shared_norm=True)"}

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "baseline": ("classical", {"mlp": "plain"}),
    "yurii_lt": ("lie_trotter", YURII),
    "plain_euler": (f"plain_euler(step={FIRST})", SOFTMAX),
    "presymp_euler": (f"explicit_euler(step={FIRST})", SOFTMAX),
    "presymp_exp_euler": (f"exponential_euler(step={FIRST})", SOFTMAX),
    "presymp": (f"presymplectic(step={SECOND}, xi=0.5, angle=1.0)", SOFTMAX),
    "presymp_ab2": (f"ab2(step={SECOND})", SOFTMAX),
    "presymp_etd_ab2": (f"etd_ab2(step={SECOND})", SOFTMAX),
    "presymp_strang": (f"strang(step={SECOND}, xi=0.5, angle=1.0)", SOFTMAX),
    "lin_baseline": (f"classical(step={SECOND})", {"oracle": "linear", "mlp": "plain"}),
    "lin_yurii": (f"lie_trotter(step={SECOND})", {**LINEAR, **YURII}),
    "lin_euler": (f"plain_euler(step={SECOND})", LINEAR),
    "lin_presymp": (f"presymplectic_euler(step={SECOND})", LINEAR),
    "lin_exp_euler": (f"exponential_euler(step={SECOND})", LINEAR),
    "lin_ab2": (f"ab2(step={SECOND})", LINEAR),
    "lin_etd_ab2": (f"etd_ab2(step={SECOND})", LINEAR),
}
"""The integrator of each, and what else its block has."""

LATER: Mapping[str, Any] = {
    **RUN,
    **{"steps": 6103, "batch": 128, "accumulate": 16, "learning_rate": 6e-4, "warmup": 610, "floor": 0.1},
    "scalar_rate": 10.0,
}
LATER_LINEAR: Mapping[str, Any] = {**LATER, "context": 512, "batch": 32, "accumulate": 8}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "B": {"integrator": "classical", "mlp": "plain"},
    "Y": {"integrator": "lie_trotter", **YURII},
    "H0": {"integrator": "lie_trotter", **YURII, "look_ahead": False},
    "H1": {"integrator": "lie_trotter(connection='h1')", **YURII, "look_ahead": False},
    "R2": {"integrator": "lie_trotter(connection='r2')", **YURII, "look_ahead": False},
}
"""The methods of the manuscript, with softmax attention; with linear attention of heads their names end with _L."""
REDUCED: Mapping[str, Any] = {
    **LATER,
    **{"steps": 1220, "warmup": 122},
    "block": {
        "oracle": "reduced",
        "damping": "log(c_log=3.0, learned=False)",
        "mlp": "velocity",
        "normalise": "none",
        "spread": 0.02,
        "detach": True,
    },
}
"""Of the second program: 20 million tokens, fixed damping, no norm of the matrices."""
LOOPED: Mapping[str, Any] = {**LATER_LINEAR, "width": 256, "heads": 8}

PRESETS: dict[str, Mapping[str, Any]] = {
    **{
        name: {**RUN, "block": {**BLOCK, "integrator": integrator, **options}}
        for name, (integrator, options) in VARIANTS.items()
    },
    **{name: {**LATER, "block": {"spread": 0.02, **block}} for name, block in METHODS.items()},
    **{
        f"{name}_L": {**LATER_LINEAR, "block": {"spread": 0.02, "oracle": "signed", **block}}
        for name, block in METHODS.items()
    },
    **{
        f"lin_reduced_{name}": {**REDUCED, "block": {**REDUCED["block"], "integrator": f"{integrator}(step=0.1)"}}
        for name, integrator in (("exp_mid", "exponential_midpoint"), ("ab2", "ab2"))
    },
    **{
        f"{name}_{layout}": {**LOOPED, **depth, "block": {"spread": 0.02, **METHODS[name]}}
        for name in ("B", "Y", "H0", "R2")
        for layout, depth in (("tied", {"layers": 2, "loops": 4}), ("untied", {"layers": 8}))
    },
}

_CONFIGURATIONS = "code, the configurations of the manuscript of October 2026"


def _place(preset: str) -> str:
    if preset in VARIANTS:
        return "code, the program of March 2026 and its jobs"
    return "code, the program of autumn 2026 and its linear screen" if preset.startswith("lin_") else _CONFIGURATIONS


WHOSE: dict[str, Mapping[str, str]] = {
    preset: {
        name: "ours, portions of a batch save memory and change no result" if name == "accumulate" else _place(preset)
        for name in (*(n for n in settings if n != "block"), *(f"block.{option}" for option in settings["block"]))
    }
    for preset, settings in PRESETS.items()
}
"""Whose each setting is: all are the authors', but for the portions that a batch is cut into."""
