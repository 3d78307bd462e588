"""Softmax attention in Triton, by flash-linear-attention. fla-core 0.6.0, triton 3.9.0.

Causal alone, with as many queries as keys; its windows count the query's own key.
"""

from fla.ops.attn import parallel_attn

import refattn


def attend(q, k, v, *, causal=False, scale=None, window=None, sink=None):
    if not causal:
        return refattn.Decline("causal alone")
    if window is not None and (window[0] is None or window[1] not in (None, 0)):
        return refattn.Decline("windows of earlier keys alone")
    if sink is not None and sink.ndim != 1:
        return refattn.Decline("one sink for each head")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    width = None if window is None else window[0] + 1
    return parallel_attn(q, k, v, scale=scale, window_size=width, sink_bias=sink).transpose(1, 2)


attend.framework = "torch"
attend.interpret = "triton"
attend.supports = {
    "n": {"at_least": 1},
    "d": {"at_most": 256},
    "where": ["nq = nk"],
    "options": ["causal", "scale", "window", "sink"],
    "dtypes": ["float32", "float16", "bfloat16"],
}
