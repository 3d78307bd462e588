"""Tokens as particles: attention, and attention accelerated by a momentum, as differential equations.

N particles x_i with momenta y_i, the rows of X and Y, follow

    X' = dH/dY,   Y' = -alpha(t) Y - dH/dX,   alpha(t) = c_log / t + c_lin,   so that   H' = -2 alpha K

with the kinetic energy K, the part of H that is quadratic in Y. Attention without momentum is the gradient flow of the
other part in the same metric: X' = dH/dY at Y = -dH/dX (X, 0).

Linear attention, A and V symmetric::

    H = 1/2N sum_ij (x_i^T A x_j) <y_i, y_j> - 1/2 sum_i x_i^T V x_i
    X' = X A C                                      C = X^T Y / N
    Y' = -alpha Y - Y C^T A + X V

Softmax attention, A and B symmetric, M_ij = exp(x_i^T A x_j), z_i = 1/N sum_j M_ij, s_i = <y_i, B y_i> / z_i^2, and a
potential 1/2 x^T U x that holds the particles together, for without it nothing bounds the energy from below::

    H = 1/2 sum_i <y_i, B y_i> / z_i - w/2N sum_ij M_ij + 1/2 sum_i x_i^T U x_i
    x_i' = B y_i / z_i
    y_i' = -alpha y_i + 1/2N sum_j M_ij (s_i + s_j + 2 w) A x_j - U x_i

The weight w of the attraction is 1 (mean field), N^2 (the authors' program), or what is asked for. Without momentum the
particles follow x_i' = w sum_j softmax_j(x_i^T A x_j) B A x_j: attention, with V = B A for its values.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535); every equation was derived again from its H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from refattn.args import Having, One, Real, check, check_all, checked

Matrix = NDArray[Any]

EVALUATIONS = 500_000
"""Slopes that a solution may take."""

SCALINGS = ("mean_field", "repo")


class System(Protocol):
    """What particles with momenta need to know: the derivatives of H, and its two parts."""

    def velocity(self, x: Matrix, y: Matrix) -> Matrix:
        """Return dH/dY (N, d), which is linear in the momenta."""

    def force(self, x: Matrix, y: Matrix) -> Matrix:
        """Return -dH/dX (N, d)."""

    def kinetic(self, x: Matrix, y: Matrix) -> float:
        """Return the part of H that is quadratic in the momenta."""

    def potential(self, x: Matrix) -> float:
        """Return the part of H without momenta."""


@dataclass(frozen=True)
class Linear:
    """Linear attention: a bilinear kernel x^T A y between particles, and a potential -1/2 x^T V x of each."""

    a: Matrix  # (d, d)
    v: Matrix  # (d, d)

    def __post_init__(self) -> None:
        check("a", self.a, "d d")
        check("v", self.v, "d d")
        _check_symmetric(a=self.a, v=self.v)

    def velocity(self, x: Matrix, y: Matrix) -> Matrix:
        """Return X A C."""
        return x @ (self.a @ (x.T @ y)) / len(x)

    def force(self, x: Matrix, y: Matrix) -> Matrix:
        """Return X V - Y C^T A."""
        return x @ self.v - y @ (y.T @ x @ self.a) / len(x)

    def kinetic(self, x: Matrix, y: Matrix) -> float:
        """Return 1/2N sum_ij (x_i^T A x_j) <y_i, y_j>."""
        return 0.5 * np.sum((x @ self.a @ x.T) * (y @ y.T)) / len(x)

    def potential(self, x: Matrix) -> float:
        """Return -1/2 sum_i x_i^T V x_i."""
        return -0.5 * np.sum(x * (x @ self.v))


@dataclass(frozen=True)
class Exponential:
    """Softmax attention: the kernel exp(x^T A y), the mobility B / z, and a potential 1/2 x^T U x of each particle.

    Attributes
    ----------
    a, b
        The symmetric matrices of the scores and of the mobility.
    u
        The matrix of the potential; None: there is none.
    scaling
        The weight of the attraction: "mean_field", 1; "repo", N^2, as in the authors' program.
    attraction
        A weight in place of both: 0 leaves the potential alone.
    """

    a: Matrix  # (d, d)
    b: Matrix  # (d, d)
    u: Matrix | None = None  # (d, d)
    scaling: str = "mean_field"
    attraction: float | None = None

    def __post_init__(self) -> None:
        _check_symmetric(a=self.a, b=self.b, **({} if self.u is None else {"u": self.u}))
        check("scaling", self.scaling, One(tuple(SCALINGS)))

    def weight(self, n: int) -> float:
        """Return w for n particles."""
        if self.attraction is not None:
            return self.attraction
        return 1.0 if self.scaling == "mean_field" else float(n * n)

    def velocity(self, x: Matrix, y: Matrix) -> Matrix:
        """Return B y_i / z_i."""
        return y @ self.b / np.mean(self._growth(x), axis=1)[:, None]

    def force(self, x: Matrix, y: Matrix) -> Matrix:
        """Return 1/2N sum_j M_ij (s_i + s_j + 2 w) A x_j - U x_i."""
        growth, n = self._growth(x), len(x)
        s = np.sum(y * (y @ self.b), axis=1) / np.mean(growth, axis=1) ** 2
        pull = (growth * (s[:, None] + s[None, :] + 2.0 * self.weight(n))) @ (x @ self.a) / (2.0 * n)
        return pull if self.u is None else pull - x @ self.u

    def kinetic(self, x: Matrix, y: Matrix) -> float:
        """Return 1/2 sum_i <y_i, B y_i> / z_i."""
        return 0.5 * np.sum(y * self.velocity(x, y))

    def potential(self, x: Matrix) -> float:
        """Return -w/2N sum_ij M_ij + 1/2 sum_i x_i^T U x_i."""
        pull = -0.5 * self.weight(len(x)) * np.sum(self._growth(x)) / len(x)
        return pull if self.u is None else pull + 0.5 * np.sum(x * (x @ self.u))

    def _growth(self, x: Matrix) -> Matrix:
        return np.exp(x @ self.a @ x.T)


@dataclass(frozen=True)
class Damping:
    """The damping alpha(t) = c_log / t + c_lin: 3/t is Nesterov's, a constant that of a heavy ball."""

    c_log: float = 3.0
    c_lin: float = 0.0

    def __post_init__(self) -> None:
        check_all(self, c_log=Real(0.0), c_lin=Real(0.0))

    def alpha(self, t: float) -> float:
        """Return alpha(t)."""
        return self.c_log / t + self.c_lin

    def between(self, t: float, later: float) -> float:
        """Return the integral of alpha from t to a later time."""
        return self.c_log * math.log(later / t) + self.c_lin * (later - t)


