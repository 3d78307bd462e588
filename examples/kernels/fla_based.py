"""Based, linear attention of the Taylor polynomial of order 2, in Triton, by flash-linear-attention. fla-core 0.6.0,
triton 3.9.0.

Causal, with as many queries as keys; queries and keys are normalised here. 1e-6 is added to what it divides by.
"""

from fla.ops.based import fused_chunk_based, parallel_based
from torch.nn.functional import layer_norm

import refattn

interpret = "triton"


def adapter(kernel, widest):
    def attend(q, k, v, *, causal=False, alpha=3.0, layer_norm=True):
        if not causal:
            return refattn.Decline("causal alone")
        if layer_norm:
            q, k = (normalised(x) for x in (q, k))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return kernel(q, k, v, scale=q.shape[3] ** -0.5 / alpha).transpose(1, 2)

    attend.framework = "torch"
    attend.supports = {
        "n": {"at_least": 1},
        "d": {"at_most": widest},
        "where": ["nq = nk", "h = g"],
        "dtypes": ["float32", "float16", "bfloat16"],
    }
    return attend


def normalised(x):
    return layer_norm(x, x.shape[-1:])


parallel = adapter(parallel_based, 128)
chunked = adapter(fused_chunk_based, 16)
