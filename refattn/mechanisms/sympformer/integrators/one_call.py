"""The methods that compute the force once: a table of coefficients, and one step for all of them.

A step damps, kicks, damps, and drifts. Equations (g is the force SYMP.13 at (x, p_in), f the velocity SYMP.17 with what
the force gave there; a last layer whose momentum nobody reads has no SYMP.14 and no SYMP.16)::

    [SYMP.kept]  kept = 1                               see `coefficients`, as all four
    [SYMP.weight]  weight = h_y
    [SYMP.entering]  p_in = before p                    not at rest
    [SYMP.14]  p* = kept p_in + weight g                kick; a stack that starts at rest has p = 0
    [SYMP.16]  p' = after p*                            damp
    [SYMP.18]  x' = x + h_x f(y)                        drift; y = p' in the definition

    method                      coefficients                    y
    presymplectic_euler         euler: after = exp(-a)          p'
    forward_euler               euler                           p
    half_damped                 half: before, after             p*
    exponential_presymplectic   exponential: kept, weight       p'
    exponential_euler           exponential                     p
    exponential_midpoint        midpoint: kept, weight          (p + p') / 2
    explicit_euler              explicit: kept                  p
    plain_euler                 plain: kept                     p

The first line is the definition's, with a = SYMP.15: p* = p + h_y g, p' = exp(-a) p*. The block normalises p' (SYMP.19)
and puts its clock on by h_x. A layer at rest moves nothing if it drifts with the old momentum.

Adjoints, for given dx' and later, the gradient of p' if a later layer reads it; dy = df w_b^T / z that of y::

    [dSYMP.17]  as in the definition
    [dSYMP.h_x]  as in the definition
    [dSYMP.16]  dp' = later + dy                        here and below dy times the share that the line has in y
    [dSYMP.14]  dp* = after dp'                         and dy
    [dSYMP.kept]  dkept = sum dp* p_in
    [dSYMP.weight]  dweight = sum dp* g
    [dSYMP.13]  dg = weight dp*
    [dSYMP.entering]  dp_in = kept dp* + dSYMP.momentum    and dy; the latter: from the force at dg and dz
    [dSYMP.p]  dp = before dp_in                        not at rest
    [dSYMP.x]  as in the definition
    [dSYMP.h_y]  as in the definition                    with Euler and Half

and of the logarithms dlog before = sum dp_in p_in, dlog after = sum dp' p'; da is dSYMP.15.

Axes: b batch, i token, m width. Numbers are arrays of one element. Momenta that are matrices have one axis m more.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its presymplectic Euler method and the others of its program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.args import Real, check
from refattn.mechanisms.sympformer.forces import softmax
from refattn.mechanisms.sympformer.integrators import coefficients
from refattn.mechanisms.sympformer.integrators.coefficients import Coefficients, Rule, Ruled
from refattn.mechanisms.sympformer.params import Add, Layer, at_rest, inner, plus
from refattn.xp import Array


class OneCall(Ruled):
    """A row of the table."""

    drift: ClassVar[tuple[float, float, float]] = (0.0, 0.0, 1.0)
    """What tokens drift with: the shares of p_in, p* and p' in y."""
    moves: ClassVar[bool] = True


class Lagging(OneCall):
    """One that drifts with the old momentum."""

    moves: ClassVar[bool] = False


class PresymplecticEuler(OneCall):
    """Presymplectic Euler: the step of the definition."""


class ForwardEuler(Lagging):
    """Forward Euler: the momentum of presymplectic Euler, and a drift with the old one."""


class HalfDamped(OneCall):
    """Half-damped presymplectic Euler: half of the damping before the kick, half after it."""

    rule: ClassVar[Rule] = staticmethod(coefficients.half)
    drift: ClassVar[tuple[float, float, float]] = (0.0, 1.0, 0.0)
    damped: ClassVar[str] = "both"


class ExponentialPresymplectic(OneCall):
    """Exponential presymplectic Euler: exact for a force that stays the same, and a drift with the new momentum."""

    rule: ClassVar[Rule] = staticmethod(coefficients.exponential)


class ExponentialEuler(Lagging):
    """Exponential Euler: exact for a force that stays the same, and a drift with the old momentum."""

    rule: ClassVar[Rule] = staticmethod(coefficients.exponential)


class ExponentialMidpoint(OneCall):
    """The exponential midpoint: exact damping for a force that stays the same, and a drift with the mean momentum."""

    rule: ClassVar[Rule] = staticmethod(coefficients.midpoint)
    drift: ClassVar[tuple[float, float, float]] = (0.5, 0.0, 0.5)


class ExplicitEuler(Lagging):
    """Explicit Euler of the momentum, damping and all."""

    rule: ClassVar[Rule] = staticmethod(coefficients.explicit)
    damped: ClassVar[str] = "old"


