"""`Attend` of x-transformers, eager and through PyTorch's kernels. x-transformers 2.31.10, torch 2.13.0.

Causal masks are aligned bottom right; the bias is added before the soft-cap.
"""

from common import empty, four
from x_transformers.attend import Attend

import refattn


def adapter(flash):
    def attend(q, k, v, *, mask=None, causal=False, scale=None, softcap=None, bias=None):
        if declined := empty(q, k, v):
            return declined
        if causal == "top_left" and q.shape[2] != k.shape[2]:
            return refattn.Decline("causal masks are aligned bottom right")
        if flash and softcap is not None:
            return refattn.Decline("no soft-cap in flash")
        capped = {} if softcap is None else {"softclamp_logits": True, "logit_softclamp_value": softcap}
        module = Attend(causal=bool(causal), heads=q.shape[1], scale=scale, flash=flash, **capped)
        return module(q, k, v, mask=four(mask), attn_bias=four(bias))[0]

    attend.framework = "torch"
    attend.supports = {"dtypes": ["float32", "float16", "bfloat16"]}
    return attend


eager, flash = adapter(False), adapter(True)
eager.roundings = ("SM.1", "SM.capped", "SM.biased")  # it stores them in the type of q
