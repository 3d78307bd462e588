"""`dot_product_attention` of Equinox, which its `MultiheadAttention` calls. equinox 0.13.8, jax 0.10.2.

It has one head of one sequence, a boolean mask and the scale 1/sqrt(d): q is scaled for others.
"""

import jax
import jax.numpy as jnp
from common import empty, four, seen
from equinox.nn._attention import dot_product_attention

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None):
    if declined := empty(q, k, v):
        return declined
    if q.shape[1] != k.shape[1]:
        return refattn.Decline("no grouped heads")
    mask = four(seen(jnp, q, k, mask, causal))
    mask = None if mask is None else jnp.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    q = q if scale is None else q * (scale * q.shape[3] ** 0.5)
    heads = jax.vmap(jax.vmap(dot_product_attention))
    return heads(q, k, v) if mask is None else heads(q, k, v, mask)


attend.framework = "jax"
attend.supports = {"dtypes": ["float32", "float16", "bfloat16"]}
