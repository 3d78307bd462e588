"""The methods of four calls: two copies of tokens and momenta, (X, P) and (Y, Q), each moved by the other.

The map A asks the force at (X, Q) and moves P and Y, the map B asks at (Y, P) and moves X and Q, both by half a step,
and a rotation (Tao's equation 3) holds the copies together. A, B, rotation, B, A is the same backwards, and hence of
second order, where the angle is 2 xi h with xi fixed. A learned angle that does not vanish with h makes it first order.

"presymplectic": the system depends on time through its damping. In P = exp(a_s) p, a_s the damping of the time s
since the step began, nothing is lost. The maps B and the rotation have the a_s of s = h_y/2, the last map A that of s
= h_y; in the first it is 0. The system of P is Hamiltonian, by exp(a_s) H, if velocity and force are derivatives of
one H: without causality, and with B and w_v w_o = scale w_q w_k^T symmetric (softmax attention), with A and V
symmetric (linear attention), or with B symmetric (the force "hamiltonian"); and then in the normalised tokens, whose
norm is left out of H. A causal layer, or one with free matrices, is no Hamiltonian system: there the step is of
second order, and no more is said of it.

"strang" splits instead: half of the damping, the maps without any (a_s = 0), the other half.

Equations (a is SYMP.15; `at` the copies at which the force is computed, `move` those that move)::

    [SYMP.doubled_entering]  p_in = before p            both copies begin there; "strang": before = exp(-a/2), else 1
    [SYMP.copy_momentum]  p = exp(-a_s) P_at
    [SYMP.copy_kicked]  P_move = P_move + h_y/2 exp(a_s) g    g force and f velocity at (x_at, p)
    [SYMP.copy_drifted]  x_move = x_move + h_x/2 f
    [SYMP.copy_normed]  P_move = exp(a_s) (gain_p norm(exp(-a_s) P_move) + shift_p)    where substeps are normalised
    [SYMP.doubled_momentum]  p' = after P               "strang": after = exp(-a/2), "presymplectic": exp(-a)

Adjoints, for given gradients of what a map makes, in reverse order of the maps::

    [dSYMP.copy_normed]  dP_move = exp(-a_s) times the adjoint of norm at exp(a_s) dP_move
    [dSYMP.copy_kicked]  dg = h_y/2 exp(a_s) dP_move
    [dSYMP.copy_drifted]  df = h_x/2 dx_move
    [dSYMP.copy_momentum]  dp = dSYMP.momentum          from the force at dg and df; dP_at = exp(-a_s) dp
    [dSYMP.doubled_entering]  dp_in = dP + dQ           of the copies as they begin

and da_s = sum dP_move (exp(a_s) h_y/2 g) - sum dp p, with a norm of the momentum its own part of the same kind; dP =
after dp', dp = before dp_in, and of the logarithms dlog before = sum dp_in p_in, dlog after = sum dp' p'.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its presymplectic integrator, after Tao 2016 (arXiv:1609.02212),
equations 1 to 3, and Strang 1968 (doi:10.1137/0705041) for the splitting; derived again here.

How the authors' code differs: the momenta of "presymplectic" are scaled by all damping since the time 1, and not since
the step began, so that the rotation turns other pairs the later a layer is; and the damping of a step is that of h_x,
not of h_y. In "strang" both halves are damped as the first one, from t to t + h/2, so that it is of first order.

Equations of the rotation (share, a number of the block: xi is learned below a largest angle, or not at all)::

    [SYMP.frequency]  xi = clip(largest share / (2 h_x), least, most)
    [SYMP.rotation_angle]  angle = 2 xi h_x
    [SYMP.rotated_x]  X = (X + Y + cos(angle) (X - Y) + sin(angle) (P - Q)) / 2
    [SYMP.rotated_y]  Y = X + Y - X'                    X' the new X
    [SYMP.rotated_p]  P = (P + Q - sin(angle) (X - Y) + cos(angle) (P - Q)) / 2
    [SYMP.rotated_q]  Q = P + Q - P'

Adjoints, for given dX, dY, dP and dQ of what it makes::

    [dSYMP.rotated_x]  dX = (dX + dY + cos(angle) (dX - dY) - sin(angle) (dP - dQ)) / 2    of what goes in; the left dX
    [dSYMP.rotation_angle]  dangle = 1/2 sum ((dX - dY) U + (dP - dQ) V)
    [dSYMP.frequency]  dxi = 2 h_x dangle               0 where it is clipped

with U = cos(angle) (P - Q) - sin(angle) (X - Y) and V = -cos(angle) (X - Y) - sin(angle) (P - Q); dY, dP and dQ of
what goes in are SYMP.rotated_y to SYMP.rotated_q of the gradients, for minus the angle. dh_x = 2 xi dangle - xi dxi /
h_x (2 xi dangle where xi is fixed), dshare = largest dxi / (2 h_x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.args import check_number
from refattn.mechanisms.sympformer.integrators import coefficients, damping
from refattn.mechanisms.sympformer.integrators.coefficients import Coefficients, Rule, Ruled
from refattn.mechanisms.sympformer.params import Add, Layer, at_rest, inner, normed, normed_backward
from refattn.xp import Array, clip, namespace

Copies = tuple[Array, Array, Array, Array]
"""X, Y, P and Q, or their gradients."""

EDGE = 1e-4
"""How near to 0 or 1 a share of an angle may start, where it hardly moves."""


@dataclass(frozen=True)
class Doubled(Ruled):
    """An integrator with two copies.

    Attributes
    ----------
    xi
        The rotation turns by 2 xi h_x. Where xi is learned it starts here.
    angle
        None, or a largest angle: xi is learned, and the rotation turns by a share of this angle.
    least, most
        Bounds of a learned xi.
    """

    xi: float = 1.0
    angle: float | None = None
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
        if self.angle is not None:
            check_number("angle", self.angle, positive=True)
        if self.least >= self.most:
            raise ValueError(f"least: got {self.least!r}, needs less than most, which is {self.most!r}")

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return what xi is learned by: a share of the largest angle."""
        if self.angle is None:
            return {}
        share = 2.0 * self.xi * self.step / self.angle
        return {"xi": ("unit", min(max(share, EDGE), 1.0 - EDGE))}


