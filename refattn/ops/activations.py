"""GELU, the expectation of x times a switch that is on with probability Phi(x), exact and in the form with a tanh.

    exact   y = x Phi(x),                                dy/dx = Phi(x) + x phi(x)
    tanh    y = x (1 + t) / 2,  t = tanh(c (x + a x^3))  dy/dx = (1 + t) / 2 + x (1 - t^2) c (1 + 3 a x^2) / 2

with Phi(x) = (1 + erf(x / sqrt 2)) / 2, phi its derivative, c = sqrt(2 / pi) and a = 0.044715. They differ by at most
5e-4. Source: Hendrycks, Gimpel 2016 (arXiv:1606.08415), section 2.
"""

from __future__ import annotations

import math

from refattn.xp import Array, backend, namespace

_C = math.sqrt(2.0 / math.pi)
_A = 0.044715


def gelu_exact_forward(x: Array) -> Array:
    """Return x Phi(x)."""
    return 0.5 * x * (1.0 + backend(x).erf(x * math.sqrt(0.5)))


def gelu_exact_backward(x: Array, d_y: Array) -> Array:
    """Return the gradient with respect to x."""
    below = 0.5 * (1.0 + backend(x).erf(x * math.sqrt(0.5)))
    density = namespace(x).exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
    # forward: y = x * below
    return d_y * (below + x * density)


def gelu_tanh_forward(x: Array) -> Array:
    """Return x (1 + tanh(c (x + a x^3))) / 2."""
    half = 0.5 * x
    return half + half * _tanh(x, x * x)


def gelu_tanh_backward(x: Array, d_y: Array) -> Array:
    """Return the gradient with respect to x."""
    square = x * x
    t = _tanh(x, square)
    # forward: y = 0.5 * x * (1 + t), t = tanh(x * (c + c a x^2))
    slope = (0.5 * _C + 1.5 * _C * _A * square) * x * (1.0 - t * t)
    return d_y * (0.5 + 0.5 * t + slope)


def _tanh(x: Array, square: Array) -> Array:
    return namespace(x).tanh(x * (_C + _C * _A * square))
