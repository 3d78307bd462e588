"""`LocalAttention` of local-attention: causal windows in blocks. local-attention 1.11.2, torch 2.13.0."""

from common import empty
from local_attention import LocalAttention

import refattn


def attend(q, k, v, *, causal=False, scale=None, window=None):
    if not causal or window is None or not window[0] or window[1] not in (None, 0):
        return refattn.Decline("causal windows of earlier keys alone")
    if declined := empty(q, k, v):
        return declined
    options = {"causal": True, "look_backward": 1, "look_forward": 0, "exact_windowsize": True, "autopad": True}
    layer = LocalAttention(window_size=window[0], use_rotary_pos_emb=False, dim=q.shape[3], scale=scale, **options)
    return layer(q, k, v)


attend.framework = "torch"
attend.roundings = ("SM.1",)
attend.supports = {
    "n": {"at_least": 1},
    "where": ["nq = nk", "h = g"],
    "options": ["causal", "scale", "window"],
    "dtypes": ["float32", "float16", "bfloat16"],
}
