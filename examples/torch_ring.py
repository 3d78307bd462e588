"""Ring attention on `torch.distributed`, written plainly, as a kernel for `refattn verify --mesh`.

    refattn verify softmax --impl examples/torch_ring.py:ring --mesh tokens=4 --grad
    refattn verify softmax --impl examples/torch_ring.py:zigzag --mesh tokens=4 --grad

refattn starts as many processes as there are shards, in a group with gloo, and calls this in each of them, with the
tokens of its rank: neighbours for `ring`, and for `zigzag` two chunks, one from the front and one from the back, which
gives every rank as much to do under a causal mask. The backward is written out: keys and values go round once more,
each with its gradients. It shares no code with refattn: put yours in its place. (PyTorch's own
`context_parallel` replaces kernels of CUDA alone, of which a CPU has none.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import refattn

Tensor = torch.Tensor


def ring(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor] | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e) of this rank -> out (b, h, n_q, e), lse (b, h, n_q)."""
    return attend(q, k, v, "contiguous", **options)


def zigzag(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor] | refattn.Decline:
    """`ring` with the tokens of a rank in two chunks."""
    return attend(q, k, v, "zigzag", **options)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor] | refattn.Decline:
    """Attend with the tokens of all ranks; `mask` has the rows of this rank's queries and the columns of all keys."""
    if options:
        import refattn  # only here: whoever borrows `attend` for another purpose does not need it

        return refattn.Decline(f"it has no option {', '.join(sorted(options))}")
    size, rank = dist.get_world_size(), dist.get_rank()
    queries, keys = size * q.shape[2], size * k.shape[2]
    offset = 0 if causal == "top_left" else keys - queries
    rows = places(layout, rank, size, queries)[:, None] + offset
    columns = [places(layout, source, size, keys) for source in range(size)]
    allowed = [None if causal is False else rows >= at for at in columns]
    if mask is not None:
        parts = [mask[..., at] if mask.shape[-1] == keys else mask for at in columns]
        allowed = [part if other is None else part & other for part, other in zip(parts, allowed, strict=True)]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = Ring.apply(q.to(wide), k.to(wide), v.to(wide), allowed, q.shape[3] ** -0.5 if scale is None else scale)
    return out.to(q.dtype), lse


class Ring(torch.autograd.Function):
    """Attention to the keys of all ranks; `allowed` says for each source which of its keys the queries attend."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, allowed: Any, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = q.new_zeros((*q.shape[:3], v.shape[3])), q.new_full(q.shape[:3], -torch.inf)
        moving = [k, v]
        for step in range(size := dist.get_world_size()):
            scores = scores_of(q, moving[0], allowed[(dist.get_rank() - step) % size], scale)
            whole = torch.logaddexp(lse, torch.logsumexp(scores, dim=3))
            shift = torch.where(whole == -torch.inf, 0.0, whole)
            weights = torch.exp(scores - shift[..., None])
            out = torch.exp(lse - shift)[..., None] * out + weights @ repeated(moving[1], q)
            lse = whole
            moving = passed_on(moving)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.allowed, ctx.scale = allowed, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        d_q, moving = torch.zeros_like(q), [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        shift = torch.where(lse == -torch.inf, 0.0, lse)[..., None]
        inner = torch.sum(d_out * out, dim=3, keepdim=True)
        for step in range(size := dist.get_world_size()):
            k, v, d_k, d_v = moving
            allowed = ctx.allowed[(dist.get_rank() - step) % size]
            weights = torch.exp(scores_of(q, k, allowed, ctx.scale) - shift)
            d_scores = weights * (d_out @ repeated(v, q).mT - inner) * ctx.scale
            d_q += d_scores @ repeated(k, q)
            d_v = d_v + summed(weights.mT @ d_out, v)
            d_k = d_k + summed(d_scores.mT @ q, k)
            moving = passed_on([k, v, d_k, d_v])
        return d_q, moving[2], moving[3], None, None


def scores_of(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Return the scores of a block of keys, -inf where a query may not attend."""
    scores = q @ repeated(k, q).mT * scale
    return scores if allowed is None else torch.where(allowed, scores, -torch.inf)


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def summed(d_x: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of keys or values for that of `repeated`."""
    return d_x.unflatten(1, (x.shape[1], -1)).sum(dim=2)


def passed_on(tensors: list[Tensor]) -> list[Tensor]:
    """Hand tensors to the next rank of the ring; return those of the rank before."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return tensors
    received = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    calls = [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % size) for x in tensors]
    calls += [dist.P2POp(dist.irecv, x, (rank - 1) % size) for x in received]
    for call in dist.batch_isend_irecv(calls):
        call.wait()
    return received


def places(layout: str, rank: int, size: int, count: int) -> Tensor:
    """Return the places in the sequence of a rank's tokens."""
    chunks = torch.arange(count).chunk(size if layout == "contiguous" else 2 * size)
    return chunks[rank] if layout == "contiguous" else torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


for function in (ring, zigzag):
    function.framework = "torch"  # type: ignore[attr-defined]
zigzag.layout = "zigzag"  # type: ignore[attr-defined]
