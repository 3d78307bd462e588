"""Linear attention with a decay of heads (RetNet, Mamba-2) in Triton, by flash-linear-attention. fla-core 0.6.0,
triton 3.9.0.
"""

import rules
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

interpret = "triton"
recurrent = rules.adapter(fused_recurrent_simple_gla, decay="heads")
chunked = rules.adapter(chunk_simple_gla, decay="heads")
