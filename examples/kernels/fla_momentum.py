"""The momentum delta rule in Triton, by flash-linear-attention. fla-core 0.6.0, triton 3.9.0.

Its momentum has the other sign, and state and momentum stand in front: (2, b, h, d, e).
"""

import torch
from fla.ops.momentum_delta_rule import chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule

import refattn

interpret = "triton"


def adapter(kernel):
    def attend(
        q, k, v, *, beta=None, log_decay=None, log_momentum=None, step=None, state=None, scale=None, qk_norm=False
    ):
        if log_momentum is None or not q.shape[1] == k.shape[1] == v.shape[1]:
            return refattn.Decline("momentum alone, and no grouped heads")
        log_decay = torch.zeros_like(log_momentum) if log_decay is None else log_decay
        sign = torch.tensor([1.0, -1.0])[:, None, None, None, None]
        before = None if state is None else (state.movedim(2, 0) * sign).contiguous()
        q, k, v, log_decay, log_momentum, beta, step = (
            None if x is None else x.transpose(1, 2).contiguous()
            for x in (q, k, v, log_decay, log_momentum, beta, step)
        )
        given = {"beta": beta, "eta": step, "scale": scale, "initial_state": before, "output_final_state": True}
        out, last = kernel(q, k, v, log_decay, log_momentum, use_qk_l2norm_in_kernel=qk_norm, **given)
        return out.transpose(1, 2), (last * sign).movedim(0, 2)

    attend.framework = "torch"
    attend.supports = {"dtypes": ["float32", "float16", "bfloat16"]}
    return attend


recurrent = adapter(fused_recurrent_momentum_delta_rule)
chunked = adapter(chunk_momentum_delta_rule)
