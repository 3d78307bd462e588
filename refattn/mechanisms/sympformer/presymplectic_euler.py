"""One step of presymplectic Euler, of any oracle: kick, damp, drift.

The step of `definition`, whose numbers the equations have: dx/dt = dH/dp, dp/dt = -dH/dx - alpha p with the friction
alpha = c_log / t + c_lin. The oracle is asked once, at (x, p): it gives the force g and the normalisers z.

Equations (f is SYMP.17, the velocity B p' / z, with the z that the oracle gave)::

    [SYMP.14]  p* = p + h_y g                           kick; a stack that starts at rest has p = 0
    [SYMP.15]  a = clip(c_log log(1 + h_y / t) + c_lin h_y, -clip, clip)    the integral of alpha from t to t + h_y
    [SYMP.16]  p' = exp(-a) p*                          damp
    [SYMP.18]  x' = x + h_x f(p')                       drift: by the new momentum, so that tokens at rest move too

The block normalises p' (SYMP.19) and puts its clock on by h_x. With c_log = 3 the damping is Nesterov's 3/t.

Adjoints, for given dx' and later, the gradient of p' where a later layer reads it::

    [dSYMP.17]  df = h_x dx'
    [dSYMP.h_x]  dh_x = sum dx' f
    [dSYMP.16]  dp' = later + dB w_b^T                  dB = df / z, that of B p'
    [dSYMP.14]  dp* = exp(-a) dp'
    [dSYMP.15]  da = -sum dp' p'
    [dSYMP.c_log]  dc_log = da log(1 + h_y / t)         where a is at its clip: 0, and so are the next two
    [dSYMP.c_lin]  dc_lin = da h_y
    [dSYMP.t]  dt = -da c_log h_y / (t (t + h_y))
    [dSYMP.13]  dg = h_y dp*
    [dSYMP.h_y]  dh_y = sum dp* g + da (c_log / (t + h_y) + c_lin)
    [dSYMP.x]  dx = dx' + X                             X the adjoint of norm at dSYMP.1, in `oracles.softmax`
    [dSYMP.p]  dp = dp* + dSYMP.momentum                not at rest; the same page

Axes: b batch, i token, m width. Numbers are arrays of one element.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its presymplectic Euler method: kick, damping, drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.mechanisms.arguments import check_is, check_number
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Integrator:
    """What every integrator has: its steps. Its kind says what else.

    Attributes
    ----------
    step
        Where the steps h_x and h_y of a layer start.
    learned
        Whether they are parameters.
    """

    step: float = 0.3
    learned: bool = True

    moves: ClassVar[bool] = False
    """Whether tokens at rest move: positions drift with the new momentum."""
    calls: ClassVar[int] = 1
    """How often a step asks the layer.oracle."""
    remembers: ClassVar[bool] = False
    """Whether the layer before is remembered."""
    baseline: ClassVar[bool] = False
    """Whether there is no Hamiltonian."""
    carries: ClassVar[bool] = True
    """Whether layers hand a momentum on."""

    def __post_init__(self) -> None:
        check_number("step", self.step, positive=True)
        check_is("learned", self.learned, bool)

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """Return whether the damping of a layer changes anything that is read."""
        return kicks

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return the learned numbers that the integrator has beside its steps: "positive" or "unit", and a start."""
        return {}