@dataclass(frozen=True)
class PlainEuler(Lagging):
    """Plain Euler: momentum as in heavy-ball methods.

    Attributes
    ----------
    retention
        Where the share of the momentum that is kept starts.
    """

    retention: float = 0.9

    rule: ClassVar[Rule] = staticmethod(coefficients.plain)
    damped: ClassVar[str] = "nothing"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("retention", self.retention, Real(0.0, 1.0, above=True, below=True))

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return the retention, where there is a momentum to keep."""
        return {} if config.rests or not config.keeps else {"retention": ("unit", self.retention)}


@dataclass(frozen=True)
class Saved:
    """What the backward reads; None: of a momentum that nobody reads, and of tokens that do not move."""

    t: Array
    coefficients: Coefficients
    slopes: Any
    entering: Array | None  # p_in
    force: Array | None  # g
    momentum: Array | None  # p'
    y: Array | None
    moved: Array | None  # B y
    speed: Array | None  # f
    context: Any  # z
    asked: Any


def forward(
    layer: Layer, x: Array, p: Array | None, t: Array, history: None
) -> tuple[Array, Array | None, None, Saved]:
    """Return the next tokens and momenta (None where nobody reads them), no history, and what `backward` reads."""
    kind = layer.params.config.integrator
    found, slopes = kind.rule(layer, t)
    before, kept, weight, after = found  # (1), (1) [SYMP.kept], (1) [SYMP.weight], (1)
    entering = kicked = momentum = speed = None
    if p is not None:
        entering = before * p  # (b, i, m) [SYMP.entering]
    answer, asked = layer.force.forward(layer, x, entering)
    if answer.g is not None:
        kicked = kept * at_rest(entering, answer.g) + weight * answer.g  # (b, i, m) [SYMP.14]
        momentum = after * kicked  # (b, i, m) [SYMP.16]
    y, moved = entering, answer.b  # (b, i, m), (b, i, m): B p is known
    if kind.moves:
        shares = zip(kind.drift, (at_rest(entering, kicked), kicked, momentum), strict=True)
        parts = [p if share == 1.0 else share * p for share, p in shares if share]
        y = sum(parts[1:], parts[0])  # (b, i, m)
        moved = equations.active(softmax).mobilised(layer, y)  # (b, i, m): B y
    result = x  # (b, i, m): at rest
    if moved is not None:
        speed = layer.force.velocity(moved, answer.context)  # (b, i, m): B y / z
        result = x + layer.numbers["h_x"] * speed  # (b, i, m) [SYMP.18]
    c = Coefficients(before, kept, weight, after)
    return (
        result,
        momentum,
        None,
        Saved(t, c, slopes, entering, answer.g, momentum, y, moved, speed, answer.context, asked),
    )


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, d_following: None, add: Add
) -> tuple[Array, Array | None, None, Array]:
    """Return the gradients of x, p, no history and t, and add those of the parameters and the numbers."""
    kind, c = layer.params.config.integrator, saved.coefficients
    d_moved = d_context = d_force = d_y = d_own = None
    if saved.speed is not None:
        # forward: result = x + h_x * speed
        d_speed = layer.numbers["h_x"] * d_result  # (b, i, m) [dSYMP.17]
        d_h_x = inner(d_result, saved.speed)  # (1) [dSYMP.h_x]
        add("h_x", d_h_x)
        # forward: speed = velocity(mobilised(y), z)
        back = layer.force.velocity_backward(saved.moved, saved.speed, saved.context, d_speed)
        d_moved, d_context = back  # (b, i, m)
        if kind.moves:
            d_y = equations.active(softmax).mobilised_backward(layer, saved.y, d_moved, add)  # (b, i, m)
            d_moved = None
    d_t = 0.0 * saved.t  # (1)
    if saved.momentum is not None:
        old, middle, new = kind.drift
        d_y = at_rest(d_y, saved.momentum)  # (b, i, m): 0 if tokens drift with the old momentum, which the force has
        # forward: momentum = after * kicked; y = old * entering + middle * kicked + new * momentum
        d_momentum = at_rest(d_later, saved.momentum) + new * d_y  # (b, i, m) [dSYMP.16]
        d_kicked = c.after * d_momentum + middle * d_y  # (b, i, m) [dSYMP.14]
        # forward: kicked = kept * entering + weight * force
        d_force = c.weight * d_kicked  # (b, i, m) [dSYMP.13]
        d_own = c.kept * d_kicked + old * d_y  # (b, i, m): dSYMP.entering but for the force
    # forward: answer = force(x, entering)
    back = layer.force.backward(layer, saved.asked, d_force, d_moved, d_context, add)
    d_ahead, d_asked = back  # (b, i, m), (b, i, m)
    d_x = d_result + d_ahead  # (b, i, m) [dSYMP.x]
    d_before, d_p = 0.0 * saved.t, None  # (1)
    if saved.entering is not None:
        # forward: entering = before * p
        d_entering = plus(d_asked, d_own)  # (b, i, m) [dSYMP.entering]
        d_p = c.before * d_entering  # (b, i, m) [dSYMP.p]
        d_before = inner(d_entering, saved.entering)  # (1): of its logarithm, as the last one below
    if saved.momentum is not None:
        d_kept = inner(d_kicked, at_rest(saved.entering, d_kicked))  # (1) [dSYMP.kept]
        d_weight = inner(d_kicked, saved.force)  # (1) [dSYMP.weight]
        d_c = Coefficients(d_before, d_kept, d_weight, inner(d_momentum, saved.momentum))
        # forward: before, kept, weight, after = rule(t)
        d_t, d_h_y = coefficients.backward(layer, saved.t, saved.slopes, d_c, add)  # (1), (1) [dSYMP.h_y]
        add("h_y", d_h_y)
    return d_x, d_p, None, d_t
