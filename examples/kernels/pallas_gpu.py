"""JAX's flash kernel for GPUs in Pallas, interpreted. jax 0.10.2.

Lengths are multiples of its blocks, here of 16; causal masks are aligned top left.
"""

from jax.experimental.pallas.ops.gpu import attention

import refattn

BLOCKS = attention.BlockSizes(**{f"block_{x}": 16 for x in ("q", "k", "q_dkv", "kv_dkv", "q_dq", "kv_dq")})


def attend(q, k, v, *, causal=False, scale=None):
    if causal in (True, "bottom_right") and q.shape[2] != k.shape[2]:
        return refattn.Decline("causal masks are aligned top left")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return attention.mha(q, k, v, None, scale, bool(causal), BLOCKS).swapaxes(1, 2)


attend.framework = "jax"
attend.interpret = "pallas"
attend.supports = {
    "d": [16, 32, 64],
    "n": {"multiple_of": 16},
    "where": ["h = g", "e = d"],
    "options": ["causal", "scale"],
    "dtypes": ["float32", "float16", "bfloat16"],
}