@dataclass(frozen=True)
class PresymplecticEuler(Integrator):
    """Presymplectic Euler: this file."""

    moves: ClassVar[bool] = True


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    t: Array
    force: Array  # g
    a: Array
    momentum: Array  # p'
    moved: Array  # B p'
    speed: Array  # f
    context: Any  # z
    asked: Any


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array, Saved]:
    """Return the next tokens and momenta, and what `backward` reads.

    `oracle` is a module of `oracles`; p is None at rest.
    """
    xp, h_x, h_y = namespace(x), layer.numbers["h_x"], layer.numbers["h_y"]  # -, (1), (1)
    answer, asked = layer.oracle.forward(layer, x, p)
    before = xp.zeros_like(x) if p is None else p  # (b, i, m)
    kicked = before + h_y * answer.g  # (b, i, m) [SYMP.14]
    a = damping(layer, t, h_y)  # (1): SYMP.15
    momentum = xp.exp(-a) * kicked  # (b, i, m) [SYMP.16]
    moved = layer.oracle.mobilised(layer, momentum)  # (b, i, m): B p'
    speed = layer.oracle.velocity(moved, answer.context)  # (b, i, m): B p' / z
    result = x + h_x * speed  # (b, i, m) [SYMP.18]
    return result, momentum, Saved(p, t, answer.g, a, momentum, moved, speed, answer.context, asked)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    xp, h_x, h_y = namespace(d_result), layer.numbers["h_x"], layer.numbers["h_y"]  # -, (1), (1)
    # forward: result = x + h_x * speed
    d_speed = h_x * d_result  # (b, i, m) [dSYMP.17]
    d_h_x = inner(d_result, saved.speed)  # (1) [dSYMP.h_x]
    # forward: speed = velocity(mobilised(momentum), z)
    d_moved, d_context = layer.oracle.velocity_backward(
        saved.moved, saved.speed, saved.context, d_speed
    )  # (b, i, m): of B p'
    d_new = layer.oracle.mobilised_backward(layer, saved.momentum, d_moved, add)  # (b, i, m): part of dSYMP.16
    d_momentum = d_new if d_later is None else d_later + d_new  # (b, i, m) [dSYMP.16]
    # forward: momentum = exp(-a) * kicked
    d_kicked = xp.exp(-saved.a) * d_momentum  # (b, i, m) [dSYMP.14]
    d_a = -inner(d_momentum, saved.momentum)  # (1) [dSYMP.15]
    # forward: a = damping(t, h_y)
    d_t, d_h = damping_backward(layer, saved.t, h_y, d_a, add)  # (1), (1)
    # forward: kicked = before + h_y * answer.g
    d_force = h_y * d_kicked  # (b, i, m) [dSYMP.13]
    d_h_y = inner(d_kicked, saved.force) + d_h  # (1) [dSYMP.h_y]
    # forward: answer = oracle(x, p)
    d_ahead, d_asked = layer.oracle.backward(layer, saved.asked, d_force, None, d_context, add)  # (b, i, m), (b, i, m)
    d_x = d_result + d_ahead  # (b, i, m) [dSYMP.x]
    d_p = None
    if d_asked is not None:
        d_p = d_kicked + d_asked  # (b, i, m) [dSYMP.p]
    add("h_x", d_h_x)
    add("h_y", d_h_y)
    return d_x, d_p, d_t


def damping(layer: Layer, t: Array, h: Array) -> Array:
    """Return a, the integral of the damping from t to t + h; a number that is not there is 0."""
    xp, clip = namespace(t), layer.params.config.damping.clip
    a = xp.clip(_integral(layer, t, h), -clip, clip)  # (1) [SYMP.15]
    return a


def damping_backward(layer: Layer, t: Array, h: Array, d_a: Array, add: Add) -> tuple[Array, Array]:
    """Return the gradients of t and h, and add those of c_log and c_lin."""
    xp, clip = namespace(t), layer.params.config.damping.clip
    c_log, c_lin = (layer.numbers.get(name, 0.0 * t) for name in ("c_log", "c_lin"))
    # forward: a = clip(c_log * log(1 + h / t) + c_lin * h, -clip, clip)
    d_free = xp.where(xp.abs(_integral(layer, t, h)) < clip, d_a, 0.0)  # (1): 0 where it is clipped
    d_c_log = d_free * xp.log1p(h / t)  # (1) [dSYMP.c_log]
    d_c_lin = d_free * h  # (1) [dSYMP.c_lin]
    d_t = -d_free * c_log * h / (t * (t + h))  # (1) [dSYMP.t]
    d_h = d_free * (c_log / (t + h) + c_lin)  # (1): part of dSYMP.h_y
    add("c_log", d_c_log)
    add("c_lin", d_c_lin)
    return d_t, d_h


def _integral(layer: Layer, t: Array, h: Array) -> Array:
    """Return a before it is clipped."""
    c_log, c_lin = (layer.numbers.get(name, 0.0 * t) for name in ("c_log", "c_lin"))
    return c_log * namespace(t).log1p(h / t) + c_lin * h
