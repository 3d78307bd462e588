"""Which functions the operator acts on: the observables g that it reads, and the functions kappa that it answers with.

    keys        g_o = k(k_o, .) at the keys;            kappa = N g, N = B G^-1: it answers in the span of what it reads
    augmented   these, and the coordinates x_p;         kappa = N g, so that what is linear is met whatever the keys are
    full        g_o = k(k_o, .) at the keys;            kappa_l = k(x_l, .): every function may come out

`Observables` are g, with 0 for what a query does not see. `Projected` and `AtPoints` are kappa. Inner products of
observables are G, those with the coordinate functions P: <k(k_o, .), x_p> = (k_o)_p, and <x_p, x_p'> = I / n with n the
factor of x . y in the kernel.

Letters: b batch, h head, i query, j key, l transition, o observable: keys, then coordinates if augmented; d width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman.options.kernel import Kernel
from refattn.ops.solve import identity
from refattn.xp import Array, namespace, transpose, zeros

Solved = Callable[..., Array]


@dataclass(frozen=True)
class Observables:
    """The sections k(k_o, .) at the keys that a query sees."""

    kernel: Kernel
    keys: Array  # (b, h, 1 or i, j, d)
    seen: Array  # (b, h, i, j): whether the query sees the key
    count: Array  # (b, h, i, 1): how many it sees, 1 where it sees none

    def observed(self) -> Array:
        """Return whether a query sees an observable, (b, h, i, o)."""
        return self.seen

    def visible(self, x: Array) -> Array:
        """Return x (b, h, i, l, o) with 0 for observables that are not seen."""
        return namespace(x).where(self.seen[..., None, :], x, 0.0)

    def forward(self, x: Array) -> Array:
        """Return g(x): (b, h, i, l, d) -> (b, h, i, l, o)."""
        return self.visible(self.beside(self.kernel.values(x, self.keys), x))

    def backward(self, x: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients of x, of the keys (b, h, i, j, d), the bandwidth and the weight."""
        at_keys, beyond = self.parts(self.visible(d_values))
        d_x, d_keys, d_bandwidth, d_weight = self.kernel.backward(x, self.keys, at_keys)
        return d_x + beyond, d_keys, d_bandwidth, d_weight

    def look(self, x: Array, factors: Array) -> tuple[Array, Array, Array]:
        """Return C g(x) (b, h, i, d) for C (b, h, i, d, o), the size of its terms, and its Jacobian (b, h, i, d, d)."""
        xp, row = namespace(x), x[..., None, :]
        values, cross, own, *_ = self.kernel.look(row, self.keys)  # (b, h, i, 1, j)
        at_keys, beyond = self.parts(factors)
        jacobian = (at_keys * cross) @ self.keys + xp.sum(at_keys * own, axis=-1, keepdims=True) * row
        beyond = beyond + self.kernel.more(row, self.keys, at_keys)
        at_x = self.visible(self.beside(values, row))  # (b, h, i, 1, o)
        value, size = factors @ transpose(at_x), xp.abs(factors) @ transpose(xp.abs(at_x))
        return value[..., 0], size[..., 0], jacobian + beyond

    def parts(self, factors: Array) -> tuple[Array, Array | float]:
        """Return of factors (..., o) those of the keys, and those of the coordinates."""
        return factors, 0.0

    def beside(self, values: Array, x: Array) -> Array:
        """Return values at the keys (..., j) and, of coordinates, x (..., d) itself: (..., o)."""
        return values

    def coordinates(self) -> Array:
        """Return P (b, h, 1, o, d)."""
        return self.keys

    def coordinates_backward(self, d_coordinates: Array) -> dict[str, Array]:
        """Return for the gradient of P (b, h, o, d) those of the keys and, by "norm", of 1 / n."""
        return {"k": d_coordinates}

    def gram(self, keys: Array, delta: Any) -> Array:
        """Return the inner products (b, h, o, o) of the observables at keys (b, h, j, d), + delta on the diagonal."""
        return self.kernel.look(keys, keys)[0] + delta * identity(keys.shape[2], keys)

    def gram_backward(self, keys: Array, d_gram: Array, d_norm: Array) -> dict[str, Array]:
        """Return for the gradients of the inner products and, from P, of 1 / n those of the keys and the numbers."""
        left, right, d_bandwidth, d_weight = self.kernel.backward(keys, keys, d_gram)
        return {"k": left + right, "bandwidth": d_bandwidth, "weight": d_weight}

    def steepness(self, factors: Array) -> Array:
        """Return a bound on |C g(x) - C g(y)| / |x - y|, (b, h, i), for C = `factors` (b, h, i, d, o)."""
        xp, (at_keys, beyond) = namespace(factors), self.parts(factors)
        lengths = xp.sum(xp.sqrt(xp.sum(at_keys * at_keys, axis=-2)), axis=-1)
        return xp.linalg.matrix_norm(at_keys @ self.keys + beyond, ord=2) + self.kernel.slope_bound() * lengths


