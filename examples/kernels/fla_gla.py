"""Gated linear attention (a decay of channels) in Triton, by flash-linear-attention. fla-core 0.6.0, triton 3.9.0."""

import rules
from fla.ops.gla import chunk_gla, fused_recurrent_gla

interpret = "triton"
recurrent = rules.adapter(fused_recurrent_gla, decay="channels", named="gk")
chunked = rules.adapter(chunk_gla, decay="channels")
