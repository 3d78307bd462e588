"""Linear attention in d x d matrices: what its particles do together needs no particle.

With S = X^T X / N, C = X^T Y / N and the mean m of the particles the equations of `particles.Linear` close, for any
momenta::

    S' = (A C)^T S + S A C
    C' = -alpha C + C^T A C - C C^T A + S V
    m' = (A C)^T m

Momenta that begin as a linear map of the particles, Y = X P with P symmetric, remain one::

    P' = -alpha P - A S P^2 - P^2 S A + V

and without momentum S follows a Riccati equation, S' = V S A S + S A S V. It is that of Stein variational gradient
descent with the kernel x^T A y in the potential -1/2 x^T V x, without an entropy.

X(t) = X(0) F(t) with a matrix F: an elliptical law stays one, and its scatter follows the equation of S.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535) for Y = X P; the closure for any momenta is derived here.
"""

from __future__ import annotations

from refattn.analysis.particles import Linear, Matrix
from refattn.args import checked


@checked(x="n d", y="n d")
def moments(x: Matrix, y: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Return S, C and m of particles x and momenta y (N, d)."""
    return x.T @ x / len(x), x.T @ y / len(x), x.mean(axis=0)


def moments_slope(system: Linear, s: Matrix, c: Matrix, m: Matrix, alpha: float) -> tuple[Matrix, Matrix, Matrix]:
    """Return S', C' and m'."""
    turn = system.a @ c
    return turn.T @ s + s @ turn, -alpha * c + c.T @ system.a @ c - c @ c.T @ system.a + s @ system.v, turn.T @ m


def linear_momentum_slope(system: Linear, s: Matrix, p: Matrix, alpha: float) -> Matrix:
    """Return P'."""
    return -alpha * p - system.a @ s @ p @ p - p @ p @ s @ system.a + system.v


def riccati_slope(system: Linear, s: Matrix) -> Matrix:
    """Return S' of particles without momentum."""
    turned = system.v @ s @ system.a @ s
    return turned + turned.T
