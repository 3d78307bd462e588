"""New columns beside the old ones, which stay as they are.

additive    along the leading directions of the hidden gradient, in both w_q and w_k: the kernel changes by -eta sum_j
            sigma_j u_j v_j^T in whitened coordinates
gradmax     w_k gets zeros, w_q the leading left singular vectors of N: nothing changes, and of all orthogonal columns
            of this length c these give the new columns of w_k the largest gradient, |.|^2 = s^2 c^2 sum_j sigma_j(N)^2
zero        w_k gets zeros, w_q random columns
net2wider   copies of some columns of w_q; the matching columns of w_k are split in unequal parts. Equal parts would get
            equal gradients for ever, and the rank would never grow

The last three keep the block's function exactly. Zeros in both w_q and w_k would keep it too, and would stay zeros.

Axes: h head, in width of the augmented tokens.

Source: additive: Verbockhaven et al. 2024 (arXiv:2405.19816); gradmax: Evci et al. 2022 (arXiv:2201.05125); net2wider:
Chen et al. 2016 (arXiv:1511.05641), with the unequal split of Wang et al. 2024 (LEMON).
"""

from __future__ import annotations

from refattn import philox
from refattn.mechanisms.growing.growth.bottleneck import Bottleneck
from refattn.mechanisms.growing.growth.metric import Metric
from refattn.mechanisms.growing.growth.truncate import random_columns, svd
from refattn.xp import Array, namespace, zeros

SPLIT = 0.7
"""The larger part of a column of w_k that net2wider splits."""

Pair = tuple[Array, Array]


def additive(found: Bottleneck, metric: Metric, columns: int, scale: float, eta: float) -> Pair:
    """Return new columns (h, in, columns) with scale w_q w_k^T = -eta sum_j sigma_j (W^+ u_j) (W^+ v_j)^T."""
    xp = namespace(found.sigma)
    roots = xp.sqrt(found.sigma[:, None, :columns] * (eta / scale))
    return -(metric.left.back @ found.u[..., :columns]) * roots, (metric.right.back @ found.v[..., :columns]) * roots


def gradmax(w_q: Array, gradient: Array, columns: int) -> Pair:
    """Return new columns of w_q, as long as the old ones in the mean, and zeros for w_k."""
    u, _, _ = svd(gradient)
    return column_length(w_q) * u[..., :columns], zeros((*w_q.shape[:2], columns), w_q)


def zero(w_q: Array, columns: int, seed: int) -> Pair:
    """Return random new columns of w_q, and zeros for w_k."""
    heads, inputs, width = w_q.shape
    return random_columns(heads, inputs, columns, width + columns, seed, w_q), zeros((heads, inputs, columns), w_q)


def net2wider(w_q: Array, w_k: Array, columns: int, seed: int, split: float = SPLIT) -> tuple[Pair, Array]:
    """Return copies of random columns of w_q with their part of w_k, and w_k with what is left of its old columns."""
    xp, width = namespace(w_q), w_q.shape[2]
    order = philox.permutation(width, seed=seed, purpose="growing.net2wider", step=width + columns)
    chosen = [int(order[j % width]) for j in range(columns)]
    old, new = [w_k[..., j : j + 1] for j in range(width)], []
    for j in chosen:
        new.append((1.0 - split) * old[j])
        old[j] = split * old[j]
    copies = xp.concat([w_q[..., j : j + 1] for j in chosen], axis=2)
    return (copies, xp.concat(new, axis=2)), xp.concat(old, axis=2)


def column_length(w: Array) -> Array:
    """Return the root mean square (h, 1, 1) of the lengths of the columns of w (h, in, d)."""
    xp = namespace(w)
    return xp.sqrt(xp.mean(xp.sum(w * w, axis=1, keepdims=True), axis=2, keepdims=True))
