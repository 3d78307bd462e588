"""Higher-order attention as a recurrence, causal: one token after the other, in a state of constant size.

    S_t = S_{t-1} + psi(k+_t) [v_t, 1]^T,    [a_t, z_t] = phi(q+_t)^T S_t + constant u_t

where `state` has the values about their mean so far. This is what decoding does, without chunks and without pairs; it
is the plainest of the implementations with a state, and slow. The backward goes once forward in time, with S_t for the
gradient of q_t, and once back, where::

    R_t = R_{t+1} + phi(q+_t) d_sums_t^T,    dpsi_t = R_t [v_t, 1],    d[v_t, 1] = R_t^T psi_t + ...

with R after the last token 0, or the gradient of the state that went out. What R is before the first token is the
gradient of the state that came in.

Source: Katharopoulos et al. 2020 (arXiv:2006.16236), equations 16 to 20, with the features of `kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.higher_order.implementations import common
from refattn.mechanisms.higher_order.implementations.common import keys_attended, whole, with_ones
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.mechanisms.higher_order.implementations.state import (
    Running,
    State,
    about_adjoint,
    centred_gradient,
    empty,
    fold_backward,
    read,
    read_adjoint,
    read_backward,
    recentred,
    settled,
    whole_gradient,
)
from refattn.mechanisms.higher_order.options import Options
from refattn.ops.heads import group_heads, ungroup_heads
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the recurrent implementation reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    key_mask: Array | None
    offset: int
    options: Options
    start: State | None  # what came in
    state: State | None  # what goes out
    attended: Array | None  # (b, 1, 1, i, 1)
    out: Array  # (b, g, r, i, e)
    total: Array  # (b, g, r, i, 1)


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    key_mask: Array | None,
    offset: int | None,
    options: Options,
    state: State | None = None,
) -> tuple[Array, Array, Saved]:
    """Return (out, normaliser, saved): (b, h, i, e), (b, h, i) and what `backward` reads, with the state that goes out.

    `state` holds keys before all of k, which every query may attend.
    """
    assert offset is not None
    xp = namespace(q, k, v)
    kernel = Kernel(options, q.shape[3])
    queries, keys = kernel.lift(group_heads(q, k.shape[1]))[0], kernel.lift(k)[0]
    values = with_ones(v, key_mask, whole(q, k))
    running, sums, seen = Running(kernel, _started(kernel, state, values), values), [], 0
    for i in range(q.shape[2]):
        while seen < _sees(i, offset, k.shape[2]):
            running.fold(*_token(keys, values, seen))
            seen += 1
        sums.append(read(kernel, running.begun(), queries[..., i, :], running.centre))
    attended = None
    if options.normaliser.counts:
        attended = keys_attended(key_mask, offset, q, k)
        attended = attended if state is None else attended + state.values[:, :1, None, :, -1:]
    out, total = equations.active(common).forward(xp.stack(sums, axis=3), attended, options)
    last = None if state is None else settled(running.begun(), running.centre)[0]
    return (
        ungroup_heads(out),
        ungroup_heads(total)[..., 0],
        Saved(q, k, v, key_mask, offset, options, state, last, attended, out, total),
    )


def backward(saved: Saved, d_out: Array, d_state: State | None = None) -> dict[str, Any]:
    """Return the gradients of q, k, v, and of alpha and delta where these are learned, and of a state that came in.

    `d_state` is the gradient with respect to the state that went out.
    """
    q, k, v = saved.q, saved.k, saved.v
    xp = namespace(q, k, v)
    kernel = Kernel(saved.options, q.shape[3])
    (queries, q_normal), (keys, k_normal) = kernel.lift(group_heads(q, k.shape[1])), kernel.lift(k)
    values = with_ones(v, saved.key_mask, whole(q, k))
    d_sums = equations.active(common).backward(
        saved.out, saved.total, saved.attended, saved.options, group_heads(d_out, k.shape[1])
    )
    # Forward in time: the states once more.
    running, seen, d_queries = Running(kernel, _started(kernel, saved.start, values), values), 0, []
    centres = [running.centre]
    for i in range(q.shape[2]):
        while seen < _sees(i, saved.offset, k.shape[2]):
            running.fold(*_token(keys, values, seen))
            seen += 1
        # forward: sums = read(state, query)
        d_some = about_adjoint(d_sums[..., i, :], -running.centre)
        d_queries.append(read_backward(kernel, running.begun(), queries[..., i, :], d_some))
        centres.append(running.centre)
    # Back in time: the gradient with respect to the state.
    d_current = None
    if d_state is not None and saved.state is not None:
        d_current = centred_gradient(saved.state, d_state, centres[-1])
    d_keys = [zeros((*k.shape[:2], k.shape[2] - seen, k.shape[3]), k)]
    d_values = [zeros((*v.shape[:2], k.shape[2] - seen, v.shape[3] + 1), v)]
    for i in range(q.shape[2] - 1, -1, -1):
        centre = centres[i + 1]
        d_some = about_adjoint(d_sums[..., i, :], -centre)
        d_current = read_adjoint(kernel, d_current, queries[..., i, :], d_some)
        while seen > _sees(i - 1, saved.offset, k.shape[2]) if i else seen > 0:
            seen = seen - 1
            # forward: state = fold(state, key, value)
            d_key, d_value = fold_backward(kernel, *_token(keys, values, seen), d_current, centre)
            d_keys.append(d_key)
            d_values.append(d_value)
        d_current = recentred(d_current, centre, centres[i])
    d_rows, d_columns = xp.stack(d_queries, axis=3), xp.concat(d_keys[::-1], axis=2)
    d_q = ungroup_heads(kernel.lift_backward(q_normal, d_rows))  # (b, h, i, d) [dHOL.q]
    d_k = kernel.lift_backward(k_normal, d_columns)  # (b, g, j, d) [dHOL.k]
    d_v = xp.concat(d_values[::-1], axis=2)[..., :-1]  # (b, g, j, e) [dHOL.v]
    gradients = {"q": d_q, "k": d_k, "v": d_v}
    if saved.options.learned:
        sums = common.sums_attended(values, saved.offset, q.shape[2])
        sums = sums if saved.start is None else sums + saved.start.values[:, :, None, ...]
        parts = common.parts_of_numbers(kernel, ((queries, d_rows), (keys, d_columns)), d_sums, sums)
        gradients |= equations.active(common).gradients_of_numbers(parts)
    if saved.start is None or d_current is None:
        return gradients
    return gradients | {"state": whole_gradient(saved.start, d_current)}


def _started(kernel: Kernel, state: State | None, values: Array) -> State:
    b, g, _, width = values.shape
    return empty(kernel, (b, g, width - 1), values) if state is None else state


def _sees(query: int, offset: int, keys: int) -> int:
    """Return how many keys a query may attend."""
    return min(max(query + offset + 1, 0), keys)


def _token(keys: Array, values: Array, at: int) -> tuple[Array, Array]:
    return keys[..., at : at + 1, :], values[..., at : at + 1, :]
