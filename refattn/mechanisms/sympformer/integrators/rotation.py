"""The rotation that holds two copies of tokens and momenta, (X, P) and (Y, Q), together.

Equations (share, a number of the block: xi is learned below a largest angle, or not at all)::

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

Axes: b batch, i token, m width.

Source: Tao 2016 (arXiv:1609.02212), equation 3.
"""

from __future__ import annotations

from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.xp import Array, clip, namespace

Copies = tuple[Array, Array, Array, Array]
"""X, Y, P and Q, or their gradients."""


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


def forward(one: Array, two: Array, first: Array, second: Array, angle: Array) -> tuple[Array, Array, Array, Array]:
    """Return X, Y, P, Q with the differences of the copies turned by an angle; minus the angle is its adjoint."""
    xp = namespace(one)
    cos, sin = xp.cos(angle), xp.sin(angle)  # (1), (1)
    d_x, d_p = one - two, first - second  # (b, i, m), (b, i, m)
    x = 0.5 * (one + two + cos * d_x + sin * d_p)  # (b, i, m) [SYMP.rotated_x]
    y = one + two - x  # (b, i, m) [SYMP.rotated_y]
    p = 0.5 * (first + second - sin * d_x + cos * d_p)  # (b, i, m) [SYMP.rotated_p]
    q = first + second - p  # (b, i, m) [SYMP.rotated_q]
    return x, y, p, q


def backward(before: Copies, angle: Array, d: Copies) -> tuple[Copies, Array]:
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
