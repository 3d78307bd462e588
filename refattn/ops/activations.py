"""GELU, x times a gate between 0 and 1, exact and in the form with a tanh; and the soft threshold.

    exact   y = x g,  g = Phi(x) = (1 + erf(x / sqrt 2)) / 2          dy/dx = g + x phi(x)
    tanh    y = x g,  g = (1 + tanh(x (c + c a x^2))) / 2             dy/dx = g + x g (1 - g) (2 c + 6 c a x^2)

with phi the derivative of Phi, c = sqrt(2 / pi) and a = 0.044715. The second uses that (1 - tanh^2) / 2 = 2 g (1 - g).
They differ by at most 5e-4. Source: Hendrycks, Gimpel 2016 (arXiv:1606.08415), section 2.
"""

from __future__ import annotations

import math

from refattn.args import Axes, Real, checked, naming
from refattn.xp import Array, backend, namespace

_C = math.sqrt(2.0 / math.pi)
_CA = 0.044715 * _C


@checked(x="...")
def gelu_exact_forward(x: Array) -> tuple[Array, Array]:
    """Return (y, gate).

    >>> import numpy as np
    >>> from refattn.ops.activations import gelu_exact_forward
    >>> y, gate = gelu_exact_forward(np.asarray([-1.0, 0.0, 1.0]))
    >>> y.round(4).tolist(), gate.round(4).tolist()
    ([-0.1587, 0.0, 0.8413], [0.1587, 0.5, 0.8413])
    """
    gate = 0.5 + 0.5 * backend(x).erf(x * math.sqrt(0.5))
    return x * gate, gate


@checked(x="...", gate="...", d_y="...")
def gelu_exact_backward(x: Array, gate: Array, d_y: Array) -> Array:
    """Return the gradient with respect to x.

    >>> import numpy as np
    >>> from refattn.ops.activations import gelu_exact_backward, gelu_exact_forward
    >>> x = np.asarray([-1.0, 0.0, 1.0])
    >>> y, gate = gelu_exact_forward(x)
    >>> gelu_exact_backward(x, gate, np.ones(3)).round(4).tolist()
    [-0.0833, 0.5, 1.0833]
    """
    density = namespace(x).exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
    # forward: y = x * gate, gate = Phi(x)
    return d_y * (gate + x * density)


@checked(x="...")
def gelu_tanh_forward(x: Array) -> tuple[Array, Array]:
    """Return (y, gate).

    >>> import numpy as np
    >>> from refattn.ops.activations import gelu_tanh_forward
    >>> y, gate = gelu_tanh_forward(np.asarray([-1.0, 0.0, 1.0]))
    >>> y.round(4).tolist(), gate.round(4).tolist()
    ([-0.1588, 0.0, 0.8412], [0.1588, 0.5, 0.8412])
    """
    gate = 0.5 + 0.5 * namespace(x).tanh(x * (_C + _CA * (x * x)))
    return x * gate, gate


@checked(x="...", gate="...", d_y="...")
def gelu_tanh_backward(x: Array, gate: Array, d_y: Array) -> Array:
    """Return the gradient with respect to x.

    >>> import numpy as np
    >>> from refattn.ops.activations import gelu_tanh_backward, gelu_tanh_forward
    >>> x = np.asarray([-1.0, 0.0, 1.0])
    >>> y, gate = gelu_tanh_forward(x)
    >>> gelu_tanh_backward(x, gate, np.ones(3)).round(4).tolist()
    [-0.083, 0.5, 1.083]
    """
    # forward: y = x * gate, gate = (1 + tanh(x (c + c a x^2))) / 2
    slope = x * (2.0 * _C + 6.0 * _CA * (x * x))
    return d_y * (gate + gate * (1.0 - gate) * slope)


@checked(x="...", least=(Real(), Axes("*")), signed=bool)
@naming("least")
def soft_threshold(x: Array, least: float | Array, *, signed: bool) -> Array:
    """Return x - least where x is larger, else 0; with `signed` that of its size, and its sign.

    >>> import numpy as np
    >>> from refattn.ops.activations import soft_threshold
    >>> soft_threshold(np.asarray([-3.0, 0.5, 3.0]), 1.0, signed=True).tolist()
    [-2.0, 0.0, 2.0]
    >>> soft_threshold(np.asarray([-3.0, 0.5, 3.0]), 1.0, signed=False).tolist()
    [0.0, 0.0, 2.0]
    """
    xp = namespace(x)
    if signed:
        return xp.where(xp.abs(x) <= least, 0.0, xp.sign(x) * (xp.abs(x) - least))
    return xp.where(x <= least, 0.0, x - least)
