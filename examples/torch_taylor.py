"""Order-2 Taylor attention by feature maps in plain PyTorch, as a kernel for `refattn verify`.

    refattn verify higher_order --impl examples/torch_taylor.py:attend --grad

The textbook way: phi(x) = [1, x, x (x) x / sqrt(2)] of normalised and scaled queries and keys, all 1 + d + d^2 features
of it, and two sums over the keys. Causal attention keeps the running sum of the products of features and values for
every token: fine for checking, not for training.

What agrees with refattn: layer normalisation without gain and bias (torch's own, eps 1e-5), the scale 1 / (3 sqrt(d))
on queries and keys by its square root, key masks on the features of the keys, bottom-right causality, grouped heads.

What differs: it has order 2 without subtraction only, and the normaliser as it is; everything else is declined. The
arithmetic is float32 for float16 and bfloat16, with one rounding at the end. A query that may attend nothing would be
0 / 0: its denominator is replaced by 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import refattn


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    causal: bool | str = False,
    alpha: float = 3.0,
    **options: Any,
) -> torch.Tensor | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e), key_mask (b, n_k) -> out (b, h, n_q, e)."""
    if options:
        return decline(f"order 2 as it is, without {', '.join(sorted(options))}")
    kept, groups = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (x.double() if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    phi_q, phi_k = features(q, alpha), features(k, alpha).repeat_interleave(groups, dim=1)
    values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1).repeat_interleave(groups, dim=1)
    if key_mask is not None:
        phi_k = phi_k * key_mask[:, None, :, None]
    sums = running(phi_q, phi_k, values, causal) if causal else phi_q @ (phi_k.mT @ values)
    total = sums[..., -1:]
    return (sums[..., :-1] / torch.where(total == 0, 1.0, total)).to(kept)


def features(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """(b, h, n, d) -> (b, h, n, 1 + d + d^2), whose inner products are 1 + s + s^2 / 2."""
    x = torch.nn.functional.layer_norm(x, x.shape[-1:]) * (alpha * math.sqrt(x.shape[-1])) ** -0.5
    products = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2.0)
    return torch.cat([torch.ones_like(x[..., :1]), x, products], dim=-1)


def running(phi_q: torch.Tensor, phi_k: torch.Tensor, values: torch.Tensor, causal: bool | str) -> torch.Tensor:
    """Return for query i the sum over the keys j <= i + shift, (b, h, n_q, e + 1)."""
    n_q, n_k = phi_q.shape[2], phi_k.shape[2]
    shift = 0 if causal == "top_left" else n_k - n_q
    states = torch.cumsum(phi_k[..., :, None] * values[..., None, :], dim=2)
    states = torch.cat([torch.zeros_like(states[:, :, :1]), states], dim=2)  # the state before any key comes first
    seen = (torch.arange(n_q) + shift + 1).clamp(0, n_k)
    return (phi_q[..., None, :] @ states[:, :, seen]).squeeze(-2)


attend.framework = "torch"  # type: ignore[attr-defined]


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)
