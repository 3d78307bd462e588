"""Further calls, which need no golden vectors of their own: fits whose operator is limited."""

from __future__ import annotations

from refattn.mechanisms.koopman.testing.cases import case

KERNEL_SIZES = tuple(
    case(
        name, "limited", purpose, h=4, g=2, n_q=13, n_k=17, d=8, updates=3, fit=f"separable(ridge=0.5, {name}={limit})"
    )
    for name, limit, purpose in (("rank", 1, "an operator of one mode"), ("nuclear", 0.1, "few modes, and small ones"))
)
