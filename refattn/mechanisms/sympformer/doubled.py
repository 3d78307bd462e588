"""One step of second order with four calls of the oracle: two copies of tokens and momenta, each moved by the other.

The system depends on time through its damping. With P = e^(eta(t + s) - eta(t)) p, s the time since the step began, it
is Hamiltonian, and it is split on two copies, (X, P) and (Y, Q): the map A asks the oracle at (X, Q) and moves P and Y,
the map B asks at (Y, P) and moves X and Q, both by half a step, and `rotation` holds the two copies together. One step
is A, B, rotation, B, A, at the times s = 0, h/2, h/2, h of the damping: the same backwards, and hence of second order,
where the angle is 2 xi h with xi fixed. A learned angle that does not vanish with h makes it first order.

Equations (`at` the copies that the oracle is asked at, `move` those that move; a_s = eta(t + s) - eta(t), s measured
in h_y)::

    [SYMP.24]  p = exp(-a_s) P_at
    [SYMP.25]  P_move = P_move + h_y/2 exp(a_s) g       g, f of the oracle at (x_at, p)
    [SYMP.26]  x_move = x_move + h_x/2 f
    [SYMP.27]  P_move = exp(a_s) gain_p norm(exp(-a_s) P_move)  where every substep is normalised
    [SYMP.32]  p' = exp(-a_h) P                         Strang: p' = exp(-a_h / 2) P, and P = exp(-a_h / 2) p at first

Strang's splitting damps for half a step before and after the four maps, which then are without damping (a_s = 0).

Adjoints, for given gradients of what a map makes, in reverse order of the maps::

    [dSYMP.32]  dP = exp(-a_h) dp'                      Strang: exp(-a_h / 2) dp'
    [dSYMP.27]  dP_move = exp(-a_s) times the adjoint of norm at exp(a_s) dP_move
    [dSYMP.25]  dg = h_y/2 exp(a_s) dP_move
    [dSYMP.26]  df = h_x/2 dx_move
    [dSYMP.24]  dp = what the oracle asks of p

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its presymplectic integrator, after Tao 2016 (arXiv:1609.02212),
equations 1 to 3; derived again here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.sympformer import rotation
from refattn.mechanisms.sympformer.damping import Decay, decay
from refattn.mechanisms.sympformer.numbers import Numbers, dot
from refattn.mechanisms.sympformer.oracles import module_of
from refattn.mechanisms.sympformer.params import Add, Params
from refattn.mechanisms.sympformer.prefix import Prefix
from refattn.ops import layer_norm
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Shear:
    """What the backward of a map A or B reads."""

    p: Array
    force: Array
    speed: Array
    moved: Array
    context: Any
    oracle: Any
    time: Decay | None
    norm: Normed | None


@dataclass(frozen=True)
class Normed:
    """What the backward of a normalised momentum reads: its layer norm, exp(a_s), and the momentum that it gave."""

    norm: layer_norm.Saved
    time: Decay | None
    given: Array
    result: Array


@dataclass(frozen=True)
class Saved:
    """What the backward reads: the maps in order, the pairs before the rotation, and its angle."""

    p: Array
    shears: tuple[Shear, ...]
    before: tuple[Array, Array, Array, Array]
    normed: tuple[Normed, Normed] | None
    angle: Array
    ends: tuple[Decay | None, Decay, Array]


def forward(
    params: Params, numbers: Numbers, x: Array, p: Array | None, t: Array, causal: bool | Prefix
) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where nobody reads them), and what `backward` reads."""
    config, xp = params.config, namespace(x)
    strang = config.integrator == "strang"
    times = [None, None, None] if strang else [None, *(_decay(params, numbers, t, share) for share in (0.5, 1.0))]
    damped = _decay(params, numbers, t, 1.0)
    given = xp.zeros_like(x) if p is None else p  # (b, i, m): the momentum that came in
    momentum = given  # (b, i, m): the momentum that the copies begin with
    if strang:
        momentum = xp.exp(-0.5 * damped.a) * given  # (b, i, m): the first half of Strang's damping
    one, two, first, second = x, x, momentum, momentum
    first, two, shear_1 = _shear(params, numbers, one, second, first, two, times[0], causal)  # tagged in the function
    second, one, shear_2 = _shear(params, numbers, two, first, second, one, times[1], causal)  # tagged in the function
    before = (one, two, first, second)
    angle = _angle(params, numbers)  # (1): the angle
    one, two, first, second = equations.active(rotation).forward(*before, angle)  # tagged in the function
    normed = None
    if config.normalise == "each_substep":
        first, normed_1 = _normalise(params, first, times[1])  # tagged in the function
        second, normed_2 = _normalise(params, second, times[1])  # tagged in the function
        normed = (normed_1, normed_2)
    second, one, shear_3 = _shear(params, numbers, two, first, second, one, times[1], causal)  # tagged in the function
    first, two, shear_4 = _shear(params, numbers, one, second, first, two, times[2], causal)  # tagged in the function
    raw = xp.exp((-0.5 if strang else -1.0) * damped.a) * first  # (b, i, m) [SYMP.32]
    saved = Saved(given, (shear_1, shear_2, shear_3, shear_4), before, normed, angle, (times[2], damped, raw))
    return one, raw if config.keeps else None, saved


