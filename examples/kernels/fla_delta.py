"""The delta rule in Triton, by flash-linear-attention. fla-core 0.6.0, triton 3.9.0."""

import rules
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule

interpret = "triton"
recurrent = rules.adapter(fused_recurrent_delta_rule, beta=True, norm=True)
chunked = rules.adapter(chunk_delta_rule, beta=True, norm=True)
