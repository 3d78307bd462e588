"""A block whose last queries point at tokens: the sequence model of the article, around a block.

A query that has moved says which of the tokens that it sees comes next: its softmax over their keys is a distribution.
Before all tokens stands an empty one, a learned vector, which is what a query points at that finds none. Where the
queries end, taken back to token space, is what the block returns.

Equations (y are the empty token e and the tokens; k and v of KOOP.keys and KOOP.values for them; p = q^m of KOOP.15)::

    [KOOP.pointed]  a_ij = p_i . k_j / sqrt(d)                    similarity "kernel": k(p_i, k_j)
    [KOOP.log_weights]  l_ij = a_ij - log sum_j exp(a_ij) if j in J(i), else -inf

J(i) are the keys that query i sees, over which sums over j go: the empty token's, those before it, and its own.

Adjoints, for given dl, and dx' of KOOP.output::

    [dKOOP.pointed]  da_ij = dl_ij - exp(l_ij) sum_j dl_ij    0 outside of J(i)
    [dKOOP.last]  dp_i = do_i + sum_j da_ij k_j / sqrt(d)
    [dKOOP.empty]  de = sum_b dy_0

with do of dKOOP.merged by head; in dy_j is what the core gives for k_j, and sum_i da_ij p_i / sqrt(d) more. Similarity
"kernel" has the kernel's derivatives for k_j / sqrt(d) and p_i / sqrt(d).

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d width of a head.

Source: N. Tie 2024, Koopman attention; pointing: Vinyals et al. 2015 (arXiv:1506.03134), equation 3; the empty token as
what holds the weight of finding nothing: Merity et al. 2017 (arXiv:1609.07843), section 2.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from refattn import equations
from refattn.mechanisms import projections
from refattn.mechanisms.cache import KeysAndValues
from refattn.mechanisms.context import Context
from refattn.mechanisms.koopman import core
from refattn.mechanisms.koopman.layer import block
from refattn.mechanisms.koopman.options.similarity import Similarity
from refattn.ops.heads import repeat_heads, split_heads, sum_heads
from refattn.ops.linear import linear_backward
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, arange, max_last, namespace, zeros


@dataclass(frozen=True)
class Params:
    """Parameters of the block, and the empty token."""

    block: block.Params
    empty_embedding: Array  # (1, m)


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    block: block.Saved
    y: Array  # (b, j, m)
    log_weights: Array  # (b, h, i, j)


def init(config: block.Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return a fresh block that adds to its tokens, and a random empty token of the size of normalised ones."""
    config = replace(config, residual=True)
    more: dict[str, Any] = {"seed": seed, "like": like, "layer": layer}
    empty = fresh_weight(1, config.width, bound=math.sqrt(3.0), purpose="koopman.empty", **more)  # (1, m)
    return Params(block.init(config, **more), empty)


def forward(params: Params, x: Array, context: Context) -> tuple[Array, Array, Saved]:
    """Return the log weights (b, h, i, j) of the empty token and the tokens x (b, i, m), the next x, and what is saved.

    A query sees the empty token, those before it, and its own.
    """
    y = namespace(x).concat([_first(params, x.shape[0]), x], axis=1)  # (b, j, m)
    keys, values = equations.active(block).keys_and_values(params.block, y)  # (b, g, j, d), (b, g, j, d)
    return point(params, x, y, KeysAndValues(keys, values), context)


def start(params: Params, batch: int) -> KeysAndValues:
    """Return the cache before the first token, which holds the empty one."""
    return KeysAndValues(*block.keys_and_values(params.block, _first(params, batch)))


def extend(params: Params, cache: KeysAndValues, x: Array, context: Context) -> tuple[Array, Array, KeysAndValues]:
    """Return what `forward` does for new tokens x (b, i, m) behind those of the cache, and the cache with them."""
    xp = namespace(x)
    keys, values = equations.active(block).keys_and_values(params.block, x)  # (b, g, i, d), (b, g, i, d)
    longer = KeysAndValues(xp.concat([cache.k, keys], axis=2), xp.concat([cache.v, values], axis=2))
    log_weights, following, _ = point(params, x, x, longer, context)  # (b, h, i, j), (b, i, m)
    return log_weights, following, longer


