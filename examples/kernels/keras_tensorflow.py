"""Keras's `ops.dot_product_attention` on TensorFlow. keras 3.15.1, tensorflow-cpu 2.21.0.

Its layout is (b, n, h, d), causal masks are aligned top left; grouped heads are repeated here.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import ml_dtypes
import numpy as np
from common import empty, four, seen

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None, bias=None, dtype=None):
    if declined := empty(q, k, v):
        return declined
    if causal in (True, "bottom_right") and q.shape[2] != k.shape[2]:
        mask, causal = seen(np, q, k, mask, causal), False
    if mask is not None and bias is not None:
        return refattn.Decline("a bias or a mask, not both")
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    if dtype == "bfloat16":
        q, k, v, bias = (None if x is None else x.astype(ml_dtypes.bfloat16) for x in (q, k, v, bias))
    out = keras.ops.dot_product_attention(
        q, k, v, bias=four(bias), mask=four(mask), scale=scale, is_causal=bool(causal)
    )
    return np.swapaxes(out.numpy(), 1, 2)


attend.roundings = ("SM.1",)