SYSTEM = Having(("velocity", "force", "kinetic", "potential"), "a system, such as Linear or Exponential")


@checked(system=SYSTEM, x="n d", y="n d")
def hamiltonian(system: System, x: Matrix, y: Matrix) -> float:
    """Return H."""
    return system.kinetic(x, y) + system.potential(x)


@checked(system=SYSTEM, x="n d")
def attention(system: System, x: Matrix) -> Matrix:
    """Return the velocity (N, d) of particles without momentum: attention as it is."""
    width = np.asarray(getattr(system, "a", np.eye(x.shape[1]))).shape[0]
    if x.shape[1] != width:
        raise ValueError(f"x: got shape {x.shape}, needs (n, {width}), the width of the system")
    return system.velocity(x, system.force(x, np.zeros_like(x)))


def _check_start(times: Matrix, **start: Matrix) -> None:
    for name, x in {**start, "times": times}.items():
        if not x.size or not np.all(np.isfinite(x)):
            raise ValueError(f"{name}: got {'numbers that are not finite' if x.size else 'none'}, needs finite numbers")
    if np.any(np.diff(times) <= 0.0):
        raise ValueError("times: got such that do not grow, needs growing ones")


@checked(system=SYSTEM, x="n d", times="t", rtol=Real(0.0))
def descend(system: System, x: Matrix, times: Matrix, *, rtol: float = 1e-10) -> Matrix:
    """Return the particles (times, N, d) without momentum; the first of the times is that of `x`."""
    _check_start(times, x=x)
    return _solve(lambda t, flat: attention(system, flat.reshape(x.shape)).ravel(), x.ravel(), times, rtol).reshape(
        len(times), *x.shape
    )


@checked(system=SYSTEM, x="n d", y="n d", times="t", damping=Damping, rtol=Real(0.0))
def accelerate(
    system: System, x: Matrix, y: Matrix, times: Matrix, damping: Damping, *, rtol: float = 1e-10
) -> tuple[Matrix, Matrix]:
    """Return particles and momenta (times, N, d); the first of the times is that of `x` and `y`."""

    def slope(t: float, flat: Matrix) -> Matrix:
        x_now, y_now = flat.reshape(2, *x.shape)
        pushed = system.force(x_now, y_now) - damping.alpha(t) * y_now
        return np.stack([system.velocity(x_now, y_now), pushed]).ravel()

    found = _solve(slope, np.stack([x, y]).ravel(), times, rtol).reshape(len(times), 2, *x.shape)
    return found[:, 0], found[:, 1]


def _solve(slope: Any, start: Matrix, times: Matrix, rtol: float) -> Matrix:
    span, count = (float(times[0]), float(times[-1])), 0

    def counted(t: float, flat: Matrix) -> Matrix:
        nonlocal count
        count += 1
        if count > EVALUATIONS:
            raise ValueError(f"times: got {span[0]:g} to {span[1]:g}, needs an earlier end: stiff, stopped at {t:g}")
        return slope(t, flat)

    found = solve_ivp(counted, span, start, method="DOP853", t_eval=times, rtol=rtol, atol=1e-3 * rtol)
    if not found.success:
        raise ValueError(f"times: got {span[0]:g} to {span[1]:g}, needs an earlier end: {found.message}")
    return found.y.T


def _check_symmetric(**matrices: Matrix) -> None:
    for name, matrix in matrices.items():
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
        if not square or np.max(np.abs(matrix - matrix.T)) > 1e-12 * np.max(np.abs(matrix)):
            raise ValueError(f"{name}: got a matrix of shape {matrix.shape}, needs a symmetric one")
