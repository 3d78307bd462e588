"""Decoding with a cache: keys, values, and for each token where its score was at every stage of the flow.

A causal graph without symmetry lets a token act on later ones alone. So the way that its score took is final, and a new
token's score flows beside those that are kept: its memory grows by a number for each stage and channel, and its time
with the number of tokens before it. In states "query" and "prefix" scores flow anew for every query, on a graph of all
tokens so far; there queries are kept, and everything is computed again.

With levels of tokens a level keeps its last nodes, no more than a token reads: then the time and the memory of a new
token do not grow with what was before it.

A key mask covers the tokens of the past and the new ones, and so do positions.

Axes: b batch, n new token, j token, h head, g key/value head, d and e widths of a head, p stage, c channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from refattn import equations
from refattn.mechanisms.context import Context
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.graph_energy import core, dense
from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.implementations import pairs
from refattn.mechanisms.graph_energy.layer import block, hierarchy, learned
from refattn.mechanisms.graph_energy.layer.config import Params, core_options
from refattn.mechanisms.graph_energy.layer.level import Level
from refattn.mechanisms.graph_energy.options.call import Options, tau_of
from refattn.mechanisms.graph_energy.options.integrator import Stage
from refattn.mechanisms.graph_energy.options.state import STATES
from refattn.ops.heads import merge_heads, repeat_heads
from refattn.ops.linear import linear_forward
from refattn.ops.masks import where_allowed
from refattn.ops.softmax import softmax_forward
from refattn.ops.sums import moved_by, sum_of
from refattn.xp import Array, arange, namespace, raised, zeros


@dataclass(frozen=True)
class Nodes:
    """What is kept of the last nodes of a level; without levels, of every token."""

    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e); of later levels (b, h, j, e)
    points: (
        Array | None
    )  # (b, h, j, p, c): where each stage was evaluated, and the end; None in states "query", "prefix"


@dataclass(frozen=True)
class Cache:
    """What is kept of the `seen` tokens so far."""

    seen: int
    levels: tuple[Nodes, ...]
    q: Array | None = None  # (b, h, j, d), in states "query" and "prefix"


def start(params: Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    config, like = params.config, params.w_q
    h, g, d, e = config.sizes
    if STATES[config.state].per_query:
        keys, values = zeros((batch, g, 0, d), like), zeros((batch, g, 0, e), like)
        return Cache(0, (Nodes(keys, values, None),), zeros((batch, h, 0, d), like))
    like, channels = raised(like), e if config.state == "feature" else 1
    points = zeros((batch, h, 0, len(config.chosen("integrator").beta) * config.steps + 1, channels), like)
    heads = [h if at else g for at in range(config.levels or 1)]
    return Cache(0, tuple(Nodes(zeros((batch, g, 0, d), like), zeros((batch, n, 0, e), like), points) for n in heads))


def prefill(params: Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of new tokens (b, n, m), and the cache with them."""
    _check(params, context)
    own, xp, x = equations.active(block), namespace(state.x), state.x
    if cache.seen and cache.q is None:
        parts = []
        for n in range(x.shape[1]):
            mask = None if context.key_mask is None else context.key_mask[:, : cache.seen + 1]
            classes = None if context.positions is None else context.positions[: cache.seen + 1]
            known = replace(context, key_mask=mask, positions=classes)
            one, cache = _step(params, cache, x[:, n : n + 1, :], known)
            parts.append(one)
        return replace(state, x=xp.concat(parts, axis=1) if parts else x), cache
    q, k, v = own.project(params, x, x)
    chosen = core_options(params.config, equations.active(learned).numbers(params, context))
    if params.config.levels is not None and cache.q is None:
        attended, read = hierarchy.forward(q, k, v, key_mask=context.key_mask, causal=True, **chosen)
        kept, below = list(cache.levels), (read.v, *read.read)
        for at, (level, stage) in enumerate(zip(read.levels, read.stages, strict=True)):
            first = 0 if level.window is None else max(level.count - level.window, 0)
            every = (level.take(read.k, 2), level.take(below[at], 2), _points(stage.flow, level.count))
            kept[at] = Nodes(*(each[:, :, first:, ...] for each in every))
        return replace(state, x=_result(params, x, attended)), Cache(x.shape[1], tuple(kept))
    if cache.q is not None:
        (past,) = cache.levels
        q, k, v = (xp.concat(pair, axis=2) for pair in ([cache.q, q], [past.k, k], [past.v, v]))
    tokens = (x.shape[0], q.shape[1], k.shape[2], k.shape[2])
    saved: Any
    if params.config.levels is not None:
        attended, saved = hierarchy.forward(q, k, v, key_mask=context.key_mask, causal=True, **chosen)
    else:
        attended, saved = core.forward(q, k, v, mask=block.mask_of(context, tokens), causal=True, **chosen)
    result = replace(state, x=_result(params, x, attended[:, :, k.shape[2] - x.shape[1] :, :]))
    if cache.q is not None:
        return result, Cache(k.shape[2], (Nodes(k, v, None),), q)
    return result, Cache(k.shape[2], (Nodes(raised(k), raised(v), _points(saved.inner.flow, k.shape[2])),))


