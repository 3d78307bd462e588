"""Rotary positions: pairs of numbers of a query or a key are turned by angles that grow with its position.

[forward]  y_a = cos x_a - sin x_b,  y_b = sin x_a + cos x_b

for the pairs (a, b) = (n, n + r/2), the two halves of the first r numbers, or (2n, 2n + 1), interleaved. It is a linear
map of x before the core; the adjoint turns back, whatever cos and sin are. These are constants: a model that scales its
angles has other ones.

Source: Su et al. 2021 (arXiv:2104.09864), equation 34.

Letters: b batch, h head, n token, d width, r numbers that turn.
"""

from __future__ import annotations

from refattn.xp import Array, arange, backend, namespace


def angles(positions: Array, width: int, like: Array, base: float = 10000.0) -> tuple[Array, Array]:
    """Return cos and sin (..., width/2) of p base^(-2n/width) at positions p (...), in float64 where there is one.

    They come in the dtype of `like`. In float32 an angle beyond 100,000 would be off by some thousandths.
    """
    xp = namespace(like)
    wide = xp.float64 if backend(like).float64() else like.dtype
    exponents = xp.astype(arange(0, width // 2, like), wide) * (-2.0 / width)
    turned = xp.astype(positions, wide)[..., None] * base**exponents
    return xp.astype(xp.cos(turned), like.dtype), xp.astype(xp.sin(turned), like.dtype)


def rotary_forward(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Turn the first r numbers of x (b, h, n, d), with cos and sin (n, r/2) or (b, n, r/2); the others pass.

    Raises
    ------
    ValueError
        Where cos and sin have not the same shape, or do not fit x.
    """
    xp, half = namespace(x), cos.shape[-1]
    b, _, n, d = x.shape
    if tuple(cos.shape) != tuple(sin.shape) or tuple(cos.shape) not in ((n, half), (b, n, half)) or 2 * half > d:
        shapes = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ValueError(f"cos, sin: got shapes {shapes}, needs ({n}, r/2) or ({b}, {n}, r/2) with r at most {d}")
    if len(cos.shape) == 3:
        cos, sin = cos[:, None, :, :], sin[:, None, :, :]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    turned = cos * first - sin * second, sin * first + cos * second
    if interleaved:
        together = xp.reshape(xp.stack(turned, axis=-1), (*x.shape[:3], 2 * half))
    else:
        together = xp.concat(turned, axis=-1)
    return together if 2 * half == d else xp.concat([together, x[..., 2 * half :]], axis=-1)


def rotary_backward(d_y: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Return the gradient of x for that of y: turned back."""
    return rotary_forward(d_y, cos, -sin, interleaved=interleaved)
