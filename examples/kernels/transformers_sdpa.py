"""The path of transformers to PyTorch's scaled_dot_product_attention: grouped heads, packed ones for one query.
transformers 5.24.0, torch 2.13.0.
"""

from types import SimpleNamespace

from masks import additive
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None, window=None, offset=None, bias=None):
    if offset is not None and getattr(offset, "ndim", 0):
        return refattn.Decline("one offset for all sequences")
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    plain = causal in (True, "bottom_right") and mask is None and window is None and offset is None and bias is None
    own = plain and q.shape[2] == k.shape[2]  # as it is called by models then
    hidden = None if own else additive(q, k, mask, causal, window, offset, bias)
    return sdpa_attention_forward(module, q, k, v, hidden, scaling=scale, is_causal=own)[0].transpose(1, 2)


attend.framework = "torch"
attend.supports = {"n": {"at_least": 1}, "dtypes": ["float32", "float16", "bfloat16"]}
