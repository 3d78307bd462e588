"""What the adapters of fla share: the axes (b, n, h, d), starts of packed sequences, and what a rule needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import refattn


def adapter(
    kernel: Callable[..., Any], *, beta: bool = False, decay: str = "", named: str = "g", norm: bool = False
) -> Any:
    """Return the adapter of a kernel: whether its rule has a beta, and decays by "heads", "channels" or not at all.

    The decay has the name `named` there. With `norm` it can normalise queries and keys, and has grouped heads.
    """
    rule = beta, decay, norm

    def attend(
        q: Any,
        k: Any,
        v: Any,
        *,
        beta: Any = None,
        log_decay: Any = None,
        state: Any = None,
        scale: Any = None,
        qk_norm: bool = False,
        lengths: Any = None,
    ) -> Any:
        import torch

        decays = "" if log_decay is None else ("heads", "channels")[log_decay.ndim - 3]
        if (beta is not None, decays) != rule[:2]:
            return refattn.Decline(f"its rule has {'a beta' if rule[0] else 'no beta'}, decay: {rule[1] or 'none'}")
        if qk_norm and not rule[2]:
            return refattn.Decline("no norm of its own")
        if not q.shape[1] == k.shape[1] <= v.shape[1]:
            return refattn.Decline("as many query heads as key heads, and no more than states")
        if q.shape[1] != v.shape[1] and not rule[2]:
            return refattn.Decline("no grouped heads")
        arrays = {"q": q, "k": k, "v": v, named: log_decay, "beta": beta}
        arrays = {name: x.transpose(1, 2).contiguous() for name, x in arrays.items() if x is not None}
        more: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if qk_norm else {}
        if lengths is not None:
            more["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        out, last = kernel(**arrays, scale=scale, initial_state=state, output_final_state=True, **more)
        return out.transpose(1, 2), last

    attend.framework = "torch"  # type: ignore[attr-defined]
    attend.supports = {"dtypes": ["float32", "float16", "bfloat16"]}  # type: ignore[attr-defined]
    return attend
