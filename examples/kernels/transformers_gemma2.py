"""The eager attention of Gemma 2 in transformers, with its soft-cap. transformers 5.24.0, torch 2.13.0."""

from types import SimpleNamespace

from masks import additive
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None, window=None, offset=None, bias=None, softcap=None):
    if offset is not None and getattr(offset, "ndim", 0):
        return refattn.Decline("one offset for all sequences")
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, head_dim=q.shape[3])
    hidden = additive(q, k, mask, causal, window, offset, bias)
    return eager_attention_forward(module, q, k, v, hidden, scaling=scale, softcap=softcap)[0].transpose(1, 2)


attend.framework = "torch"
attend.roundings = ("SM.1", "SM.capped", "SM.biased")  # it stores them in the type of q
attend.supports = {"n": {"at_least": 1}, "dtypes": ["float32", "float16", "bfloat16"]}
