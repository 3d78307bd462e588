"""The integrators of the blocks for particles, with one step size and without layer normalisation; and an exact one.

With h the step, g = -dH/dX the force, f = dH/dY the velocity, e^-a the damping of the step and r = e^-a/2:

    presymplectic_euler         y' = e^-a (y + h g)                     x' = x + h f(x, y')
    forward_euler               the same                                x' = x + h f
    exponential_presymplectic   y' = e^-a y + h phi(a) g                x' = x + h f(x, y')
    exponential_euler           the same                                x' = x + h f
    half_damped                 y* = r y + h g(x, r y), y' = r y*       x' = x + h f(x, y*)
    explicit_euler              y' = y + h (g - alpha y)                x' = x + h f
    ab2                         the same, extrapolated from two steps: 3/2 of this one, -1/2 of the one before
    etd_ab2                     y' = e^-a y + h (3/2 e^-a g - 1/2 e^-b g_0)   b: the damping of two steps
    presymplectic, strang       two copies, each moved by the other, and a rotation by 2 h
    conformal                   y* = y + h g(x, y*), y' = e^-a y*       x' = x + h f(x, y*)

`conformal` is implicit, and its Jacobian J satisfies J^T W J = e^-a W with the symplectic form W exactly, for every
Hamiltonian. `presymplectic_euler` does so where H is the sum of a function of x and one of y, and only there.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535); the doubled ones after Tao 2016 (arXiv:1609.02212).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from refattn.analysis.particles import Damping, Matrix, System
from refattn.args import check_choice

ITERATIONS = 200


@dataclass(frozen=True)
class State:
    """Particles and momenta at a time, and what a multistep integrator remembers: its force and its velocity."""

    x: Matrix  # (N, d)
    y: Matrix  # (N, d)
    t: float
    before: tuple[Matrix, Matrix] | None = None


@dataclass(frozen=True)
class Step:
    """What a step is made with."""

    system: System
    damping: Damping
    h: float

    def kept(self, t: float, share: float = 1.0) -> float:
        """Return what is left of a momentum after a share of the step."""
        return math.exp(-self.damping.between(t, t + share * self.h))


def _euler(kick: Callable[[Step, State], Matrix], moving: bool) -> Callable[[Step, State], State]:
    """Return the step that makes the new momentum by `kick`, and drifts with it, or with the old one."""

    def step(s: Step, now: State) -> State:
        y = kick(s, now)
        return State(now.x + s.h * s.system.velocity(now.x, y if moving else now.y), y, now.t + s.h)

    return step


def _damped(s: Step, now: State) -> Matrix:
    return s.kept(now.t) * (now.y + s.h * s.system.force(now.x, now.y))


def _exponential(s: Step, now: State) -> Matrix:
    a = s.damping.between(now.t, now.t + s.h)
    phi = -math.expm1(-a) / a if a else 1.0
    return s.kept(now.t) * now.y + s.h * phi * s.system.force(now.x, now.y)


def _explicit(s: Step, now: State) -> Matrix:
    return now.y + s.h * (s.system.force(now.x, now.y) - s.damping.alpha(now.t) * now.y)


def _half_damped(s: Step, now: State) -> State:
    root = math.sqrt(s.kept(now.t))
    inner = root * now.y
    kicked = inner + s.h * s.system.force(now.x, inner)
    return State(now.x + s.h * s.system.velocity(now.x, kicked), root * kicked, now.t + s.h)


def _ab2(s: Step, now: State) -> State:
    push = s.system.force(now.x, now.y) - s.damping.alpha(now.t) * now.y
    speed = s.system.velocity(now.x, now.y)
    old_push, old_speed = now.before or (push, speed)
    x, y = now.x + s.h * (1.5 * speed - 0.5 * old_speed), now.y + s.h * (1.5 * push - 0.5 * old_push)
    return State(x, y, now.t + s.h, (push, speed))


def _etd_ab2(s: Step, now: State) -> State:
    push, speed, kept = s.system.force(now.x, now.y), s.system.velocity(now.x, now.y), s.kept(now.t)
    if now.before is None:
        x, y = now.x + s.h * speed, kept * (now.y + s.h * push)
    else:
        late = math.exp(-s.damping.between(now.t - s.h, now.t + s.h))
        x = now.x + s.h * (1.5 * speed - 0.5 * now.before[1])
        y = kept * now.y + s.h * (1.5 * kept * push - 0.5 * late * now.before[0])
    return State(x, y, now.t + s.h, (push, speed))


def _conformal(s: Step, now: State) -> State:
    y = now.y
    for _ in range(ITERATIONS):
        last, y = y, now.y + s.h * s.system.force(now.x, y)
        if not np.all(np.abs(y) < 1e100):
            break
        if np.max(np.abs(y - last)) <= 1e-15 * (1.0 + np.max(np.abs(y))):
            return State(now.x + s.h * s.system.velocity(now.x, y), s.kept(now.t) * y, now.t + s.h)
    raise ValueError(f"h: got {s.h!r}, the implicit kick needs a smaller step")


def _doubled(s: Step, now: State, damped: bool) -> State:
    """Return the state after A, B, rotation, B, A; A moves (p, y) by the oracle at (x, q), B the others at (y, p)."""

    def oracle(x: Matrix, p: Matrix, share: float) -> tuple[Matrix, Matrix]:
        kept = s.kept(now.t, share) if damped else 1.0
        return 0.5 * s.h * s.system.force(x, kept * p) / kept, 0.5 * s.h * s.system.velocity(x, kept * p)

    whole = s.kept(now.t)
    x = y = now.x
    p = q = now.y if damped else math.sqrt(whole) * now.y
    push, move = oracle(x, q, 0.0)
    p, y = p + push, y + move
    push, move = oracle(y, p, 0.5)
    q, x = q + push, x + move
    cos, sin = math.cos(2.0 * s.h), math.sin(2.0 * s.h)
    d_x, d_p = x - y, p - q
    x, y = 0.5 * (x + y + cos * d_x + sin * d_p), 0.5 * (x + y - cos * d_x - sin * d_p)
    p, q = 0.5 * (p + q - sin * d_x + cos * d_p), 0.5 * (p + q + sin * d_x - cos * d_p)
    push, move = oracle(y, p, 0.5)
    q, x = q + push, x + move
    push, move = oracle(x, q, 1.0)
    return State(x, (whole if damped else math.sqrt(whole)) * (p + push), now.t + s.h)


STEPS: dict[str, Callable[[Step, State], State]] = {
    "presymplectic_euler": _euler(_damped, True),
    "forward_euler": _euler(_damped, False),
    "exponential_presymplectic": _euler(_exponential, True),
    "exponential_euler": _euler(_exponential, False),
    "half_damped": _half_damped,
    "explicit_euler": _euler(_explicit, False),
    "ab2": _ab2,
    "etd_ab2": _etd_ab2,
    "presymplectic": lambda s, now: _doubled(s, now, True),
    "strang": lambda s, now: _doubled(s, now, False),
    "conformal": _conformal,
}


def steps(
    system: System, x: Matrix, y: Matrix, *, integrator: str, damping: Damping, h: float, number: int, t: float = 1.0
) -> Iterator[State]:
    """Yield the states of an integrator: the first one, and that after each step."""
    check_choice("integrator", integrator, STEPS)
    made, now = Step(system, damping, h), State(x, y, t)
    yield now
    for _ in range(number):
        now = STEPS[integrator](made, now)
        yield now
