"""Decoding with a cache: keys, values, and for each token where its score was at every stage of the flow.

A causal graph without symmetry lets a token act on later ones alone. So the way that its score took is final, and a new
token's score flows beside those that are kept: its memory grows by a number for each stage and channel, and its time
with the number of tokens before it. In states "query" and "prefix" scores flow anew for every query, on a graph of all
tokens so far; there, and with levels of tokens, queries are kept, and everything is computed again.

A key mask covers the tokens of the past and the new ones, and so do positions.

Axes: b batch, n new token, j token, h head, g key/value head, d and e widths of a head, p stage, c channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from refattn import equations
from refattn.mechanisms.context import Context
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.graph_energy import core, general
from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.general import Flow
from refattn.mechanisms.graph_energy.implementations.pairs import rows_forward
from refattn.mechanisms.graph_energy.layer import block, hierarchy, numbers
from refattn.mechanisms.graph_energy.layer.config import Params, core_options
from refattn.mechanisms.graph_energy.options.call import Options, tau_of
from refattn.mechanisms.graph_energy.options.integrator import Stage
from refattn.mechanisms.graph_energy.options.state import STATES
from refattn.ops.heads import merge_heads, repeat_heads
from refattn.ops.linear import linear_forward
from refattn.ops.masks import where_allowed
from refattn.ops.softmax import softmax_forward
from refattn.ops.sums import moved_by
from refattn.xp import Array, namespace, raised, zeros


@dataclass(frozen=True)
class Cache:
    """What is kept of the `seen` tokens so far: their ways, or else their queries."""

    seen: int
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    points: Array | None = None  # (b, h, j, p, c): where each stage was evaluated, and the end
    q: Array | None = None  # (b, h, j, d)


def start(params: Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    config, like = params.config, params.w_q
    h, g, d, e = config.sizes
    if STATES[config.state].per_query or config.levels is not None:
        keys, values = zeros((batch, g, 0, d), like), zeros((batch, g, 0, e), like)
        return Cache(0, keys, values, q=zeros((batch, h, 0, d), like))
    like, channels = raised(like), e if config.state == "feature" else 1
    points = zeros((batch, h, 0, len(config.chosen("integrator").beta) * config.steps + 1, channels), like)
    return Cache(0, zeros((batch, g, 0, d), like), zeros((batch, g, 0, e), like), points)


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
    chosen = core_options(params.config, equations.active(numbers).numbers(params, context))
    if cache.q is not None:
        q, k, v = (xp.concat(pair, axis=2) for pair in ([cache.q, q], [cache.k, k], [cache.v, v]))
    count, saved = k.shape[2], None
    if params.config.levels is not None:
        attended, _ = hierarchy.forward(q, k, v, key_mask=context.key_mask, causal=True, **chosen)
    else:
        mask = block.mask_of(context, (x.shape[0], q.shape[1], count, count))
        attended, saved = core.forward(q, k, v, mask=mask, causal=True, **chosen)
    result = replace(state, x=_result(params, x, attended[:, :, count - x.shape[1] :, :]))
    if cache.q is not None or saved is None:
        return result, Cache(count, k, v, q=q)
    return result, Cache(count, raised(k), raised(v), _points(saved.inner.flow))


def _step(params: Params, cache: Cache, x: Array, context: Context) -> tuple[Array, Cache]:
    """Return the next x of one new token (b, 1, m), and the cache with it."""
    config, xp = params.config, namespace(x)
    q, k, v = (raised(each) for each in equations.active(block).project(params, x, x))
    chosen = core_options(config, equations.active(numbers).numbers(params, context))
    if config.classes is not None:
        chosen["mu"] = chosen["mu"][:, -1:]  # of the new token
    given = {name: each for name, each in defaults_of(core.forward).items() if name not in _OF_CALLS} | chosen
    token = _Token(core.checked(q, k, v, masked=False, causal=True, **given), q)
    mask, seen = None, cache.seen + 1
    if context.key_mask is not None:
        block.mask_of(context, (x.shape[0], q.shape[1], seen, seen))
        mask = context.key_mask & context.key_mask[:, -1:]  # (b, j)
    k, v = xp.concat([cache.k, k], axis=2), xp.concat([cache.v, v], axis=2)
    assert cache.points is not None
    out, points = token.read(k, v, cache.points, mask)
    return _result(params, x, xp.astype(out, x.dtype)), Cache(seen, k, v, points)


_OF_CALLS = ("mask", "causal", "implementation")
"""Options of the core that are no choices of a block."""


@dataclass(frozen=True)
class _Token:
    """A new token, with its query (b, h, 1, d)."""

    options: Options
    q: Array

    def read(self, k: Array, v: Array, points: Array, mask: Array | None) -> tuple[Array, Array]:
        """Return what it reads of all tokens, (b, h, 1, e), and the ways of their scores.

        It is the last of the keys and values itself, and the points are the ways of the others.
        """
        options, heads, nodes = self.options, self.q.shape[1], k.shape[2]
        xp, allowed = namespace(k), None if mask is None else mask[:, None, None, :]  # (b, 1, 1, j)
        matches = self.q @ xp.matrix_transpose(repeat_heads(k, heads)) * options.scale  # (b, h, 1, j)
        masked = where_allowed(allowed, matches, -math.inf)  # (b, h, 1, j)
        attention = softmax_forward(masked)  # (b, h, 1, j)
        tau = tau_of(options, None, matches)
        last = xp.concat([zeros((nodes - 1,), matches), xp.ones_like(matches[0, 0, 0, :1])])  # (j), 1 for the token
        begin = 0.5 + 0.5 * xp.tanh(0.5 * matches[:, :, :, nodes - 1 :])  # (b, h, 1, c)
        if not options.state.weighs:
            begin = repeat_heads(v[:, :, nodes - 1 :, :], heads)  # (b, h, 1, c)
        points = xp.concat([points, self.way(attention * (1.0 - last), begin, points, tau)], axis=2)
        ends = points[:, :, nodes - 1 :, -1, :] if not options.state.weighs else points[:, :, :, -1, :]
        out, _ = general.readout_forward(ends, masked, attention, v, allowed=allowed, options=options, tau=tau)
        return out, points

    def way(self, links: Array, begin: Array, others: Array, tau: Number) -> Array:
        """Return where its score was at each stage, and where it ends, (b, h, 1, p, c); `others` are ways of others."""
        options, xp, h, nodes = self.options, namespace(begin), self.options.step, others.shape[2] + 1
        points: list[Array] = []

        def rate(x: Array, h: Number, alpha: Sequence[float], rates: Sequence[Array]) -> Stage:
            point = moved_by(x, h, alpha, rates)  # (b, h, 1, c)
            every = xp.concat([others[:, :, :, len(points), :], point], axis=2)  # (b, h, j, c)
            pull = rows_forward(options.coupling, links, None, slice(nodes - 1, nodes), every)
            points.append(point)
            return point, pull, options.intrinsic.force(point, begin, options.mu) + options.kappa * pull

        at, step = begin, options.threshold.around(options.integrator, tau)
        for _ in range(options.steps):
            at, _ = step.forward(rate, at, h)  # (b, h, 1, c)
        return xp.stack([*points, at], axis=3)


def _points(flow: Flow) -> Array:
    """Return the ways of the scores of tokens, (b, h, j, p, c), by what a flow has saved."""
    ways = [point for taken in flow.steps for point, *_ in taken.stages]
    return namespace(flow.states[0]).stack([*ways, flow.states[-1]], axis=3)


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
