"""Where branches of equilibria turn or cross: found, located and told apart.

At an equilibrium with one zero eigenvalue, J v = 0, w J = 0 and w . v = 1, the flow along v is that of a few numbers::

    a = w . v_lambda                                            whether lambda pushes along v
    b2 = w . D2v[v, v]
    c3 = w . (D3v[v, v, v] + 3 D2v[v, h2])                      J h2 = -(1 - v w) D2v[v, v]
    cross = w . (Dv_lambda v + D2v[v, h])                       J h = -(1 - v w) v_lambda

    fold            a and b2 not 0
    transcritical   a = 0, cross and b2 not 0
    pitchfork       a = b2 = 0, cross and c3 not 0; supercritical where c3 < 0
    degenerate      none of these
    multiple        more than one zero eigenvalue
    hopf            none: a pair of complex ones without a real part, which a flow with an energy does not have

The article on graph dynamical systems that graph energy attention follows asks for a second derivative of the energy of
0 and a third one that is not: b2 not 0, that is. With an odd coupling and an intrinsic force that is odd the energy is
even, and the bifurcation of scores of 0 is a pitchfork, where b2 is 0; so that condition is reported by itself.

Source: Yu. A. Kuznetsov, Elements of Applied Bifurcation Theory, chapters 5 and 10, for the numbers and for the
equations of folds and of branch points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import svd
from scipy.optimize import brentq, root

from refattn.analysis.continuation import Branch, Family, corrected, tangent_at
from refattn.analysis.graphs import Floats

SMALL = 1e-4
"""Numbers that are smaller count as 0: they come from differences."""

ZERO = 1e-6
"""Eigenvalues that are smaller, relative to the size of J or 1, count as 0 at a bifurcation that has been located."""

APART = 1e-3
"""The step of the differences: they err by its square, and rounding by 1e-16 over its square."""


@dataclass(frozen=True)
class Bifurcation:
    """A bifurcation at lambda = `at` and x (n,).

    Attributes
    ----------
    kind
        `fold`, `transcritical`, `pitchfork`, `degenerate`, `multiple` or `hopf`.
    zeros
        The number of zero eigenvalues.
    null
        The vector v, (n,), or those that span the null space, (zeros, n).
    numbers
        a, b2, c3 and cross; None where there is not one zero eigenvalue.
    """

    at: float
    x: Floats
    kind: str
    zeros: int
    null: Floats
    numbers: dict[str, float] | None

    @property
    def supercritical(self) -> bool | None:
        """Of a pitchfork, whether its side branches attract along v; None of all others."""
        return self.numbers["c3"] < 0.0 if self.kind == "pitchfork" and self.numbers else None

    @property
    def article_condition(self) -> bool | None:
        """Whether the third derivative of the energy along v is not 0; None where there is no v."""
        return None if self.numbers is None else abs(self.numbers["b2"]) > SMALL

    @property
    def label(self) -> str:
        """The kind in words."""
        if self.kind == "multiple":
            return f"multiple ({self.zeros})"
        return {True: "supercritical ", False: "subcritical ", None: ""}[self.supercritical] + self.kind

    def to_json(self) -> dict[str, Any]:
        """Return the facts."""
        found = {"at": self.at, "x": self.x.tolist(), "kind": self.kind, "label": self.label, "zeros": self.zeros}
        return {**found, "null": self.null.tolist(), "numbers": self.numbers, "article": self.article_condition}


def bifurcations_on(family: Family, branch: Branch) -> list[Bifurcation]:
    """Return the bifurcations on a branch, in its order.

    Where a side branch passes through a point with several zero eigenvalues its equations do not locate it; it is left
    out there, and found on the branch that it leaves.
    """
    found: list[Bifurcation] = []
    for z in _crossings(family, branch):
        new = classified(family, *_polished(family, z))
        not_located = new.kind == "hopf" and family.weights is not None
        if not not_located and not any(same(new, other) for other in found):
            found.append(new)
    return found


def same(one: Bifurcation, other: Bifurcation) -> bool:
    """Tell whether two bifurcations are one."""
    return abs(one.at - other.at) < 1e-6 and bool(np.max(np.abs(one.x - other.x)) < 1e-4)


def classified(family: Family, x: Floats, at: float) -> Bifurcation:
    """Return the bifurcation at an equilibrium with a zero eigenvalue."""
    matrix, slope = family.jacobian(x, at), family.by_parameter(x, at)
    left, sizes, right = svd(matrix)
    small = ZERO * max(1.0, float(sizes[0]))
    zeros = int(np.sum(sizes <= small))
    if zeros != 1:
        return Bifurcation(at, x, "multiple" if zeros else "hopf", zeros, right[len(x) - zeros :], None)
    v, w = right[-1], left[:, -1] / (left[:, -1] @ right[-1])
    v, w = (-v, -w) if v[np.argmax(np.abs(v))] < 0.0 else (v, w)

    def second(u: Floats) -> Floats:
        """Return D2v[v, u]."""
        ahead, behind = (family.jacobian(x + h * v, at) @ u for h in (APART, -APART))
        return (ahead - behind) / (2.0 * APART)

    def aside(y: Floats) -> Floats:
        """Return the h with J h = -(1 - v w) y and v . h = 0."""
        bordered = np.block([[matrix, w[:, None]], [v[None, :], np.zeros((1, 1))]])
        return np.asarray(np.linalg.solve(bordered, np.append(v * (w @ y) - y, 0.0))[:-1], np.float64)

    ahead, behind = (family.jacobian(x + h * v, at) @ v for h in (APART, -APART))
    third = (ahead - 2.0 * matrix @ v + behind) / APART**2
    mixed = (family.jacobian(x, at + APART) @ v - family.jacobian(x, at - APART) @ v) / (2.0 * APART)
    numbers = {
        "a": float(w @ slope),
        "b2": float(w @ second(v)),
        "c3": float(w @ (third + 3.0 * second(aside(second(v))))),
        "cross": float(w @ (mixed + second(aside(slope)))),
    }
    return Bifurcation(at, x, _kind(numbers), 1, v, numbers)


def _kind(numbers: dict[str, float]) -> str:
    a, b2, c3, cross = (abs(numbers[name]) > SMALL for name in ("a", "b2", "c3", "cross"))
    if a:
        return "fold" if b2 else "degenerate"
    if not cross:
        return "degenerate"
    return "transcritical" if b2 else "pitchfork" if c3 else "degenerate"


def _crossings(family: Family, branch: Branch) -> Iterator[Floats]:
    """Yield points (n + 1,) of a branch at which an eigenvalue changes its sign, or lambda turns back."""
    unstable = branch.unstable
    for m in range(len(branch.at) - 1):
        z = np.append(branch.x[m], branch.at[m])
        tangent = branch.tangents[m]
        length = float(tangent @ (np.append(branch.x[m + 1], branch.at[m + 1]) - z))
        between = sorted((int(unstable[m]), int(unstable[m + 1])))
        for which in range(*between):
            yield _root(family, z, tangent, length, partial(_eigenvalue, family, which))
        if between[0] == between[1] and tangent[-1] * branch.tangents[m + 1][-1] < 0.0:
            yield _root(family, z, tangent, length, partial(_turn, family, tangent))


def _eigenvalue(family: Family, which: int, z: Floats) -> float:
    return float(family.eigenvalues(z[:-1], float(z[-1]))[which])


def _turn(family: Family, tangent: Floats, z: Floats) -> float:
    return float(tangent_at(family, z, tangent)[-1])


def _root(family: Family, z: Floats, tangent: Floats, length: float, value: Callable[[Floats], float]) -> Floats:
    """Return the point of the branch, at most `length` behind z, at which a function of it is 0."""

    def point(s: float) -> Floats:
        found = corrected(family, z + s * tangent, tangent)
        return z + s * tangent if found is None else found

    ends = value(point(0.0)), value(point(length))
    if ends[0] * ends[1] > 0.0:  # one of them is 0, but for rounding
        return point(0.0 if abs(ends[0]) < abs(ends[1]) else length)
    return point(float(brentq(lambda s: value(point(s)), 0.0, length, xtol=1e-13, rtol=1e-13)))


def _polished(family: Family, z: Floats) -> tuple[Floats, float]:
    """Return x and lambda of a bifurcation near z, from equations that have it as a regular solution.

    On the branch itself they lose half the digits where branches cross, for the equations of a branch are singular
    there. With several zero eigenvalues z is left as it is.
    """
    x, at, n = z[:-1], float(z[-1]), len(z) - 1
    left, sizes, right = svd(family.jacobian(x, at))
    if np.sum(sizes <= 1e-3 * max(1.0, float(sizes[0]))) > 1:
        return x, at
    v, w = right[-1], left[:, -1]

    def fold(y: Floats) -> Floats:
        """v = 0, J v = 0, |v| = 1, of (x, lambda, v)."""
        here, there, null = y[:n], float(y[n]), y[n + 1 :]
        return np.concatenate([family.rate(here, there), family.jacobian(here, there) @ null, [null @ null - 1.0]])

    def crossing(y: Floats) -> Floats:
        """v + beta w = 0, w J = 0, w . v_lambda = 0, |w| = 1, of (x, lambda, beta, w)."""
        here, there, null = y[:n], float(y[n]), y[n + 2 :]
        pulled = family.rate(here, there) + y[n + 1] * null
        still = [null @ family.by_parameter(here, there), null @ null - 1.0]
        return np.concatenate([pulled, null @ family.jacobian(here, there), still])

    turns = abs(w @ family.by_parameter(x, at)) > SMALL
    guesses = [(fold, np.concatenate([z, v])), (crossing, np.concatenate([z, [0.0], w]))]
    for equations, guess in guesses if turns else guesses[::-1]:
        found = root(equations, guess, method="hybr", tol=1e-14)
        near = np.max(np.abs(found.x[: n + 1] - z)) < 1e-2 * (1.0 + np.max(np.abs(z)))
        if near and np.max(np.abs(found.fun)) < 1e-11:
            return found.x[:n], float(found.x[n])
    return x, at
