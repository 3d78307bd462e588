"""The scan of Mamba-2 in chunks in plain PyTorch, by transformers. transformers 5.24.0, torch 2.13.0.

Its step enters the decay and what is written: here it is the decay itself, and values are divided by it before.
"""

import torch
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

import refattn


def attend(q, k, v, *, log_decay=None, state=None, scale=None):
    if log_decay is None or log_decay.ndim != 3:
        return refattn.Decline("a decay of heads is needed, and no beta")
    if not bool(((log_decay < 0) & log_decay.isfinite()).all()):
        return refattn.Decline("no step of 0 or without end")
    if not q.shape[1] == k.shape[1] == v.shape[1]:
        return refattn.Decline("no grouped heads")
    step = -log_decay.transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q * (q.shape[3] ** -0.5 if scale is None else scale), k, v))
    more = {"initial_states": None if state is None else state.mT, "return_final_states": True}
    rate = -torch.ones(step.shape[2])
    out, last = mamba2_chunk_scan(v / step[..., None], step, rate, k, q, chunk_size=64, **more)
    return out.transpose(1, 2), last.mT


attend.framework = "torch"
attend.supports = {"n": {"at_least": 1}, "dtypes": ["float32"]}
