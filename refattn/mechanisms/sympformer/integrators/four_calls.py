"""The methods of four calls: two copies of tokens and momenta, (X, P) and (Y, Q), each moved by the other.

The map A asks the oracle at (X, Q) and moves P and Y, the map B asks at (Y, P) and moves X and Q, both by half a step,
and `rotation` holds the copies together. A, B, rotation, B, A is the same backwards, and hence of second order, where
the angle is 2 xi h with xi fixed. A learned angle that does not vanish with h makes it first order.

"presymplectic": the system depends on time through its damping. In P = exp(a_s) p, a_s the damping of the time s
since the step began, nothing is lost. The maps B and the rotation have the a_s of s = h_y/2, the last map A that of s
= h_y; in the first it is 0. The system of P is Hamiltonian, by exp(a_s) H, if velocity and force are derivatives of
one H: without causality, and with B and w_v w_o = scale w_q w_k^T symmetric (softmax attention), with A and V
symmetric (linear attention), or with B symmetric (the oracle "hamiltonian"); and then in the normalised tokens, whose
norm is left out of H. A causal layer, or one with free matrices, is no Hamiltonian system: there the step is of
second order, and no more is said of it.

"strang" splits instead: half of the damping, the maps without any (a_s = 0), the other half.

Equations (a is SYMP.15; `at` the copies that the oracle is asked at, `move` those that move)::

    [SYMP.doubled_entering]  p_in = before p            both copies begin there; "strang": before = exp(-a/2), else 1
    [SYMP.copy_momentum]  p = exp(-a_s) P_at
    [SYMP.copy_kicked]  P_move = P_move + h_y/2 exp(a_s) g    g, f of the oracle at (x_at, p)
    [SYMP.copy_drifted]  x_move = x_move + h_x/2 f
    [SYMP.copy_normed]  P_move = exp(a_s) (gain_p norm(exp(-a_s) P_move) + shift_p)    where substeps are normalised
    [SYMP.doubled_momentum]  p' = after P               "strang": after = exp(-a/2), "presymplectic": exp(-a)

Adjoints, for given gradients of what a map makes, in reverse order of the maps::

    [dSYMP.copy_normed]  dP_move = exp(-a_s) times the adjoint of norm at exp(a_s) dP_move
    [dSYMP.copy_kicked]  dg = h_y/2 exp(a_s) dP_move
    [dSYMP.copy_drifted]  df = h_x/2 dx_move
    [dSYMP.copy_momentum]  dp = dSYMP.momentum          what the oracle asks for dg and df; dP_at = exp(-a_s) dp
    [dSYMP.doubled_entering]  dp_in = dP + dQ           of the copies as they begin

and da_s = sum dP_move (exp(a_s) h_y/2 g) - sum dp p, with a norm of the momentum its own part of the same kind; dP =
after dp', dp = before dp_in, and of the logarithms dlog before = sum dp_in p_in, dlog after = sum dp' p'.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its presymplectic integrator, after Tao 2016 (arXiv:1609.02212),
equations 1 to 3, and Strang 1968 (doi:10.1137/0705041) for the splitting; derived again here.

How the authors' code differs: the momenta of "presymplectic" are scaled by all damping since the time 1, and not since
the step began, so that the rotation turns other pairs the later a layer is; and the damping of a step is that of h_x,
not of h_y. In "strang" both halves are damped as the first one, from t to t + h/2, so that it is of first order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.args import check, check_number
from refattn.mechanisms.sympformer.integrators import damping, rotation
from refattn.mechanisms.sympformer.integrators.coefficients import Coefficients, Half, Rule, Ruled
from refattn.mechanisms.sympformer.params import Add, Layer, at_rest, inner
from refattn.ops import layer_norm
from refattn.xp import Array, namespace

EDGE = 1e-4
"""How near to 0 or 1 a share of an angle may start, where it hardly moves."""

Times = tuple[Array, Array] | None
"""a_s for half of the step and for all of it."""


@dataclass(frozen=True)
class Doubled(Ruled):
    """An integrator with two copies.

    Attributes
    ----------
    xi
        The rotation turns by 2 xi h_x. Where xi is learned it starts here.
    angle
        None, or a largest angle: xi is learned, and the rotation turns by a share of this angle.
    free
        Whether xi is learned without a largest angle.
    least, most
        Bounds of a learned xi.
    """

    xi: float = 1.0
    angle: float | None = None
    free: bool = False
    least: float = 1e-4
    most: float = 100.0

    moves: ClassVar[bool] = True
    calls: ClassVar[int] = 4
    scaled: ClassVar[bool] = False
    """Whether momenta are measured in units of exp(-a_s)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("xi", "least", "most"):
            check_number(name, getattr(self, name), positive=True)
        check("free", self.free, bool)
        if self.angle is not None:
            check_number("angle", self.angle, positive=True)
            if self.free:
                raise ValueError(f"free: got True with a largest angle of {self.angle!r}, needs one of them")
        if self.least >= self.most:
            raise ValueError(f"least: got {self.least!r}, needs less than most, which is {self.most!r}")

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return what xi is learned by: a share of the largest angle, or xi itself."""
        if self.angle is not None:
            share = 2.0 * self.xi * self.step / self.angle
            return {"xi": ("unit", min(max(share, EDGE), 1.0 - EDGE))}
        return {"xi": ("positive", self.xi)} if self.free else {}


@dataclass(frozen=True)
class Presymplectic(Doubled):
    """The presymplectic integrator: momenta that carry their damping."""

    scaled: ClassVar[bool] = True


@dataclass(frozen=True)
class Strang(Doubled):
    """Strang's splitting: half of the damping, the copies, the other half."""

    rule: ClassVar[Rule] = Half()


