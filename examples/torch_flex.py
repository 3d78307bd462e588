"""PyTorch's FlexAttention on the CPU, as a kernel for `refattn verify`.

    refattn verify softmax --impl examples/torch_flex.py:attend --grad

It is not compiled, and so computes every score; verified are its `score_mod`, its `mask_mod` and its lse.
Windows, places among the keys, lengths and masks are a `mask_mod`, the soft-cap and a bias a `score_mod`, in this
order, so that the bias comes after the soft-cap.

What agrees with refattn: the layout (batch, heads, tokens, dim), grouped heads, the scale before `score_mod`, 0 with an
lse of -inf for a row that may attend nothing, and the natural logarithm.

What differs (measured with torch 2.13):
- There are no sinks and no dropout: declined. What lengths leave out is masked, and set to 0 here: where it holds NaN a
  product with it would be NaN all the same.
- There is no backward on the CPU: gradients are declined.
- A bias of -inf for a whole row gives NaN: a mask has to say so. Where a bias is -inf the mask is told.
- Axes of size 0 are declined.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

if TYPE_CHECKING:
    import refattn

Tensor = torch.Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    offset: int | Tensor | None = None,
    bias: Tensor | None = None,
    q_lengths: Tensor | None = None,
    k_lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor] | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e) -> out (b, h, n_q, e), lse (b, h, n_q)."""
    if options:
        return decline(f"flex_attention has no option {', '.join(sorted(options))}")
    if q.requires_grad and q.device.type == "cpu":
        return decline("no gradients: there is no backward on the CPU")
    if 0 in (*q.shape, *k.shape):
        return decline("no axes of size 0")
    (b, h, n_q, _), n_k = q.shape, k.shape[2]
    left, right = window or (None, None)
    own = torch.full((b,), n_q) if q_lengths is None else q_lengths
    other = torch.full((b,), n_k) if k_lengths is None else k_lengths
    if offset is None:
        place = torch.zeros(b, dtype=torch.int64) if causal == "top_left" else other - own
    else:
        place = torch.full((b,), offset) if isinstance(offset, int) else offset
    if q_lengths is not None or k_lengths is not None:
        rows, columns = (torch.arange(n) < size[:, None] for n, size in ((n_q, own), (n_k, other)))
        q = torch.where(rows[:, None, :, None], q, 0.0)
        k, v = (torch.where(columns[:, None, :, None], x, 0.0) for x in (k, v))
    given = None if mask is None else mask.broadcast_to(b, h, n_q, n_k)
    added = None if bias is None else bias.broadcast_to(b, h, n_q, n_k)

    def seen(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = i + place[batch]
        allowed = (i < own[batch]) & (j < other[batch])
        if causal is not False:
            allowed = allowed & (j <= at)
        if left is not None:
            allowed = allowed & (j >= at - left)
        if right is not None:
            allowed = allowed & (j <= at + right)
        if given is not None:
            allowed = allowed & given[batch, head, i, j]
        if added is not None:
            allowed = allowed & (added[batch, head, i, j] > -torch.inf)
        return allowed

    def score(value: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            value = softcap * torch.tanh(value / softcap)
        return value if added is None else value + added[batch, head, i, j]

    blocks = create_block_mask(seen, b, h, n_q, n_k, device=q.device.type)
    changed = None if softcap is None and bias is None else score
    aux = AuxRequest(lse=True)
    with warnings.catch_warnings():  # that it is not compiled, which is meant
        warnings.filterwarnings("ignore", "flex_attention called without")
        out, beside = flex_attention(
            q, k, v, score_mod=changed, block_mask=blocks, scale=scale, enable_gqa=True, return_aux=aux
        )
    return out, beside.lse


attend.framework = "torch"  # type: ignore[attr-defined]


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)
