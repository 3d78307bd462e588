"""The authors' variants by name: which there are, that they build, and that their sizes are those of the program."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from refattn import mechanism, model
from refattn.mechanisms.sympformer.config import name_of
from refattn.mechanisms.sympformer.mlp import AttentionVelocity
from refattn.mechanisms.sympformer.presets import PRESETS, VARIANTS
from refattn.train import metrics, settings
from tests.rows import holds
from tests.train.runs import train

SOFTMAX = ("presymp", "presymp_euler", "presymp_exp_euler", "presymp_ab2", "presymp_etd_ab2", "presymp_strang")
LINEAR = ("lin_baseline", "lin_yurii", "lin_euler", "lin_presymp", "lin_exp_euler", "lin_ab2", "lin_etd_ab2")


def test_these_are_those_of_the_programs_and_of_the_manuscript() -> None:
    later = {f"{name}{of}" for name in ("B", "Y", "H0", "H1", "R2") for of in ("", "_L")}
    looped = {f"{name}_{layout}" for name in ("B", "Y", "H0", "R2") for layout in ("tied", "untied")}
    reduced = {"lin_reduced_exp_mid", "lin_reduced_ab2"}
    assert set(PRESETS) == {"baseline", "yurii_lt", "plain_euler", *SOFTMAX, *LINEAR, *later, *looped, *reduced}
    assert mechanism("sympformer").presets == PRESETS
    compared = [name for name in VARIANTS if name not in STEPS and name in PUBLISHED]
    assert len(VARIANTS) == 16 and len(compared) == 4
    said = "as said; the four that are compared with have the numbers of parameters of the program"
    assert holds("sympformer", "sixteen variants by name, as published") == said


STEPS = {
    **{"plain_euler": ("plain_euler", 0.3), "presymp_euler": ("explicit_euler", 0.3)},
    **{"presymp_exp_euler": ("exponential_euler", 0.3), "presymp": ("presymplectic", 0.01)},
    **{"presymp_ab2": ("ab2", 0.01), "presymp_etd_ab2": ("etd_ab2", 0.01), "presymp_strang": ("strang", 0.01)},
    **{"lin_euler": ("plain_euler", 0.01), "lin_presymp": ("presymplectic_euler", 0.01)},
    **{"lin_exp_euler": ("exponential_euler", 0.01), "lin_ab2": ("ab2", 0.01), "lin_etd_ab2": ("etd_ab2", 0.01)},
}
"""By name: the integrator, and where its steps start. The other four of the sixteen are compared with."""


@pytest.mark.parametrize("name", STEPS)
def test_variants_have_what_they_are_named_after(name: str) -> None:
    linear, block = name.startswith("lin_"), settings.build("sympformer", {"preset": name}).model.block(1)
    assert (name_of(type(block.integrator)), block.integrator.step) == STEPS[name]
    assert (name_of(type(block.oracle)), block.look_ahead) == (("linear", False) if linear else ("softmax", True))
    assert (block.start, type(block.mlp)) == ("table" if linear else "rest", AttentionVelocity)


FIRST: dict[str, object] = {
    "context": 128,
    "width": 64,
    "heads": 4,
    "layers": 4,
    "steps": 1001,
    "batch": 72,
    "accumulate": 12,
}
LATER: dict[str, object] = FIRST | {"steps": 6103, "batch": 128, "accumulate": 16}
LINEAR_HEADS = LATER | {"context": 512, "batch": 32, "accumulate": 8}
PLANS: dict[str, dict[str, object]] = {
    "first": {"learning_rate": 3e-4, "warmup": 150, "floor": 0.4, "scalar_rate": 100.0},
    "later": {"learning_rate": 6e-4, "warmup": 610, "floor": 0.1, "scalar_rate": 10.0},
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_numbers_of_a_run_are_the_authors(name: str) -> None:
    """Of the first program and its jobs, or of the later configurations: rates, decay, sizes and lengths."""
    if name in VARIANTS:
        wanted: dict[str, object] = FIRST | PLANS["first"]
    elif name.startswith("lin_reduced"):
        wanted = LATER | PLANS["later"] | {"steps": 1220, "warmup": 122}
    else:
        wanted = (LATER if name in ("B", "Y", "H0", "H1", "R2") else LINEAR_HEADS) | PLANS["later"]
    if name.endswith("tied"):
        wanted |= {
            "width": 256,
            "heads": 8,
            **({"layers": 8} if name.endswith("untied") else {"layers": 2, "loops": 4}),
        }
    wanted |= {"weight_decay": 0.1, "decayed": "embeddings"}
    assert {key: value for key, value in PRESETS[name].items() if key != "block"} == wanted


@pytest.mark.parametrize("name", PRESETS)
def test_every_layer_of_a_preset_has_a_configuration(name: str) -> None:
    chosen = settings.Settings("sympformer", **{**PRESETS[name], "block": {}})
    assert chosen.decayed == "embeddings" and chosen.batch * chosen.context in (72 * 128, 16_384)
    config = model.Config("sympformer", width=64, options=PRESETS[name]["block"])  # checks every layer
    assert config.block(0).spread == 0.02


PUBLISHED = {
    **{"baseline": 3_424_832, "lin_baseline": 3_392_068, "yurii_lt": 6_652_760, "lin_yurii": 6_619_996},
    **{"B": 3_424_832, "Y": 6_652_760, "H0": 6_652_756, "H1": 6_652_756, "R2": 6_652_756},
    **{"B_L": 3_449_408, "Y_L": 6_701_912, "H0_L": 6_701_908, "H1_L": 6_701_908, "R2_L": 6_701_908},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_numbers_of_parameters_of_the_program(name: str) -> None:
    """But for the vocabulary and the bias of the last norm."""
    preset = PRESETS[name]
    config = model.Config("sympformer", context=preset["context"], width=64, options=preset["block"])
    blocks = sum(math.prod(shape) for n in range(4) for shape in config.block(n).shapes().values())
    embeddings = (256 + preset["context"]) * 64 + 2 * 64  # of the tokens and places; the last norm
    moves = preset["block"].get("start") == "table"
    found = blocks + embeddings + (1 + moves) * (50_304 - 256) * 64
    assert found - 64 == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "published"), [("B_tied", 14_583_040), ("H0_tied", 27_592_458), ("R2_tied", 27_592_458)]
)
def test_tied_models_have_the_numbers_of_parameters_of_the_manuscript(name: str, published: int) -> None:
    """But for the vocabulary and the bias of the last norm."""
    built = settings.build("sympformer", {"preset": name})
    config, moves = built.model, "start" in built.block
    assert (config.layers, config.depth, config.width) == (2, 8, 256)
    blocks = 0
    for layer in range(2):
        shapes = [config.block(place).shapes() for place in range(layer, 8, 2)]
        blocks += sum(math.prod(shape) for shape in {n: x for each in shapes for n, x in each.items()}.values())
    embeddings = (256 + 512) * 256 + 256 + (1 + moves) * (50_304 - 256) * 256
    assert blocks + embeddings == published


def test_the_reduced_variants_are_those_of_the_linear_screen() -> None:
    built = settings.build("sympformer", {"preset": "lin_reduced_ab2"})
    block = built.model.block(1)
    assert (built.steps, built.batch * built.context, built.scalar_rate) == (20_000_000 // 16_384, 16_384, 10.0)
    numbers = block.numbers()
    assert {n: numbers[n].start for n in ("h_x", "h_y", "c_log")} == {"h_x": 0.1, "h_y": 0.1, "c_log": 3.0}
    assert not numbers["c_log"].learned
    blocks = {name: dict(PRESETS[f"lin_reduced_{name}"]["block"]) for name in ("exp_mid", "ab2")}
    steps = {name: block.pop("integrator") for name, block in blocks.items()}
    assert steps == {"exp_mid": "exponential_midpoint(step=0.1)", "ab2": "ab2(step=0.1)"}
    assert blocks["exp_mid"] == blocks["ab2"] and (block.matrices, block.normalise) == (True, "none")


def test_what_is_given_beside_a_preset_holds() -> None:
    given = {"preset": "presymp_euler", "steps": 7, "block": {"mlp": "none"}}
    found = settings.expanded("sympformer", given)
    assert found["steps"] == 7 and found["learning_rate"] == 3e-4 and "preset" not in found
    assert found["block"]["mlp"] == "none" and found["block"]["integrator"] == "explicit_euler(step=0.3)"
    built = settings.build("sympformer", {**given, "width": 8})
    assert built.optimiser.group_of("layers.0.block.numbers.h_y", np.ones(1)).rate == 100.0


def test_the_trainer_writes_down_what_numbers_have_come_to(tmp_path: Path) -> None:
    """At the scores, a number for each layer: of a step of no size those that they start with."""
    (tmp_path / "text").write_text("to be or not to be, " * 50)
    tiny = {
        "width": 4,
        "heads": 2,
        "layers": 2,
        "context": 8,
        "batch": 2,
        "accumulate": 1,
        "steps": 1,
        "score_bytes": 60,
    }
    given = {"preset": "presymp", "data": str(tmp_path / "text"), "learning_rate": 1e-9, "sample_bytes": 0, **tiny}
    train(settings.build("sympformer", given), tmp_path / "run")
    (row,) = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert set(row["learned"]) == {"h_x", "h_y", "c_log", "c_lin", "look", "mu", "gamma", "xi"}
    for name, start in (("h_x", 0.01), ("xi", 0.5), ("c_log", 3.0), ("look", 1e-3)):
        np.testing.assert_allclose(row["learned"][name], [start, start], rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sympformer", {"preset": "adam"}, "preset: got 'adam', needs one of baseline, yurii_lt, plain_euler"),
        ("softmax", {"preset": "baseline"}, "preset: got 'baseline', needs none: softmax has no presets"),
    ],
)
def test_a_preset_that_there_is_not(name: str, given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.expanded(name, given)
