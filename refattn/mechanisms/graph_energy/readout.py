"""From scores that have flowed to an output: a threshold, then weights in proportion to the scores.

Equations (x is the last state of the flow; with `signed` |x| stands for x in the threshold; rows y_ij are y_j1 of
"token" and y_ji of "query"; phi(y) = max(y, 0); A(i) is the set of tokens that token i may attend)::

    [GE.12]  y_jc = x_jc if x_jc >= tau, else 0          "soft": x_jc - tau if x_jc > tau, else 0; "proximal": x_jc
    [GE.13]  u_ij = a_ij phi(y_ij)                       "query": phi(y_ij) for j in A(i), else 0
    [GE.14]  z_i = sum_j u_ij                            1 where that is 0
    [GE.15]  p_ij = u_ij / z_i                           where every u_ij is 0: what the option empty says
    [GE.16]  o_i = sum_j p_ij v_j                        "feature" has none of GE.13 to GE.16: o_i = y_i

Adjoints, for given do, and where the loss depends on the weights dp0::

    [dGE.v]  dv_j = sum_i p_ij do_i                      "feature": dv = db of the flow
    [dGE.15]  dp_ij = do_i . v_j + dp0_ij
    [dGE.14]  dz_i = -sum_j dp_ij p_ij / z_i             0 where every u_ij is 0
    [dGE.13]  du_ij = dp_ij / z_i + dz_i                 0 where every u_ij is 0
    [dGE.12]  dy_jc = sum_i du_ij a_ij where y_jc > 0    "query": du_ij; "feature": do

"proximal" has acted in the flow, after every step. dx, which the flow takes, is dy where the threshold keeps a score
and 0 elsewhere; dtau, which the flow adds up, has -dy sign(x) where "soft" keeps a score. With `straight_through` the
backward passes the threshold by: y > 0 reads x > 0 in dGE.12, and dx is dy everywhere. The jump of a hard threshold has
no part in any gradient. da has du_ij phi(y_ij), and where every u_ij is 0 and `empty` is "dense", dp_ij.

A row whose u are all 0, though it may attend something, is emptied by the threshold. `empty` says what it becomes:
"argmax": all weight on the token of A(i) with the largest a_ij x_j ("query": x_ji; "proximal", where every x is 0:
a_ij), to which no gradient goes but that of its value; "dense": a_i; "zero": nothing; "error": a FloatingPointError. A
row that may attend nothing is 0.

Axes: b batch, h query head, i and j tokens, c channel, e width of values.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), for the threshold.

How the source differs: it says nothing of how scores of tokens become weights of pairs, nor of rows that are emptied.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.graph_energy.empty import alive_rows, emptied
from refattn.mechanisms.graph_energy.law import Threshold
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the readout reads."""

    threshold: Threshold
    state: str
    attention: Array | None
    allowed: Array | None
    v: Array  # (b, g, j, e)
    x: Array  # (b, h, j, c)
    kept: Array  # (b, h, j, c): the thresholded scores
    total: Array | None  # (b, h, i, 1)
    filled: Array | None  # (b, h, i, 1): whether the threshold left something
    weights: Array | None  # (b, h, i, j)


def forward(
    x: Array, attention: Array | None, v: Array, *, allowed: Array | None, state: str, threshold: Threshold
) -> tuple[Array, Saved]:
    """Return the output (b, h, i, e) and what `backward` reads."""
    xp = namespace(x)
    size = xp.abs(x) if threshold.signed else x  # (b, h, j, c): what is compared with tau
    # Comparisons that are false for NaN, which so propagates.
    if threshold.kind == "proximal":
        above = x  # (b, h, j, c): GE.12, "proximal"
    elif threshold.kind == "hard":
        above = xp.where(size < threshold.tau, 0.0, x)  # (b, h, j, c): GE.12, "hard"
    else:
        sign = xp.sign(x) if threshold.signed else 1.0  # (b, h, j, c): of what is left
        above = xp.where(size <= threshold.tau, 0.0, sign * (size - threshold.tau))  # GE.12, "soft"
    kept = above  # (b, h, j, c) [GE.12]
    if state == "feature":
        out = kept if allowed is None else xp.where(alive_rows(allowed), kept, 0.0)  # (b, h, i, e): o_i = y_i
        return out, Saved(threshold, state, attention, allowed, v, x, kept, None, None, None)
    rows = xp.matrix_transpose(xp.maximum(kept, zeros((), x)))  # (b, h, c, j): phi(y), by row
    if state == "token":
        carried = attention * rows  # (b, h, i, j): GE.13 of "token"
    else:
        carried = rows if allowed is None else xp.where(allowed, rows, 0.0)  # (b, h, i, j): GE.13 of "query"
    parts = carried  # (b, h, i, j) [GE.13]
    summed_parts = xp.sum(parts, axis=-1, keepdims=True)  # (b, h, i, 1): GE.14, 0 where nothing is left
    filled = summed_parts != 0.0  # (b, h, i, 1): whether something is left
    total = xp.where(filled, summed_parts, 1.0)  # (b, h, i, 1) [GE.14]
    instead = emptied(x, attention, allowed, filled, state, threshold)  # (b, h, i, j): part of GE.15
    weights = xp.where(filled, parts / total, instead)  # (b, h, i, j) [GE.15]
    v_heads = repeat_heads(v, x.shape[1])  # (b, h, j, e): copies of v
    out = weights @ v_heads  # (b, h, i, e) [GE.16]
    return out, Saved(threshold, state, attention, allowed, v, x, kept, total, filled, weights)