class Presymplectic(Doubled):
    """The presymplectic integrator: momenta that carry their damping."""

    scaled: ClassVar[bool] = True


class Strang(Doubled):
    """Strang's splitting: half of the damping, the copies, the other half."""

    rule: ClassVar[Rule] = staticmethod(coefficients.half)
    damped: ClassVar[str] = "both"


@dataclass(frozen=True)
class Saved:
    """What the backward reads: the maps in order, the copies before the rotation, and its angle."""

    t: Array
    coefficients: Coefficients
    slopes: Any
    entering: Array
    momentum: Array
    shears: tuple[Any, ...]
    before: Copies
    normed: tuple[Any, Any] | None
    angle: Array


def forward(layer: Layer, x: Array, p: Array | None, t: Array, history: None) -> tuple[Array, Array, None, Saved]:
    """Return the next tokens and momenta, no history, and what `backward` reads."""
    kind, own, h_y = layer.params.config.integrator, equations.active(damping), layer.numbers["h_y"]  # -, -, (1)
    c, slopes = kind.rule(layer, t)
    entering = c.before * at_rest(p, x)  # (b, i, m) [SYMP.doubled_entering]
    none = half = whole = 0.0 * h_y  # (1), (1), (1): a_s of the first map, of the next two and of the last
    if kind.scaled:
        half, whole = own.damping(layer, t, 0.5 * h_y), own.damping(layer, t, h_y)  # (1), (1)
    copies, shear_1 = _shear(layer, (x, x, entering, entering), none)
    copies, shear_2 = _shear(layer, swapped(copies), half)
    before, normed = swapped(copies), None
    angle = angle_of(layer)  # (1): SYMP.rotation_angle
    one, two, first, second = rotate(*before, angle)  # (b, i, m), (b, i, m), (b, i, m)
    if layer.params.config.normalise == "each_substep":
        first, normed_1 = _normalise(layer, first, half)  # (b, i, m)
        second, normed_2 = _normalise(layer, second, half)  # (b, i, m)
        normed = (normed_1, normed_2)
    copies, shear_3 = _shear(layer, (two, one, second, first), half)
    copies, shear_4 = _shear(layer, swapped(copies), whole)
    momentum = c.after * copies[2]  # (b, i, m) [SYMP.doubled_momentum]
    shears = (shear_1, shear_2, shear_3, shear_4)
    return copies[0], momentum, None, Saved(t, c, slopes, entering, momentum, shears, before, normed, angle)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, d_following: None, add: Add
) -> tuple[Array, Array, None, Array]:
    """Return the gradients of x, p, no history and t, and add those of the parameters and the numbers."""
    kind, c, h_y = layer.params.config.integrator, saved.coefficients, layer.numbers["h_y"]  # -, -, (1)
    none, (shear_1, shear_2, shear_3, shear_4) = namespace(d_result).zeros_like(d_result), saved.shears  # (b, i, m)
    d_later = none if d_momentum is None else d_momentum  # (b, i, m)
    # forward: momentum = after * first, and the maps in reverse
    d, d_whole = _shear_backward(layer, shear_4, (d_result, none, c.after * d_later, none), add)  # -, (1)
    d, d_half = _shear_backward(layer, shear_3, swapped(d), add)  # -, (1)
    d_one, d_two, d_first, d_second = swapped(d)  # (b, i, m), (b, i, m), (b, i, m), (b, i, m)
    if saved.normed is not None:
        d_first, d_a = _normalise_backward(layer, saved.normed[0], d_first, add)  # (b, i, m), (1)
        d_second, d_b = _normalise_backward(layer, saved.normed[1], d_second, add)  # (b, i, m), (1)
        d_half = d_half + d_a + d_b  # (1)
    # forward: one, two, first, second = rotate(*before, angle)
    d, d_angle = rotate_backward(saved.before, saved.angle, (d_one, d_two, d_first, d_second))  # -, (1)
    angle_backward(layer, d_angle, add)
    d, d_a = _shear_backward(layer, shear_2, swapped(d), add)  # -, (1)
    d, _ = _shear_backward(layer, shear_1, swapped(d), add)  # -, (1)
    d_entering = d[2] + d[3]  # (b, i, m) [dSYMP.doubled_entering]
    # forward: entering = before * p; before, after = rule(t)
    d_c = Coefficients(inner(d_entering, saved.entering), 0.0 * h_y, 0.0 * h_y, inner(d_later, saved.momentum))
    d_t, d_h = coefficients.backward(layer, saved.t, saved.slopes, d_c, add)  # (1), (1)
    add("h_y", d_h)
    for share, d_s in ((0.5, d_half + d_a), (1.0, d_whole)) if kind.scaled else ():
        # forward: half, whole = damping(t, h_y / 2), damping(t, h_y)
        d_now, d_h = equations.active(damping).damping_backward(layer, saved.t, share * h_y, -d_s, add)  # (1), (1)
        d_t = d_t + d_now  # (1)
        add("h_y", share * d_h)
    return d[0] + d[1], c.before * d_entering, None, d_t


