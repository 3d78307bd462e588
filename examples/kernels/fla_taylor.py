"""The Taylor feature map of order 2 of flash-linear-attention, in plain PyTorch. fla-core 0.6.0, torch 2.13.0.

Its features are d^2/2 + 3d/2 + 1: products of different numbers stand once. What is around it is written here.
"""

import torch
from fla.modules.feature_map import TaylorFeatureMap

import refattn


def attend(q, k, v, *, key_mask=None, causal=False, alpha=3.0, layer_norm=True):
    if 0 in (*q.shape, *k.shape):
        return refattn.Decline("no empty arrays")
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    if layer_norm:
        q, k = (torch.nn.functional.layer_norm(x, x.shape[-1:]) for x in (q, k))
    features = TaylorFeatureMap(q.shape[3])
    q, k = (features(x / alpha**0.5) for x in (q, k))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    weights = q @ k.mT
    if key_mask is not None:
        weights = weights * key_mask[:, None, None, :]
    if causal:
        weights = weights.tril(0 if causal == "top_left" else k.shape[2] - q.shape[2])
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total) @ v).to(dtype)


attend.framework = "torch"
