"""SageAttention in Triton: queries and keys in int8 by blocks. sageattention 1.0.6, triton 3.9.0, torch 2.13.0.

Its own entry point asserts a GPU, so that the kernels are called here as it calls them. `rough` leaves out its
smoothing, which takes the mean of all keys from each.
"""

import sageattention.core as sage

import refattn


def adapter(smooth):
    def attend(q, k, v, *, causal=False, scale=None):
        if causal and q.shape[2] != k.shape[2]:
            return refattn.Decline("causal with as many queries as keys")
        k = k - k.mean(2, keepdim=True) if smooth else k
        scale = q.shape[3] ** -0.5 if scale is None else scale
        q8, q_scale, k8, k_scale = sage.per_block_int8(q.contiguous(), k.contiguous(), sm_scale=scale)
        kernel = sage.attn_true if causal else sage.attn_false
        return kernel(q8, k8, v.half().contiguous(), q_scale, k_scale, output_dtype=q.dtype)

    attend.framework = "torch"
    attend.roundings = {"q": "int8", "k": "int8"}
    attend.supports = {
        "n": {"at_least": 1},
        "d": [64, 128],
        "e": [64, 128],
        "where": ["e = d"],
        "options": ["causal", "scale"],
        "dtypes": ["float16", "bfloat16"],
    }
    return attend


interpret = "triton"
attend, rough = adapter(True), adapter(False)
