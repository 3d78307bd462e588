"""The forces that move a score: along each edge the coupling g, and by itself the intrinsic force f.

A coupling g(x_j - x_i) is odd and analytic. It has an even antiderivative G with G(0) = 0, the potential of an edge::

    name      g              G                                   g'            g''                     sup |g'|
    sin       sin x          2 sin^2(x/2)                        cos x         -sin x                  1
    tanh      tanh x         |x| + log1p(e^(-2|x|)) - log 2      1 - tanh^2    -2 tanh (1 - tanh^2)    1
    identity  x              x^2 / 2                             1             0                       1
    arctan    atan x         x atan x - log1p(x^2) / 2           1/(1+x^2)     -2x / (1+x^2)^2         1
    sinh      sinh x         2 sinh^2(x/2)                       cosh x        sinh x                  cosh R
    cubic     x - x^3/6      x^2/2 - x^4/24                      1 - x^2/2     -x                      1 for R <= 2

where R bounds |x|, and a polynomial of any odd powers. Below `increasing` in size of its argument g increases: there
the flow is that of a convex energy.

An intrinsic force f(x; b) has a potential F with f = -dF/dx; b is where the score starts::

    name         f               F                            df/dx       df/db  df/dmu    dF/db        dF/dmu
    anchor       mu (b - x)      mu (x - b)^2 / 2             -mu         mu     b - x     mu (b - x)   (x - b)^2 / 2
    none         0               0                            0           0      0         0            0
    double_well  mu x - x^3 + b  -mu x^2 / 2 + x^4 / 4 - b x  mu - 3 x^2  1      x         -x           -x^2 / 2

A coupling of a user's own is checked to be odd, with the derivatives that it claims, and analytic; an intrinsic force,
to have the derivatives and the potential that it claims. Derivatives are compared with central differences at 400
points of [-2, 2]. Whether a function is analytic no finite number of values can tell; but its Chebyshev coefficients on
[-1.5, 1.5] fall geometrically if it is analytic around that interval, and only as a power of their index if a
derivative jumps inside it: see `TAIL`.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), and its part 2 (Medium, 22 August
2023) for polynomials whose coefficients are learned; D. Sclosa, From Combinatorics to Geometry: The Dynamics of Graph
Gradient Diffusion (arXiv:2308.08311), equation 1, for odd analytic coupling; sin is that of Kuramoto.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from refattn.args import check_arrays, check_floating
from refattn.xp import Array, arange, concrete, constants, dtype_name, is_array, namespace, raised

Number = float | Array
Function = Callable[[Array], Array]
Terms = tuple[tuple[Array, Array, Array, Array], ...]


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """An odd analytic function.

    Attributes
    ----------
    name
        What the option `coupling` calls it.
    force, potential, slope, curvature
        g, G, g' and g''.
    largest_slope
        sup |g'| over |x| <= R, as a function of R, a number that may be infinite, or an array of finite ones.
    increasing
        g increases where |x| is below it.
    zeros, period
        Where g is 0, from 0 on up, None where nobody has told; with a period up to half of it. On a tree without
        intrinsic forces they are all that scores at rest may differ by along a link.
    terms
        What gives all (alpha_t, beta_t, alpha_t', beta_t') at x, where g(x_j - x_i) is the sum of
        alpha_t(x_i) beta_t(x_j); None where no finite sum is.
    coefficients, powers
        Of a polynomial, its coefficients, and what these multiply: x, x^3, ...
    """

    name: str
    force: Function
    potential: Function
    slope: Function
    curvature: Function
    largest_slope: Callable[[float], float]
    increasing: float = math.inf
    zeros: tuple[float, ...] | None = None
    period: float | None = None
    terms: Callable[[Array], Terms] | None = None
    coefficients: tuple[Number, ...] = ()
    powers: tuple[Coupling, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell copies and pickles, which cannot hold lambdas, how it is made again."""
        if COUPLINGS.get(self.name) is self:
            return _coupling_named, (self.name,)
        if self.coefficients:
            return _polynomial_again, (self.coefficients, not self.powers)
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


