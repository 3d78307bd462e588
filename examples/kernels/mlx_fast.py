"""MLX's `mx.fast.scaled_dot_product_attention` on the CPU. mlx 0.32.4.

Boolean masks, grouped heads, sinks; causal masks are aligned bottom right.
"""

import mlx.core as mx
import numpy as np
from common import empty, seen

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None, sink=None, bias=None, dtype=None):
    if declined := empty(q, k, v):
        return declined
    if sink is not None and sink.ndim != 1:
        return refattn.Decline("one sink for each head")

    def given(x):
        return None if x is None else mx.array(np.ascontiguousarray(x)).astype(getattr(mx, dtype))

    if causal in (True, "bottom_right") and mask is None and bias is None:
        mask = "causal"
    elif (mask := seen(np, q, k, mask, causal)) is not None:
        mask = mx.array(np.ascontiguousarray(mask))
    if bias is not None:
        mask = given(bias) if mask is None else mx.where(mask, given(bias), mx.array(-mx.inf, getattr(mx, dtype)))
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    attend = mx.fast.scaled_dot_product_attention
    out = attend(given(q), given(k), given(v), scale=scale, mask=mask, sinks=given(sink))
    return np.array(out.astype(mx.float32)).astype(q.dtype)


attend.roundings = ("SM.1",)  # on the CPU it is made of single operations, in the type of q
attend.supports = {"dtypes": ["float32", "float16", "bfloat16"]}
