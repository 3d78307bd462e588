"""Heads that grow by unequal numbers of columns: the new ones go where they gain most.

The weights of all heads are one array, so a narrower head has columns of zeros, in w_q and in w_k. Neither then gets a
gradient, and they stay zeros: it is as if they were not there. New columns stand behind all that there are, so that an
optimiser counts their steps from this growth on.

To first order heads know nothing of each other, so each gets a plan of its own, as a block of one head. What they share
is the direction and its size, which is that of all scores, and so the amplitude.

Axes: h head, in width of the augmented tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refattn.mechanisms.growing.growth.bottleneck import Bottleneck, believed, bottleneck
from refattn.mechanisms.growing.growth.metric import Metric
from refattn.mechanisms.growing.growth.options import Options
from refattn.mechanisms.growing.growth.path import Plan, live, pick, scale_of, slope_of
from refattn.mechanisms.growing.growth.statistics import Kept, Statistics


def allot(found: Bottleneck, total: int, room: Sequence[int], least: float = 0.0) -> tuple[int, ...]:
    """Return how many columns each head gets: those of the largest squares, at most `total`, and at most its room.

    A square below `least` is not worth a column.
    """
    squares = [(found.square(i, j), i) for i, own in enumerate(room) for j in range(own)]
    chosen = [i for square, i in sorted(squares, reverse=True)[:total] if square > 0.0 and square >= least]
    return tuple(chosen.count(i) for i in range(len(room)))


def worth_while(
    found: Bottleneck,
    metric: Metric,
    options: Options,
    room: Sequence[int],
    validation: Statistics | None = None,
) -> tuple[int, ...]:
    """Return how many columns are worth while for each head: `select_columns`, head by head.

    All heads together get at most `options.most` for each of them; a column has to follow `options.share` of what is
    one head's part of all squares, and more than rounding.
    """
    heads = len(room)
    if validation is not None:
        along = believed(found, metric, validation)
        room = [
            next((j for j in range(own) if float(along[i, j]) < options.trust * found.square(i, j)), own)
            for i, own in enumerate(room)
        ]
    least = max(options.share * sum(found.squares) / heads, found.rounding)
    return allot(found, options.most * heads, room, least)


def plans(made: Plan, each: Sequence[int]) -> tuple[Plan, ...]:
    """Return a plan for every head of a block, as a block of one, with so many columns."""
    params, way, metric = made.params, made.direction, made.metric
    assert way is not None and metric is not None
    found = []
    for i, (columns, places) in enumerate(zip(each, live(params), strict=True)):
        at = slice(i, i + 1)
        w_q, w_k = (pick(w[at, ...], places) for w in (params.w_q, params.w_k))
        config = replace(params.config, heads=1, head_width=len(places), value_width=params.config.sizes[2])
        config = replace(config, scale=scale_of(params), train_scale=False)
        head = replace(params, config=config, w_q=w_q, w_k=w_k, scale=None)
        kept = tuple(_of(one, at) for one in made.statistics.kept)
        seen = replace(made.statistics, gradient=made.statistics.gradient[at, ...], kept=kept)
        hidden = bottleneck(head, seen, metric)
        options = replace(made.options, uneven=False, seed=made.options.seed + i)
        gain = hidden.gain(columns) / way.size
        own = Plan(head, seen, options, columns, 0.0, gain, hidden.psi, metric, hidden, replace(way, p=way.p[at, ...]))
        found.append(replace(own, slope=slope_of(own)))
    return tuple(found)


def _of(kept: Kept, head: slice) -> Kept:
    """Return what was kept, for one head."""
    mask = kept.mask
    if mask is not None and mask.shape[1] != 1:
        mask = mask[:, head, ...]
    return replace(kept, gradient=kept.gradient[:, head, ...], mask=mask)
