"""Linear attention in Triton, by flash-linear-attention. fla-core 0.6.0, triton 3.9.0."""

from functools import partial

import rules
from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn

interpret = "triton"
recurrent = rules.adapter(partial(fused_recurrent_linear_attn, normalize=False))
chunked = rules.adapter(partial(chunk_linear_attn, normalize=False))
