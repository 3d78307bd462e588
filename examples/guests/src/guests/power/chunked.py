"""Power attention with a state, in chunks of tokens: for causal calls with as many queries as keys.

phi(x) has one number for each multiset of p coordinates: their product, times the root of the number of their orders,
p! / (m_1! m_2! ...) if coordinate a comes m_a times. So phi(x) . phi(y) is (x . y)^p, by the multinomial theorem.
V_j = (v_j, 1), so that the sums of weights come with those of values. Q is scale q.

    [POW.state]  S_c = S_(c-1) + sum_j phi(k_j) V_j^T   over the tokens j of chunk c; S_0 = 0

A query i of chunk c reads phi(Q_i)^T S_(c-1), and the keys of its own chunk up to itself by POW.1 and POW.2.

    [POW.3]  as in the definition
    [POW.4]  as in the definition

Adjoints, with dV_i = (do_i / z_i, dz_i) of the numbers that query i reads, and dS after the last chunk 0:

    [dPOW.state]  dS_(c-1) = dS_c + sum_i phi(Q_i) dV_i^T  over the tokens i of chunk c
    [dPOW.3]  as in the definition
    [dPOW.q]  as in the definition
    [dPOW.k]  as in the definition
    [dPOW.v]  as in the definition

dphi(x) / dx is the sum over the places of a product of its other factors.

Axes: b batch, h head, g head of keys and values, i query, j key, d width of queries and keys, f features, e width of
values and 1 more.
"""

import math
from collections import Counter
from itertools import combinations_with_replacement
from typing import NamedTuple

from refattn.mechanisms.record import Unsupported
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, device, namespace, transpose, zeros

CHUNK = 16
"""Tokens of a chunk."""


class Features(NamedTuple):
    """The multisets of p of d coordinates: for each place of a product which coordinate is there, and its weight."""

    places: tuple[Array, ...]  # p of (d, f), with one 1 in each column
    weights: Array  # (f,)


def features_of(d: int, p: int, like: Array) -> Features:
    """Return the features of vectors of width d."""
    sets = list(combinations_with_replacement(range(d), p))
    orders = [math.factorial(p) / math.prod(map(math.factorial, Counter(one).values())) for one in sets]
    hot = [[[float(one[place] == a) for one in sets] for a in range(d)] for place in range(p)]

    def array(rows: list) -> Array:
        return namespace(like).asarray(rows, dtype=like.dtype, device=device(like))

    return Features(tuple(map(array, hot)), array([math.sqrt(n) for n in orders]))


def phi(x: Array, features: Features) -> Array:
    """Return phi(x) (..., f) of x (..., d)."""
    return features.weights * math.prod((x @ place for place in features.places[1:]), start=x @ features.places[0])


def phi_backward(x: Array, features: Features, d_phi: Array) -> Array:
    """Return the gradient of x."""
    factors = [x @ place for place in features.places]
    d_x = zeros(x.shape, x)
    for n, place in enumerate(features.places):
        others = math.prod((y for m, y in enumerate(factors) if m != n), start=features.weights * d_phi)
        d_x = d_x + others @ transpose(place)
    return d_x


def forward(
    q: Array, k: Array, v: Array, mask: Array | None, offset: int | None, scale: float | None = None, p: int = 2
) -> tuple[Array, tuple]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, g, i, d), v (b, g, i, e), and what `backward` reads."""
    if mask is not None or offset != 0 or q.shape[2] != k.shape[2] or p % 2:
        raise Unsupported(
            "implementation: got chunked, needs a causal call without a mask, with as many queries as keys"
        )
    xp, h, n = namespace(q), q.shape[1], q.shape[2]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    queries, keys, v_heads = (
        scale * q,
        repeat_heads(k, h),
        repeat_heads(v, h),
    )  # (b, h, i, d), (b, h, i, d), (b, h, i, e)
    values = xp.concat([v_heads, xp.ones_like(v_heads[..., :1])], axis=3)  # (b, h, i, e)
    features, sums, states = features_of(q.shape[3], p, q), [], []
    state = zeros((*q.shape[:2], features.weights.shape[0], values.shape[3]), q)  # (b, h, f, e)
    for begin in range(0, n, CHUNK):
        own = slice(begin, begin + CHUNK)
        states.append(state)
        weights = xp.tril((queries[:, :, own, :] @ transpose(keys[:, :, own, :])) ** p)  # (b, h, i, j)
        sums.append(phi(queries[:, :, own, :], features) @ state + weights @ values[:, :, own, :])
        state = state + transpose(phi(keys[:, :, own, :], features)) @ values[:, :, own, :]  # (b, h, f, e) [POW.state]
    read = xp.concat(sums, axis=2) if sums else values  # (b, h, i, e)
    total = xp.where(read[..., -1:] == 0.0, 1.0, read[..., -1:])  # (b, h, i, 1) [POW.3]
    out = read[..., :-1] / total  # (b, h, i, e) [POW.4]
    return out, (queries, keys, values, scale, p, k.shape[1], features, states, total, out)


def backward(saved: tuple, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for d_out, that of out."""
    queries, keys, values, scale, p, g, features, states, total, out = saved
    xp = namespace(queries)
    # forward: out = read[..., :-1] / total
    d_part = d_out / total  # (b, h, i, e)
    d_total = -xp.sum(d_part * out, axis=-1, keepdims=True)  # (b, h, i, 1) [dPOW.3]
    d_read = xp.concat([d_part, d_total], axis=3)  # (b, h, i, e)
    d_state = zeros((*queries.shape[:2], features.weights.shape[0], values.shape[3]), queries)  # (b, h, f, e)
    parts: list[tuple[Array, Array, Array]] = []
    for number in reversed(range(len(states))):
        own = slice(number * CHUNK, number * CHUNK + CHUNK)
        q, k, v, d = (x[:, :, own, :] for x in (queries, keys, values, d_read))
        # forward: weights = tril((q @ transpose(k)) ** p)
        scores = q @ transpose(k)  # (b, h, i, j)
        d_scores = xp.tril(p * scores ** (p - 1) * (d @ transpose(v)))  # (b, h, i, j)
        # forward: state = state + transpose(phi(k)) @ v, read = phi(q) @ state + weights @ v
        d_q_part = d_scores @ k + phi_backward(q, features, d @ transpose(states[number]))  # (b, h, i, d)
        d_k_part = transpose(d_scores) @ q + phi_backward(k, features, v @ transpose(d_state))  # (b, h, i, d)
        d_v_part = transpose(xp.tril(scores**p)) @ d + phi(k, features) @ d_state  # (b, h, i, e)
        d_state = d_state + transpose(phi(q, features)) @ d  # (b, h, f, e) [dPOW.state]
        parts.insert(0, (d_q_part, d_k_part, d_v_part))
    joined = [xp.concat(list(x), axis=2) for x in zip(*parts, strict=True)] or [queries, keys, values]
    d_q = scale * joined[0]  # (b, h, i, d) [dPOW.q]
    d_k = sum_heads(joined[1], g)  # (b, g, j, d) [dPOW.k]
    d_v = sum_heads(joined[2][..., :-1], g)  # (b, g, j, e) [dPOW.v]
    return {"q": d_q, "k": d_k, "v": d_v}
