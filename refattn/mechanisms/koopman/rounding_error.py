"""How far rounding may have moved the results of a call: by the norms of its systems, or by computing it again.

Where points hardly differ, or are large beside the ridge and the jitter, the systems of KOOP.dual and KOOP.9 are nearly
singular, and rounding in the points, their values and their sums comes out multiplied. The first estimate follows the
norms through the updates. The relative error e of the points before an update becomes, with the unit roundoff u,

    e' = (u (1 + |N|^2 |G| / |Z|) + e) (1 + |c| |H| / |t|) gain |J| |J^-1|

where the first factor is what kappa errs by, the second what cancels in KOOP.14, and the gain what the fit makes of an
error in its right-hand side. The answers to it are seen through kappa and the coordinates, whose parts along the
eigenvectors of Z and G are at most sqrt(z) and sqrt(g), in units of the norms of the functions; so it is the largest of

    stein       sqrt(z g) / (z g + ridge) times sqrt(|Z| |G|)            hence sqrt(1 + |Z| |G| / ridge)
    separable   the same of z and the ridge, times that of g and delta   hence sqrt((1 + |Z| / ridge) (1 + |G| / delta))

It is no bound, as norms leave out factors of the sizes, but it lies far above nearly all errors, and costs nothing: of
random calls with numbers of the sizes 1e-3 to 1e3, those where it was below 1e-6 erred by 3e-9, and their gradients by
2e-8. A call where it is below what is passed over is done. Any other is computed twice more, with all that may err
changed by some units of rounding, each in its own way: q, k and v, every value and gradient of the kernel, Z, D, R and
c. What the results then differ by, at most, is the estimate.

Letters: b batch, h head, i query.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from refattn.xp import Array, arange, concrete, namespace

REPEATS = 2
"""How often a call is computed again: by chance one result may lie near a wrong one."""

FAINT = 1e-3
"""A gradient counts as no smaller than this part of the loss, sum(d_out out), over 1 + the largest of its variable: one
that is 0 by what the equations say, as that of epsilon with a linear kernel, has no digit that is right."""

UNITS = 16.0
"""Units of rounding by which numbers are changed: more than a value of the kernel, or a point, errs by."""


def unchanged(x: Array) -> Array:
    """Return x."""
    return x


def grown(error: Array, lift: Any, dual: Array, inner: Array, gram: Any, options: Any, condition: Array) -> Array:
    """Return e' (b, h, i) for e, for what an update computed, the norms of G, and the condition of its inverse."""
    xp, norm = namespace(inner), namespace(inner).linalg.matrix_norm
    unit, ridge = 0.5 * float(xp.finfo(inner.dtype).eps), xp.min(lift.numbers[2])
    z, length = norm(inner), xp.linalg.vector_norm
    of_kappa = unit * (1.0 + _over(norm(dual) ** 2 * gram, z))
    cancelled = 1.0 + _over(length(lift.section, axis=-1) * norm(lift.lifted), length(lift.image, axis=-1))
    delta = options.jitter * options.kernel.unit()
    return (of_kappa + error) * cancelled * options.fit.gain(z, gram, ridge, delta) * condition


def _over(a: Array, b: Array) -> Array:
    """Return a / b, 0 where both are 0."""
    xp = namespace(a)
    return xp.where(b > 0.0, a / xp.where(b > 0.0, b, 1.0), xp.where(a > 0.0, math.inf, 0.0 * a))


def suspects(error: Array, out: Array, bound: float) -> Array:
    """Return where (b, h, i) the norms do not show that the output is right."""
    xp = namespace(out)
    return ~(error <= bound) & xp.all(xp.isfinite(out), axis=-1)


class Nudged:
    """A kernel whose values, and whose gradients before they are summed, err by some units of rounding.

    `values` is called for the points, and errs in another way each time; `look` also by Newton's method, which has to
    find the same function again, and by the Gram matrix.
    """

    def __init__(self, kernel: Any, like: Array, number: int) -> None:
        self.kernel, self.calls = kernel, 100 * number
        self.size = UNITS * float(namespace(like).finfo(like.dtype).eps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def values(self, x: Array, y: Array) -> Array:
        """Return what `Kernel.values` does, nearly."""
        return self.nudged(self.kernel.values(x, y))

    def look(self, x: Array, y: Array) -> tuple[Array, ...]:
        """Return what `Kernel.look` does, with other values."""
        value, *rest = self.kernel.look(x, y)
        return value * self._factors(value, 0), *rest

    def backward(self, x: Array, y: Array, d_values: Array) -> Any:
        """Return what `Kernel.backward` does, for nearly the same gradient."""
        return self.kernel.backward(x, y, self.nudged(d_values))

    def nudged(self, x: Array) -> Array:
        """Return x (..., p, q) with other changes in each call, the same for all axes in front."""
        self.calls += 1
        return x * self._factors(x, self.calls)

    def _factors(self, x: Array, call: int) -> Array:
        xp, (rows, columns) = namespace(x), x.shape[-2:]
        places = xp.astype(arange(1, rows * columns + 1, x), x.dtype)
        # Any numbers between -1 and 1 do that are unlike for neighbours and calls.
        return xp.reshape(1.0 + self.size * xp.sin(places * 12.9898 + call * 78.233), (rows, columns))


def repeats(arrays: tuple[Array, Array, Array], options: Any) -> Iterable[tuple[tuple[Array, ...], Any]]:
    """Yield q, k and v and the options of calls that differ by rounding alone."""
    for number in range(1, REPEATS + 1):
        kernel = Nudged(options.kernel, arrays[0], number)
        nudged = replace(options, kernel=kernel, nudge=kernel.nudged, certify=False)
        yield tuple(kernel.nudged(x) for x in arrays), nudged


def apart(results: Array, others: Iterable[Array | None], axes: Any, least: Any = 0.0) -> Array:
    """Return by how much others lie from results at most, over the largest of these along the axes, or the least size.

    Where there is no other result it is infinite.
    """
    xp = namespace(results)
    size, error = xp.max(xp.abs(results), axis=axes), xp.max(0.0 * xp.abs(results), axis=axes)
    size = xp.where(size < least, least + 0.0 * size, size)
    for other in others:
        if other is None:
            return error + math.inf
        far = _over(xp.max(xp.abs(other - results), axis=axes), size)
        error = xp.where(far > error, far, xp.where(xp.isnan(far) & ~xp.isnan(size), math.inf, error))
    return error


def needs_of(computed: Array) -> str:
    """Return what to change, for results that were computed in the dtype of an array."""
    wider = ", or float64" if namespace(computed).finfo(computed.dtype).bits == 32 else ""
    return f"a larger jitter or ridge, or keys, values and queries of a smaller scale{wider}"


def is_true(condition: Array) -> bool:
    """Tell whether a condition on values holds somewhere; False where they cannot be asked."""
    return bool(concrete(namespace(condition).any(condition)))