def point(params: Params, x: Array, y: Array, among: KeysAndValues, context: Context) -> tuple[Array, Array, Saved]:
    """Return what `forward` does, of tokens x (b, i, m), the last of those whose keys and values are given."""
    following, saved = equations.active(block).attend(params.block, x, among.k, among.v, context)  # (b, i, m)
    keys = among.k  # (b, g, j, d)
    last = namespace(x).astype(saved.core.trajectory[-1], keys.dtype)  # (b, h, i, d): the core's is of float64
    rows, columns = last.shape[2], keys.shape[2]
    seen = arange(0, columns, x)[None, :] <= arange(0, rows, x)[:, None] + (columns - rows)  # (i, j)
    log_weights = log_weights_of(last, keys, seen, similarity_of(saved))  # tagged there
    return log_weights, following, Saved(saved, y, log_weights)


def backward(params: Params, saved: Saved, d_log_weights: Array, d_following: Array) -> tuple[Array, Params]:
    """Return the gradients of x and of the parameters; a gradient of a weight that is not seen counts for nothing."""
    xp, config, inner = namespace(d_following), params.block.config, saved.block
    keys = inner.core.inputs[1]  # (b, g, j, d)
    last = xp.astype(inner.core.trajectory[-1], keys.dtype)  # (b, h, i, d)
    # forward: log_weights = log_weights_of(last, keys, ...)
    own = log_weights_backward(last, keys, saved.log_weights, similarity_of(inner), d_log_weights)
    # forward: following = x + merge_heads(last) @ w_o + b_o
    d_joined, d_w_o, d_b_o = linear_backward(inner.joined, params.block.w_o, d_following)  # (b, i, h*d), as the others
    d_last = split_heads(d_joined, config.heads) + own["q"]  # (b, h, i, d) [dKOOP.last]
    d = core.backward(inner.core, d_last)
    d |= {name: d[name] + part for name, part in own.items() if name in d and name != "q"}
    # forward: queries = split_heads(x @ w_q + b_q), and so for the keys and values of y
    d_x_q, d_y, gradients = projections.projected_backward(params.block, inner.x, saved.y, d)  # (b, i, m), (b, j, m)
    d_x = d_x_q + d_y[:, 1:, :] + d_following  # (b, i, m): of x
    d_empty = xp.sum(d_y[:, :1, :], axis=0)  # [dKOOP.empty]
    gradients |= block.kernel_backward(params.block, d)  # (1) each
    d_block = block.Params(config, **gradients, w_o=d_w_o, b_o=d_b_o if config.bias else None)
    return d_x, Params(d_block, d_empty)


def log_weights_of(q: Array, k: Array, seen: Array, similarity: Similarity) -> Array:
    """Return the logarithms (b, h, i, j) of the weights of last queries q (b, h, i, d) over keys k (b, g, j, d).

    `seen` broadcasts to (b, h, i, j); a query that sees no key has -inf for all.
    """
    xp, keys = namespace(q), repeat_heads(k, q.shape[1])  # -, (b, h, j, d)
    scores = similarity.forward(q, keys)  # (b, h, i, j) [KOOP.pointed]
    masked = xp.where(seen, scores, -math.inf)  # (b, h, i, j)
    top = max_last(masked)  # (b, h, i, 1)
    shifted = masked - xp.where(top == -math.inf, 0.0, top)  # (b, h, i, j)
    total = xp.sum(xp.exp(shifted), axis=-1, keepdims=True)  # (b, h, i, 1): 0 for a query that sees no key
    log_weights = shifted - xp.log(xp.where(total == 0.0, 1.0, total))  # (b, h, i, j) [KOOP.log_weights]
    return log_weights


def log_weights_backward(
    q: Array, k: Array, log_weights: Array, similarity: Similarity, d_log_weights: Array
) -> dict[str, Array]:
    """Return the gradients of q and k, and of the numbers of the similarity."""
    xp, keys = namespace(q), repeat_heads(k, q.shape[1])  # -, (b, h, j, d)
    # forward: log_weights = scores - log(sum(exp(scores)))
    d_seen = xp.where(log_weights == -math.inf, 0.0, d_log_weights)  # (b, h, i, j)
    d_scores = d_seen - xp.exp(log_weights) * xp.sum(d_seen, axis=-1, keepdims=True)  # (b, h, i, j) [dKOOP.pointed]
    # forward: scores = similarity(q, keys)
    d_q, passed = similarity.backward(q, keys, d_scores)  # (b, h, i, d), -
    return passed | {"q": d_q, "k": sum_heads(passed["k"], k.shape[1])}


def similarity_of(saved: block.Saved) -> Similarity:
    """Return what a block compares queries and keys by."""
    similarity: Similarity = saved.core.inner.options.similarity
    return similarity


def _first(params: Params, batch: int) -> Array:
    """Return the empty token (b, 1, m) of each sequence."""
    return params.empty_embedding + zeros((batch, 1, params.empty_embedding.shape[1]), params.empty_embedding)
