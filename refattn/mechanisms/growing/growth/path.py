"""The path of a growth step: which weights a plan leads to at an amplitude.

With D of GROW.8, and the size nu of what D does to the scores::

    [GROW.1]  M = scale w_q w_k^T                       the kernel of a head
    [GROW.10]  F = M - amplitude D / nu

The mode "replace" goes along F, cut to the new rank (from GROW.11 on): all columns change, the old ones by a
natural-gradient step. The mode "additive" leaves the old columns alone, and so do those that keep the function.

The block's scale is that of the kernel, so that the weights have to make M / scale; the option `scale` says which that
is after the step. All of it is computed in float64, and the weights are cast back.

Axes: h head, in width of the augmented tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from refattn import equations
from refattn.mechanisms.growing.growth import columns, metric, truncate
from refattn.mechanisms.growing.growth.bottleneck import Bottleneck
from refattn.mechanisms.growing.growth.metric import Direction, Metric
from refattn.mechanisms.growing.growth.options import Options
from refattn.mechanisms.growing.growth.statistics import Statistics
from refattn.mechanisms.growing.layer import block
from refattn.xp import Array, device, namespace, sum_wide, zeros

SLOPE_STEP = 1e-5
"""Amplitude of the difference quotient where the slope has no closed form."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a growth step would do to one block.

    Attributes
    ----------
    columns
        New columns of every head; 0 where none is worth while.
    slope
        The derivative of the loss with respect to the amplitude, at 0.
    gain
        What the new columns alone take off the loss for a unit of amplitude, to first order.
    psi
        The part of the gradient that the width hides.
    facts
        What there is to write down.
    heads
        Where they grow unevenly: a plan for each, of as many columns as that gets; `columns` is the most of them.
    """

    params: block.Params
    statistics: Statistics
    options: Options
    columns: int
    slope: float
    gain: float
    psi: float
    metric: Metric | None
    found: Bottleneck | None
    direction: Direction | None
    facts: dict[str, Any] = field(default_factory=dict)
    heads: tuple[Plan, ...] = ()


def slope_of(made: Plan) -> float:
    """Return the derivative of the loss along the path: in closed form where there is one."""
    options, found, way = made.options, made.found, made.direction
    if made.heads:
        return sum(head.slope for head in made.heads)
    if not options.searches or found is None or way is None:
        return 0.0
    if options.mode == "additive":
        return -found.gain(made.columns) / way.size
    if (options.metric, options.method) == ("kron", "optimal"):
        return -(found.tangent + found.gain(made.columns)) / way.size
    kernel = kernel_of(made.params)
    left, right = _factors(made, kernel, SLOPE_STEP)
    change = left @ namespace(left).matrix_transpose(right) - kernel
    return float(sum_wide(made.statistics.gradient * change)) / SLOPE_STEP


def kernel_of(params: block.Params) -> Array:
    """Return M = scale w_q w_k^T (h, in, in) of every head, in float64."""
    w_q, w_k = _wide(params)
    kernel = scale_of(params) * w_q @ namespace(w_q).matrix_transpose(w_k)  # (h, in, in) [GROW.1]
    return kernel


def scale_of(params: block.Params) -> float:
    """Return the scale that the block computes with."""
    return params.config.factor if params.scale is None else float(params.scale)


def _wide(params: block.Params) -> tuple[Array, Array]:
    xp = namespace(params.w_q)
    return xp.astype(params.w_q, xp.float64, copy=False), xp.astype(params.w_k, xp.float64, copy=False)


def _factors(made: Plan, kernel: Array, amplitude: float) -> tuple[Array, Array]:
    """Return factors of the truncated kernel at an amplitude."""
    assert made.direction is not None and made.metric is not None
    rank = made.params.config.sizes[1] + made.columns
    moved = kernel - (amplitude / made.direction.size) * made.direction.p  # (h, in, in) [GROW.10]
    return equations.active(truncate).truncate(moved, rank, made.options.method, made.metric, made.statistics)


def weights_at(made: Plan, amplitude: float) -> block.Params:
    """Return the parameters after the step, in the dtype of the old ones, with the scale written down.

    At an amplitude of 0 there are new columns that change nothing.
    """
    params, xp = made.params, namespace(made.params.w_q)
    if made.found is None:
        return params
    scale, (w_q, w_k), like = scale_of(params), _weights(made, amplitude), params.w_q
    width = w_q.shape[2]
    if made.options.scale == "rescale":
        new = 1.0 / math.sqrt(width)
        w_q, w_k, scale = w_q * math.sqrt(scale / new), w_k * math.sqrt(scale / new), new
    config = replace(params.config, head_width=width, scale=scale)
    trained = None if params.scale is None else xp.full((), scale, dtype=like.dtype, device=device(like))
    w_q, w_k = (xp.astype(w, like.dtype, copy=False) for w in (w_q, w_k))
    return replace(params, config=config, w_q=w_q, w_k=w_k, scale=trained)


def _weights(made: Plan, amplitude: float) -> tuple[Array, Array]:
    """Return the weights after the step, in float64."""
    params, options = made.params, made.options
    if made.heads:
        return _side_by_side(made, amplitude)
    if options.mode == "replace" and options.method == "report":
        return _as_printed(made)
    if not amplitude and options.searches:
        return _appended(replace(made, options=replace(options, mode="zero")), 0.0)
    if options.mode != "replace":
        return _appended(made, amplitude)
    low_rank, root = equations.active(truncate), math.sqrt(scale_of(params))
    factors = _factors(made, kernel_of(params), amplitude)
    left, right = low_rank.balance(*factors, params.config.sizes[1] + made.columns, options.seed)
    left, right = left / root, right / root
    found: tuple[Array, Array] = low_rank.align(left, right, *_wide(params)) if options.align else (left, right)
    return found


def live(params: block.Params) -> list[list[int]]:
    """Return for every head the places of its columns that are not zeros in both weights; the first where all are."""
    xp = namespace(params.w_q)
    sizes = xp.max(xp.abs(params.w_q), axis=1) + xp.max(xp.abs(params.w_k), axis=1)
    heads, width = sizes.shape
    return [[j for j in range(width) if float(sizes[i, j]) > 0.0] or [0] for i in range(heads)]


def pick(w: Array, places: list[int]) -> Array:
    """Return some columns of a weight (h, in, d)."""
    return namespace(w).concat([w[..., j : j + 1] for j in places], axis=2)


def _side_by_side(made: Plan, amplitude: float) -> tuple[Array, Array]:
    """Return the weights of heads that grew unevenly: old columns in their places, new ones behind, else zeros."""
    w_q, w_k = _wide(made.params)
    rows: list[list[Array]] = [[], []]
    for head, places in zip(made.heads, live(made.params), strict=True):
        grown = weights_at(head, amplitude)
        for row, old, new in zip(rows, (w_q, w_k), _wide(grown), strict=True):
            columns = {place: new[..., n : n + 1] for n, place in enumerate(places)}
            columns |= {old.shape[2] + n: new[..., len(places) + n : len(places) + n + 1] for n in range(head.columns)}
            nothing = zeros((1, old.shape[1], 1), old)
            every = [columns.get(place, nothing) for place in range(old.shape[2] + made.columns)]
            row.append(namespace(old).concat(every, axis=2))
    joined = [namespace(w_q).concat(row, axis=0) for row in rows]
    return joined[0], joined[1]


def _appended(made: Plan, amplitude: float) -> tuple[Array, Array]:
    """Return the weights with new columns behind the old ones."""
    (w_q, w_k), options, count = _wide(made.params), made.options, made.columns
    assert made.found is not None and made.metric is not None and made.direction is not None
    if not count:
        return w_q, w_k
    xp = namespace(w_q)
    if options.mode == "additive":
        eta = amplitude / made.direction.size
        new = columns.additive(made.found, made.metric, count, scale_of(made.params), eta)
    elif options.mode == "gradmax":
        new = columns.gradmax(w_q, made.statistics.gradient, count)
    elif options.mode == "zero":
        new = columns.zero(w_q, count, options.seed)
    else:
        new, w_k = columns.net2wider(w_q, w_k, count, options.seed)
    return xp.concat([w_q, new[0]], axis=2), xp.concat([w_k, new[1]], axis=2)


def _as_printed(made: Plan) -> tuple[Array, Array]:
    """Return the weights of the report: the truncated singular value decomposition of Z* = X^+ B X^+^T.

    B = X w_q w_k^T X^T + G takes the gradient with the sign of ascent, a step of 1 however the loss is normalised, and
    leaves the scale out of the scores that it models. X^+ cuts off what the tokens do not use of the old kernel. Of
    several sequences it is the mean of their Z*, the author's first choice. The metric and its damping have no part.
    """
    assert made.metric is not None
    w_q, w_k = _wide(made.params)
    kernel = w_q @ namespace(w_q).matrix_transpose(w_k)
    target = equations.active(metric).mean_of_sequences(made.statistics, kernel)
    rank = made.params.config.sizes[1] + made.columns
    factors = truncate.truncate(target, rank, "frobenius", made.metric)
    return truncate.balance(*factors, rank, made.options.seed)
