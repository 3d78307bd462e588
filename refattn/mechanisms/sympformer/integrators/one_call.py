"""The methods that ask the oracle once: a table of coefficients, and one step for all of them.

A step damps, kicks, damps, and drifts. Equations (g is the force SYMP.13 at (x, p_in), f the velocity SYMP.17 with what
the oracle gave there; a last layer whose momentum nobody reads has no SYMP.14 and no SYMP.16)::

    [SYMP.kept]  kept = 1                               see `coefficients`, as all four
    [SYMP.weight]  weight = h_y
    [SYMP.entering]  p_in = before p                    not at rest
    [SYMP.14]  p* = kept p_in + weight g                kick; a stack that starts at rest has p = 0
    [SYMP.16]  p' = after p*                            damp
    [SYMP.18]  x' = x + h_x f(y)                        drift; y = p' in the definition

    method                      coefficients                    y
    presymplectic_euler         Euler: after = exp(-a)          p'
    forward_euler               Euler                           p
    half_damped                 Half: before, after             p*
    exponential_presymplectic   Exponential: kept, weight       p'
    exponential_euler           Exponential                     p
    exponential_midpoint        Midpoint: kept, weight          (p + p') / 2
    explicit_euler              Explicit: kept                  p
    plain_euler                 Plain: kept                     p

The first line is the definition's, with a = SYMP.15: p* = p + h_y g, p' = exp(-a) p*. The block normalises p' (SYMP.19)
and puts its clock on by h_x. A layer at rest moves nothing if it drifts with the old momentum.

Adjoints, for given dx' and later, the gradient of p' if a later layer reads it; dy = df w_b^T / z that of y::

    [dSYMP.17]  df = h_x dx'
    [dSYMP.h_x]  dh_x = sum dx' f
    [dSYMP.16]  dp' = later + dy                        here and below dy times the share that the line has in y
    [dSYMP.14]  dp* = after dp'                         and dy
    [dSYMP.kept]  dkept = sum dp* p_in
    [dSYMP.weight]  dweight = sum dp* g
    [dSYMP.13]  dg = weight dp*
    [dSYMP.entering]  dp_in = kept dp* + dSYMP.momentum    and dy; the latter: what the oracle asks for dg and dz
    [dSYMP.p]  dp = before dp_in                        not at rest
    [dSYMP.x]  dx = dx' + X                             X the adjoint of norm at dSYMP.1, in `oracles.softmax`
    [dSYMP.h_y]  dh_y = sum dp* g + da (c_log / (t + h_y) + c_lin)    with Euler and Half

and of the logarithms dlog before = sum dp_in p_in, dlog after = sum dp' p'; da is dSYMP.15.

Axes: b batch, i token, m width. Numbers are arrays of one element. Momenta that are matrices have one axis m more.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its presymplectic Euler method and the others of its program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from refattn.args import Real, check
from refattn.mechanisms.sympformer.integrators.coefficients import (
    Coefficients,
    Explicit,
    Exponential,
    Half,
    Midpoint,
    Plain,
    Rule,
    Ruled,
)
from refattn.mechanisms.sympformer.params import Add, Layer, at_rest, inner, plus
from refattn.xp import Array, namespace


class Drift(NamedTuple):
    """What tokens drift with: the shares of p_in, p* and p' in y."""

    old: float
    kicked: float
    new: float

    def forward(self, *momenta: Array) -> Array:
        """Return y."""
        parts = [p if share == 1.0 else share * p for share, p in zip(self, momenta, strict=True) if share]
        return sum(parts[1:], parts[0])

    def backward(self, d_y: Array) -> list[Array | None]:
        """Return the gradients of p_in, p* and p'; None of one without a share."""
        return [share * d_y if share else None for share in self]


OLD, KICKED, NEW, MEAN = Drift(1.0, 0.0, 0.0), Drift(0.0, 1.0, 0.0), Drift(0.0, 0.0, 1.0), Drift(0.5, 0.0, 0.5)


@dataclass(frozen=True)
class OneCall(Ruled):
    """A row of the table."""

    drift: ClassVar[Drift] = NEW
    moves: ClassVar[bool] = True


@dataclass(frozen=True)
class Lagging(OneCall):
    """One that drifts with the old momentum."""

    drift: ClassVar[Drift] = OLD
    moves: ClassVar[bool] = False


@dataclass(frozen=True)
class PresymplecticEuler(OneCall):
    """Presymplectic Euler: the step of the definition."""


@dataclass(frozen=True)
class ForwardEuler(Lagging):
    """Forward Euler: the momentum of presymplectic Euler, and a drift with the old one."""


@dataclass(frozen=True)
class HalfDamped(OneCall):
    """Half-damped presymplectic Euler: half of the damping before the kick, half after it."""

    rule: ClassVar[Rule] = Half()
    drift: ClassVar[Drift] = KICKED


