"""PyTorch's `scaled_dot_product_attention` on the CPU, as a kernel for `refattn verify`.

    refattn verify softmax --impl examples/torch_sdpa.py:attend --grad
    refattn verify softmax --impl examples/torch_sdpa.py:attend_math --tangent --hessian

`attend` lets torch choose its kernel (flash where d_v = d and the mask has 2 or 4 axes, else math); `attend_math` and
`attend_flash` hold it to one. They take NumPy arrays or torch tensors and return a torch tensor; `framework` tells the
verifier to call them with tensors that require gradients and to let torch differentiate.

What agrees with refattn: the layout (batch, heads, tokens, dim), boolean masks (True = may attend), grouped heads
(`enable_gqa`), the scale, and 0 with zero gradients for a row that may attend nothing.

What differs (measured with torch 2.13):
- `is_causal` aligns top-left. Bottom-right, refattn's default, is torch's own `causal_lower_right`, which has no kernel
  on the CPU: torch builds the triangle and passes it on as a boolean mask. For n_q > n_k torch warns of NaN in the
  empty rows; on the CPU they are 0.
- `is_causal` together with a mask is an error by torch's documentation. The math kernel raises; the flash kernel
  applies both without a word. So the triangle is combined with the mask here, and `is_causal` is not exercised then.
- There is no soft-cap: declined. So are windows, offsets, sinks and lengths, which would be masks here, and dropout,
  for which the kernels draw their own numbers. A bias is a floating `attn_mask`; a mask beside it makes it -inf.
- The flash kernel rounds the unnormalised weights to bfloat16 or float16; the math kernel works in float32 and rounds
  the output alone. A 1-D mask is an error in the flash kernel and a 3-D mask is not taken by it: all become 4-D here.
- The math kernel has forward-mode and second derivatives, which agree; the flash kernel has neither.
- The flash kernel demands d_v = d > 0, and has no gradient of a bias: `attend_flash` declines these.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    import refattn

Array = np.ndarray | torch.Tensor


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    causal: bool | str = False,
    bias: Array | None = None,
    scale: float | None = None,
    dtype: str | None = None,
    **options: Any,
) -> torch.Tensor | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e), mask like (b, h, n_q, n_k) -> out (b, h, n_q, e)."""
    if options:
        return decline(f"scaled_dot_product_attention has no option {', '.join(sorted(options))}")
    q, k, v = (tensor(x, dtype) for x in (q, k, v))
    n_q, n_k = q.shape[2], k.shape[2]
    shift = n_k - n_q if causal in (True, "bottom_right") else 0  # query i may see key j when j <= i + shift
    seen = None
    if mask is not None or (bias is not None and causal):
        past = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril(shift)
        seen = past if mask is None else tensor(mask)
        seen = seen[(None,) * (4 - seen.ndim)]
        seen = seen & past if causal and mask is not None else seen
    elif shift and bias is None:
        with warnings.catch_warnings():  # the warning of NaN, which refattn will see if it comes true
            warnings.filterwarnings("ignore", "Lower right causal bias")
            seen = causal_lower_right(n_q, n_k)
    if bias is not None:
        bias = tensor(bias, dtype)
        bias = bias[(None,) * (4 - bias.ndim)]
        bias = bias if seen is None else torch.where(seen, bias, -torch.inf)
        # Both kernels want the bias full in its last two axes.
        seen = bias.broadcast_to(*bias.shape[:2], n_q, n_k)
    is_causal = bool(causal) and seen is None
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=is_causal, scale=scale, enable_gqa=True)


def attend_math(
    q: Array, k: Array, v: Array, *, dtype: str | None = None, **options: Any
) -> torch.Tensor | refattn.Decline:
    """`attend` through the unfused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(q, k, v, dtype=dtype, **options)


def attend_flash(
    q: Array, k: Array, v: Array, *, dtype: str | None = None, **options: Any
) -> torch.Tensor | refattn.Decline:
    """`attend` through the blockwise kernel."""
    if not q.shape[-1] == v.shape[-1] > 0:
        return decline(f"the flash kernel needs d_v = d > 0, not d = {q.shape[-1]} and d_v = {v.shape[-1]}")
    if getattr(options.get("bias"), "requires_grad", False):
        return decline("the flash kernel has no gradient of a bias")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend(q, k, v, dtype=dtype, **options)


for function in (attend, attend_math, attend_flash):
    function.framework = "torch"  # type: ignore[attr-defined]


def tensor(x: Array, dtype: str | None = None) -> torch.Tensor:
    """A copy of a (read-only) NumPy array; a tensor stays itself, with its gradient. bfloat16 comes as float32."""
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x)
    return x.to(torch.bfloat16) if dtype == "bfloat16" else x


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)