def swapped(copies: Copies) -> Copies:
    """Return the copies, or their gradients, with one in place of the other: so the map A is B."""
    one, two, first, second = copies
    return two, one, second, first


def _shear(layer: Layer, copies: Copies, a: Array) -> tuple[Copies, tuple[Any, ...]]:
    """Return the copies after the map A, with a_s, and what its backward reads."""
    x_at, x_move, p_move, p_at = copies
    grown = namespace(x_at).exp(a)  # (1)
    p = namespace(x_at).exp(-a) * p_at  # (b, i, m) [SYMP.copy_momentum]
    answer, asked = layer.force.forward(layer, x_at, p)
    speed = layer.force.velocity(answer.b, answer.context)  # (b, i, m)
    kicked = p_move + 0.5 * layer.numbers["h_y"] * grown * answer.g  # (b, i, m) [SYMP.copy_kicked]
    drifted = x_move + 0.5 * layer.numbers["h_x"] * speed  # (b, i, m) [SYMP.copy_drifted]
    norm = None
    if layer.params.config.normalise == "each_substep":
        kicked, norm = _normalise(layer, kicked, a)  # (b, i, m)
    return (x_at, drifted, kicked, p_at), (p, answer, speed, asked, a, norm)


def _shear_backward(layer: Layer, saved: tuple[Any, ...], d: Copies, add: Add) -> tuple[Copies, Array]:
    """Return the gradients of the copies before the map A for those after it, and that of a_s."""
    p, answer, speed, asked, a, norm = saved  # (b, i, m), -, (b, i, m), -, (1), -
    d_x_at, d_x_move, d_p_move, d_p_at = d
    xp, d_a = namespace(d_x_at), 0.0 * a  # -, (1)
    if norm is not None:
        d_p_move, d_a = _normalise_backward(layer, norm, d_p_move, add)  # (b, i, m), (1)
    # forward: drifted = x_move + h_x / 2 * speed
    d_speed = 0.5 * layer.numbers["h_x"] * d_x_move  # (b, i, m) [dSYMP.copy_drifted]
    add("h_x", 0.5 * inner(d_x_move, speed))
    # forward: kicked = p_move + h_y / 2 exp(a) * force
    d_force = 0.5 * layer.numbers["h_y"] * xp.exp(a) * d_p_move  # (b, i, m) [dSYMP.copy_kicked]
    work = 0.5 * xp.exp(a) * inner(d_p_move, answer.g)  # (1)
    add("h_y", work)
    back = layer.force.velocity_backward(answer.b, speed, answer.context, d_speed)
    d_moved, d_context = back  # (b, i, m)
    back = layer.force.backward(layer, asked, d_force, d_moved, d_context, add)
    d_x, d_p = back  # (b, i, m), (b, i, m) [dSYMP.copy_momentum]
    # forward: p = exp(-a) * p_at
    d_a = d_a + layer.numbers["h_y"] * work - inner(d_p, p)  # (1)
    return (d_x_at + d_x, d_x_move, d_p_move, d_p_at + xp.exp(-a) * d_p), d_a


