"""Flax's `nnx.dot_product_attention`. flax 0.12.8, jax 0.10.2.

Its layout is (b, n, h, d); heads are not grouped and the scale is 1/sqrt(d): q is scaled for others. Causal is a mask.
"""

import jax.numpy as jnp
from common import empty, seen
from flax import nnx

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None, bias=None):
    if q.shape[1] != k.shape[1]:
        return refattn.Decline("no grouped heads")
    if q.shape[3] != v.shape[3]:
        return refattn.Decline("values as wide as keys")
    if declined := empty(q, k, v):
        return declined
    full = (*q.shape[:3], k.shape[2])
    mask, bias = (None if x is None else jnp.broadcast_to(x, full) for x in (seen(jnp, q, k, mask, causal), bias))
    q = q if scale is None else q * (scale * q.shape[3] ** 0.5)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return nnx.dot_product_attention(q, k, v, bias=bias, mask=mask).swapaxes(1, 2)


attend.framework = "jax"
attend.roundings = ("q", "SM.1", "SM.biased")
attend.supports = {"dtypes": ["float32", "float16", "bfloat16"]}
