"""tinygrad's `Tensor.scaled_dot_product_attention` on the CPU, compiled by clang. tinygrad 0.14.0.

Causal masks are aligned top left, so that bottom right is a mask here; the scale is 1/sqrt(d): q is scaled for others.
"""

import os

os.environ.setdefault("DEV", "CPU")

import numpy as np
from common import empty, seen
from tinygrad import Tensor


def attend(q, k, v, *, mask=None, causal=False, scale=None, bias=None):
    if declined := empty(q, k, v):
        return declined
    if causal and (mask is not None or bias is not None or (causal != "top_left" and q.shape[2] != k.shape[2])):
        mask, causal = seen(np, q, k, mask, causal), False
    if bias is not None:
        mask = bias if mask is None else np.where(mask, bias, bias.dtype.type(-np.inf))
    if scale is not None:
        q = q * q.dtype.type(scale * q.shape[3] ** 0.5)
    q, k, v = (Tensor(np.ascontiguousarray(x)) for x in (q, k, v))
    mask = None if mask is None else Tensor(np.ascontiguousarray(mask))
    grouped = q.shape[1] != k.shape[1]
    return q.scaled_dot_product_attention(k, v, attn_mask=mask, is_causal=bool(causal), enable_gqa=grouped).numpy()


attend.roundings = ("q",)
attend.supports = {"dtypes": ["float32", "float16"]}
