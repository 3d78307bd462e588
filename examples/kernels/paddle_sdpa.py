"""`paddle.nn.functional.scaled_dot_product_attention` on the CPU. paddlepaddle 3.3.1.

Its layout is (b, n, h, d); masks are added; the scale is 1/sqrt(d): q is scaled for others.
"""

import numpy as np
import paddle
from common import empty, four, seen


def attend(q, k, v, *, mask=None, causal=False, scale=None, bias=None):
    if declined := empty(q, k, v):
        return declined
    if causal and (mask is not None or bias is not None or (causal != "top_left" and q.shape[2] != k.shape[2])):
        mask, causal = seen(np, q, k, mask, causal), False
    if bias is not None:
        mask = bias if mask is None else np.where(mask, bias, bias.dtype.type(-np.inf))
    if mask is not None:
        mask = np.broadcast_to(four(mask), (*q.shape[:3], k.shape[2]))
        mask = paddle.to_tensor(np.ascontiguousarray(mask))
    if scale is not None:
        q = q * q.dtype.type(scale * q.shape[3] ** 0.5)
    q, k, v = (paddle.to_tensor(np.ascontiguousarray(np.swapaxes(x, 1, 2))) for x in (q, k, v))
    out = paddle.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=bool(causal))
    return np.swapaxes(out.numpy(), 1, 2)


attend.supports = {"where": ["h = g"], "dtypes": ["float32"]}
