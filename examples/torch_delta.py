"""The seven rules of `delta`, token by token, in plain PyTorch: a kernel for `refattn verify`.

    refattn verify delta --impl examples/torch_delta.py:attend --grad

As code without kernels has them: a loop over tokens, a state that is decayed, asked, written to and read, and PyTorch
differentiates. For checking, not for training. Arithmetic is float32 for float16 and bfloat16, with one rounding at the
end; the state stays float32. Packed sequences are declined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import refattn


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    log_momentum: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    qk_norm: bool = False,
    norm_eps: float = 1e-6,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor] | refattn.Decline:
    """q (b, h, n, d), k (b, f, n, d), v (b, g, n, e), gates (b, g, n) -> out (b, max(h, g), n, e), the last state."""
    if options:
        import refattn

        return refattn.Decline(f"it has no {', '.join(sorted(options))}")
    kept, (b, g, n, e) = q.dtype, v.shape
    q, k, v, beta, log_decay, log_momentum, step = map(wide, (q, k, v, beta, log_decay, log_momentum, step))
    if qk_norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + norm_eps).sqrt() for x in (q, k))
    heads, d = max(q.shape[1], g), q.shape[3]
    q, k = q.repeat_interleave(heads // q.shape[1], 1), k.repeat_interleave(g // k.shape[1], 1)
    moving = log_momentum is not None
    start = v.new_zeros((b, g, 2, d, e) if moving else (b, g, d, e)) if state is None else wide(state)
    s, m = (start[:, :, 0], start[:, :, 1]) if moving else (start, None)

    def gate(x: torch.Tensor, i: int) -> torch.Tensor:
        return x[:, :, i, None, None] if x.ndim == 3 else x[:, :, i, :, None]

    out = [v.new_zeros(b, heads, 0, e)]
    for i in range(n):
        decayed = s if log_decay is None else s * gate(log_decay, i).exp()
        key, error = k[:, :, i, :, None], v[:, :, i, None, :]
        if beta is not None:
            error = error - (decayed * key).sum(-2, keepdim=True)
        if m is not None:
            faster = m * gate(log_momentum, i).exp() + key * (error if step is None else gate(step, i) * error)
            new = decayed + gate(beta, i) * faster
            m = faster if key_mask is None else torch.where(key_mask[:, i, None, None, None], faster, m)
        else:
            new = decayed + key * (error if beta is None else gate(beta, i) * error)
        s = new if key_mask is None else torch.where(key_mask[:, i, None, None, None], new, s)
        read = q[:, :, i, :, None] * s.repeat_interleave(heads // g, 1)
        out.append(read.sum(-2, keepdim=True))
    last = s if m is None else torch.stack((s, m), 2)
    return (torch.cat(out, 2) * (d**-0.5 if scale is None else scale)).to(kept), last


def wide(x: torch.Tensor | None) -> Any:
    """Return an array in float32 where it has less."""
    return x if x is None or x.dtype == torch.float64 else x.float()


attend.framework = "torch"  # type: ignore[attr-defined]
