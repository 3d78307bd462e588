"""The weight of a pair as an inner product of features: why attention by a polynomial needs no pairs.

A weight is a kernel of two vectors plus a constant, w = K(q+, k+) + constant, and the kernel is an inner product of
monomials, K(x, y) = phi(x) . psi(y) (see `monomials`). Sums over keys then need psi(k+) alone, whatever queries come.

In general x+ = sqrt(c) x' and K is the polynomial itself, with the monomials of all degrees up to p::

    K(x, y) = T_p(x . y),    constant = -delta,    C(d + p, p) monomials

With layer normalisation and p = 2 it is a square, because the elements of x' add up to 0::

    T_2(s) = (1 + s)^2 / 2 + 1/2
    x+ = sqrt(c) x' + 1/sqrt(d),    q+ . k+ = 1 + s
    K(x, y) = (x . y)^2 / 2,    constant = 1/2 - delta,    d (d + 1) / 2 monomials, all of degree 2

so that order 2 is attention by squared inner products, plus a constant times the plain mean. Where rotations or the
lack of a layer normalisation let the sum be anything, the general form is taken; its monomials of degree up to 2 are
those of degree 2 of x+ with a 1 appended.

The mean of x' is subtracted once more, for in float32 it is 0 only up to the rounding of a large mean of x. The adjoint
leaves that out: the adjoint of the layer normalisation removes this part of the gradient anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from refattn.mechanisms.higher_order.dense import taylor
from refattn.mechanisms.higher_order.implementations.monomials import count, monomials, monomials_backward, pieces
from refattn.mechanisms.higher_order.options import Options
from refattn.ops.layer_norm import normalise, normalise_backward
from refattn.xp import Array, namespace, sum_last


@dataclass(frozen=True)
class Kernel:
    """The kernel of some options for queries and keys of width d."""

    options: Options
    width: int

    @property
    def square(self) -> bool:
        """Whether the weight is a square and a constant."""
        return self.options.order == 2 and self.options.layer_norm

    @property
    def constant(self) -> float | Array:
        """What is added to the kernel: kappa."""
        return (0.5 if self.square else 0.0) - self.options.normaliser.delta

    @property
    def homogeneous(self) -> bool:
        """Whether nothing is added, whatever is learned."""
        return isinstance(self.constant, float) and self.constant == 0.0

    @property
    def lowest(self) -> int:
        """The lowest degree of its monomials; the highest is the order."""
        return 2 if self.square else 0

    @property
    def features(self) -> int:
        """How many monomials it has."""
        return count(self.width, self.lowest, self.options.order)

    def lift(self, x: Array) -> tuple[Array, tuple[Array, Array] | None]:
        """Return x+ for x (..., n, d), and what `lift_backward` reads."""
        factor = self._root
        if not self.options.layer_norm:
            return x * factor, None
        normal, saved = normalise(x, self.options.norm_eps)
        if not self.square:
            return normal * factor, saved
        shift = 1.0 / math.sqrt(self.width) - factor / self.width * sum_last(normal)
        return normal * factor + shift, saved

    def lift_backward(self, saved: tuple[Array, Array] | None, d_lifted: Array) -> Array:
        """Return the gradient of x for that of `lift`."""
        d_normal = d_lifted * self._root
        return d_normal if saved is None else normalise_backward(*saved, d_normal)

    def part_of_alpha(self, lifted: Array, d_lifted: Array) -> Array:
        """Return the part of dalpha that comes from some x+, (b, g, 1, 1), for the gradient of these.

        x+ is sqrt(c) x', or that and a constant vector, and c is 1 / (alpha sqrt(d)): dalpha = -x . dx / (2 alpha).
        """
        xp = namespace(lifted)
        own = lifted - xp.mean(lifted, axis=-1, keepdims=True) if self.square else lifted
        total = xp.sum(own * d_lifted, axis=tuple(range(2, len(own.shape))))
        return -total[:, :, None, None] / (2.0 * self.options.alpha)

    @property
    def _root(self) -> float | Array:
        scale = self.options.scale(self.width)
        return math.sqrt(scale) if isinstance(scale, float) else namespace(scale).sqrt(scale)

    def phi(self, x: Array) -> Iterator[Array]:
        """Yield the features of queries x+ (..., n, d): (..., features, n), in pieces."""
        return monomials(_columns(x), self.lowest, self.options.order, divided=False)

    def phi_backward(self, x: Array, d_phi: Array) -> Array:
        """Return the gradient of x+ for that of `phi`, (..., features, n)."""
        columns = _columns(x)
        d_columns = monomials_backward(columns, self.lowest, self.options.order, d_phi, divided=False)
        return namespace(x).matrix_transpose(d_columns)

    def psi(self, y: Array) -> Iterator[Array]:
        """Yield the features of keys y+ (..., n, d), with their weights: (..., features, n), in pieces."""
        return monomials(_columns(y), self.lowest, self.options.order, divided=True)

    def psi_backward(self, y: Array, d_psi: Array) -> Array:
        """Return the gradient of y+ for that of `psi`, (..., features, n)."""
        columns = _columns(y)
        d_columns = monomials_backward(columns, self.lowest, self.options.order, d_psi, divided=True)
        return namespace(y).matrix_transpose(d_columns)

    def sum(self, features: Iterator[Array], weights: Array) -> Array:
        """Return the sum over all features of phi or psi (..., n), times weights (..., features, e): (..., n, e)."""
        xp = namespace(weights)
        total: Array = 0.0
        for rows, piece in zip(pieces(self.width, self.lowest, self.options.order), features, strict=True):
            total += xp.matrix_transpose(piece) @ weights[..., rows, :]
        return total

    @property
    def factor(self) -> float:
        """A constant of the kernel that is left to smaller arrays than those of all pairs."""
        return 0.5 if self.square else 1.0

    def of(self, product: Array) -> Array:
        """Return K / factor for inner products x+ . y+."""
        return product * product if self.square else taylor(product, self.options.order)

    def slope(self, product: Array) -> Array:
        """Return the derivative of K."""
        return product if self.square else taylor(product, self.options.order - 1)


def _columns(x: Array) -> Array:
    """(..., n, d) -> (..., d, n), each row in one piece of memory: all products of features run along the tokens."""
    xp = namespace(x)
    columns = xp.matrix_transpose(x)
    # A reshape to one axis copies in the order of the axes; a plain copy may keep the order of the memory.
    flat = xp.reshape(columns, (*columns.shape[:-2], columns.shape[-2] * columns.shape[-1]))
    return xp.reshape(flat, columns.shape)
