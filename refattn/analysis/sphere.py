"""Attention on the sphere: tokens that move by a mechanism, and what theory says of tokens at equal angles.

Tokens x_i of length 1 attend to each other with tied weights, q = k = v = x. P_i y = y - <x_i, y> x_i keeps what is
tangent at x_i. Without momentum, with A the core of a mechanism::

    x_i' = P_i A(x)_i

With momenta p_i, where the core takes the kinetic terms of tokens, with a damping c and a scale beta::

    H = 1/2 sum_i |p_i|^2 / z_i - 1/(2n beta) sum_ij E_ij,   E_ij = e^(beta (<x_i, x_j> - 1)),   z_i = 1/n sum_j E_ij
    x_i' = p_i / z_i
    p_i' = P_i A(x)_i - <p_i, x_i'> x_i - c p_i
    A(x)_i = 1/n sum_j E_ij (1 + beta (|p_i|^2 / z_i^2 + |p_j|^2 / z_j^2) / 2) x_j

where the 1 that is taken from the cosines only sets the unit of time.

n tokens at equal angles, with all cosines rho = 1 - g, stay so if no token is special. Whatever the mechanism, A(x)_i
is then in the span of x_i and the sum of the others, with a weight b(g) on each of these. With D = g (1 + (n - 1) rho),
<P_i A_i, x_j> = b D, hence

    g' = -2 b(g) D(g)                                        without momentum
    softmax attention:   b = e^(-beta g) / (1 + (n - 1) e^(-beta g))
    Taylor polynomials:  b = T(s_o) / (T(s_i) + (n - 1) T(s_o)),   s_o = -s_i / (n - 1),
                         s_i = n v / ((v + eps) alpha sqrt(n)) for a layer norm in n dimensions, v = g (1 - 1/n) / n
    any other:           b is read from the core at n tokens with this angle

and with p_i = pi u_i, u_i = P_i sum_j x_j, |u_i|^2 = (n - 1) D, which has the reduced Hamiltonian
n (n - 1) pi^2 D / 2z - n z / 2 beta,

    g' = -2 pi D / z,   pi' = -c pi - pi^2 (D/z)' + e^(-beta g) / n,   z = (1 + (n - 1) e^(-beta g)) / n

with the derivative by rho. In the end g falls like e^(-2t) without momentum where b tends to 1/n; with momentum a token
swings about the others as x'' + c x' + x = 0 does.

Sources: Geshkovski, Letrouit, Polyanskiy, Rigollet 2023 (arXiv:2312.10794), section 6 for the equal angles of softmax
attention; Rigollet 2025 (arXiv:2512.01868). The equations of the others were derived here in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

Matrix = NDArray[Any]

TOLERANCE = 1e-10
"""Of SciPy's integration of the equation of equal angles, relative to 1 - rho."""

SAME = 1e-9
"""How near, relatively, the weights of a core have to be to those of a law."""