def _coupling_named(name: str) -> Coupling:
    return COUPLINGS[name]


def _polynomial_again(coefficients: tuple[Number, ...], part: bool) -> Coupling:
    return polynomial(coefficients, part=part)


def _square(x: Array) -> Array:
    return x * x


def _cosh(x: Any) -> Any:
    if isinstance(x, float):
        return math.cosh(x) if x < 700.0 else math.inf
    xp, most = namespace(x), math.log(float(namespace(x).finfo(x.dtype).max)) - 1.0
    return xp.where(x < most, xp.cosh(xp.where(x < most, x, 0.0)), math.inf)


def _larger(number: float, x: Any) -> Any:
    return max(number, x) if isinstance(x, float) else namespace(x).where(x > number, x, number)


def _sin_terms(x: Array) -> Terms:
    """sin(x_j - x_i) = cos x_i sin x_j - sin x_i cos x_j."""
    s, c = namespace(x).sin(x), namespace(x).cos(x)
    return (c, s, -s, c), (-s, c, -c, -s)


def _identity_terms(x: Array) -> Terms:
    one, zero = namespace(x).ones_like(x), namespace(x).zeros_like(x)
    return (one, x, zero, one), (-x, one, -one, zero)


def _cubic_terms(x: Array) -> Terms:
    """d - d^3 / 6 with d^3 = x_j^3 - 3 x_j^2 x_i + 3 x_j x_i^2 - x_i^3."""
    one, zero, square = namespace(x).ones_like(x), namespace(x).zeros_like(x), x * x
    return (
        (one, x - x * square / 6.0, zero, 1.0 - 0.5 * square),
        (0.5 * x, square, 0.5 * one, 2.0 * x),
        (-0.5 * square, x, -x, one),
        (x * square / 6.0 - x, one, 0.5 * square - 1.0, zero),
    )


SIN = Coupling(
    name="sin",
    force=lambda x: namespace(x).sin(x),
    potential=lambda x: 2.0 * _square(namespace(x).sin(0.5 * x)),
    slope=lambda x: namespace(x).cos(x),
    curvature=lambda x: -namespace(x).sin(x),
    largest_slope=lambda reach: 1.0,
    increasing=math.pi / 2.0,
    zeros=(0.0, math.pi),
    period=2.0 * math.pi,
    terms=_sin_terms,
)
TANH = Coupling(
    name="tanh",
    force=lambda x: namespace(x).tanh(x),
    potential=lambda x: (
        namespace(x).abs(x) + namespace(x).log1p(namespace(x).exp(-2.0 * namespace(x).abs(x))) - math.log(2.0)
    ),
    slope=lambda x: 1.0 - _square(namespace(x).tanh(x)),
    curvature=lambda x: -2.0 * namespace(x).tanh(x) * (1.0 - _square(namespace(x).tanh(x))),
    largest_slope=lambda reach: 1.0,
    zeros=(0.0,),
)
IDENTITY = Coupling(
    name="identity",
    force=lambda x: x,
    potential=lambda x: 0.5 * x * x,
    slope=lambda x: namespace(x).ones_like(x),
    curvature=lambda x: namespace(x).zeros_like(x),
    largest_slope=lambda reach: 1.0,
    terms=_identity_terms,
    zeros=(0.0,),
)
ARCTAN = Coupling(
    name="arctan",
    force=lambda x: namespace(x).atan(x),
    potential=lambda x: x * namespace(x).atan(x) - 0.5 * namespace(x).log1p(x * x),
    slope=lambda x: 1.0 / (1.0 + x * x),
    curvature=lambda x: -2.0 * x / ((1.0 + x * x) * (1.0 + x * x)),
    largest_slope=lambda reach: 1.0,
    zeros=(0.0,),
)
SINH = Coupling(
    name="sinh",
    force=lambda x: namespace(x).sinh(x),
    potential=lambda x: 2.0 * _square(namespace(x).sinh(0.5 * x)),
    slope=lambda x: namespace(x).cosh(x),
    curvature=lambda x: namespace(x).sinh(x),
    largest_slope=lambda reach: _cosh(reach),
    zeros=(0.0,),
)
CUBIC = Coupling(
    name="cubic",
    force=lambda x: x - x * x * x / 6.0,
    potential=lambda x: 0.5 * (x * x) - (x * x) * (x * x) / 24.0,
    slope=lambda x: 1.0 - 0.5 * x * x,
    curvature=lambda x: -x,
    largest_slope=lambda reach: _larger(1.0, 0.5 * reach * reach - 1.0),
    increasing=math.sqrt(2.0),
    zeros=(0.0, math.sqrt(6.0)),
    terms=_cubic_terms,
)
COUPLINGS = {known.name: known for known in (SIN, TANH, IDENTITY, ARCTAN, SINH, CUBIC)}
"""The couplings by name."""


