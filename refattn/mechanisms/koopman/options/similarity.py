"""What the softmax is taken of: how alike a query and a key are.

dot      s = x . k / sqrt(d)        ds = ds . k / sqrt(d): as in softmax attention
kernel   s = k(x, k)                the kernel's own: points are then compared in attention as in the fit
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman.options.kernel import Kernel
from refattn.xp import Array, transpose


@dataclass(frozen=True)
class Dot:
    """s = x . k / sqrt(d), the scaled product of softmax attention."""

    def forward(self, x: Array, k: Array) -> Array:
        """Return the scores (b, h, i, j) of x (b, h, i, d) and k (b, h, j, d)."""
        return x @ transpose(k) / math.sqrt(x.shape[-1])

    def backward(self, x: Array, k: Array, d_scores: Array) -> tuple[Array, dict[str, Array]]:
        """Return the gradient of x, and by name those of k and of the numbers that the similarity has."""
        d_dot = d_scores / math.sqrt(x.shape[-1])
        return d_dot @ k, {"k": transpose(d_dot) @ x}


@dataclass(frozen=True)
class OfKernel:
    """s = k(x, k): a point is as near in attention as it is in the fit."""

    kernel: Kernel

    def forward(self, x: Array, k: Array) -> Array:
        """Return k(x, k)."""
        return self.kernel.values(x, k)

    def backward(self, x: Array, k: Array, d_scores: Array) -> tuple[Array, dict[str, Array]]:
        """Return the kernel's gradients."""
        d_x, d_k, d_bandwidth, d_weight = self.kernel.backward(x, k, d_scores)
        return d_x, {"k": d_k, "bandwidth": d_bandwidth, "weight": d_weight}


Similarity = Dot | OfKernel

SIMILARITIES: dict[str, Callable[[Any], Similarity]] = {"dot": lambda _: Dot(), "kernel": OfKernel}
"""By name, for a kernel."""
