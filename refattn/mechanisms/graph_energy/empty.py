"""What becomes of rows that the threshold has emptied, and of rows that may attend nothing."""

from __future__ import annotations

import math

from refattn.mechanisms.graph_energy.law import Threshold
from refattn.xp import Array, arange, concrete, namespace, zeros


def alive_rows(allowed: Array) -> Array:
    """Tell which tokens may attend something, as (b, h, i, 1)."""
    return namespace(allowed).any(allowed, axis=-1, keepdims=True)


def emptied(
    x: Array, attention: Array, allowed: Array | None, filled: Array, state: str, threshold: Threshold
) -> Array:
    """Return the weights of rows that the threshold has emptied."""
    xp, empty = namespace(x), threshold.empty
    if empty == "dense":
        return attention
    alive = True if allowed is None else alive_rows(allowed)
    if empty == "error":
        check_filled(filled | ~alive if allowed is not None else filled)
    if empty in ("zero", "error") or attention.shape[-1] == 0:
        return zeros(attention.shape, x)
    rows = xp.matrix_transpose(x)
    rank = attention if threshold.kind == "proximal" else attention * rows if state == "token" else rows
    if allowed is not None:
        rank = xp.where(allowed, rank, -math.inf)
    best = xp.argmax(rank, axis=-1, keepdims=True)
    chosen = arange(0, attention.shape[-1], x) == best
    chosen = chosen if allowed is None else chosen & allowed
    return xp.astype(chosen, x.dtype)


def check_filled(filled: Array) -> None:
    """Raise FloatingPointError where a row has been emptied, and name the first."""
    xp = namespace(filled)
    if concrete(xp.all(filled)) is not False:
        return
    flat = int(xp.argmin(xp.astype(xp.reshape(filled, (-1,)), xp.int8)))
    _, heads, queries, _ = filled.shape
    place = (flat // (heads * queries), flat // queries % heads, flat % queries)
    raise FloatingPointError(
        f"batch {place[0]}, head {place[1]}, token {place[2]}: no score is above tau; lower tau, or choose empty="
        '"argmax", "dense" or "zero"'
    )
