"""Where the width of queries and keys is in the way: the part of the gradient that no change of the weights can follow.

With W of the metric (GROW.4), and the projectors P_q, P_k on the columns of W w_q and W w_k::

    [GROW.5]  G = (W^+)^T N W^+                         the gradient with respect to the whitened kernel W M W^T
    [GROW.6]  H = (1 - P_q) G (1 - P_k)                 what only new columns can follow
    [GROW.7]  diag(sigma) = u^T H v                     by the singular value decomposition, from the largest

The columns that there are can follow the tangent part, G - H; psi = |H|^2 / |G|^2 is the part that they cannot.

One growth step along the truncated path is a natural-gradient step on the old columns, and new columns along u_j, v_j.
Its first-order gain is |tangent|^2 + sum_{j<=p} sigma_j^2, divided by nu for a unit of amplitude. The tangent part
vanishes exactly where the weights have no gradient, so psi goes to 1 at every plateau; the gain says more.

All of this is about what some kernel of full rank can follow. What none can, whatever the width, is the bottleneck of
the embedding: |ds|^2 - <N, T^+ N>, the part of the functional gradient outside of all y dM y^T.

Axes: h head, in width of the augmented tokens.

Source: Verbockhaven et al. 2024 (arXiv:2405.19816), the expressivity bottleneck, for a kernel in place of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.growing.growth.metric import Direction, Metric, direction, kronecker
from refattn.mechanisms.growing.growth.options import Options
from refattn.mechanisms.growing.growth.statistics import Statistics
from refattn.mechanisms.growing.growth.truncate import projector, svd
from refattn.mechanisms.growing.layer import block
from refattn.xp import Array, namespace, sum_wide

TIE = 1e-8
"""Singular values that differ by less than this part are equal."""


@dataclass(frozen=True)
class Bottleneck:
    """The whitened gradient of a block, taken apart.

    Attributes
    ----------
    total, tangent, normal
        Squares of the whole and of its two parts, over all heads.
    sigma
        (h, seen): the singular values of the normal part.
    u, v
        (h, seen, seen): its singular vectors, in whitened coordinates.
    """

    total: float
    tangent: float
    normal: float
    sigma: Array
    u: Array
    v: Array

    @property
    def psi(self) -> float:
        """The part of the gradient that the width hides, from 0 to 1; 0 where there is no gradient."""
        return self.normal / self.total if self.total > 0.0 else 0.0

    @property
    def squares(self) -> list[float]:
        """The squares of the singular values, summed over the heads, from the largest."""
        xp = namespace(self.sigma)
        summed = xp.sum(self.sigma * self.sigma, axis=0)
        return [float(summed[j]) for j in range(summed.shape[0])]

    @property
    def rounding(self) -> float:
        """What a square has to exceed: less is rounding of the whole."""
        return float(namespace(self.sigma).finfo(self.sigma.dtype).eps) * self.total

    def square(self, head: int, column: int) -> float:
        """Return the square of one singular value."""
        return float(self.sigma[head, column]) ** 2

    def gain(self, columns: int) -> float:
        """Return the sum of the squares that so many new columns of every head follow."""
        return sum(self.squares[:columns])


def bottleneck(params: block.Params, statistics: Statistics, metric: Metric | None = None) -> Bottleneck:
    """Return the bottleneck of a block; `metric` is the Kronecker metric where there is one already."""
    metric = metric or kronecker(statistics)
    xp = namespace(statistics.gradient)
    whole = metric.whiten_gradient(statistics.gradient)  # (h, in, in) [GROW.5]
    w_q, w_k = (xp.astype(w, xp.float64, copy=False) for w in (params.w_q, params.w_k))
    outside = whole - projector(metric.left, w_q) @ whole  # (h, in, in): (1 - P_q) G
    normal = outside - outside @ projector(metric.right, w_k)  # (h, in, in) [GROW.6]
    u, sigma, v = svd(normal)  # (h, in, in), (h, in) [GROW.7]
    total, hidden = (float(sum_wide(x * x)) for x in (whole, normal))
    tangent = whole - normal
    return Bottleneck(total, float(sum_wide(tangent * tangent)), hidden, sigma, u, v)


def embedding_bottleneck(statistics: Statistics, way: Direction | None = None) -> float:
    """Return the part of the functional gradient that no kernel can follow, from 0 to 1: width does not help there.

    `way` is the direction of the metric "exact" where it is known; the Kronecker metric would bound nothing. ValueError
    where the sequences were not kept.
    """
    if not statistics.square > 0.0:
        return 0.0
    p = (way or direction(statistics, "exact", tolerance=1e-10)).p
    return max(0.0, 1.0 - float(sum_wide(statistics.gradient * p)) / statistics.square)


def select_columns(
    found: Bottleneck, metric: Metric, most: int, options: Options, validation: Statistics | None = None
) -> int:
    """Return how many columns are worth while for every head: 0 to `most`.

    Parameters
    ----------
    found, metric
        The bottleneck, and the metric that it was found in.
    most
        The largest answer.
    options
        A column has to follow at least the part `share` of all squares, and more than rounding.
    validation
        Statistics of other sequences. A direction is believed only where their gradient along it is at least `trust` of
        the options times what was found: directions of small batches are noise.
    """
    xp, squares = namespace(found.sigma), found.squares
    least = options.share * sum(squares)
    count = 0
    along = None if validation is None else xp.sum(believed(found, metric, validation), axis=0)
    for j, square in enumerate(squares[:most]):
        if square <= found.rounding or square < least:
            break
        if along is not None and float(along[j]) < options.trust * square:
            break
        count += 1
    return count


def believed(found: Bottleneck, metric: Metric, validation: Statistics) -> Array:
    """Return sigma_j u_j^T G' v_j (h, seen) with the gradient of other sequences: sigma_j^2 where these agree."""
    xp = namespace(found.sigma)
    other = metric.whiten_gradient(validation.gradient)
    return xp.sum(found.u * (other @ found.v), axis=1) * found.sigma


def with_ties(found: Bottleneck, columns: int, room: int) -> int:
    """Return so many columns and more, where the last one's singular value is that of the next in some head.

    Of equal singular values the directions are arbitrary: one may get either, both are well defined.
    """
    heads, seen = found.sigma.shape

    def tied(j: int) -> bool:
        pairs = ((float(found.sigma[i, j - 1]), float(found.sigma[i, j])) for i in range(heads))
        return any(0.0 < (1.0 - TIE) * last <= following for last, following in pairs)

    while 0 < columns < min(room, seen) and tied(columns):
        columns += 1
    return columns