@dataclass(frozen=True)
class Normed:
    """What the backward of a normalised momentum reads."""

    norm: layer_norm.Saved
    a: Array | None
    given: Array
    result: Array


@dataclass(frozen=True)
class Shear:
    """What the backward of a map A or B reads."""

    p: Array
    force: Array
    speed: Array
    moved: Array
    context: Any
    asked: Any
    a: Array | None
    norm: Normed | None


@dataclass(frozen=True)
class Copied:
    """What the backward of the maps reads: the maps in order, the copies before the rotation, and its angle."""

    shears: tuple[Shear, Shear, Shear, Shear]
    before: rotation.Copies
    normed: tuple[Normed, Normed] | None
    angle: Array


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    t: Array
    coefficients: Coefficients
    entering: Array
    momentum: Array
    copies: Copied


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array, Saved]:
    """Return the next tokens and momenta, and what `backward` reads."""
    kind, own, h_y = layer.params.config.integrator, equations.active(damping), layer.numbers["h_y"]  # -, -, (1)
    c = kind.rule.forward(layer, t)
    entering = c.before * at_rest(p, x)  # (b, i, m) [SYMP.doubled_entering]
    times = (own.damping(layer, t, 0.5 * h_y), own.damping(layer, t, h_y)) if kind.scaled else None
    result, last, copies = copied(layer, x, entering, times)  # (b, i, m), (b, i, m)
    momentum = c.after * last  # (b, i, m) [SYMP.doubled_momentum]
    return result, momentum, Saved(t, c, entering, momentum, copies)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    kind, c, h_y = layer.params.config.integrator, saved.coefficients, layer.numbers["h_y"]  # -, -, (1)
    d_later = namespace(d_result).zeros_like(d_result) if d_momentum is None else d_momentum  # (b, i, m)
    # forward: momentum = after * last
    d_last = c.after * d_later  # (b, i, m)
    # forward: result, last = copied(x, entering, times)
    turned = copied_backward(layer, saved.copies, d_result, d_last, add)
    d_x, d_entering, d_half, d_whole = turned  # (b, i, m), (b, i, m) [dSYMP.doubled_entering], (1), (1)
    # forward: entering = before * p; before, after = rule(t)
    d_c = Coefficients(inner(d_entering, saved.entering), 0.0 * h_y, 0.0 * h_y, inner(d_later, saved.momentum))
    d_t, d_h = kind.rule.backward(layer, saved.t, c, d_c, add)  # (1), (1)
    add("h_y", d_h)
    for share, d_a in ((0.5, d_half), (1.0, d_whole)) if kind.scaled else ():
        # forward: times = (damping(t, h_y / 2), damping(t, h_y))
        own = equations.active(damping)
        d_now, d_h = own.damping_backward(layer, saved.t, share * h_y, -d_a, add)  # (1), (1)
        d_t = d_t + d_now  # (1)
        add("h_y", share * d_h)
    return d_x, c.before * d_entering, d_t