def _normalise(layer: Layer, momentum: Array, a: Array) -> tuple[Array, tuple[Any, ...]]:
    """Return the momentum of which exp(-a_s) is normalised, and what its backward reads."""
    xp = namespace(momentum)
    physical = xp.exp(-a) * momentum  # (b, i, m): part of SYMP.copy_normed
    unit, norm = normed(layer.params, physical, "_p")  # (b, i, m): part of SYMP.copy_normed
    result = xp.exp(a) * unit  # (b, i, m) [SYMP.copy_normed]
    return result, (norm, a, physical, result)


def _normalise_backward(layer: Layer, saved: tuple[Any, ...], d_result: Array, add: Add) -> tuple[Array, Array]:
    """Return the gradients of the momentum and of a_s, and add those of the norm."""
    xp, (norm, a, physical, result) = namespace(d_result), saved  # -, (1), (b, i, m), (b, i, m)
    # forward: result = exp(a) * norm(physical); physical = exp(-a) * momentum
    d_physical = normed_backward(layer.params, norm, xp.exp(a) * d_result, add, "_p")  # (b, i, m)
    d_momentum = xp.exp(-a) * d_physical  # (b, i, m) [dSYMP.copy_normed]
    return d_momentum, inner(d_result, result) - inner(d_physical, physical)


