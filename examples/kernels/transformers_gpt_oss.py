"""The eager attention of gpt-oss in transformers: with sinks. transformers 5.24.0, torch 2.13.0."""

from types import SimpleNamespace

from masks import additive
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import refattn


def attend(q, k, v, *, sink=None, mask=None, causal=False, scale=None, window=None, offset=None, bias=None):
    if sink is None or sink.ndim != 1:
        return refattn.Decline("one sink for each head is needed")
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, sinks=sink)
    hidden = additive(q, k, mask, causal, window, offset, bias)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return eager_attention_forward(module, q, k, v, hidden, scaling=scale)[0].transpose(1, 2)


attend.framework = "torch"
attend.roundings = ("SM.1", "SM.biased")  # it stores them in the type of q
attend.supports = {"n": {"at_least": 1}, "dtypes": ["float32", "float16", "bfloat16"]}
