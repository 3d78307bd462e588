"""Decoding with a cache: keys, values, and for each token where its score was at every stage of the flow.

A causal graph without symmetry lets a token act on later ones alone. So the way that its score took is final, and a new
token's score flows beside those that are kept: its memory grows by a number for each stage and channel, and its time
with the number of tokens before it. In state "query" scores flow anew for every query, on a graph of all tokens so
far; there queries are kept, and everything is computed again.

A key mask covers the tokens of the past and the new ones, and so do positions.

Axes: b batch, n new token, j token, h head, g key/value head, d and e widths of a head, p stage, c channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from refattn import equations
from refattn.mechanisms.context import Context
from refattn.mechanisms.entry import defaults_of
from refattn.mechanisms.graph_energy import core, dense
from refattn.mechanisms.graph_energy.forms import pairs
from refattn.mechanisms.graph_energy.layer import block, learned
from refattn.mechanisms.graph_energy.layer.config import Params, core_options
from refattn.mechanisms.graph_energy.options import Proximal, tau_of
from refattn.ops.activations import soft_threshold
from refattn.ops.heads import merge_heads, repeat_heads
from refattn.ops.linear import linear_forward
from refattn.ops.softmax import softmax_forward
from refattn.ops.sums import moved_by
from refattn.xp import Array, namespace, raised, zeros


@dataclass(frozen=True)
class Cache:
    """What is kept of the tokens so far."""

    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    q: Array | None  # (b, h, j, d), in state "query"
    points: Array | None  # (b, h, j, p, c): where each stage was evaluated, and the end; else


def start(params: Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    h, g, d, e = params.config.sizes
    like = params.w_q
    keys, values = zeros((batch, g, 0, d), like), zeros((batch, g, 0, e), like)
    if params.config.state == "query":
        return Cache(keys, values, zeros((batch, h, 0, d), like), None)
    stages = len(_tableau(params)[1]) * params.config.steps + 1
    channels = e if params.config.state == "feature" else 1
    return Cache(keys, values, None, zeros((batch, h, 0, stages, channels), raised(like)))


def prefill(params: Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of new tokens (b, n, m), and the cache with them."""
    _check(params, cache, state, context)
    own, xp, x = equations.active(block), namespace(state.x), state.x
    if cache.points is not None and cache.k.shape[2]:
        parts = []
        for n in range(x.shape[1]):
            mask = None if context.key_mask is None else context.key_mask[:, : cache.k.shape[2] + 1]
            classes = None if context.positions is None else context.positions[: cache.k.shape[2] + 1]
            known = replace(context, key_mask=mask, positions=classes)
            one, cache = step(params, cache, block.State(x[:, n : n + 1, :]), known)
            parts.append(one.x)
        return replace(state, x=xp.concat(parts, axis=1) if parts else x), cache
    q, k, v = own.project(params, x, x)
    k, v = xp.concat([cache.k, k], axis=2), xp.concat([cache.v, v], axis=2)
    all_q = q if cache.q is None else xp.concat([cache.q, q], axis=2)
    tokens = (x.shape[0], q.shape[1], k.shape[2], k.shape[2])
    chosen = _options(params, context)
    attended, saved = core.forward(all_q, k, v, mask=block.mask_of(context, tokens), causal=True, **chosen)
    result = _result(params, x, attended[:, :, k.shape[2] - x.shape[1] :, :])
    if cache.points is None:
        return replace(state, x=result), Cache(k, v, all_q, None)
    ways = [point for taken in saved.inner.flow.steps for point, _, _ in taken.stages]
    points = xp.stack([*ways, saved.scores], axis=3)  # (b, h, j, p, c)
    return replace(state, x=result), Cache(k, v, None, points)