@dataclass(frozen=True)
class WithCoordinates(Observables):
    """The sections at the keys, and behind them the coordinates, g(x) = (k(k_o, x), x): these are always seen."""

    def observed(self) -> Array:
        """Return whether a query sees an observable, (b, h, i, o)."""
        every = zeros((*self.seen.shape[:3], self.keys.shape[-1]), self.keys) == 0.0
        return namespace(self.keys).concat([self.seen, every], axis=-1)

    def visible(self, x: Array) -> Array:
        """Return x (b, h, i, l, o) with 0 for observables that are not seen."""
        xp, j = namespace(x), self.keys.shape[3]
        return xp.concat([xp.where(self.seen[..., None, :], x[..., :j], 0.0), x[..., j:]], axis=-1)

    def parts(self, factors: Array) -> tuple[Array, Array]:
        """Return of factors (..., o) those of the keys, and those of the coordinates."""
        return factors[..., : self.keys.shape[3]], factors[..., self.keys.shape[3] :]

    def beside(self, values: Array, x: Array) -> Array:
        """Return values at the keys (..., j) and x (..., d) itself: (..., o)."""
        return namespace(x).concat([values, x], axis=-1)

    def coordinates(self) -> Array:
        """Return P (b, h, 1, o, d) = (k, I / n)."""
        own = identity(self.keys.shape[-1], self.keys) / self.kernel.linear_part()
        every = zeros((*self.keys.shape[:2], 1, 1, 1), self.keys)
        return namespace(own).concat([self.keys, own + every], axis=-2)

    def coordinates_backward(self, d_coordinates: Array) -> dict[str, Array]:
        """Return for the gradient of P (b, h, o, d) those of the keys and, by "norm", of 1 / n."""
        j, eye = self.keys.shape[3], identity(d_coordinates.shape[-1], d_coordinates)
        return {"k": d_coordinates[..., :j, :], "norm": namespace(eye).sum(d_coordinates[..., j:, :] * eye)}

    def gram(self, keys: Array, delta: Any) -> Array:
        """Return [[k(keys, keys), keys], [keys^T, I / n]] (b, h, o, o), + delta on the diagonal."""
        xp = namespace(keys)
        corner = (1.0 / self.kernel.linear_part() + delta) * identity(keys.shape[3], keys)
        corner = corner + zeros((*keys.shape[:2], 1, 1), keys)
        upper = xp.concat([super().gram(keys, delta), keys], axis=-1)
        return xp.concat([upper, xp.concat([transpose(keys), corner], axis=-1)], axis=-2)

    def gram_backward(self, keys: Array, d_gram: Array, d_norm: Array) -> dict[str, Array]:
        """Return for the gradients of the inner products and, from P, of 1 / n those of the keys and the numbers."""
        xp, j = namespace(keys), keys.shape[2]
        total = super().gram_backward(keys, d_gram[..., :j, :j], d_norm)
        # forward: gram = [[k(keys, keys), keys], [keys^T, I / n]]
        d_keys = d_gram[..., :j, j:] + transpose(d_gram[..., j:, :j])
        own = xp.sum(d_gram[..., j:, j:] * identity(keys.shape[3], keys))
        d_bandwidth, d_weight = self.kernel.linear_part_backward(-(d_norm + own) / self.kernel.linear_part() ** 2)
        beyond = {"k": d_keys, "bandwidth": d_bandwidth, "weight": d_weight}
        return {name: part + beyond[name] for name, part in total.items()}


@dataclass(frozen=True)
class Kappa:
    """The functions that an operator answers with: kappa(x) = dual @ centres(x)."""

    centres: Observables
    dual: Array

    def at(self, x: Array) -> Array:
        """Return kappa(x) (b, h, i, l) for x (b, h, i, d)."""
        return (self.dual @ transpose(self.centres.forward(x[..., None, :])))[..., 0]


