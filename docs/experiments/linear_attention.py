"""The two older linear attentions that the experiments compare with, causal, forward and backward by hand.

Both are sums over the keys up to the query whose weights factor into a vector of the query and one of the key::

    [F]  o_i = sum_{j<=i} (p_i . f_j) v_j

so that a state of constant size, the sum of f_j v_j^T, is enough. Here the products p_i . f_j are written down, which
is quicker for short sequences. They differ in p and f alone, with z_i = sum_{j<=i} f_j, one number for each feature:

- elu: f_j = phi(k_j) and p_i = phi(q_i) / (phi(q_i) . z_i), where phi(x) = elu(x) + 1, which is x + 1 above 0 and
  exp(x) below. One sum divides all features of a query. phi is above 0, so that no eps is needed. Source:
  Katharopoulos et al. 2020 (arXiv:2006.16236), equations 7 to 12.
- separate: f_j = exp(k_j) and p_i = softmax(q_i) / z_i, element by element: queries are normalised over the features,
  keys over the positions, each feature by itself. Source: Shen et al. 2018 (arXiv:1812.01243), equations 5 and 6.

Shen et al. have images and no causal form: their softmax over the positions sees all of them. Here query i has the
softmax over the positions up to i, so that its output is what the implementation without causality gives for the keys
up to i::

    o_i = sum_d softmax(q_i)_d sum_{j<=i} (exp(k_jd) / z_id) v_j

The weights of a query sum to 1 and a state with z_i is as good as before. Causal code that calls itself by their name
may divide all features by the one sum softmax(q_i) . z_i instead, as elu does; the weights of the keys are then other
ones, without causality too. Nothing is subtracted before exp: the largest key of all would be one of the future. In
float32 that holds for keys up to 88.

Adjoints, for given do, with A_ij = p_i . f_j for j <= i and 0 otherwise::

    dA_ij = do_i . v_j for j <= i     dv = A^T do     dp = dA f     df = dA^T p     and, from z, df_j += sum_{i>=j} dz_i

Axes: b batch, h head, i query, j key, d width of a query or key, e width of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.xp import Array, namespace

KINDS = ("elu", "separate")


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    kind: str
    queries: Array  # (b, h, i, d): phi(q) or softmax(q)
    keys: Array  # (b, h, j, d): f
    sums: Array  # (b, h, i, d): z
    p: Array  # (b, h, i, d)
    weights: Array  # (b, h, i, j): A
    v: Array  # (b, h, j, e)


def forward(q: Array, k: Array, v: Array, *, kind: str) -> tuple[Array, Saved]:
    """Return (out, saved) of queries and keys (b, h, n, d) and values (b, h, n, e), for a kind of `KINDS`."""
    xp = namespace(q, k, v)
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, needs one of {', '.join(KINDS)}")
    queries = _phi(q) if kind == "elu" else _softmax(q)
    keys = _phi(k) if kind == "elu" else xp.exp(k)
    sums = xp.cumulative_sum(keys, axis=2)
    p = queries / (xp.sum(queries * sums, axis=-1, keepdims=True) if kind == "elu" else sums)
    weights = xp.tril(p @ xp.matrix_transpose(keys))
    return weights @ v, Saved(kind, queries, keys, sums, p, weights, v)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients with respect to q, k and v for a given gradient of the output (b, h, i, e)."""
    xp, queries, sums, p = namespace(d_out), saved.queries, saved.sums, saved.p
    # forward: out = weights @ v
    d_weights = xp.tril(d_out @ xp.matrix_transpose(saved.v))
    d_v = xp.matrix_transpose(saved.weights) @ d_out
    # forward: weights = tril(p @ keys^T)
    d_p = d_weights @ saved.keys
    d_keys = xp.matrix_transpose(d_weights) @ p
    if saved.kind == "elu":
        # forward: p = queries / sum(queries * sums)
        total = xp.sum(queries * sums, axis=-1, keepdims=True)
        d_total = -xp.sum(d_p * p, axis=-1, keepdims=True) / total
        d_queries, d_sums = d_p / total + d_total * sums, d_total * queries
        # forward: queries = phi(q)
        d_q = d_queries * _phi_slope(queries)
    else:
        # forward: p = queries / sums
        d_queries, d_sums = d_p / sums, -d_p * p / sums
        # forward: queries = softmax(q)
        d_q = queries * (d_queries - xp.sum(d_queries * queries, axis=-1, keepdims=True))
    # forward: sums = cumulative_sum(keys)
    d_keys = d_keys + xp.flip(xp.cumulative_sum(xp.flip(d_sums, axis=2), axis=2), axis=2)
    # forward: keys = phi(k), or exp(k)
    d_k = d_keys * (_phi_slope(saved.keys) if saved.kind == "elu" else saved.keys)
    return {"q": d_q, "k": d_k, "v": d_v}


def _phi(x: Array) -> Array:
    """Return elu(x) + 1."""
    xp = namespace(x)
    return xp.where(x > 0.0, x + 1.0, xp.exp(xp.minimum(x, xp.zeros_like(x))))


def _phi_slope(phi: Array) -> Array:
    """Return the derivative of phi by its value: phi itself where x is below 0, otherwise 1."""
    xp = namespace(phi)
    return xp.minimum(phi, xp.ones_like(phi))


def _softmax(x: Array) -> Array:
    xp = namespace(x)
    exponentials = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return exponentials / xp.sum(exponentials, axis=-1, keepdims=True)
