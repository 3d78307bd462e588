"""JAX's `jax.nn.dot_product_attention` on the CPU (XLA), as a kernel for `refattn verify`.

    refattn verify softmax --impl examples/jax_attention.py:attend --grad
    refattn verify softmax --impl examples/jax_attention.py:attend_alone --tangent --hessian --dtype float32

It takes JAX arrays and returns `out`, in float32 with the logarithm of the denominators beside it; JAX differentiates.
What it returns is returned as it comes.

What agrees with refattn: boolean masks (True = may attend), grouped heads (each key head serves consecutive query
heads), the scale, scores and softmax in float32, weights rounded to the storage type.

What differs (measured with jax 0.10):
- The layout is (batch, tokens, heads, dim): the axes are exchanged here.
- `is_causal` aligns top-left. Bottom-right, refattn's default, is had by a mask.
- A row that may attend nothing gives the mean of all values, not 0, for a masked score is a large negative number and
  not -inf; its logarithm is that number. Such cases disagree, and are meant to.
- The softmax is float32 for float64, too: good to 1e-7 only. Declined.
- The logarithm of the denominators comes in the storage type, and so is passed on in float32 alone.
- Windows are aligned top left, and so are taken where there are as many queries as keys, or top-left was asked; a
  bound that is not given is a large one. Lengths are aligned so, too, and leave queries without keys the mean.
- There are no offsets, sinks and dropout: declined.
- JAX takes these logarithms for constants: their tangent is 0, and t_lse of `attend` disagrees. `attend_alone` is
  without them.
- d_v has to be d, and there is no soft-cap: declined. Axes of size 0 are declined, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    import refattn


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    bias: jax.Array | None = None,
    q_lengths: jax.Array | None = None,
    k_lengths: jax.Array | None = None,
    scale: float | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array] | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, d), mask like (b, h, n_q, n_k) -> out (b, h, n_q, d), lse."""
    if options:
        return decline(f"dot_product_attention has no option {', '.join(sorted(options))}")
    if q.dtype == jnp.float64:
        return decline("its softmax is float32 for float64, too")
    if v.shape[3] != q.shape[3]:
        return decline(f"it needs d_v = d, not d = {q.shape[3]} and d_v = {v.shape[3]}")
    if 0 in (*q.shape, *k.shape):
        return decline("no axes of size 0")
    n_q, n_k = q.shape[2], k.shape[2]
    if mask is not None:  # full in its last three axes, and with as many heads as there are queries' heads, or one
        mask = mask[(None,) * (4 - mask.ndim)]
        mask = jnp.broadcast_to(mask, (q.shape[0], mask.shape[1], n_q, n_k))
    aligned = n_q == n_k and q_lengths is None and k_lengths is None
    if window is not None and not (aligned or causal == "top_left"):
        return decline("its windows are aligned top left")
    if q_lengths is not None or k_lengths is not None:
        if causal in (True, "bottom_right"):
            return decline("it aligns by the padded lengths")
        none = jnp.all(jnp.asarray(0 if k_lengths is None else jnp.min(k_lengths)) > 0)
        if k_lengths is not None and not bool(none):
            return decline("a sequence without keys gives the mean of all values")
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], n_q, n_k))
    bottom, top = causal in (True, "bottom_right"), causal == "top_left"
    return compiled(q, k, v, bias, mask, q_lengths, k_lengths, scale=scale, bottom=bottom, top=top, window=window)


@functools.partial(jax.jit, static_argnames=("scale", "bottom", "top", "window"))
def compiled(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    q_lengths: jax.Array | None,
    k_lengths: jax.Array | None,
    *,
    scale: float | None,
    bottom: bool,
    top: bool,
    window: tuple[int | None, int | None] | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Call JAX's function. One compilation for each shape: without it, each operation is compiled on its own."""
    n_q, n_k = q.shape[2], k.shape[2]
    if bottom:
        past = jnp.tri(n_q, n_k, n_k - n_q, dtype=bool)[None, None]
        mask = past if mask is None else mask & past
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    beside = q.dtype == jnp.float32
    found = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=scale,
        is_causal=top,
        query_seq_lengths=q_lengths,
        key_value_seq_lengths=k_lengths,
        local_window_size=None if window is None else tuple(n_k + n_q if n is None else n for n in window),
        return_residual=beside,
    )
    if not beside:
        return found.transpose(0, 2, 1, 3)
    return found[0].transpose(0, 2, 1, 3), found[1].transpose(0, 2, 1)


def attend_alone(
    q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
) -> jax.Array | tuple[jax.Array, jax.Array] | refattn.Decline:
    """`attend` without the logarithm of the denominators, which is a constant to JAX's derivatives."""
    found = attend(q, k, v, **options)
    return found[0] if isinstance(found, tuple) else found


for function in (attend, attend_alone):
    function.framework = "jax"  # type: ignore[attr-defined]


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)
