"""Plausible wrong readings of graph energy attention: what an implementation computes that follows another convention.

Each has the signature of the core without `implementation` and returns (out,). Verification has to tell them from the
core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.options import graph_of, threshold_of
from refattn.mechanisms.graph_energy.options.links import Directed
from refattn.mechanisms.graph_energy.options.threshold import Soft
from refattn.mechanisms.wrong import Changed, conventions, of_group_gradients, of_masks
from refattn.xp import Array

Wrong = Callable[..., tuple[Array]]


def _core(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    return (core.forward(q, k, v, **options)[0],)


_with = partial(Changed, _core)


def _soft(given: dict[str, Any]) -> dict[str, Any]:
    known = threshold_of(given)
    return {"threshold": Soft(tau=known.tau, signed=known.signed, empty=known.empty)}


def _directed(given: dict[str, Any]) -> dict[str, Any]:
    over = graph_of(given)
    return {"graph": Directed() if over is None else Directed(over=over.over)}


READINGS: dict[str, Wrong] = {
    "no flow": _with(lambda given: {"steps": 0}),
    "one step less": _with(lambda given: {"steps": max(given.get("steps", 10) - 1, 0)}),
    "soft for hard": _with(_soft),
    "directed graph": _with(_directed),
    "edges counted twice": _with(lambda given: {"kappa": 2.0 * given.get("kappa", 1.0)}),  # from both ends
    "no anchor": _with(lambda given: {"intrinsic": "none"}),
    "emptied rows get 0": _with(lambda given: {"threshold": replace(threshold_of(given), empty="zero")}),
    **of_masks(_core, "mask ignored", "interleaved groups"),
}

WRONG = {
    **conventions(READINGS),
    **of_group_gradients(core),
}
