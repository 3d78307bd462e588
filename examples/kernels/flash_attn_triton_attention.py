"""The flash kernel of flash-attn-triton, as Triton's tutorial has it. flash-attn-triton 0.1.1, triton 3.9.0.

float16 alone, as its weights are cast to that; lengths are multiples of its blocks.
"""

import sys
import types

from torch import contiguous_format
from torch.autograd import Function


class Dense(Function):
    """What comes is passed on; the gradient is copied, since the kernel asserts that all strides are equal."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_out):
        return d_out.clone(memory_format=contiguous_format)


def attend(q, k, v, *, causal=False, scale=None):
    # It imports a module, which it does not use, that is gone since triton 3.5.
    sys.modules.setdefault("triton.tools.experimental_descriptor", types.ModuleType("experimental_descriptor"))
    from flash_attn_triton.triton_kernel.attention_kernel import attention

    q, k, v = (x.clone(memory_format=contiguous_format) for x in (q, k, v))
    return Dense.apply(attention(q, k, v, bool(causal), q.shape[3] ** -0.5 if scale is None else scale))


attend.framework = "torch"
attend.interpret = "triton"
attend.supports = {
    "n": [128, 256],
    "d": 64,
    "e": 64,
    "where": ["nq = nk", "h = g", "e = d"],
    "options": ["causal", "scale"],
    "dtypes": ["float16"],
}
