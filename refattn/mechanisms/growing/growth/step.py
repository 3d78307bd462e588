"""A growth step: from statistics to wider queries and keys.

`observe` gathers the statistics of a batch, `merge` those of several; `plan` says how many columns are worth while, and
along which path the weights would go; `apply` goes along that path as far as it is told; `search` finds how far that
should be. `grow` does all of it for one block. This is the record's `grow`: who trains a stack of blocks calls its
parts.

A step of the usual options is the definition. Here its parts stand in files of their own: the gradient N of the kernels
and the tokens' C (`dense`); the metric A and the direction D that descends in it (`metric`); what of N only new columns
can follow, which says how many there shall be (`bottleneck`); the kernel M, moved along -D to F (`path`); the kernel of
the new rank nearest to F, and its factors, which are the new weights (`truncate`).

Source: L. Burgund, Attention Growing Networks, section 2; what differs from it stands in docs/deviations.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from refattn import equations
from refattn.args import Real, check, described
from refattn.mechanisms.growing import dense
from refattn.mechanisms.growing.growth import bottleneck, metric, path, truncate, uneven
from refattn.mechanisms.growing.growth.bottleneck import Bottleneck, embedding_bottleneck, select_columns, with_ties
from refattn.mechanisms.growing.growth.metric import Metric
from refattn.mechanisms.growing.growth.options import Options
from refattn.mechanisms.growing.growth.path import Plan, live
from refattn.mechanisms.growing.growth.search import Found, search
from refattn.mechanisms.growing.growth.statistics import Statistics, merge, observe
from refattn.mechanisms.growing.layer import block
from refattn.xp import namespace, sum_wide

__all__ = ["Options", "Plan", "Statistics", "apply", "facts_of", "grow", "merge", "observe", "plan", "search", "width"]

TAGGED = (dense, metric, bottleneck, path, truncate)
"""The modules whose lines carry the equations of growth."""

Halves = tuple[Statistics, Statistics]


def plan(
    params: block.Params,
    statistics: Statistics,
    options: Options | None = None,
    *,
    columns: int | None = None,
    halves: Halves | None = None,
) -> Plan:
    """Return what a growth step would do.

    Parameters
    ----------
    params
        The block's parameters.
    statistics
        Of `observe` under these parameters, `merge`d.
    options
        How it grows.
    columns
        How many columns every head gets; None: as many as are worth while. No more than the width of the augmented
        tokens, or `options.largest`, allows.
    halves
        The statistics of two halves of the sequences, for the second to confirm what the first found.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong class or out of its range, the statistics are those of another block, or the
        sequences were not kept and are needed.

    Notes
    -----
    Where the options lead to a direction that does not descend, the plan is that of the metric "kron" with the method
    "optimal", which always does; the fact "in_place_of" then names what was asked for.
    """
    options = options or Options()
    check("params", params, block.Params)
    _check_statistics(params, statistics, halves)
    check("options", options, Options)
    if columns is not None and (isinstance(columns, bool) or not isinstance(columns, int) or columns < 0):
        raise ValueError(f"columns: got {described(columns)}, needs None or a whole number of at least 0")
    width, inputs = params.config.sizes[1], params.config.inputs
    most = min(options.largest or inputs, inputs)
    room = max(0, most - width)
    xp, n = namespace(statistics.gradient), statistics.gradient
    facts: dict[str, Any] = {"width": width, "mode": options.mode}
    of_none = {**facts, "mode": "none", "columns": 0}
    nothing = Plan(params, statistics, options, 0, 0.0, 0.0, 0.0, None, None, None, of_none)
    if not float(xp.sqrt(sum_wide(n * n))) > 1e-30:
        return nothing
    kron = _metric(statistics, options)
    found = equations.active(bottleneck).bottleneck(params, statistics, kron)
    way = equations.active(metric).direction(statistics, options.metric, metric=kron, center_keys=options.center_keys)
    if not way.size > 0.0:
        return nothing
    made = Plan(params, statistics, options, 0, 0.0, 0.0, found.psi, kron, found, way)
    if options.uneven:
        spare = [max(0, most - len(places)) for places in live(params)]
        made = _unevenly(made, columns, halves, spare)
        facts |= {"each": [head.columns for head in made.heads]}
    else:
        if columns is None:
            selected, own, validation = _to_select_from(made, halves)
            count = select_columns(selected, own, min(options.most, room), options, validation)
        else:
            count = min(columns, room)
        count = with_ties(found, count, room) if options.keep_ties else count
        facts |= {"asked": columns} if columns is not None and columns > room else {}
        made = replace(made, columns=count, gain=found.gain(count) / way.size)
    count, slope = made.columns, equations.active(path).slope_of(made)
    if options.searches and not slope < 0.0 and (options.metric, options.method) != ("kron", "optimal"):
        # Only the Kronecker metric with its own truncation is certain to descend.
        surer = replace(options, metric="kron", method="optimal")
        sure = plan(params, statistics, surer, columns=columns, halves=halves)
        instead = {"metric": options.metric, "method": options.method}
        return replace(sure, facts={**sure.facts, "in_place_of": instead})
    sigma = [math.sqrt(square) for square in found.squares[: max(count, options.most) + 1]]
    facts |= {"columns": count, "psi": found.psi, "sigma": sigma, "gain": made.gain, "slope": slope}
    if options.metric == "exact":
        facts |= {"iterations": way.iterations, "embedding": embedding_bottleneck(statistics, way)}
    return replace(made, slope=slope, facts=facts)


def _check_statistics(params: block.Params, statistics: Statistics, halves: Halves | None) -> None:
    """Raise where statistics are none, or those of a block of other heads or tokens."""
    check("statistics", statistics, Statistics)
    if halves is not None and not (
        isinstance(halves, tuple) and len(halves) == 2 and all(isinstance(half, Statistics) for half in halves)
    ):
        raise TypeError(f"halves: got {type(halves).__name__}, needs None or a pair of Statistics")
    needed = (params.config.heads, params.config.inputs, params.config.inputs)
    for name, own in (("statistics", statistics), *(("halves", half) for half in halves or ())):
        if tuple(own.gradient.shape) != needed:
            shape = tuple(own.gradient.shape)
            raise ValueError(f"{name}: got those of kernels {shape}, needs {needed} as the block")


def _metric(statistics: Statistics, options: Options) -> Metric:
    """Return the Kronecker metric as the options have it."""
    own = equations.active(metric)
    made: Metric = own.kronecker(
        statistics, center_keys=options.center_keys, singular=options.singular, damping=options.damping
    )
    return made


def _to_select_from(made: Plan, halves: Halves | None) -> tuple[Bottleneck, Metric, Statistics | None]:
    """Return the bottleneck from which columns are selected, its metric, and what has to confirm it."""
    assert made.found is not None and made.metric is not None
    if halves is None:
        return made.found, made.metric, None
    first, second = halves
    own = _metric(first, made.options)
    return bottleneck.bottleneck(made.params, first, own), own, second


def _unevenly(made: Plan, columns: int | None, halves: Halves | None, room: list[int]) -> Plan:
    """Return the plan with one for each head; `columns` of every head in the mean, or as many as are worth while."""
    assert made.found is not None
    if columns is None:
        found, kron, validation = _to_select_from(made, halves)
        each = uneven.worth_while(found, kron, made.options, room, validation)
    else:
        each = uneven.allot(made.found, columns * len(room), room)
    heads = uneven.plans(made, each)
    if made.options.keep_ties:
        ties = [with_ties(h.found, h.columns, own) for h, own in zip(heads, room, strict=True) if h.found is not None]
        heads = heads if ties == list(each) else uneven.plans(made, ties)
    return replace(made, heads=heads, columns=max(head.columns for head in heads), gain=sum(h.gain for h in heads))


def apply(made: Plan, amplitude: float = 0.0) -> block.Params:
    """Return the parameters after the step.

    Parameters
    ----------
    made
        Of `plan`.
    amplitude
        How far to go; 0, or a mode that keeps the function: new columns that change nothing.

    Raises
    ------
    ValueError
        Where the amplitude is negative or not finite.
    """
    check("made", made, Plan)
    check("amplitude", amplitude, Real(0.0))
    grown: block.Params = equations.active(path).weights_at(made, amplitude)
    return grown


def grow(
    params: block.Params,
    statistics: Statistics,
    loss: Callable[[block.Params], float],
    options: Options | None = None,
    *,
    columns: int | None = None,
    halves: Halves | None = None,
) -> tuple[block.Params, dict[str, Any]]:
    """Grow one block: plan, search for the amplitude, apply.

    Parameters
    ----------
    params, statistics, options, columns, halves
        As for `plan`.
    loss
        The loss that falls, as a function of the block's parameters: that of the statistics, or of other sequences.

    Returns
    -------
    params
        With wider queries and keys; the same where there is nothing to gain.
    facts
        "columns", "psi", "sigma", "gain", "slope" of the plan, and of the search "amplitude", "before", "after",
        "predicted", "actual" and "evaluations".

    Examples
    --------
    A block that shall give what another one gives, which is wider:

    >>> import numpy as np, refattn as ra
    >>> block, growth = ra.mechanism("growing").block, ra.mechanism("growing").grow
    >>> like, context = np.zeros(1), ra.Context()
    >>> x = np.cos(np.arange(8.0 * 5 * 6)).reshape(8, 5, 6)
    >>> teacher = block.init(block.Config(width=6, heads=1, head_width=4, value_width=6), seed=1, like=like)
    >>> student = block.init(block.Config(width=6, heads=1, head_width=1, value_width=6), seed=1, like=like)
    >>> wanted = block.forward(teacher, block.start(teacher, x, context), context)[0].x
    >>> def loss(params):
    ...     state, _ = block.forward(params, block.start(params, x, context), context)
    ...     return float(np.mean((state.x - wanted) ** 2))
    >>> state, saved = block.forward(student, block.start(student, x, context), context)
    >>> gradient = block.module.State(2.0 * (state.x - wanted) / wanted.size)
    >>> grown, facts = growth.grow(student, growth.observe(student, saved, gradient), loss, columns=1)
    >>> grown.w_q.shape, loss(grown) < loss(student)
    ((1, 6, 2), True)
    """
    made = plan(params, statistics, options, columns=columns, halves=halves)
    options = made.options
    before = loss(params)
    if made.found is None or (not made.columns and (columns is None or not options.searches)):
        return params, made.facts | {"amplitude": 0.0, "before": before, "after": before}
    if not options.searches:
        grown = apply(made)
        return grown, made.facts | {"amplitude": 0.0, "before": before, "after": loss(grown), "evaluations": 1}
    tried: dict[float, block.Params] = {}

    def at(amplitude: float) -> block.Params:
        tried[amplitude] = apply(made, amplitude) if amplitude not in tried else tried[amplitude]
        return tried[amplitude]

    found = search(lambda amplitude: loss(at(amplitude)), before, made.slope, options)
    return at(found.amplitude), made.facts | facts_of(found)


def width(params: block.Params) -> int:
    """Return the width that grows: that of the queries and keys of a head."""
    return params.config.sizes[1]


def facts_of(found: Found) -> dict[str, Any]:
    """Return what there is to write down of a search."""
    names = ("amplitude", "before", "after", "predicted", "actual", "evaluations")
    return {name: getattr(found, name) for name in names}