def xi_of(layer: Layer) -> tuple[Array, Array | None]:
    """Return xi, and where it is not clipped, or None where it is not learned."""
    kind, h_x = layer.params.config.integrator, layer.numbers["h_x"]  # -, (1)
    if "xi" not in layer.numbers:
        return 0.0 * h_x + kind.xi, None
    asked = 0.5 * kind.angle * layer.numbers["xi"] / h_x  # (1): xi before it is clipped
    xi = clip(asked, kind.least, kind.most)  # (1) [SYMP.frequency]
    return xi, (asked > kind.least) & (asked < kind.most)


def angle_of(layer: Layer) -> Array:
    """Return the angle of a block: of a fixed xi, or of one that is learned."""
    h_x = layer.numbers["h_x"]  # (1)
    angle = 2.0 * xi_of(layer)[0] * h_x  # (1) [SYMP.rotation_angle]
    return angle


def angle_backward(layer: Layer, d_angle: Array, add: Add) -> None:
    """Add the gradients of h_x and of what xi is learned by."""
    h_x, largest = layer.numbers["h_x"], layer.params.config.integrator.angle  # (1), -
    xi, free = xi_of(layer)  # (1), (1)
    # forward: angle = 2 * xi * h_x
    add("h_x", 2.0 * xi * d_angle)
    if free is not None:
        d_xi = namespace(d_angle).where(free, 2.0 * h_x * d_angle, 0.0)  # (1) [dSYMP.frequency]
        # forward: xi = clip(largest * share / (2 * h_x), least, most)
        add("xi", 0.5 * largest * d_xi / h_x)
        add("h_x", -xi * d_xi / h_x)


def rotate(one: Array, two: Array, first: Array, second: Array, angle: Array) -> tuple[Array, Array, Array, Array]:
    """Return X, Y, P, Q with the differences of the copies turned by an angle; minus the angle is its adjoint."""
    xp = namespace(one)
    cos, sin = xp.cos(angle), xp.sin(angle)  # (1), (1)
    d_x, d_p = one - two, first - second  # (b, i, m), (b, i, m)
    x = 0.5 * (one + two + cos * d_x + sin * d_p)  # (b, i, m) [SYMP.rotated_x]
    y = one + two - x  # (b, i, m) [SYMP.rotated_y]
    p = 0.5 * (first + second - sin * d_x + cos * d_p)  # (b, i, m) [SYMP.rotated_p]
    q = first + second - p  # (b, i, m) [SYMP.rotated_q]
    return x, y, p, q


def rotate_backward(before: Copies, angle: Array, d: Copies) -> tuple[Copies, Array]:
    """Return the gradients of X, Y, P and Q before the rotation, and of the angle."""
    one, two, first, second = before
    d_one, d_two, d_first, d_second = d
    xp = namespace(one)
    cos, sin = xp.cos(angle), xp.sin(angle)  # (1), (1)
    turned_x, turned_p = d_one - d_two, d_first - d_second  # (b, i, m), (b, i, m)
    d_x, d_p = one - two, first - second  # (b, i, m), (b, i, m)
    # forward: x = (... + cos d_x + sin d_p) / 2; p = (... - sin d_x + cos d_p) / 2; y and q with the other signs
    quarter_x = cos * d_p - sin * d_x  # (b, i, m): the pair turned by a quarter
    quarter_p = -cos * d_x - sin * d_p  # (b, i, m): the pair turned by a quarter
    d_angle = 0.5 * (inner(turned_x, quarter_x) + inner(turned_p, quarter_p))  # (1) [dSYMP.rotation_angle]
    back_x = 0.5 * (d_one + d_two + cos * turned_x - sin * turned_p)  # (b, i, m) [dSYMP.rotated_x]
    back_p = 0.5 * (d_first + d_second + sin * turned_x + cos * turned_p)  # (b, i, m): dSYMP.rotated_x of momenta
    return (back_x, d_one + d_two - back_x, back_p, d_first + d_second - back_p), d_angle