@dataclass(frozen=True)
class Polynomial:
    """The coupling g(x) = sum_n coefficients[n] x^(2n+1); it may bend down, and its slope has no bound.

    Attributes
    ----------
    coefficients
        (m,), an array, which has a gradient, or numbers.
    """

    coefficients: Array | Sequence[float]

    def __post_init__(self) -> None:
        a = self.coefficients
        if not is_array(a) and (not isinstance(a, (tuple, list)) or not all(type(c) in (int, float) for c in a)):
            raise TypeError(f"coefficients: got {a!r}, needs {_NEEDS}, or a tuple of numbers")

    def array(self, q: Array) -> Array:
        """Return the coefficients as an array of the dtype that queries q are computed in; raise where they are none.

        Raises
        ------
        TypeError, ValueError
            Where the shape, the dtype or a number does not fit.
        """
        a: Any = self.coefficients
        xp = namespace(q)
        if not is_array(a):
            a = constants([float(c) for c in a], raised(q).dtype, q)
        check_arrays(q=q, coefficients=a)
        check_floating(coefficients=a)
        if len(a.shape) != 1 or a.shape[0] == 0:
            raise ValueError(f"coefficients: got shape {tuple(a.shape)}, needs {_NEEDS}")
        if concrete(xp.all(xp.isfinite(a))) is False:
            raise ValueError(f"coefficients: got a number that is not finite, needs {_NEEDS}")
        return xp.astype(a, raised(q).dtype)


_NEEDS = "an array (m,) of at least one finite number"


def polynomial(coefficients: Sequence[float | Array], *, part: bool = False) -> Coupling:
    """Return the functions of a polynomial with the coefficients a_0, a_1, ...: numbers, or arrays without axes.

    One that is a `part` has no powers of its own.
    """
    a = tuple(coefficients)
    return Coupling(
        name="polynomial",
        force=lambda x: x * _even(a, x),
        potential=lambda x: x * x * _even(tuple(c / (2 * n + 2) for n, c in enumerate(a)), x),
        slope=lambda x: _even(tuple((2 * n + 1) * c for n, c in enumerate(a)), x),
        curvature=lambda x: x * _even(tuple((2 * n + 1) * 2 * n * c for n, c in enumerate(a))[1:], x),
        largest_slope=lambda reach: math.inf,
        increasing=0.0,
        terms=lambda x: tuple(_term(a, power, x) for power in range(2 * len(a))),
        coefficients=a,
        powers=tuple(polynomial((0.0,) * n + (1.0,), part=True) for n in range(0 if part else len(a))),
    )


def _even(coefficients: Sequence[float | Array], x: Array) -> Array:
    """Return sum_n c_n x^(2n), by Horner's rule."""
    total = namespace(x).zeros_like(x)
    for c in reversed(coefficients):
        total = total * (x * x) + c
    return total


