"""The gated delta rule in Triton, by flash-linear-attention. fla-core 0.6.0, triton 3.9.0."""

import rules
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

interpret = "triton"
recurrent = rules.adapter(fused_recurrent_gated_delta_rule, beta=True, decay="heads", norm=True)
chunked = rules.adapter(chunk_gated_delta_rule, beta=True, decay="heads", norm=True)