@dataclass(frozen=True)
class Flow:
    """How tokens move by a core.

    Attributes
    ----------
    core
        Its `forward`.
    options
        What it is given beside q, k and v; "scale" is beta.
    damping
        c, of tokens with momenta; None: they have none.
    """

    core: Callable[..., Any]
    options: Mapping[str, Any]
    damping: float | None = None

    def start(self, x: Matrix) -> Matrix:
        """Return the state of tokens (n, d) at rest: with momenta (n, 2d)."""
        return x if self.damping is None else np.concatenate([x, np.zeros_like(x)], axis=-1)

    def tokens(self, state: Matrix) -> Matrix:
        """Return the tokens of a state."""
        return state if self.damping is None else state[:, : state.shape[1] // 2]

    def slope(self, state: Matrix) -> Matrix:
        """Return the derivative of a state."""
        if self.damping is None:
            return tangent(state, self.attended(state))
        x, p = np.split(state, 2, axis=-1)
        beta, one = self.options["scale"], np.ones_like(x[:, :1])
        kinetic = beta * np.sum(p * p, axis=-1, keepdims=True)
        given = (np.concatenate([x, -one], axis=-1), np.concatenate([x, one], axis=-1), x)
        out, saved = self.core(*(each[None, None] for each in given), kinetic=kinetic[None, None], **self.options)
        speed = p / np.exp(saved.log_z[0, 0][:, None])
        turning = np.sum(p * speed, axis=-1, keepdims=True) * x
        return np.concatenate([speed, tangent(x, out[0, 0]) - turning - self.damping * p], axis=-1)

    def attended(self, x: Matrix) -> Matrix:
        """Return A(x), of tokens without momenta."""
        return np.asarray(self.core(*[x[None, None]] * 3, **self.options)[0][0, 0])

    def back(self, state: Matrix) -> Matrix:
        """Return a state whose tokens are put back on the sphere, and momenta onto its tangents."""
        x = self.tokens(state)
        x = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
        return x if self.damping is None else np.concatenate([x, tangent(x, state[:, x.shape[1] :])], axis=-1)


def tangent(x: Matrix, y: Matrix) -> Matrix:
    """Return P y."""
    return y - np.sum(x * y, axis=-1, keepdims=True) * x


def walk(flow: Flow, x: Matrix, times: Matrix, step: float) -> list[Matrix]:
    """Return tokens (n, d) at times, by Runge-Kutta steps of at most a size, each put back on the sphere."""
    state, found, now = flow.start(x), [x], float(times[0])
    for end in times[1:]:
        count = max(1, math.ceil((end - now) / step - 1e-9))
        h = (end - now) / count
        for _ in range(count):
            a = flow.slope(state)
            b = flow.slope(state + 0.5 * h * a)
            c = flow.slope(state + 0.5 * h * b)
            state = flow.back(state + h / 6.0 * (a + 2.0 * b + 2.0 * c + flow.slope(state + h * c)))
        now = float(end)
        found.append(flow.tokens(state))
    return found


# --- equal angles


@dataclass(frozen=True)
class EqualAngles:
    """Tokens at equal angles: what 1 - rho is at times, measured and predicted, and by which law."""

    law: str
    times: Matrix
    measured: Matrix
    predicted: Matrix

    def rates(self) -> tuple[float, float]:
        """Return the rate at which 1 - rho falls in the end, measured and predicted."""
        late = slice(len(self.times) // 2, None)
        measured, predicted = (
            np.polyfit(self.times[late], np.log(x[late]), 1) for x in (self.measured, self.predicted)
        )
        return -float(measured[0]), -float(predicted[0])

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        measured, predicted = self.rates()
        return {
            "law": self.law,
            "times": self.times.tolist(),
            "measured": self.measured.tolist(),
            "predicted": self.predicted.tolist(),
            "rate_measured": measured,
            "rate_predicted": predicted,
        }


def simplex(n: int, rho: float) -> Matrix:
    """Return n unit vectors (n, n) whose cosines are all rho, none of them special: a e_i + b (1, ..., 1)."""
    a = math.sqrt(1.0 - rho)
    return a * np.eye(n) + (math.sqrt(a * a + n * rho) - a) / n


def softmax_weight(gap: Any, n: int, beta: float) -> Any:
    """Return b of softmax attention at 1 - rho = gap."""
    return np.exp(-beta * gap) / (1.0 + (n - 1) * np.exp(-beta * gap))


def taylor_weight(gap: Any, n: int, order: int, alpha: float, eps: float) -> Any:
    """Return b of higher-order attention with a layer norm, of n tokens in n dimensions."""
    variance = gap * (1.0 - 1.0 / n) / n
    own = n * variance / ((variance + eps) * alpha * math.sqrt(n))
    of_own, of_other = (sum(s**m / math.factorial(m) for m in range(order + 1)) for s in (own, -own / (n - 1)))
    return of_other / (of_own + (n - 1) * of_other)


def weight_of(flow: Flow, gap: float, n: int) -> float:
    """Return b as the core has it; of flows without momentum."""
    x = simplex(n, 1.0 - gap)
    moved = tangent(x, flow.attended(x)) @ x.T
    return float(np.sum(moved * (1.0 - np.eye(n))) / (n * (n - 1) * _spread(gap, n)))


def _spread(gap: Any, n: int) -> Any:
    return gap * (1.0 + (n - 1) * (1.0 - gap))


def equal_angles(flow: Flow, rho: float = 0.1, n: int = 8, end: float = 8.0, step: float = 0.05) -> EqualAngles | None:
    """Return what becomes of n tokens at equal angles; None where they do not stay so or do not gather, and of momenta
    with a damping below 2, with which they swing through each other."""
    if flow.damping is not None and flow.damping < 2.0:
        return None
    times = np.linspace(0.0, end, 81)
    moved = walk(flow, simplex(n, rho), times, step)
    squares = [np.sum((x[:, None] - x[None, :]) ** 2, axis=-1) for x in moved]  # |x - y|^2 = 2 (1 - rho)
    apart = ~np.eye(n, dtype=bool)
    gaps = np.asarray([np.mean(each[apart]) / 2.0 for each in squares])
    alike = all(np.ptp(each[apart]) <= 1e-6 * np.max(each) for each in squares)
    if not alike or not np.all(np.isfinite(gaps)) or not gaps[-1] < gaps[0]:
        return None
    if flow.damping is not None:
        law = "H of tokens with momenta"
        predicted = _with_momentum(flow.options["scale"], flow.damping, n, rho, times)
    else:
        law, weight = _law(flow, n)
        predicted = _integrate(lambda g: [-2.0 * weight(g[0]) * _spread(g[0], n)], [1.0 - rho], times)
    return EqualAngles(law, times, gaps, predicted)


def _law(flow: Flow, n: int) -> tuple[str, Callable[[float], Any]]:
    """Return the law whose weights are those of the core."""
    given = flow.options
    laws: dict[str, Callable[[float], Any]] = {
        "softmax attention": lambda gap: softmax_weight(gap, n, given.get("scale", 1.0 / math.sqrt(n))),
        "Taylor polynomials": lambda gap: taylor_weight(gap, n, given.get("order", 2), given.get("alpha", 3.0), 1e-5),
    }
    for name, weight in laws.items():
        if all(abs(weight_of(flow, gap, n) / weight(gap) - 1.0) < SAME for gap in (0.9, 0.4, 0.01)):
            return name, weight
    return "weights read from the core", lambda gap: weight_of(flow, gap, n)


def _with_momentum(beta: float, damping: float, n: int, rho: float, times: Matrix) -> Matrix:
    def slope(state: Any) -> list[Any]:
        gap, pi = state
        away, spread = np.exp(-beta * gap), _spread(gap, n)
        z = (1.0 + (n - 1) * away) / n
        by_rho = ((n - 2) - 2.0 * (n - 1) * (1.0 - gap)) / z - spread * beta * (n - 1) * away / (n * z * z)
        return [-2.0 * pi * spread / z, -damping * pi - pi * pi * by_rho + away / n]

    return _integrate(slope, [1.0 - rho, 0.0], times)


def _integrate(slope: Callable[[Any], list[Any]], start: list[float], times: Matrix) -> Matrix:
    """Return the first number at times; it may be small, and keeps its digits."""
    least = [1e-22] + [TOLERANCE] * (len(start) - 1)
    found = solve_ivp(
        lambda _, y: slope(y), (times[0], times[-1]), start, t_eval=times, method="DOP853", rtol=TOLERANCE, atol=least
    )
    return np.asarray(found.y[0])