def _term(a: Sequence[float | Array], power: int, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return what x_j^power is multiplied with in sum_n a_n (x_j - x_i)^(2n+1), x_j^power, and both derivatives."""
    zero = namespace(x).zeros_like(x)
    alpha, d_alpha = zero, zero
    for n, c in enumerate(a):
        rest = 2 * n + 1 - power
        if rest >= 0:
            factor = c * float(math.comb(2 * n + 1, power) * (-1) ** rest)
            alpha = alpha + factor * _power(x, rest)
            d_alpha = d_alpha + (factor * float(rest) * _power(x, rest - 1) if rest else zero)
    return alpha, _power(x, power), d_alpha, float(power) * _power(x, power - 1) if power else zero


def _power(x: Array, exponent: int) -> Array:
    result = namespace(x).ones_like(x)
    for _ in range(exponent):
        result = result * x
    return result


Intrinsics = Callable[[Array, Array, Number], Array]


@dataclass(frozen=True, kw_only=True)
class Intrinsic:
    """An intrinsic force.

    Attributes
    ----------
    name
        What the option `intrinsic` calls it.
    force, potential
        f and F of (x, b, mu).
    d_x, d_b, d_mu
        The derivatives of f.
    potential_b, potential_mu
        The derivatives of F.
    largest_slope
        sup |df/dx| as a function of mu and of how large |x| gets.
    """

    name: str
    force: Intrinsics
    potential: Intrinsics
    d_x: Intrinsics
    d_b: Intrinsics
    d_mu: Intrinsics
    potential_b: Intrinsics
    potential_mu: Intrinsics
    largest_slope: Callable[[Number, Number], Number]

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell copies and pickles, which cannot hold lambdas, how it is made again."""
        if INTRINSICS.get(self.name) is self:
            return _intrinsic_named, (self.name,)
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


def _intrinsic_named(name: str) -> Intrinsic:
    return INTRINSICS[name]


def _nothing(x: Array, b: Array, mu: Number) -> Array:
    return namespace(x).zeros_like(x)


ANCHOR = Intrinsic(
    name="anchor",
    force=lambda x, b, mu: mu * (b - x),
    potential=lambda x, b, mu: 0.5 * mu * (x - b) * (x - b),
    d_x=lambda x, b, mu: -mu + namespace(x).zeros_like(x),
    d_b=lambda x, b, mu: mu + namespace(x).zeros_like(x),
    d_mu=lambda x, b, mu: b - x,
    potential_b=lambda x, b, mu: mu * (b - x),
    potential_mu=lambda x, b, mu: 0.5 * (x - b) * (x - b),
    largest_slope=lambda mu, size: abs(mu),
)
NONE = Intrinsic(
    name="none",
    **dict.fromkeys(("force", "potential", "d_x", "d_b", "d_mu", "potential_b", "potential_mu"), _nothing),
    largest_slope=lambda mu, size: 0.0 * mu,
)
DOUBLE_WELL = Intrinsic(
    name="double_well",
    force=lambda x, b, mu: mu * x - x * x * x + b,
    potential=lambda x, b, mu: 0.25 * (x * x) * (x * x) - 0.5 * mu * (x * x) - b * x,
    d_x=lambda x, b, mu: mu - 3.0 * x * x,
    d_b=lambda x, b, mu: namespace(x).ones_like(x),
    d_mu=lambda x, b, mu: x,
    potential_b=lambda x, b, mu: -x,
    potential_mu=lambda x, b, mu: -0.5 * x * x,
    largest_slope=lambda mu, size: abs(mu) + 3.0 * size**2,
)
INTRINSICS = {known.name: known for known in (ANCHOR, NONE, DOUBLE_WELL)}
"""The intrinsic forces by name."""


POINTS = 400
NODES = 65
STEP = 1e-5
SLOPES = 1e-6
"""Largest error of a derivative, relative to its largest value: differences err by STEP^2, rounding by 1e-16 / STEP."""

TAIL = 1e-8
"""Largest of the last eight of 65 Chebyshev coefficients, relative to the largest."""

_CHECKED: WeakSet[Coupling | Intrinsic] = WeakSet()


def check_coupling(coupling: Coupling, like: Array) -> None:
    """Raise ValueError if a coupling is not odd and analytic with these derivatives, once for each.

    `like` is an array of the library to compute with; a library that has float64 uses it.
    """
    if coupling in _CHECKED or COUPLINGS.get(coupling.name) is coupling or (x := _points(like)) is None:
        return
    g = coupling.force(x)
    _check(coupling, "force: it is not odd", g + coupling.force(-x), g, 1e-12)
    for function, derivative in (("potential", "force"), ("force", "slope"), ("slope", "curvature")):
        _check_derivative(coupling, function, derivative, (x,), 0)
    _check(coupling, "potential: it is not 0 at 0", coupling.potential(0.0 * x), g, 1e-12)
    for zero in coupling.zeros or ():
        _check(coupling, f"zeros: it is not 0 at {zero:.6g}", coupling.force(0.0 * x + zero), g, 1e-12)
    coefficients = _chebyshev(coupling, like)
    _check(coupling, "force: it is not analytic around [-1.5, 1.5]", coefficients[-8:], coefficients, TAIL)
    _CHECKED.add(coupling)


def check_intrinsic(intrinsic: Intrinsic, like: Array) -> None:
    """Raise ValueError if an intrinsic force has not the derivatives and the potential that it claims, once each."""
    if intrinsic in _CHECKED or INTRINSICS.get(intrinsic.name) is intrinsic or (x := _points(like)) is None:
        return
    at = (x, namespace(x).sin(3.0 * x), 0.7 + 0.0 * x)
    for argument, derivative in enumerate(("d_x", "d_b", "d_mu")):
        _check_derivative(intrinsic, "force", derivative, at, argument)
    for argument, derivative in enumerate(("force", "potential_b", "potential_mu")):
        _check_derivative(intrinsic, "potential", derivative, at, argument, -1.0 if argument == 0 else 1.0)
    _CHECKED.add(intrinsic)


def _points(like: Array) -> Array | None:
    """Return points of [-2, 2] in float64; None if the library was not told to compute in it, and so cannot tell."""
    xp = namespace(like)
    count = xp.astype(arange(0, POINTS, like), xp.float64)
    return -2.0 + 4.0 * (count + 0.5) / POINTS if dtype_name(count) == "float64" else None


def _check_derivative(
    of: Coupling | Intrinsic, function: str, derivative: str, at: tuple[Array, ...], argument: int, sign: float = 1.0
) -> None:
    """Compare what is claimed of a function of some arguments with central differences in one of them."""
    above, below = (
        getattr(of, function)(*(x + step if n == argument else x for n, x in enumerate(at))) for step in (STEP, -STEP)
    )
    found, claimed = sign * (above - below) / (2.0 * STEP), getattr(of, derivative)(*at)
    what = "minus the" if sign < 0.0 else "the"
    _check(of, f"{derivative}: it is not {what} derivative of {function}", found - claimed, claimed, SLOPES)


def _check(coupling: Coupling | Intrinsic, problem: str, error: Array, size: Array, allowed: float) -> None:
    xp = namespace(error)
    if concrete(xp.max(xp.abs(error)) <= allowed * (xp.max(xp.abs(size)) + 1e-3)) is False:
        raise ValueError(f"{type(coupling).__name__.lower()} {coupling.name}: {problem}")


def _chebyshev(coupling: Coupling, like: Array) -> Array:
    """Return the Chebyshev coefficients of g on [-1.5, 1.5]."""
    xp = namespace(like)
    n = xp.astype(arange(0, NODES, like), xp.float64)
    angles = math.pi * (n + 0.5) / NODES
    values = coupling.force(1.5 * xp.cos(angles))
    return (2.0 / NODES) * (xp.cos(n[:, None] * angles[None, :]) @ values)