@dataclass(frozen=True)
class ExponentialPresymplectic(OneCall):
    """Exponential presymplectic Euler: exact for a force that stays the same, and a drift with the new momentum."""

    rule: ClassVar[Rule] = Exponential()


@dataclass(frozen=True)
class ExponentialEuler(Lagging):
    """Exponential Euler: exact for a force that stays the same, and a drift with the old momentum."""

    rule: ClassVar[Rule] = Exponential()


@dataclass(frozen=True)
class ExponentialMidpoint(OneCall):
    """The exponential midpoint: exact damping for a force that stays the same, and a drift with the mean momentum."""

    rule: ClassVar[Rule] = Midpoint()
    drift: ClassVar[Drift] = MEAN


@dataclass(frozen=True)
class ExplicitEuler(Lagging):
    """Explicit Euler of the momentum, damping and all."""

    rule: ClassVar[Rule] = Explicit()


@dataclass(frozen=True)
class PlainEuler(Lagging):
    """Plain Euler: momentum as in heavy-ball methods.

    Attributes
    ----------
    retention
        Where the share of the momentum that is kept starts.
    """

    retention: float = 0.9

    rule: ClassVar[Rule] = Plain()

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
    entering: Array | None  # p_in
    force: Array | None  # g
    momentum: Array | None  # p'
    y: Array | None
    moved: Array | None  # B y
    speed: Array | None  # f
    context: Any  # z
    asked: Any


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where nobody reads them), and what `backward` reads."""
    kind = layer.params.config.integrator
    before, kept, weight, after, rate = kind.rule.forward(layer, t)  # (1), (1) [SYMP.kept], (1) [SYMP.weight], (1)
    entering = kicked = momentum = speed = None
    if p is not None:
        entering = before * p  # (b, i, m) [SYMP.entering]
    answer, asked = layer.oracle.forward(layer, x, entering)
    if answer.g is not None:
        kicked = kept * at_rest(entering, answer.g) + weight * answer.g  # (b, i, m) [SYMP.14]
        momentum = after * kicked  # (b, i, m) [SYMP.16]
    y, moved = entering, answer.b  # (b, i, m), (b, i, m): B p is known
    if kind.moves:
        y = kind.drift.forward(at_rest(entering, kicked), kicked, momentum)  # (b, i, m)
        moved = layer.oracle.mobilised(layer, y)  # (b, i, m): B y
    result = x  # (b, i, m): at rest
    if moved is not None:
        speed = layer.oracle.velocity(moved, answer.context)  # (b, i, m): B y / z
        result = x + layer.numbers["h_x"] * speed  # (b, i, m) [SYMP.18]
    c = Coefficients(before, kept, weight, after, rate)
    return result, momentum, Saved(t, c, entering, answer.g, momentum, y, moved, speed, answer.context, asked)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    kind, c = layer.params.config.integrator, saved.coefficients
    d_moved = d_context = d_force = d_own = d_kicked = d_new = None
    if saved.speed is not None:
        # forward: result = x + h_x * speed
        d_speed = layer.numbers["h_x"] * d_result  # (b, i, m) [dSYMP.17]
        d_h_x = inner(d_result, saved.speed)  # (1) [dSYMP.h_x]
        add("h_x", d_h_x)
        # forward: speed = velocity(mobilised(y), z)
        d_moved, d_context = layer.oracle.velocity_backward(
            saved.moved, saved.speed, saved.context, d_speed
        )  # (b, i, m)
        if kind.moves:
            d_y = layer.oracle.mobilised_backward(layer, saved.y, d_moved, add)  # (b, i, m)
            d_own, d_kicked, d_new = kind.drift.backward(d_y)  # (b, i, m), (b, i, m), (b, i, m)
            d_moved = None
    d_t = 0.0 * saved.t  # (1)
    if saved.momentum is not None:
        # forward: momentum = after * kicked
        d_later = namespace(d_result).zeros_like(saved.momentum) if d_later is None else d_later  # (b, i, m)
        d_momentum = plus(d_later, d_new)  # (b, i, m) [dSYMP.16]
        d_kicked = plus(c.after * d_momentum, d_kicked)  # (b, i, m) [dSYMP.14]
        # forward: kicked = kept * entering + weight * force
        d_force = c.weight * d_kicked  # (b, i, m) [dSYMP.13]
        d_own = plus(c.kept * d_kicked, d_own)  # (b, i, m): dSYMP.entering but for the oracle
    # forward: answer = oracle(x, entering)
    d_ahead, d_asked = layer.oracle.backward(
        layer, saved.asked, d_force, d_moved, d_context, add
    )  # (b, i, m), (b, i, m)
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
        d_t, d_h_y = kind.rule.backward(layer, saved.t, c, d_c, add)  # (1), (1) [dSYMP.h_y]
        add("h_y", d_h_y)
    return d_x, d_p, d_t
