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

_KIND = "pairs"
_ONE: dict[str, Any] = {"h": 2, "g": 1, "n": 1, "d": 8, "e": 6}
_FEW: dict[str, Any] = {"h": 2, "g": 1, "n": 7, "d": 8, "e": 6}
_MANY: dict[str, Any] = {"h": 2, "n": 131, "d": 8}
_CROSS: dict[str, Any] = {"n": 13, "graph": "kernel(over='keys')"}
_SOFT = "soft(tau=0.05)"

KERNEL_SIZES = (
    case(
        "few-forces",
        _KIND,
        "a few tokens of the past, on a graph and by forces of their own",
        **_FEW,
        mask=_mask(7, 7),
        bias=bias(2, 7, 7),
        causal=True,
        graph="none",
        coupling="tanh",
        intrinsic="double_well",
        kappa=0.5,
        integrator="heun",
    ),
    case(
        "few-past",
        _KIND,
        "a few tokens of the past, from where they are told to start",
        **_FEW,
        mask=_mask(7, 7),
        start=Input((7,)),
        causal=True,
        coupling="arctan",
        kappa=0.5,
        integrator="rk4",
        steps=3,
        threshold=_SOFT,
    ),
    case(
        "few-cross",
        _KIND,
        "a few queries, each with a distribution over other tokens",
        **{**_FEW, **_CROSS},
        rows=7,
        mask=_mask(2, 1, 7, 13),
        state="query",
        kappa=0.5,
        mu=0.5,
        scale=0.3,
        step=0.1,
    ),
    case(
        "few-features",
        _KIND,
        "values of a few tokens flow from the past",
        **_FEW,
        bias=bias(2, 7, 7),
        state="feature",
        causal=True,
        graph="none",
        coupling="sin",
        intrinsic="double_well",
        mu=0.5,
        scale=0.3,
    ),
    case(
        "one-start",
        _KIND,
        "a token alone, hidden in some batches, from where it is told to start",
        **_ONE,
        mask=_mask(2, 1, 1, 1),
        start=Input((1,)),
        causal=True,
        intrinsic="double_well",
        mu=0.5,
        step=0.1,
        steps=3,
    ),
    case(
        "one-cross",
        _KIND,
        "one query, with a distribution over other tokens",
        **{**_ONE, **_CROSS},
        rows=1,
        bias=bias(2, 1, 13),
        state="query",
        coupling="tanh",
        kappa=0.5,
        scale=0.3,
        integrator="heun",
    ),
    case(
        "one-feature",
        _KIND,
        "the values of a token alone, hidden in some batches",
        **_ONE,
        mask=_mask(2, 1, 1, 1),
        bias=bias(2, 1, 1),
        state="feature",
        causal=True,
        intrinsic="double_well",
        step=0.1,
        steps=3,
        threshold=_SOFT,
    ),
    case(
        "many-steps",
        _KIND,
        "several tiles, from where they are told to start",
        **_MANY,
        start=Input((131,)),
        mu=0.5,
        scale=0.3,
        step=0.1,
        steps=3,
        threshold=_SOFT,
    ),
    case(
        "many-forces",
        _KIND,
        "several tiles of the past, by forces of their own",
        **_MANY,
        e=6,
        bias=bias(2, 131, 131),
        start=Input((131,)),
        causal=True,
        coupling="tanh",
        intrinsic="double_well",
        integrator="heun",
        step=0.1,
        threshold=_SOFT,
    ),
    case(
        "many-past",
        _KIND,
        "a mask and a bias for each tile, heads that share one",
        **_MANY,
        g=1,
        mask=_mask(131, 131),
        bias=bias(2, 131, 131),
        causal=True,
        graph="none",
        intrinsic="double_well",
        integrator="heun",
        kappa=0.5,
        mu=0.5,
    ),
    case(
        "many-cross",
        _KIND,
        "tiles of queries over tiles of other tokens, some of them hidden",
        **{**_MANY, "graph": "kernel(over='keys')"},
        g=1,
        rows=67,
        mask=_mask(2, 1, 67, 131),
        bias=bias(2, 67, 131),
        start=Input((131,)),
        intrinsic="double_well",
        step=0.1,
        steps=3,
        threshold=_SOFT,
    ),
    case("many-features", _KIND, "the values of several tiles flow", **_MANY, g=1, e=6, state="feature", steps=3),
)
