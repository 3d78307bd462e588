"""Plausible wrong readings of graph energy attention: what an implementation computes that follows another convention.

Each has the signature of the core without `form` and returns (out,). Verification has to tell them from the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.judge.given import graph_of, threshold_of
from refattn.mechanisms.graph_energy.options import Directed, Soft
from refattn.mechanisms.wrong import conventions, of_group_gradients
from refattn.xp import Array, namespace

Wrong = Callable[..., tuple[Array]]


def _with(**changes: Any) -> Wrong:
    def wrong(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
        return (core.forward(q, k, v, **{**options, **changes})[0],)

    return wrong


def no_flow(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Leave scores where they start."""
    return _with(steps=0)(q, k, v, **options)


def one_step_less(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Take one step less."""
    return _with(steps=max(options.get("steps", 10) - 1, 0))(q, k, v, **options)


def soft_threshold(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Subtract tau where scores below it should be dropped."""
    known = threshold_of(options)
    return _with(threshold=Soft(tau=known.tau, signed=known.signed, empty=known.empty))(q, k, v, **options)


def directed_graph(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Take attention itself for the graph."""
    over = graph_of(options)
    return _with(graph=Directed() if over is None else Directed(over=over.over))(q, k, v, **options)


def edges_twice(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Count every edge of the energy from both ends."""
    return _with(kappa=2.0 * options.get("kappa", 1.0))(q, k, v, **options)


def no_anchor(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Leave the intrinsic force out."""
    return _with(intrinsic="none")(q, k, v, **options)


def dropped_rows(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Give 0 for a row that the threshold has emptied."""
    return _with(threshold=replace(threshold_of(options), empty="zero"))(q, k, v, **options)


def ignored_mask(q: Array, k: Array, v: Array, *, mask: Array | None = None, **options: Any) -> tuple[Array]:
    """Let every token attend masked ones."""
    return (core.forward(q, k, v, **options)[0],)


def interleaved_groups(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Give query head h the key/value head h mod g, not floor(h g / h_total)."""
    xp = namespace(q, k, v)
    times = q.shape[1] // max(k.shape[1], 1)
    return (core.forward(q, xp.concat([k] * times, axis=1), xp.concat([v] * times, axis=1), **options)[0],)


READINGS: dict[str, Wrong] = {
    "no flow": no_flow,
    "one step less": one_step_less,
    "soft for hard": soft_threshold,
    "directed graph": directed_graph,
    "edges counted twice": edges_twice,
    "no anchor": no_anchor,
    "emptied rows get 0": dropped_rows,
    "mask ignored": ignored_mask,
    "interleaved groups": interleaved_groups,
}

WRONG = {
    **conventions(READINGS),
    **of_group_gradients(core),
}
