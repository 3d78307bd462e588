"""Liger's fused neighbourhood attention in Triton. liger-kernel 0.8.5, triton 3.9.0, torch 2.13.0.

Windows as wide to both sides; without one, a neighbourhood that holds every key.
"""

from liger_kernel.ops.fused_neighborhood_attention import LigerFusedNeighborhoodAttentionFunction

import refattn


def attend(q, k, v, *, scale=None, window=None):
    if window is not None and window[0] != window[1]:
        return refattn.Decline("windows as wide to both sides alone")
    width = q.shape[2] if window is None else window[0]
    q, k, v = (x.contiguous() for x in (q, k, v))
    return LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 2 * width + 1, 1, scale)


attend.framework = "torch"
attend.interpret = "triton"
attend.supports = {
    "n": {"at_least": 1},
    "where": ["nq = nk", "h = g", "e = d"],
    "options": ["scale", "window"],
    "dtypes": ["float32", "bfloat16"],
}
