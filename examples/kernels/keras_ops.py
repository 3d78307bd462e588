"""Keras's `ops.dot_product_attention` on PyTorch. keras 3.15.1, torch 2.13.0.

Its layout is (b, n, h, d), causal masks are aligned top left; with a bias there is no mask beside it.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from common import empty, four, seen

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None, bias=None):
    if declined := empty(q, k, v):
        return declined
    if causal in (True, "bottom_right") and q.shape[2] != k.shape[2]:
        mask, causal = seen(torch, q, k, mask, causal), False
    if mask is not None and bias is not None:
        return refattn.Decline("a bias or a mask, not both")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = keras.ops.dot_product_attention(
        q, k, v, bias=four(bias), mask=four(mask), scale=scale, is_causal=bool(causal), flash_attention=False
    )
    return out.transpose(1, 2)


attend.framework = "torch"
attend.roundings = ("SM.1",)
