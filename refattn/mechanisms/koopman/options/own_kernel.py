"""Whether a kernel of a user's is one: symmetric, positive, of the shapes that it is asked for, with its gradient.

On 24 points of a normal law no kernel can be proved to be one, but what is none is mostly found. Gradients are compared
with central differences.
"""

from __future__ import annotations

from typing import Any

from refattn import philox
from refattn.xp import Array, backend, concrete, device, namespace, transpose

POINTS = 24
STEP = 1e-5
SLOPES = 1e-6
"""Largest error of a gradient, relative to its largest value: differences err by STEP^2, rounding by 1e-16 / STEP."""

_CHECKED: dict[Any, None] = {}
"""The last kernels that were found to be such."""


def check_own(kernel: Any, like: Array, space: str) -> None:
    """Raise ValueError where a kernel is none, once for each; `like` gives the library and, last, the width d.

    A library without float64 cannot tell, and is not asked.
    """
    if space == "augmented":
        raise ValueError('space: got "augmented" with a kernel of your own, whose part in x . y is not known')
    width, owner = like.shape[-1], backend(like)
    known = kernel.function, kernel.gradient, owner.name, width
    if known in _CHECKED or not owner.float64():
        return
    drawn = philox.normal((2, POINTS, width), seed=0, purpose="koopman.own")
    both = owner.from_numpy(drawn, device=device(like))
    x, way, xp = both[0, ...], both[1, ...], namespace(both)
    k, d = kernel.function(x, x), kernel.gradient(x, x)
    apart = kernel.function(x[:, None, :], x[None, :, :])
    for name, found, shape in (
        ("function", k, (POINTS, POINTS)),
        ("gradient", d, (POINTS, POINTS, width)),
        ("function", apart, (POINTS, 1, POINTS)),
    ):
        if tuple(found.shape) != shape:
            given = (POINTS, 1, width) if found is apart else (POINTS, width)
            raise ValueError(f"kernel: got a {name} of shape {tuple(found.shape)} for points {given}, needs {shape}")
    size = xp.max(xp.abs(k))
    _check("function: it is not symmetric", xp.max(xp.abs(k - transpose(k))) <= 1e-12 * size)
    _check("function: it does not broadcast", xp.max(xp.abs(apart[:, 0, :] - k)) <= 1e-10 * size)
    _check("function: it is not positive", xp.min(xp.linalg.eigvalsh(k)) >= -1e-10 * POINTS * size)
    change = (kernel.function(x + STEP * way, x) - kernel.function(x - STEP * way, x)) / (2.0 * STEP)
    error = xp.sum(d * way[:, None, :], axis=-1) - change
    _check(
        "gradient: it is not the derivative of function", xp.max(xp.abs(error)) <= SLOPES * (size + xp.max(xp.abs(d)))
    )
    if len(_CHECKED) == 64:
        del _CHECKED[next(iter(_CHECKED))]
    _CHECKED[known] = None


def _check(problem: str, holds: Array) -> None:
    if concrete(holds) is False:
        raise ValueError(f"kernel: {problem}")