def _decay(params: Params, numbers: Numbers, t: Array, share: float) -> Decay:
    c_log, c_lin = (numbers.get(name, 0.0 * t) for name in ("c_log", "c_lin"))
    return decay(c_log, c_lin, t, share * numbers["h_y"], params.config.clip)


def _angle(params: Params, numbers: Numbers) -> Array:
    if "angle" in numbers:
        return params.config.angle * numbers["angle"]
    return 2.0 * params.config.xi * numbers["h_x"]


def _shear(
    params: Params,
    numbers: Numbers,
    x_at: Array,
    p_at: Array,
    p_move: Array,
    x_move: Array,
    time: Decay | None,
    causal: bool | Prefix,
) -> tuple[Array, Array, Shear]:
    """Return the moved momentum and tokens of a map A or B; `time` is None where a_s is 0."""
    xp, own = namespace(x_at), equations.active(module_of(params.config))
    p = p_at  # (b, i, m): without damping
    if time is not None:
        p = xp.exp(-time.a) * p_at  # (b, i, m) [SYMP.24]
    answer, saved = own.forward(params, numbers, x_at, p, causal)
    speed = own.velocity(answer.b, answer.context)  # (b, i, m): SYMP.18, tagged in the function
    kick = 0.5 * numbers["h_y"] if time is None else 0.5 * numbers["h_y"] * xp.exp(time.a)  # (1): a factor
    kicked = p_move + kick * answer.g  # (b, i, m) [SYMP.25]
    drifted = x_move + 0.5 * numbers["h_x"] * speed  # (b, i, m) [SYMP.26]
    norm = None
    if params.config.normalise == "each_substep":
        kicked, norm = _normalise(params, kicked, time)  # tagged in the function
    return kicked, drifted, Shear(p, answer.g, speed, answer.b, answer.context, saved, time, norm)


def _normalise(params: Params, momentum: Array, time: Decay | None) -> tuple[Array, Normed]:
    xp = namespace(momentum)
    physical = momentum if time is None else xp.exp(-time.a) * momentum  # (b, i, m): part of SYMP.27
    unit, norm = layer_norm.layer_norm_forward(physical, params.gain_p)  # part of SYMP.27
    result = unit if time is None else xp.exp(time.a) * unit  # (b, i, m) [SYMP.27]
    return result, Normed(norm, time, physical, result)


