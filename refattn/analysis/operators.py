"""Operators fitted to given transitions: that of Koopman attention, and the two that its field knows.

Each predicts by powers of its operator K: the states after t steps are (K^t pi)(x), with pi the coordinates. No state
that was predicted is ever put in again.

Sources: Khosravi 2023 (arXiv:2208.01681) for the first; Williams, Kevrekidis, Rowley 2015 (J. Nonlinear Sci. 25) for
extended dynamic mode decomposition (EDMD); Williams, Rowley, Kevrekidis 2015 (J. Comput. Dyn. 2) for its kernel form.

Letters: n state, l transition, o observable, d coordinate.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from refattn.args import One, Real, Whole, check_number, checked
from refattn.mechanisms.koopman.options.kernel import Kernel

Numbers = Any
"""A NumPy array."""


class Operator(Protocol):
    """What is fitted to transitions."""

    def predict(self, states: Numbers, steps: int) -> Numbers:
        """Return the states after 1, 2, ... steps, (steps, n, d), of states (n, d)."""
        ...

    def eigenvalues(self) -> Numbers:
        """Return the eigenvalues, the largest first."""
        ...


class Koopman:
    """The operator of Koopman attention, whose observables are kernel sections at the keys.

    With the coefficients A, B_lo = g_o(x_l) and N = B G^-1 it is (K f)(x) = tau f(x) + kappa(x)^T A f(keys), where
    kappa(x) = N g(x), or in the full space kappa_l(x) = k(x_l, x).

    Parameters
    ----------
    kernel, ridge, fit, space, tau
        As in the mechanism.
    starts, ends
        (l, d): the transitions.
    keys
        (o, d).
    jitter
        Added to the diagonal of the Gram matrix.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.analysis.operators import Koopman
    >>> from refattn.mechanisms.koopman.options.kernel import Linear
    >>> starts = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> ends = 0.5 * starts
    >>> fitted = Koopman(Linear(), starts, ends, starts[:2], ridge=1e-9, jitter=1e-9)
    >>> fitted.predict(np.asarray([[2.0, 4.0]]), steps=2).round(3).tolist()
    [[[1.0, 2.0]], [[0.5, 1.0]]]
    """

    @checked(
        kernel=Kernel,
        starts="l d",
        ends="l d",
        keys="o d",
        ridge=Real(0.0),
        jitter=Real(0.0),
        fit=One(("stein", "separable")),
        space=One(("keys", "full")),
        tau=Real(),
    )
    def __init__(
        self,
        kernel: Kernel,
        starts: Numbers,
        ends: Numbers,
        keys: Numbers,
        *,
        ridge: float,
        jitter: float,
        fit: str = "stein",
        space: str = "keys",
        tau: float = 0.0,
    ) -> None:
        _check(kernel, starts=starts, ends=ends, keys=keys)
        self.kernel, self.tau, self.starts, self.keys = kernel, tau, starts, keys
        gram = kernel.values(keys, keys) + jitter * np.eye(len(keys))
        at_starts = kernel.values(starts, keys)
        self.dual = np.linalg.solve(gram, at_starts.T).T if space == "keys" else None
        inner = kernel.values(starts, starts) if self.dual is None else self.dual @ at_starts.T
        found = spectral(fit, inner, gram, ridge, kernel.values(ends, keys) - tau * at_starts)
        self.modes, self.matrix = found @ keys, found @ at_starts.T  # D, R

    def kappa(self, states: Numbers) -> Numbers:
        """Return kappa (n, l) of states (n, d)."""
        if self.dual is None:
            return self.kernel.values(states, self.starts)
        return self.kernel.values(states, self.keys) @ self.dual.T

    @checked(states="n d", steps=Whole(1, 1_000_000))
    def predict(self, states: Numbers, steps: int) -> Numbers:
        """Return the states after 1, 2, ... steps."""
        _check_width(states, self.keys)
        # K^t pi = own x + kappa(x)^T rows
        kappa, own, rows, found = self.kappa(states), 1.0, 0.0 * self.modes, []
        for _ in range(steps):
            own, rows = self.tau * own, self.tau * rows + own * self.modes + self.matrix @ rows
            found.append(own * states + kappa @ rows)
        return np.stack(found)

    def eigenvalues(self) -> Numbers:
        """Return the eigenvalues: tau, and beside it those of tau + R on the span of kappa."""
        return largest_first(self.tau + np.linalg.eigvals(self.matrix))


def spectral(fit: str, inner: Numbers, gram: Numbers, ridge: float, targets: Numbers) -> Numbers:
    """Return A without its part in the kernel of Z: A = U (keep (U^T Y V) / (ridge + z g^T)) V^T.

    For many transitions and keys, and for a ridge that is tiny: what A has in the kernel of Z grows as 1 / ridge and
    never enters the operator. (A derivative would want all of A.) With Z = U z U^T and G = V g V^T; kept is
    z > 1e-12 max z in float64, and 1e-6 max z in float32.
    """
    z, left = np.linalg.eigh((inner + np.matrix_transpose(inner)) / 2.0)
    g, right = np.linalg.eigh(gram)
    least = 1e-12 if z.dtype == np.float64 else 1e-6
    keep = (z > least * np.max(z, axis=-1, keepdims=True))[..., None]
    z, g = z[..., :, None], g[..., None, :]
    pairs = ridge + z * g if fit == "stein" else (ridge + z) * g
    turned = np.matrix_transpose(left) @ targets @ right
    return left @ np.where(keep, turned / np.where(keep, pairs, 1.0), 0.0) @ np.matrix_transpose(right)


class EDMD:
    """Least squares over a dictionary: kernel sections at the keys, and the coordinates.

    >>> import numpy as np
    >>> from refattn.analysis.operators import EDMD
    >>> from refattn.mechanisms.koopman.options.kernel import Linear
    >>> starts = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> fitted = EDMD(Linear(), starts, 0.5 * starts, starts[:2])
    >>> fitted.predict(np.asarray([[2.0, 4.0]]), steps=2).round(3).tolist()
    [[[1.0, 2.0]], [[0.5, 1.0]]]
    """

    @checked(kernel=Kernel, starts="l d", ends="l d", keys="o d")
    def __init__(self, kernel: Kernel, starts: Numbers, ends: Numbers, keys: Numbers) -> None:
        _check(kernel, starts=starts, ends=ends, keys=keys)
        self.kernel, self.keys, self.width = kernel, keys, starts.shape[1]
        self.matrix = np.linalg.lstsq(self.features(starts), self.features(ends), rcond=None)[0]

    def features(self, states: Numbers) -> Numbers:
        """Return the dictionary at states (n, d), coordinates first."""
        return np.concatenate([states, self.kernel.values(states, self.keys)], axis=1)

    @checked(states="n d", steps=Whole(1, 1_000_000))
    def predict(self, states: Numbers, steps: int) -> Numbers:
        """Return the states after 1, 2, ... steps."""
        _check_width(states, self.keys)
        features, found = self.features(states), []
        columns = np.eye(len(self.matrix))[:, : self.width]
        for _ in range(steps):
            columns = self.matrix @ columns
            found.append(features @ columns)
        return np.stack(found)

    def eigenvalues(self) -> Numbers:
        """Return the eigenvalues."""
        return largest_first(np.linalg.eigvals(self.matrix))


class KernelEDMD:
    """The same by kernel sections at the starts of the transitions, with small eigenvalues of their Gram cut off.

    >>> import numpy as np
    >>> from refattn.analysis.operators import KernelEDMD
    >>> from refattn.mechanisms.koopman.options.kernel import Linear
    >>> starts = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> fitted = KernelEDMD(Linear(), starts, 0.5 * starts)
    >>> fitted.predict(np.asarray([[2.0, 4.0]]), steps=2).round(3).tolist()
    [[[1.0, 2.0]], [[0.5, 1.0]]]
    """

    CUT = 1e-10
    """Kept are the eigenvalues above this part of the largest."""

    @checked(kernel=Kernel, starts="l d", ends="l d")
    def __init__(self, kernel: Kernel, starts: Numbers, ends: Numbers) -> None:
        _check(kernel, starts=starts, ends=ends)
        self.kernel, self.starts, self.ends = kernel, starts, ends
        values, vectors = np.linalg.eigh(kernel.values(starts, starts))
        kept = values > self.CUT * values[-1]
        self.roots = vectors[:, kept] / np.sqrt(values[kept])  # V g^-1/2
        self.matrix = self.roots.T @ kernel.values(ends, starts) @ self.roots

    @checked(states="n d", steps=Whole(1, 1_000_000))
    def predict(self, states: Numbers, steps: int) -> Numbers:
        """Return the states after 1, 2, ... steps."""
        _check_width(states, self.starts)
        features, found = self.kernel.values(states, self.starts) @ self.roots, []
        rows = self.roots.T @ self.ends
        for _ in range(steps):
            found.append(features @ rows)
            rows = self.matrix @ rows
        return np.stack(found)

    def eigenvalues(self) -> Numbers:
        """Return the eigenvalues."""
        return largest_first(np.linalg.eigvals(self.matrix))


def _check(kernel: Kernel, **given: Numbers) -> None:
    for name in ("bandwidth", "weight"):
        check_number(f"kernel.{name}", getattr(kernel, name), positive=name == "bandwidth")
    for name, x in given.items():
        if x.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name}: got dtype {x.dtype}, needs float32 or float64")
        if not np.all(np.isfinite(x)):
            raise ValueError(f"{name}: got an element that is not finite, needs finite numbers")


def _check_width(states: Numbers, known: Numbers) -> None:
    if states.shape[1] != known.shape[1]:
        raise ValueError(f"states: got shape {states.shape}, needs (n, {known.shape[1]})")


def largest_first(values: Numbers) -> Numbers:
    """Return complex numbers (..., l) with the largest first; of a pair the one above the real axis."""
    order = np.lexsort((-np.imag(values), -np.round(np.abs(values), 12)), axis=-1)
    return np.take_along_axis(values, order, axis=-1)
