"""Weights of one tile of pairs, computed from inner products: what the tiled and the chunked implementation have in
common.

    w_ij = K(q+_i . k+_j) + constant if j in A(i), else 0;   [a_i, z_i] = sum_j w_ij [v_j, 1]

Axes: b batch, g key/value head, r query head of a group, i query and j key of the tile, d and e widths.
"""

from __future__ import annotations

from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.ops.heads import sum_group
from refattn.xp import Array, matmul, namespace


def forward(kernel: Kernel, queries: Array, keys: Array, values: Array, allowed: Array | None) -> Array:
    """Return the sums (b, g, r, i, e + 1) of queries (b, g, r, i, d) over keys (b, g, j, d), values (b, g, j, e + 1).

    `allowed` (i, j) is 1 where a query may attend a key and 0 elsewhere; None where all may.
    """
    _, weights = _weights(kernel, queries, keys, allowed)
    return weights @ values[:, :, None, ...] * kernel.factor


def backward(
    kernel: Kernel, queries: Array, keys: Array, values: Array, allowed: Array | None, d_sums: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values for that of the sums."""
    xp = namespace(queries)
    products, weights = _weights(kernel, queries, keys, allowed)
    # forward: sums = weights @ values
    d_values = sum_group(matmul(xp.matrix_transpose(weights), d_sums)) * kernel.factor
    d_weights = d_sums @ xp.matrix_transpose(values)[:, :, None, ...]
    if allowed is not None:
        d_weights *= allowed
    # forward: weights = K(products), products = queries @ keys^T
    d_weights *= kernel.slope(products)
    d_queries = d_weights @ keys[:, :, None, ...]
    d_keys = sum_group(matmul(xp.matrix_transpose(d_weights), queries))
    return d_queries, d_keys, d_values


def _weights(kernel: Kernel, queries: Array, keys: Array, allowed: Array | None) -> tuple[Array, Array]:
    """Return the inner products and, without their constant factor, the weights: each (b, g, r, i, j)."""
    products = queries @ namespace(queries).matrix_transpose(keys)[:, :, None, ...]
    weights = kernel.of(products)
    if not kernel.homogeneous:
        weights += kernel.constant / kernel.factor
    if allowed is not None:
        weights *= allowed
    return products, weights
