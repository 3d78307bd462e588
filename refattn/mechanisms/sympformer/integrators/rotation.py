"""The rotation that holds two copies of tokens and momenta, (X, P) and (Y, Q), together.

Equations::

    [SYMP.28]  X = (X + Y + cos(angle) (X - Y) + sin(angle) (P - Q)) / 2
    [SYMP.29]  Y = X + Y - X'                           X' the new X
    [SYMP.30]  P = (P + Q - sin(angle) (X - Y) + cos(angle) (P - Q)) / 2
    [SYMP.31]  Q = P + Q - P'

Adjoints, for given dX, dY, dP and dQ of what it makes::

    [dSYMP.28]  dX = (dX + dY + cos(angle) (dX - dY) - sin(angle) (dP - dQ)) / 2    of what goes in; the left dX
    [dSYMP.angle]  dangle = 1/2 sum ((dX - dY) U + (dP - dQ) V)

with U = cos(angle) (P - Q) - sin(angle) (X - Y) and V = -cos(angle) (X - Y) - sin(angle) (P - Q); dY, dP and dQ of
what goes in are SYMP.29 to SYMP.31 of the gradients, for minus the angle.

Axes: b batch, i token, m width.

Source: Tao 2016 (arXiv:1609.02212), equation 3.
"""

from __future__ import annotations

from refattn.mechanisms.sympformer.params import inner
from refattn.xp import Array, namespace

Copies = tuple[Array, Array, Array, Array]
"""X, Y, P and Q, or their gradients."""


def forward(one: Array, two: Array, first: Array, second: Array, angle: Array) -> tuple[Array, Array, Array, Array]:
    """Return X, Y, P, Q with the differences of the copies turned by an angle; minus the angle is its adjoint."""
    xp = namespace(one)
    cos, sin = xp.cos(angle), xp.sin(angle)  # (1), (1)
    d_x, d_p = one - two, first - second  # (b, i, m), (b, i, m)
    x = 0.5 * (one + two + cos * d_x + sin * d_p)  # (b, i, m) [SYMP.28]
    y = one + two - x  # (b, i, m) [SYMP.29]
    p = 0.5 * (first + second - sin * d_x + cos * d_p)  # (b, i, m) [SYMP.30]
    q = first + second - p  # (b, i, m) [SYMP.31]
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
    d_angle = 0.5 * (inner(turned_x, quarter_x) + inner(turned_p, quarter_p))  # (1) [dSYMP.angle]
    back_x = 0.5 * (d_one + d_two + cos * turned_x - sin * turned_p)  # (b, i, m) [dSYMP.28]
    back_p = 0.5 * (d_first + d_second + sin * turned_x + cos * turned_p)  # (b, i, m): dSYMP.28 of momenta
    return (back_x, d_one + d_two - back_x, back_p, d_first + d_second - back_p), d_angle
