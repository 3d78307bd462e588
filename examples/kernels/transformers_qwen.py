"""The gated delta rule of Qwen3-Next in plain PyTorch, by transformers. transformers 5.24.0, torch 2.13.0.

The axes are (b, n, h, d), the scale is 1/sqrt(d).
"""

from transformers.models.qwen3_next import modeling_qwen3_next as qwen

import refattn


def adapter(kernel):
    def attend(q, k, v, *, beta=None, log_decay=None, state=None, qk_norm=False):
        if beta is None or log_decay is None or log_decay.ndim != 3:
            return refattn.Decline("a beta and a decay of heads are needed")
        if not q.shape[1] == k.shape[1] == v.shape[1]:
            return refattn.Decline("no grouped heads")
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, log_decay, beta))
        more = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": qk_norm}
        out, last = kernel(q, k, v, g=g, beta=beta, **more)
        return out.transpose(1, 2), last

    attend.framework = "torch"
    attend.supports = {"n": {"at_least": 1}, "dtypes": ["float32", "float16", "bfloat16"]}
    return attend


recurrent = adapter(qwen.torch_recurrent_gated_delta_rule)
chunked = adapter(qwen.torch_chunk_gated_delta_rule)