def backward(
    params: Params, numbers: Numbers, saved: Saved, d_result: Array, d_raw: Array | None, add: Add
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    config, xp = params.config, namespace(d_result)
    strang = config.integrator == "strang"
    _, damped, raw = saved.ends
    zero = xp.zeros_like(d_result)  # (b, i, m): no gradient
    clock = _Clock(numbers, add)
    share = 0.5 if strang else 1.0
    d_one, d_two, d_first, d_second = d_result, zero, zero, zero
    if d_raw is not None:
        # forward: raw = exp(-share a) * first
        d_first = xp.exp(-share * damped.a) * d_raw  # (b, i, m) [dSYMP.32]
        clock.add(damped, 1.0, -share * dot(d_raw, raw))
    shear_1, shear_2, shear_3, shear_4 = saved.shears
    d = (d_one, d_second, d_first, d_two)
    d_one, d_second, d_first, d_two = _shear_backward(
        params, numbers, shear_4, 1.0, d, clock, add
    )  # tagged in the function
    d = (d_two, d_first, d_second, d_one)
    d_two, d_first, d_second, d_one = _shear_backward(
        params, numbers, shear_3, 0.5, d, clock, add
    )  # tagged in the function
    if saved.normed is not None:
        d_first = _normalise_backward(saved.normed[0], 0.5, d_first, clock, add)  # tagged in the function
        d_second = _normalise_backward(saved.normed[1], 0.5, d_second, clock, add)  # tagged in the function
    # forward: one, two, first, second = rotation(*before, angle)
    turned = equations.active(rotation).backward(saved.before, saved.angle, (d_one, d_two, d_first, d_second))
    (d_one, d_two, d_first, d_second), d_angle = turned
    if config.rotation == "learned":
        add("angle", config.angle * d_angle)
    else:
        add("h_x", 2.0 * config.xi * d_angle)
    d = (d_two, d_first, d_second, d_one)
    d_two, d_first, d_second, d_one = _shear_backward(
        params, numbers, shear_2, 0.5, d, clock, add
    )  # tagged in the function
    d = (d_one, d_second, d_first, d_two)
    d_one, d_second, d_first, d_two = _shear_backward(
        params, numbers, shear_1, 0.0, d, clock, add
    )  # tagged in the function
    d_x = d_one + d_two  # (b, i, m): both copies begin at x
    d_p = d_first + d_second  # (b, i, m): both copies begin at p
    if strang:
        # forward: momentum = exp(-a / 2) * given
        decayed = xp.exp(-0.5 * damped.a)  # (1): a factor
        clock.add(damped, 1.0, -0.5 * dot(d_p, decayed * saved.p))
        d_p = decayed * d_p  # (b, i, m): the first half of Strang's damping
    return d_x, d_p, clock.d_t


class _Clock:
    """Collects the gradients of every a_s, and hands them on to the numbers and to t."""

    def __init__(self, numbers: Numbers, add: Add) -> None:
        self.add_to, self.d_t = add, 0.0 * numbers["h_x"]

    def add(self, time: Decay | None, share: float, d_a: Array) -> None:
        """Add the gradient of a(t, share h_y)."""
        if time is None:
            return
        self.d_t = self.d_t + d_a * time.by_t
        self.add_to("h_y", share * d_a * time.by_h)
        self.add_to("c_log", d_a * time.by_c_log)
        self.add_to("c_lin", d_a * time.by_c_lin)


def _shear_backward(
    params: Params,
    numbers: Numbers,
    saved: Shear,
    share: float,
    d: tuple[Array, Array, Array, Array],
    clock: _Clock,
    add: Add,
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of (x_at, p_at, p_move, x_move) for those of the same after the map."""
    d_x_at, d_p_at, d_p_move, d_x_move = d
    xp, own, time = namespace(d_x_at), equations.active(module_of(params.config)), saved.time
    if saved.norm is not None:
        d_p_move = _normalise_backward(saved.norm, share, d_p_move, clock, add)  # tagged in the function
    # forward: drifted = x_move + h_x / 2 * speed
    d_speed = 0.5 * numbers["h_x"] * d_x_move  # (b, i, m) [dSYMP.26]
    add("h_x", 0.5 * dot(d_x_move, saved.speed))
    # forward: kicked = p_move + h_y / 2 exp(a) * force
    grown = 0.0 * numbers["h_y"] + 1.0 if time is None else xp.exp(time.a)  # (1): exp(a_s)
    d_force = 0.5 * numbers["h_y"] * grown * d_p_move  # (b, i, m) [dSYMP.25]
    work = 0.5 * grown * dot(d_p_move, saved.force)  # (1): the gradient of h_y
    add("h_y", work)
    clock.add(time, share, numbers["h_y"] * work)
    turned = own.velocity_backward(saved.moved, saved.speed, saved.context, d_speed)
    d_moved, d_context = turned
    d_x, d_p = own.backward(params, saved.oracle, d_force, d_moved, d_context, add)  # tagged in the function
    d_inner = d_p  # (b, i, m) [dSYMP.24]
    if time is not None:
        # forward: p = exp(-a) * p_at
        clock.add(time, share, -dot(d_inner, saved.p))
        d_p = xp.exp(-time.a) * d_inner  # (b, i, m): the gradient of P_at
    return d_x_at + d_x, d_p_at + d_p, d_p_move, d_x_move


def _normalise_backward(saved: Normed, share: float, d_result: Array, clock: _Clock, add: Add) -> Array:
    xp, time = namespace(d_result), saved.time
    # forward: result = exp(a) * norm(physical); physical = exp(-a) * momentum
    clock.add(time, share, dot(d_result, saved.result))
    d_unit = d_result if time is None else xp.exp(time.a) * d_result  # (b, i, m): part of its adjoint
    d_physical, d_gain, _ = layer_norm.layer_norm_backward(saved.norm, d_unit)  # part of its adjoint
    add("gain_p", d_gain)
    clock.add(time, share, -dot(d_physical, saved.given))
    d_momentum = d_physical if time is None else xp.exp(-time.a) * d_physical  # (b, i, m) [dSYMP.27]
    return d_momentum
