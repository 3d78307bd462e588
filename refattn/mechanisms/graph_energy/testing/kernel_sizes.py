"""Designed calls in which options meet sizes and each other: every pair that the designed cases leave out.

They stand beside the cases of golden vectors, and `refattn verify` runs both. A case has eight options at most, so that
a kernel without one of them still runs others. Steps are short and thresholds soft: rounding decides on nothing.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.case_builders import bias
from refattn.mechanisms.case_builders import mask as _mask
from refattn.mechanisms.graph_energy.testing.cases import case
from refattn.mechanisms.record import Input

ONE: dict[str, Any] = {"h": 2, "g": 1, "n": 1, "d": 8, "e": 6}
FEW: dict[str, Any] = {"h": 2, "g": 1, "n": 7, "d": 8, "e": 6}
MANY: dict[str, Any] = {"h": 2, "n": 131, "d": 8}
ONE_HIDDEN: dict[str, Any] = {**ONE, "mask": _mask(2, 1, 1, 1), "causal": True, "intrinsic": "double_well"}
FEW_HIDDEN: dict[str, Any] = {**FEW, "mask": _mask(7, 7), "causal": True, "kappa": 0.5}
MANY_BIASED: dict[str, Any] = {**MANY, "bias": bias(2, 131, 131), "causal": True, "intrinsic": "double_well"}
MANY_STARTED: dict[str, Any] = {**MANY, "start": Input((131,))}
CROSS: dict[str, Any] = {"g": 1, "graph": "kernel(over='keys')"}
FEW_CROSS: dict[str, Any] = {**FEW, **CROSS, "n": 13, "state": "query", "kappa": 0.5, "scale": 0.3}
WELLS: dict[str, Any] = {"coupling": "tanh", "intrinsic": "double_well"}
HALF: dict[str, Any] = {"kappa": 0.5, "mu": 0.5}
MANY_HIDDEN: dict[str, Any] = {"mask": _mask(2, 1, 67, 131), "bias": bias(2, 67, 131)}
PAST_FEATURES: dict[str, Any] = {"state": "feature", "causal": True, "graph": "none", "intrinsic": "double_well"}
THREE: dict[str, Any] = {"step": 0.1, "steps": 3}
SOFT: dict[str, Any] = {"threshold": "soft(tau=0.05)"}

PURPOSES = {
    "few-forces": "a few tokens of the past, on a graph and by forces of their own",
    "few-past": "a few tokens of the past, from where they are told to start",
    "few-cross": "a few queries, each with a distribution over other tokens",
    "few-features": "values of a few tokens flow from the past",
    "one-start": "a token alone, hidden in some batches, from where it is told to start",
    "one-cross": "one query, with a distribution over other tokens",
    "one-feature": "the values of a token alone, hidden in some batches",
    "many-steps": "several tiles, from where they are told to start",
    "many-forces": "several tiles of the past, by forces of their own",
    "many-past": "a mask and a bias for each tile, heads that share one",
    "many-cross": "tiles of queries over tiles of other tokens, some of them hidden",
    "many-features": "the values of several tiles flow",
}
CALLS: dict[str, dict[str, Any]] = {
    "few-forces": FEW_HIDDEN | WELLS | {"bias": bias(2, 7, 7), "graph": "none", "integrator": "heun"},
    "few-past": FEW_HIDDEN | SOFT | {"start": Input((7,)), "coupling": "arctan", "integrator": "rk4", "steps": 3},
    "few-cross": FEW_CROSS | {"rows": 7, "mask": _mask(2, 1, 7, 13), "mu": 0.5, "step": 0.1},
    "few-features": FEW | PAST_FEATURES | {"bias": bias(2, 7, 7), "coupling": "sin", "mu": 0.5, "scale": 0.3},
    "one-start": ONE_HIDDEN | THREE | {"start": Input((1,)), "mu": 0.5},
    "one-cross": FEW_CROSS | {"rows": 1, "bias": bias(2, 1, 13), "coupling": "tanh", "integrator": "heun"},
    "one-feature": ONE_HIDDEN | THREE | SOFT | {"bias": bias(2, 1, 1), "state": "feature"},
    "many-steps": MANY_STARTED | THREE | SOFT | {"mu": 0.5, "scale": 0.3},
    "many-forces": MANY_BIASED | MANY_STARTED | SOFT | {"e": 6, "coupling": "tanh", "integrator": "heun", "step": 0.1},
    "many-past": MANY_BIASED | {"g": 1, "mask": _mask(131, 131), "graph": "none", "integrator": "heun"} | HALF,
    "many-cross": MANY_STARTED | CROSS | THREE | SOFT | MANY_HIDDEN | {"rows": 67, "intrinsic": "double_well"},
    "many-features": MANY | {"g": 1, "e": 6, "state": "feature", "steps": 3},
}

KERNEL_SIZES = tuple(case(name, "pairs", purpose, **CALLS[name]) for name, purpose in PURPOSES.items())