def backward(saved: Saved, d_out: Array, d_weights_read: Array | None) -> tuple[Array, Array, Array | None, Array]:
    """Return (d_x, a part of d_attention, d_v, the terms of d_tau by score); d_v is None where v is the start."""
    xp, threshold = namespace(d_out), saved.threshold
    read_shape = () if saved.attention is None else saved.attention.shape
    d_attention = zeros(read_shape, d_out)  # "feature" and "query" do not read a
    if saved.weights is None or saved.total is None or saved.filled is None:
        # forward: out = kept
        read = d_out if saved.allowed is None else xp.where(alive_rows(saved.allowed), d_out, 0.0)  # dGE.12
        d_v = None
    else:
        # forward: out = weights @ v_heads
        v_heads = repeat_heads(saved.v, d_out.shape[1])  # (b, h, j, e): copies of v
        d_v = sum_heads(xp.matrix_transpose(saved.weights) @ d_out, saved.v.shape[1])  # (b, g, j, e) [dGE.v]
        d_product = d_out @ xp.matrix_transpose(v_heads)  # (b, h, i, j): part of dGE.15
        d_weights = d_product if d_weights_read is None else d_product + d_weights_read  # (b, h, i, j) [dGE.15]
        # forward: weights = parts / total
        inner = xp.sum(d_weights * saved.weights, axis=-1, keepdims=True)  # (b, h, i, 1): part of dGE.14
        d_total = xp.where(saved.filled, -inner / saved.total, 0.0)  # (b, h, i, 1) [dGE.14]
        # forward: total = sum(parts)
        d_parts = xp.where(saved.filled, d_weights / saved.total + d_total, 0.0)  # (b, h, i, j) [dGE.13]
        # forward: parts = attention * rows, or rows
        if saved.state == "token":
            rows = xp.matrix_transpose(xp.maximum(saved.kept, zeros((), d_out)))  # (b, h, c, j): as forward
            d_attention = d_parts * rows  # (b, h, i, j): part of dGE.3
            d_rows = xp.sum(d_parts * saved.attention, axis=2)[..., None]  # (b, h, j, c): part of dGE.12
        else:
            d_allowed = d_parts if saved.allowed is None else xp.where(saved.allowed, d_parts, 0.0)  # dGE.12
            d_rows = xp.matrix_transpose(d_allowed)  # (b, h, j, c): part of dGE.12
        if threshold.empty == "dense":
            d_attention = d_attention + xp.where(saved.filled, 0.0, d_weights)  # (b, h, i, j): part of dGE.3
        positive = saved.x if threshold.straight_through else saved.kept  # (b, h, j, c): whose sign phi' takes
        read = xp.where(positive <= 0.0, 0.0, d_rows)  # (b, h, j, c): dGE.12
    d_kept = read  # (b, h, j, c) [dGE.12]
    # forward: kept = threshold(x)
    if threshold.kind == "proximal":
        return d_kept, d_attention, d_v, zeros(d_kept.shape, d_kept)
    size = xp.abs(saved.x) if threshold.signed else saved.x  # (b, h, j, c): as forward
    drops = size < threshold.tau if threshold.kind == "hard" else size <= threshold.tau  # as forward
    d_x = d_kept if threshold.straight_through else xp.where(drops, 0.0, d_kept)  # (b, h, j, c): to the flow
    sign = xp.sign(saved.x) if threshold.signed else xp.ones_like(saved.x)  # (b, h, j, c): part of dGE.tau
    terms = zeros(d_x.shape, d_x) if threshold.kind == "hard" else -sign * d_x  # (b, h, j, c): of dGE.tau
    return d_x, d_attention, d_v, terms
