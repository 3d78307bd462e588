"""Higher-order attention as a recurrence, causal: one token after the other, in a state of constant size.

    S_t = S_{t-1} + psi(k+_t) [v_t, 1]^T,    [a_t, z_t] = phi(q+_t)^T S_t + constant u_t

where `state` has the values about their mean so far. This is what decoding does, without chunks and without pairs; it
is slow. The backward goes once forward in time, with S_t for the gradient of q_t, and once back, where::

    R_t = R_{t+1} + phi(q+_t) d_sums_t^T,    dpsi_t = R_t [v_t, 1],    d[v_t, 1] = R_t^T psi_t + ...

with R after the last token 0, or the gradient of the state that went out. What R is before the first token is the
gradient of the state that came in. The code is that of `chunked`, with chunks of one token.

Source: Katharopoulos et al. 2020 (arXiv:2006.16236), equations 16 to 20, with the features of `kernel`.
"""

from __future__ import annotations

from typing import Any

from refattn import equations
from refattn.mechanisms.higher_order.implementations import chunked
from refattn.mechanisms.higher_order.implementations.common import Saved
from refattn.mechanisms.higher_order.implementations.state import State
from refattn.xp import Array


def forward(q: Array, k: Array, v: Array, **given: Any) -> tuple[Array, Array, Saved]:
    """Return (out, normaliser, saved): (b, h, i, e), (b, h, i) and what `backward` reads, as `chunked.forward`."""
    return equations.active(chunked).forward(q, k, v, **given, by_token=True)


def backward(saved: Saved, d_out: Array, d_state: State | None = None) -> dict[str, Any]:
    """Return the gradients, as `chunked.backward`."""
    return equations.active(chunked).backward(saved, d_out, d_state)
