"""Kimi Delta Attention in Triton, by flash-linear-attention. fla-core 0.6.0, triton 3.9.0."""

import rules
from fla.ops.kda import chunk_kda, fused_recurrent_kda

interpret = "triton"
recurrent = rules.adapter(fused_recurrent_kda, beta=True, decay="channels", norm=True)
chunked = rules.adapter(chunk_kda, beta=True, decay="channels", norm=True)