def _step(params: Params, cache: Cache, x: Array, context: Context) -> tuple[Array, Cache]:
    """Return the next x of one new token (b, 1, m), and the cache with it."""
    config, xp = params.config, namespace(x)
    q, k, v = (raised(each) for each in equations.active(block).project(params, x, x))
    chosen = core_options(config, equations.active(learned).numbers(params, context))
    if config.classes is not None:
        chosen["mu"] = chosen["mu"][:, -1:]  # of the new token
    logits = chosen.pop("level_logits", None)
    usual = {
        name: each for name, each in defaults_of(core.forward).items() if name in {*hierarchy.TAKEN, "state", "start"}
    }
    given = {name: each for name, each in chosen.items() if name in usual}
    token = _Token(core.checked(q, k, v, masked=False, causal=True, **(usual | given)), q)
    mask = None
    if context.key_mask is not None:
        block.mask_of(context, (x.shape[0], q.shape[1], cache.seen + 1, cache.seen + 1))
        mask = context.key_mask & context.key_mask[:, -1:]  # (b, j)
    window = None if config.levels is None else config.window
    known = [Level(cache.seen + 1, config.stride**at, window, True) for at in range(config.levels or 1)]
    kept, outs, value = list[Nodes](), list[Array](), v
    for level, nodes in zip(known, cache.levels, strict=True):
        new = level.n % level.every == 0
        if new:
            before = 0 if window is None else max(nodes.k.shape[2] + 1 - window, 0)
            k_nodes, v_nodes = xp.concat([nodes.k, k], axis=2), xp.concat([nodes.v, value], axis=2)
            assert nodes.points is not None
            nodes = Nodes(k_nodes[:, :, before:, :], v_nodes[:, :, before:, :], nodes.points[:, :, before:, :, :])
        count = nodes.k.shape[2]
        if count:
            seen = None if mask is None else xp.take(mask, level.positions(mask)[-count:], axis=1)
            value, points = token.read(nodes, seen, new=new)
            nodes = replace(nodes, points=points)
        else:
            value = zeros(value.shape, value)
        kept.append(nodes)
        outs.append(value)
    out = outs[0]
    if logits is not None:
        omega = hierarchy.omega_of(xp.astype(logits, k.dtype), known, arange(cache.seen, cache.seen + 1, k))
        out = sum_of(*(omega[0, at] * read for at, read in enumerate(outs)))
    return _result(params, x, xp.astype(out, x.dtype)), Cache(cache.seen + 1, tuple(kept))


@dataclass(frozen=True)
class _Token:
    """A new token, with its query (b, h, 1, d)."""

    options: Options
    q: Array

    def read(self, known: Nodes, mask: Array | None, *, new: bool) -> tuple[Array, Array]:
        """Return what it reads of nodes, (b, h, 1, e), and the ways of their scores.

        A `new` one is a node, the last of the keys and values, and the points are the ways of the others.
        """
        k, v, points = known.k, known.v, known.points
        assert points is not None
        options, heads, nodes = self.options, self.q.shape[1], k.shape[2]
        xp, allowed = namespace(k), None if mask is None else mask[:, None, None, :]  # (b, 1, 1, j)
        scores = self.q @ xp.matrix_transpose(repeat_heads(k, heads)) * options.scale  # (b, h, 1, j)
        masked = where_allowed(allowed, scores, -math.inf)  # (b, h, 1, j)
        attention = softmax_forward(masked)  # (b, h, 1, j)
        tau = tau_of(options, None, scores)
        if new:
            last = xp.concat([zeros((nodes - 1,), scores), xp.ones_like(scores[0, 0, 0, :1])])  # (j), 1 for the token
            begin = 0.5 + 0.5 * xp.tanh(0.5 * scores[:, :, :, nodes - 1 :])  # (b, h, 1, c)
            if not options.state.weighs:
                begin = repeat_heads(v[:, :, nodes - 1 :, :], heads)  # (b, h, 1, c)
            points = xp.concat([points, self.way(attention * (1.0 - last), begin, points, tau)], axis=2)
        ends = points[:, :, nodes - 1 :, -1, :] if not options.state.weighs else points[:, :, :, -1, :]
        out, _ = dense.readout_forward(ends, masked, attention, v, allowed=allowed, options=options, tau=tau)
        return out, points

    def way(self, links: Array, begin: Array, others: Array, tau: Number) -> Array:
        """Return where its score was at each stage, and where it ends, (b, h, 1, p, c); `others` are ways of others."""
        options, xp, h, nodes = self.options, namespace(begin), self.options.step, others.shape[2] + 1
        points: list[Array] = []

        def rate(x: Array, h: Number, alpha: Sequence[float], rates: Sequence[Array]) -> Stage:
            point = moved_by(x, h, alpha, rates)  # (b, h, 1, c)
            every = xp.concat([others[:, :, :, len(points), :], point], axis=2)  # (b, h, j, c)
            pull = pairs.rows_forward(options.coupling, links, None, slice(nodes - 1, nodes), every)
            points.append(point)
            return point, pull, options.intrinsic.force(point, begin, options.mu) + options.kappa * pull

        at, step = begin, options.threshold.around(options.integrator, tau)
        for _ in range(options.steps):
            at, _ = step.forward(rate, at, h)  # (b, h, 1, c)
        return xp.stack([*points, at], axis=3)


def _points(flow: Any, count: int) -> Array:
    """Return the ways of the scores of nodes, (b, h, j, p, c), by what a flow has saved."""
    ways = [point for taken in flow.steps for point, *_ in taken.stages]
    return namespace(ways[0] if ways else flow.states[0]).stack([*ways, flow.states[-1]], axis=3)[:, :, :count, :, :]


def _result(params: Params, x: Array, attended: Array) -> Array:
    out = linear_forward(merge_heads(attended), params.w_o, params.b_o)
    return x + out if params.config.residual else out


def _check(params: Params, context: Context) -> None:
    if params.config.jitter or context.draws is not None:
        raise ValueError(
            "jitter: got a block with one, or draws, with a stream, whose scores start where they are; needs 0"
        )
    if context.mask is not None:
        raise ValueError(
            "context.mask was given to a stream, whose past has been computed without it; needs a key_mask"
        )
