"""JAX's paged decoding kernel for GPUs in Pallas, interpreted: one query, grouped heads, pages of 16 keys. jax 0.10.2.

It has no scale of its own: queries are multiplied by it before.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

import refattn

PAGE = 16


def attend(q, k, v, *, causal=False, scale=None, k_lengths=None, softcap=None):
    if causal == "top_left":
        return refattn.Decline("the query is the last one")
    (b, _, _, d), (_, g, n, _) = q.shape, k.shape
    k, v = (x.swapaxes(0, 1).reshape(g, b * n // PAGE, PAGE, d) for x in (k, v))
    tables = jnp.arange(b * n // PAGE, dtype=jnp.int32).reshape(b, n // PAGE)
    lengths = jnp.full(b, n, jnp.int32) if k_lengths is None else k_lengths.astype(jnp.int32)
    q = q[:, :, 0] * (d**-0.5 if scale is None else scale)
    tiles = {"k_splits": 2, "pages_per_compute_block": 4}
    return paged_attention(q, k, v, tables, lengths, **tiles, attn_logits_soft_cap=softcap)[:, :, None]


attend.framework = "jax"
attend.interpret = "pallas"
attend.roundings = ("q",)
attend.supports = {
    "nq": 1,
    "nk": {"multiple_of": 128},
    "d": [16, 32, 64, 128],
    "e": [16, 32, 64, 128],
    "where": ["e = d"],
    "options": ["causal", "scale", "k_lengths", "softcap"],
    "dtypes": ["float32", "float16", "bfloat16"],
}