@dataclass(frozen=True)
class Projected(Kappa):
    """kappa(x) = N g(x): the sections at the starts of transitions, brought into the span of the observables g.

    `dual` is N (b, h, i, l, o).
    """

    starts: Array  # (b, h, i, l, o): B
    gram: Array  # (b, h, i, o, o): G

    def inner(self) -> Array:
        """Return Z = N B^T (b, h, i, l, l)."""
        return self.dual @ transpose(self.starts)

    def starts_backward(
        self, d_starts: Array, d_gram: Array, d_inner: Array, d_kappa: Array, at_beside: Array, dual_backward: Solved
    ) -> tuple[Array, Array]:
        """Return the gradients of B and G, with what N adds to them, for those of Z and of kappa at further points."""
        # forward: inner = dual @ starts^T; dual = starts G^-1; kappa(x) = dual @ g(x)
        through = dual_backward(self.starts, self.gram, d_inner, d_kappa, at_beside)  # (b, h, i, l, o): dN G^-1
        return d_starts + transpose(d_inner) @ self.dual + through, d_gram - transpose(self.dual) @ through

    def points_backward(
        self, g: Observables, points: Array, beside: Array, d_path: Array, d_inner: Array, d_kappa: Array
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return the gradients of points x_0 ... x_L, of two beside, of keys, bandwidth and weight.

        They are those of g at the points (b, h, i, l + 1, o), and of kappa at the two, (b, h, i, 2, l).
        """
        x = namespace(points).concat([points, beside], axis=-2)  # (b, h, i, l + 3, d): where g was evaluated
        d_g = namespace(points).concat([d_path, d_kappa @ self.dual], axis=-2)  # (b, h, i, l + 3, o)
        d_x, d_k, d_bandwidth, d_weight = g.backward(x, d_g)
        return d_x[..., :-2, :], d_x[..., -2:, :], d_k, d_bandwidth, d_weight


@dataclass(frozen=True)
class AtPoints(Kappa):
    """kappa_l(x) = k(x_l, x): the sections at the starts of transitions themselves, the centres; `dual` is 1 (l, l)."""

    first: Array  # (b, h, i, l, d): the starts

    def inner(self) -> Array:
        """Return Z_lm = k(x_l, x_m) (b, h, i, l, l)."""
        return self.centres.forward(self.first)

    def starts_backward(
        self, d_starts: Array, d_gram: Array, d_inner: Array, d_kappa: Array, at_beside: Array, dual_backward: Solved
    ) -> tuple[Array, Array]:
        """Return the gradients of B and G as they come: kappa is not made of them."""
        return d_starts, d_gram

    def points_backward(
        self, g: Observables, points: Array, beside: Array, d_path: Array, d_inner: Array, d_kappa: Array
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return what `Projected.points_backward` does; the starts move as points of sections, too."""
        xp = namespace(points)
        d_points, d_k, d_bandwidth, d_weight = g.backward(points, d_path)
        d_first, d_beside, more_bandwidth, more_weight = self.sections_backward(beside, d_inner, d_kappa)
        moved = xp.concat([d_first, xp.zeros_like(d_first[..., :1, :])], axis=-2)
        return d_points + moved, d_beside, d_k, d_bandwidth + more_bandwidth, d_weight + more_weight

    def sections_backward(self, beside: Array, d_inner: Array, d_kappa: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients of the starts, of two points beside, and of the numbers, for those of Z and kappa."""
        xp = namespace(beside)
        at = xp.concat([self.first, beside], axis=-2)  # where the sections were evaluated
        d_at = xp.concat([d_inner, d_kappa], axis=-2)  # of each section there
        d_x, d_first, d_bandwidth, d_weight = self.centres.backward(at, d_at)
        return d_x[..., :-2, :] + d_first, d_x[..., -2:, :], d_bandwidth, d_weight


@dataclass(frozen=True)
class Space:
    """The functions that the operator reads, and whether it answers with any function or in the span of these."""

    kind: type[Observables] = Observables
    full: bool = False

    def size(self, keys: int, width: int) -> int:
        """Return how many observables there are."""
        return keys if self.kind is Observables else keys + width

    def observables(self, kernel: Kernel, keys: Array, seen: Array) -> Observables:
        """Return the observables at keys (b, h, j, d)."""
        return self.kind(kernel, keys[:, :, None, :, :], seen, counted(keys, seen))

    def kappa(self, g: Observables, first: Array, starts: Array, gram: Array, dual_of: Solved) -> Any:
        """Return kappa for transitions that start at points (b, h, i, l, d)."""
        if not self.full:
            return Projected(g, dual_of(starts, gram), starts, gram)
        everywhere = namespace(first).zeros_like(first[..., 0]) == 0.0  # (b, h, i, l): True
        return AtPoints(Observables(g.kernel, first, everywhere, g.count), identity(first.shape[3], first), first)


SPACES = {"keys": Space(), "augmented": Space(WithCoordinates), "full": Space(full=True)}


def counted(keys: Array, seen: Array) -> Array:
    """Return how many keys each query sees, (b, h, i, 1), 1 where it sees none."""
    found = namespace(keys).sum(namespace(keys).astype(seen, keys.dtype), axis=-1, keepdims=True)
    return namespace(keys).where(found == 0.0, 1.0, found)