def step(params: Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of one new token (b, 1, m), and the cache with it."""
    if cache.points is None or not cache.k.shape[2]:
        return prefill(params, cache, state, context)
    _check(params, cache, state, context)
    own, xp, x = equations.active(block), namespace(state.x), state.x
    q, k, v = own.project(params, x, x)
    k, v = xp.concat([cache.k, k], axis=2), xp.concat([cache.v, v], axis=2)
    chosen = _options(params, context)
    if params.config.classes is not None:
        chosen["mu"] = chosen["mu"][:, -1:]  # of the new token
    rows = dict(zip("qkv", (raised(q), raised(k[:, :, -1:, :]), raised(v[:, :, -1:, :])), strict=True))
    usual = {name: x for name, x in defaults_of(core.forward).items() if name not in ("mask", "causal", "form")}
    options = core.checked(**rows, masked=False, causal=True, **(usual | chosen))
    heads, tokens = q.shape[1], k.shape[2]
    allowed = None
    if context.key_mask is not None:
        block.mask_of(context, (x.shape[0], heads, tokens, tokens))
        allowed = (context.key_mask & context.key_mask[:, -1:])[:, None, None, :]  # (b, 1, 1, j)
    scores = raised(q) @ xp.matrix_transpose(repeat_heads(raised(k), heads)) * options.scale  # (b, h, 1, j)
    attention = softmax_forward(scores if allowed is None else xp.where(allowed, scores, -math.inf))  # (b, h, 1, j)
    last = xp.concat([zeros((tokens - 1,), scores), xp.ones_like(scores[0, 0, 0, :1])])  # (j), 1 for the new token
    links = attention * (1.0 - last)  # (b, h, 1, j)
    if options.state == "feature":
        begin = repeat_heads(raised(v[:, :, tokens - 1 :, :]), heads)  # (b, h, 1, c)
    else:
        begin = 0.5 + 0.5 * xp.tanh(0.5 * scores[:, :, :, tokens - 1 :])  # (b, h, 1, c)
    tau, h = tau_of(options, None, begin), options.step
    points: list[Array] = []
    at, (alphas, beta) = begin, _tableau(params)
    for _ in range(options.steps):
        rates: list[Array] = []
        for alpha in alphas:
            point = moved_by(at, h, alpha, rates)  # (b, h, 1, c)
            every = xp.concat([cache.points[:, :, :, len(points), :], point], axis=2)  # (b, h, j, c)
            pull = pairs.rows_forward(options.coupling, links, None, slice(tokens - 1, tokens), every)
            rates.append(options.intrinsic.force(point, begin, options.mu) + options.kappa * pull)
            points.append(point)
        at = moved_by(at, h, beta, rates)  # (b, h, 1, c)
        if isinstance(options.threshold, Proximal):
            at = soft_threshold(at, h * tau, signed=options.signed)  # (b, h, 1, c)
    way = xp.stack([*points, at], axis=3)  # (b, h, 1, p, c)
    kept = xp.concat([cache.points, way], axis=2)
    ends = at if options.state == "feature" else kept[:, :, :, -1, :]
    out, _ = dense.readout_forward(ends, attention, raised(v), allowed=allowed, options=options, tau=tau)
    return replace(state, x=_result(params, x, xp.astype(out, x.dtype))), Cache(k, v, None, kept)


def _tableau(params: Params) -> Any:
    """Return alpha and beta of the integrator, which is explicit."""
    integrator = params.config.chosen("integrator")
    return integrator.alphas, integrator.beta


def _options(params: Params, context: Context) -> dict[str, Any]:
    return core_options(params.config, equations.active(learned).numbers(params, context))


def _result(params: Params, x: Array, attended: Array) -> Array:
    out = linear_forward(merge_heads(attended), params.w_o, params.b_o)
    return x + out if params.config.residual else out


def _check(params: Params, cache: Cache, state: block.State, context: Context) -> None:
    if params.config.jitter or context.draws is not None:
        raise ValueError(
            "jitter: got a block with one, or draws, with a stream, whose scores start where they are; needs 0"
        )
    if context.mask is not None:
        raise ValueError(
            "context.mask was given to a stream, whose past has been computed without it; needs a key_mask"
        )
    for name in ("memory", "memory_mask"):
        if getattr(context, name) is not None:
            raise ValueError(
                f"context.{name} was given to a stream, whose keys are those of its own tokens; needs None"
            )
    if state.x.shape[0] != cache.k.shape[0]:
        raise ValueError(f"state.x: got a batch of {state.x.shape[0]}, the cache is of {cache.k.shape[0]}")
