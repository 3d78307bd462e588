"""Taylor attention of any order by symmetric features in plain PyTorch, as a kernel for `refattn verify`.

    refattn verify higher_order --impl examples/torch_symmetric_taylor.py:attend --grad

The same idea as the library's, from the formula on: exp(s) is cut after the power p, and a power of an inner product is
an inner product of symmetric tensors,

    (x . y)^r = sum over a_1 <= ... <= a_r of r! / (m_1! m_2! ...) x_a1 ... x_ar y_a1 ... y_ar,

with m the number of times that each index comes. So phi(x) has one feature for each multiset of at most p of the d
indices, C(d + p, p) in all: for d = 4 and p = 8 these are 495. The factor 1 / (m_1! m_2! ...) stands with the keys and
the scale with the queries, for square roots on both sides would err alike in every pair. Keys and values are summed
over once; nothing is ever of size queries x keys, but for causal attention, which takes a running sum token by token:
fine for checking.

Orders, alpha, key masks, bottom-right and top-left causality and grouped heads are as in refattn; a subtracted delta,
any other normaliser, a mask of pairs and queries and keys as they come are declined, and so is what has more than
`MOST` features. The arithmetic is float32 for float16 and bfloat16, with one rounding at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import refattn

MOST = 5000


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    order: int = 2,
    alpha: float = 3.0,
    key_mask: torch.Tensor | None = None,
    causal: bool | str = False,
    **options: Any,
) -> torch.Tensor | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e), key_mask (b, n_k) -> out (b, h, n_q, e)."""
    if options:
        return decline(f"the plain polynomial alone, without {', '.join(sorted(options))}")
    if math.comb(q.shape[-1] + order, order) > MOST:
        return decline(f"at most {MOST} features")
    kept, groups = q.dtype, q.shape[1] // max(k.shape[1], 1)
    q, k, v = (x.double() if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    d = q.shape[-1]
    q, k = (torch.nn.functional.layer_norm(x, (d,)) for x in (q, k))
    phi_q, phi_k = features(q / (alpha * math.sqrt(d)), order), features(k, order) / repetitions(d, order).to(k)
    if key_mask is not None:
        phi_k = phi_k * key_mask[:, None, :, None]
    phi_k = phi_k.repeat_interleave(groups, dim=1)
    values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1).repeat_interleave(groups, dim=1)
    sums = running(phi_q, phi_k, values, causal) if causal else phi_q @ (phi_k.mT @ values)
    total = sums[..., -1:]
    return (sums[..., :-1] / torch.where(total == 0, 1.0, total)).to(kept)


def features(x: torch.Tensor, order: int) -> torch.Tensor:
    """(b, h, n, d) -> (b, h, n, C(d + order, order)): the products x_a1 ... x_ar of all degrees up to the order."""
    products = [x[..., list(indices)].prod(dim=-1) for indices in multisets(x.shape[-1], order)[1:]]
    return torch.stack([1.0 + 0.0 * x[..., 0], *products], dim=-1)


def repetitions(d: int, order: int) -> torch.Tensor:
    """Return m_1! m_2! ... of every feature."""
    counts = (Counter(indices).values() for indices in multisets(d, order))
    return torch.tensor([math.prod(map(math.factorial, each)) for each in counts])


def multisets(d: int, order: int) -> list[tuple[int, ...]]:
    """Return all multisets of at most so many of the d indices, the empty one first."""
    return [each for degree in range(order + 1) for each in combinations_with_replacement(range(d), degree)]


def running(phi_q: torch.Tensor, phi_k: torch.Tensor, values: torch.Tensor, causal: bool | str) -> torch.Tensor:
    """Return for query i the sum over the keys j <= i + shift, (b, h, n_q, e + 1)."""
    n_q, n_k = phi_q.shape[2], phi_k.shape[2]
    shift = 0 if causal == "top_left" else n_k - n_q
    state, seen, rows = torch.zeros_like(phi_k[:, :, :1].mT @ values[:, :, :1]), 0, []
    for i in range(n_q):
        while seen < min(i + shift + 1, n_k):
            state, seen = state + phi_k[:, :, seen, :, None] * values[:, :, seen, None, :], seen + 1
        rows.append(phi_q[:, :, i, None, :] @ state)
    return torch.cat(rows, dim=2)


attend.framework = "torch"  # type: ignore[attr-defined]


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)
