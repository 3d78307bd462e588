"""JAX's decoding kernel for GPUs in Pallas, `gqa`, interpreted: one query, grouped heads. jax 0.10.2."""

from jax.experimental.pallas.ops.gpu.decode_attention import gqa

import refattn


def attend(q, k, v, *, causal=False, scale=None, k_lengths=None):
    if causal == "top_left":
        return refattn.Decline("the query is the last one")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out = gqa(q[:, :, 0], k.swapaxes(1, 2), v.swapaxes(1, 2), kv_seq_len=k_lengths, sm_scale=scale)
    return out[:, :, None]


attend.framework = "jax"
attend.interpret = "pallas"
attend.supports = {
    "nq": 1,
    "nk": {"multiple_of": 256},
    "d": [16, 32, 64, 128],
    "e": [16, 32, 64, 128],
    "where": ["e = d"],
    "options": ["causal", "scale", "k_lengths"],
    "dtypes": ["float32", "float16", "bfloat16"],
}
