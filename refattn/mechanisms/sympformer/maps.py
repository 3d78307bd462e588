"""The maps with parameters that a block is made of, by the names of these: affine ones, norms, and looking ahead.

Each backward returns the gradient of what came in, and adds those of the parameters to what is known of them.
"""

from __future__ import annotations

from refattn.mechanisms.sympformer.params import Add, Layer, Mlp, Params, inner, plus
from refattn.ops import layer_norm
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array


def affine(owner: Params | Mlp, x: Array, name: str) -> Array:
    """Return x w + b for the matrix and, if there is one, the bias of a name."""
    return linear_forward(x, getattr(owner, f"w_{name}"), getattr(owner, f"b_{name}", None))


def affine_backward(owner: Params | Mlp, x: Array, name: str, d_y: Array, add: Add) -> Array:
    """Return the gradient of x, and add those of the matrix and the bias."""
    d_x, d_w, d_b = linear_backward(x, getattr(owner, f"w_{name}"), d_y)
    add(f"{head_of(owner)}w_{name}", d_w)
    add(f"{head_of(owner)}b_{name}", d_b)
    return d_x


def normed(owner: Params | Mlp, x: Array, name: str = "") -> tuple[Array, layer_norm.Saved]:
    """Return gain norm(x) + shift for the gain and, if there is one, the shift of a name."""
    return layer_norm.layer_norm_forward(x, getattr(owner, f"gain{name}"), getattr(owner, f"shift{name}"))


def normed_backward(owner: Params | Mlp, saved: layer_norm.Saved, d_y: Array, add: Add, name: str = "") -> Array:
    """Return the gradient of x, and add those of the gain and the shift."""
    d_x, d_gain, d_shift = layer_norm.layer_norm_backward(saved, d_y)
    add(f"{head_of(owner)}gain{name}", d_gain)
    add(f"{head_of(owner)}shift{name}", d_shift)
    return d_x


def head_of(owner: Params | Mlp) -> str:
    """Return what the names of parameters begin with."""
    return "mlp." if isinstance(owner, Mlp) else ""


def ahead(layer: Layer, x: Array, p: Array | None, name: str = "look") -> Array:
    """Return x + s p for the number s of a name: x itself at rest, or if there is no such number."""
    return x if p is None or name not in layer.numbers else x + layer.numbers[name] * p


def ahead_backward(
    layer: Layer, p: Array | None, d_ahead: Array, d_p: Array | None, add: Add, name: str = "look"
) -> Array | None:
    """Return the gradient of p, with what else asks for it, and add that of the number; that of x is `d_ahead`."""
    if p is None or name not in layer.numbers:
        return d_p
    add(name, inner(d_ahead, p))
    return plus(d_p, layer.numbers[name] * d_ahead)
