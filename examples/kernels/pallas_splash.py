"""JAX's splash attention for TPUs in Pallas, interpreted. jax 0.10.2.

Causal masks and windows take an offset, so that bottom right is its own; the soft-cap comes before the mask.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks


def attend(q, k, v, *, causal=False, scale=None, window=None, softcap=None):
    (_, h, nq, d), nk = q.shape, k.shape[2]
    offset = 0 if causal == "top_left" else nk - nq
    mask = masks.CausalMask((nq, nk), offset) if causal else masks.FullMask((nq, nk))
    if window is not None:
        mask = mask & masks.LocalMask((nq, nk), window, offset)
    mask = masks.MultiHeadMask([mask] * h)
    run = kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, attn_logits_soft_cap=softcap)
    q = q * (d**-0.5 if scale is None else scale)
    return jnp.stack([run(*one) for one in zip(q, k, v, strict=True)])  # the interpreter for TPUs has no vmap


attend.framework = "jax"
attend.interpret = "pallas"
attend.roundings = ("q",)  # which it gets times the scale
attend.supports = {
    "d": 128,
    "e": 128,
    "n": [128, 256],
    "where": ["h = g", "e = d"],
    "options": ["causal", "scale", "window", "softcap"],
    "dtypes": ["float32", "bfloat16"],
}
