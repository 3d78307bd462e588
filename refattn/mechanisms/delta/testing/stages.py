"""What stages of chunked kernels get wrong: the recurrences in chunks, written plainly, with one stage changed.

They are of a state without momentum; with one, and where there is no decay to be wrong about, the core answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.delta import core
from refattn.ops.heads import group_heads, repeat_heads, ungroup_heads
from refattn.ops.solve import identity, unit_lower
from refattn.ops.unit_norm import unit
from refattn.xp import Array, namespace, zeros

Outputs = tuple[Array, Array]

CHUNK = 8
"""Tokens of a chunk: fewer than nearly all cases have."""

CHUNKS = (16, 32, 64, 128)
"""What kernels have."""

NAMES = (
    "scores without decays",
    "W without decays",
    "system without decays",
    "writes that do not decay to the end",
    "state kept whole over a chunk",
    "scores to base 2",
    "system to base 2",
    "sums of decays go on over chunks",
    "diagonal in the system",
    "diagonal not in the scores",
    "errors not solved for",
    "padding of a chunk decays",
)


def usual_eps() -> float:
    """Return what is added to squared lengths where nothing is said."""
    return float(defaults_of(core.forward)["norm_eps"])


def _stage(wrong: str) -> Callable[..., Outputs]:
    """Return the recurrence in chunks of a size with one stage wrong."""

    def reading(q: Array, k: Array, v: Array, *, size: int, key_mask: Array | None = None, **options: Any) -> Outputs:
        options.pop("chunk", None)
        if options.get("log_momentum") is not None or options.get("lengths") is not None or v.shape[2] == 0:
            out, saved = core.forward(q, k, v, key_mask=key_mask, **options)
            return out, saved.state
        return _chunked(wrong, size, q, k, v, key_mask, **options)

    reading.__doc__ = f"Compute in chunks: {wrong}."
    return reading


def _chunked(
    wrong: str,
    chunk: int,
    q: Array,
    k: Array,
    v: Array,
    key_mask: Array | None,
    *,
    beta: Array | None = None,
    log_decay: Array | None = None,
    state: Array | None = None,
    scale: Any = None,
    qk_norm: bool = False,
    norm_eps: float | None = None,
) -> Outputs:
    xp, (b, g, n, e), d = namespace(q, k, v), v.shape, q.shape[3]
    heads = max(q.shape[1], g)
    log = zeros((b, g, n, d), v)
    if log_decay is not None:
        log = log + (log_decay if len(log_decay.shape) == 4 else log_decay[..., None])
    if key_mask is not None:
        rows = key_mask[:, None, :, None]
        k, v, log = (xp.where(rows, x, 0.0) for x in (k, v, log))
        beta = None if beta is None else xp.where(rows[..., 0], beta, 0.0)
    if qk_norm:
        eps = usual_eps() if norm_eps is None else norm_eps
        q, k = unit(q, eps)[0], unit(k, eps)[0]
    queries, keys = group_heads(repeat_heads(q, heads), g), repeat_heads(k, g)
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    at, outs, carried = zeros((b, g, d, e), v) if state is None else state, [], 0.0
    for first in range(0, n, chunk):
        own = slice(first, min(first + chunk, n))
        read, at, carried = _one_chunk(
            wrong,
            chunk,
            queries[:, :, :, own, :],
            keys[:, :, own, :],
            v[:, :, own, :],
            None if beta is None else beta[:, :, own, None],
            log[:, :, own, :],
            at,
            carried,
        )
        outs.append(factor * read)
    return ungroup_heads(xp.concat(outs, axis=3)), at


def _one_chunk(
    wrong: str, chunk: int, q: Array, k: Array, v: Array, beta: Array | None, log: Array, state: Array, carried: Any
) -> tuple[Array, Array, Any]:
    """Return what a chunk reads (b, g, r, i, e), the next state, and the sum of the decays so far."""
    xp, size = namespace(k), k.shape[2]
    later = xp.astype(xp.tril(xp.ones((size, size)), k=-1), xp.bool)
    after, past = later[:, :, None], xp.astype(xp.tril(xp.ones((size, size))), xp.bool)[:, :, None]
    exponents = xp.cumulative_sum(xp.where(after, log[:, :, :, None, :], 0.0), axis=2)

    def decays(scaled: float) -> Array:
        return xp.exp(xp.where(past, exponents * scaled, -math.inf))

    two, alike = decays(math.log(2.0)), decays(0.0)
    gamma = decays(1.0)
    ends = gamma[:, :, -1, ...]
    sums = xp.cumulative_sum(log, axis=2)
    prefix = xp.exp(sums + (carried if wrong == "sums of decays go on over chunks" else 0.0))
    of_scores = alike if wrong == "scores without decays" else two if wrong == "scores to base 2" else gamma
    of_system = alike if wrong == "system without decays" else two if wrong == "system to base 2" else gamma
    pairs = xp.sum(q[:, :, :, :, None, :] * (k[:, :, None, :, :] * of_scores)[:, :, None, ...], axis=-1)
    if wrong == "diagonal not in the scores":
        pairs = xp.where(later, pairs, 0.0)
    u = v
    if beta is not None:
        system = beta * xp.sum(k[:, :, :, None, :] * k[:, :, None, :, :] * of_system, axis=-1)
        right = v - (k if wrong == "W without decays" else prefix * k) @ state
        if wrong == "errors not solved for":
            u = beta * right
        elif wrong == "diagonal in the system":
            u = xp.linalg.solve(system + identity(size, k), beta * right)
        else:
            u = unit_lower(xp.where(later, system, 0.0), beta * right)
    read = (prefix[:, :, None, ...] * q) @ state[:, :, None, ...] + pairs @ u[:, :, None, ...]
    writes = k if wrong == "writes that do not decay to the end" else ends * k
    last = prefix[:, :, -1, :, None]
    if wrong == "state kept whole over a chunk":
        last = xp.ones_like(last)
    following = last * state + xp.matrix_transpose(writes) @ u
    if wrong == "padding of a chunk decays" and size < chunk:
        following = xp.exp((chunk - size) * log[:, :, -1, :, None]) * following
    return read, following, carried + sums[:, :, -1:, :]


STAGES: dict[str, Callable[..., Outputs]] = {f"stage: {wrong}": _stage(wrong) for wrong in NAMES}

SIZES = {"": CHUNK} | {f", in chunks of {size}": size for size in CHUNKS}
"""Sizes of chunks, by what is said of them."""