def copied(layer: Layer, x: Array, p: Array, times: Times) -> tuple[Array, Array, Copied]:
    """Return X and P after the four maps that begin with both copies at (x, p), and what `backward` reads."""
    half, whole = (None, None) if times is None else times  # (1), (1)
    one, two, first, second = x, x, p, p
    first, two, shear_1 = _shear(layer, one, second, first, two, None)  # (b, i, m), (b, i, m)
    second, one, shear_2 = _shear(layer, two, first, second, one, half)  # (b, i, m), (b, i, m)
    before = (one, two, first, second)
    angle = equations.active(rotation).angle_of(layer)  # (1): SYMP.rotation_angle
    one, two, first, second = equations.active(rotation).forward(*before, angle)  # (b, i, m), (b, i, m), (b, i, m)
    normed = None
    if layer.params.config.normalise == "each_substep":
        first, normed_1 = _normalise(layer, first, half)  # (b, i, m)
        second, normed_2 = _normalise(layer, second, half)  # (b, i, m)
        normed = (normed_1, normed_2)
    second, one, shear_3 = _shear(layer, two, first, second, one, half)  # (b, i, m), (b, i, m)
    first, two, shear_4 = _shear(layer, one, second, first, two, whole)  # (b, i, m), (b, i, m)
    return one, first, Copied((shear_1, shear_2, shear_3, shear_4), before, normed, angle)


