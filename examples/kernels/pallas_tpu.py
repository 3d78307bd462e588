"""JAX's flash kernel for TPUs in Pallas, interpreted. jax 0.10.2.

Lengths are multiples of 128; causal masks are aligned top left.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import refattn


def attend(q, k, v, *, causal=False, scale=None, bias=None):
    if causal in (True, "bottom_right") and q.shape[2] != k.shape[2]:
        return refattn.Decline("causal masks are aligned top left")
    bias = None if bias is None else jnp.broadcast_to(bias, (*q.shape[:3], k.shape[2]))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return flash_attention(q, k, v, bias, causal=bool(causal), sm_scale=scale)


attend.framework = "jax"
attend.interpret = "pallas"
attend.supports = {
    "d": 128,
    "e": 128,
    "n": {"multiple_of": 128, "at_most": 256},
    "where": ["h = g", "e = d"],
    "options": ["causal", "scale", "bias"],
    "dtypes": ["float32", "bfloat16"],
}
