"""Levels of tokens as a map of q, k and v, with designed calls: it is checked beside the core."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from refattn import equations
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.graph_energy import record
from refattn.mechanisms.graph_energy.layer import hierarchy
from refattn.mechanisms.record import Case, Input
from refattn.xp import Array

DEFAULTS = {**{name: hierarchy.USUAL[name] for name in hierarchy.TAKEN}, **defaults_of(hierarchy.forward)}
"""Its options with their defaults."""


def forward(
    q: Array, k: Array, v: Array, implementation: str = "dense", **options: Any
) -> tuple[Array, hierarchy.Saved]:
    """Return what `hierarchy.forward` does, under hooks, too."""
    found: tuple[Array, hierarchy.Saved] = equations.active(hierarchy).forward(q, k, v, **options)
    return found


def backward(saved: hierarchy.Saved, d_out: Array) -> dict[str, Array]:
    """Return what `hierarchy.backward` does, under hooks, too."""
    found: dict[str, Array] = equations.active(hierarchy).backward(saved, d_out)
    return found


def _case(name: str, purpose: str, *, key_mask: bool = False, n: int = 5, **options: Any) -> Case:
    inputs = {"q": Input((2, 2, n, 3), axes="bhnd"), "k": Input((2, 1, n, 3), axes="bgnd")}
    inputs |= {"v": Input((2, 1, n, 2), axes="bgne"), "level_logits": Input((3,), axes=".")}
    if key_mask:
        inputs["key_mask"] = Input((2, n), "mask", {"keep": 0.8}, axes="bn")
    return Case(name, "levels", inputs, {"stride": 2, "window": 2, "step": 0.2, "steps": 3, **options}, purpose)


CASES = (
    _case("causal", "the past alone", causal=True, levels=3),
    _case("padded", "padding, and a threshold that is subtracted", key_mask=True, levels=3, threshold="soft(tau=0.3)"),
    _case("numbers", "a gradient for each number", levels=3, mu=0.8, kappa=1.3, scale=0.4),
)
"""Designed calls of a hierarchy."""

LAYERS = (
    replace(
        record,
        title="levels",
        equation_modules=(hierarchy,),
        block_modules=(),
        implementations=("dense",),
        defaults=DEFAULTS,
        core=sys.modules[__name__],
        cases=CASES,
        rounding_scales={},
        differentiable=tuple(name for name in record.differentiable if name != "coefficients"),  # levels have none
        layers=(),
    ),
)
"""The record of these levels."""