def copied_backward(
    layer: Layer, saved: Copied, d_one: Array, d_first: Array, add: Add
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of x, p and of a_s for half of the step and for all of it; add those of the others."""
    none = namespace(d_one).zeros_like(d_one)  # (b, i, m)
    shear_1, shear_2, shear_3, shear_4 = saved.shears
    d_one, d_second, d_first, d_two, d_whole = _shear_backward(
        layer, shear_4, (d_one, none, d_first, none), add
    )  # (b, i, m)
    d_two, d_first, d_second, d_one, d_half = _shear_backward(
        layer, shear_3, (d_two, d_first, d_second, d_one), add
    )  # (b, i, m)
    if saved.normed is not None:
        d_first, d_a = _normalise_backward(saved.normed[0], d_first, add)  # (b, i, m), (1)
        d_second, d_b = _normalise_backward(saved.normed[1], d_second, add)  # (b, i, m), (1)
        d_half = d_half + d_a + d_b  # (1)
    # forward: one, two, first, second = rotation(*before, angle)
    turned = equations.active(rotation).backward(saved.before, saved.angle, (d_one, d_two, d_first, d_second))
    (d_one, d_two, d_first, d_second), d_angle = turned
    equations.active(rotation).angle_backward(layer, d_angle, add)
    d_two, d_first, d_second, d_one, d_a = _shear_backward(
        layer, shear_2, (d_two, d_first, d_second, d_one), add
    )  # (b, i, m)
    d_one, d_second, d_first, d_two, _ = _shear_backward(
        layer, shear_1, (d_one, d_second, d_first, d_two), add
    )  # (b, i, m)
    return d_one + d_two, d_first + d_second, d_half + d_a, d_whole


def _shear(
    layer: Layer, x_at: Array, p_at: Array, p_move: Array, x_move: Array, a: Array | None
) -> tuple[Array, Array, Shear]:
    """Return the moved momentum and tokens of a map A or B; `a` is None where a_s is 0."""
    xp = namespace(x_at)
    p = p_at  # (b, i, m): without damping
    if a is not None:
        p = xp.exp(-a) * p_at  # (b, i, m) [SYMP.copy_momentum]
    answer, saved = layer.oracle.forward(layer, x_at, p)
    speed = layer.oracle.velocity(answer.b, answer.context)  # (b, i, m)
    kick = 0.5 * layer.numbers["h_y"] if a is None else 0.5 * layer.numbers["h_y"] * xp.exp(a)  # (1)
    kicked = p_move + kick * answer.g  # (b, i, m) [SYMP.copy_kicked]
    drifted = x_move + 0.5 * layer.numbers["h_x"] * speed  # (b, i, m) [SYMP.copy_drifted]
    norm = None
    if layer.params.config.normalise == "each_substep":
        kicked, norm = _normalise(layer, kicked, a)  # (b, i, m)
    return kicked, drifted, Shear(p, answer.g, speed, answer.b, answer.context, saved, a, norm)


def _shear_backward(
    layer: Layer, saved: Shear, d: tuple[Array, Array, Array, Array], add: Add
) -> tuple[Array, Array, Array, Array, Array]:
    """Return the gradients of (x_at, p_at, p_move, x_move) for those of the same after the map, and that of a_s."""
    d_x_at, d_p_at, d_p_move, d_x_move = d
    xp, a, d_a = namespace(d_x_at), saved.a, 0.0 * layer.numbers["h_y"]  # -, -, (1)
    if saved.norm is not None:
        d_p_move, d_a = _normalise_backward(saved.norm, d_p_move, add)  # (b, i, m), (1)
    # forward: drifted = x_move + h_x / 2 * speed
    d_speed = 0.5 * layer.numbers["h_x"] * d_x_move  # (b, i, m) [dSYMP.copy_drifted]
    add("h_x", 0.5 * inner(d_x_move, saved.speed))
    # forward: kicked = p_move + h_y / 2 exp(a) * force
    grown = 0.0 * layer.numbers["h_y"] + 1.0 if a is None else xp.exp(a)  # (1): exp(a_s)
    d_force = 0.5 * layer.numbers["h_y"] * grown * d_p_move  # (b, i, m) [dSYMP.copy_kicked]
    work = 0.5 * grown * inner(d_p_move, saved.force)  # (1)
    add("h_y", work)
    d_a = d_a + layer.numbers["h_y"] * work  # (1)
    d_moved, d_context = layer.oracle.velocity_backward(saved.moved, saved.speed, saved.context, d_speed)  # (b, i, m)
    d_x, d_p = layer.oracle.backward(
        layer, saved.asked, d_force, d_moved, d_context, add
    )  # (b, i, m), (b, i, m) [dSYMP.copy_momentum]
    if a is not None:
        # forward: p = exp(-a) * p_at
        d_a = d_a - inner(d_p, saved.p)  # (1)
        d_p = xp.exp(-a) * d_p  # (b, i, m): the gradient of P_at
    return d_x_at + d_x, d_p_at + d_p, d_p_move, d_x_move, d_a


def _normalise(layer: Layer, momentum: Array, a: Array | None) -> tuple[Array, Normed]:
    xp = namespace(momentum)
    physical = momentum if a is None else xp.exp(-a) * momentum  # (b, i, m): part of SYMP.copy_normed
    unit, norm = layer_norm.layer_norm_forward(
        physical, layer.params.gain_p, layer.params.shift_p
    )  # (b, i, m): part of SYMP.copy_normed
    result = unit if a is None else xp.exp(a) * unit  # (b, i, m) [SYMP.copy_normed]
    return result, Normed(norm, a, physical, result)


def _normalise_backward(saved: Normed, d_result: Array, add: Add) -> tuple[Array, Array]:
    """Return the gradients of the momentum and of a_s."""
    xp, a = namespace(d_result), saved.a  # -, (1)
    # forward: result = exp(a) * norm(physical); physical = exp(-a) * momentum
    d_unit = d_result if a is None else xp.exp(a) * d_result  # (b, i, m)
    d_physical, d_gain, d_shift = layer_norm.layer_norm_backward(saved.norm, d_unit)  # (b, i, m), (m), (m)
    add("gain_p", d_gain)
    add("shift_p", d_shift)
    d_momentum = d_physical if a is None else xp.exp(-a) * d_physical  # (b, i, m) [dSYMP.copy_normed]
    return d_momentum, inner(d_result, saved.result) - inner(d_physical, saved.given)
