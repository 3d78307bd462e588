"""Levels of tokens: each level gathers the one below, and every token reads all of them.

L_0 are all n tokens, L_l every s^l-th (the last of each block of s^l tokens; without causality the last token, too), up
to a level without a token, or with as many as the one below. With stage(R, K, o), graph energy attention in state
"token" from queries of R to keys of K, whose values are o and whose scores flow on the graph of K alone::

    o_0 = v
    o_{l+1} = stage(L_{l+1}, L_l, o_l)
    o = sum_l omega_l stage(L_0, L_l, o_l),    omega = softmax(level_logits)

A token reads no later one where scores are causal, and with a `window` of the earlier ones the last so many of a level.
All levels share their numbers. What a query reads does not depend on other queries: o_{l+1} are rows of what all tokens
read of L_l, so that one stage a level is enough.

A stage is made of the core and its parts: the core on the tokens of the level gives their scores, with which all tokens
read them as in the readout of the definition. The adjoint quotes each line below, from the last level to the first; the
gradient of scores comes to the core as that of what a loss reads.

Axes: b batch, h query head, g key/value head, i tokens, j tokens of a level, d and e widths of a head.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), for a level that gathers the one
below; how tokens read levels is this library's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.arguments import check_arrays, check_gradient, check_qkv, check_whole
from refattn.mechanisms.entry import defaults_of
from refattn.mechanisms.graph_energy import core, dense
from refattn.mechanisms.graph_energy.options import FAMILIES, tau_of
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.softmax import softmax_backward, softmax_forward
from refattn.ops.sums import summed_for, summed_to
from refattn.xp import Array, arange, device, dtype_name, is_array, namespace, raised, sum_wide, zeros

TAKEN = tuple(name for name in defaults_of(core.forward) if name not in ("state", "start", "mask", "causal", "form"))
"""Options of the core that a hierarchy takes."""


@dataclass(frozen=True)
class Level:
    """One level: its tokens, and what the backward of its stage reads."""

    tokens: tuple[int, ...]
    attention: Array  # (b, h, i, j)
    core: core.Saved
    readout: dense.Readout
    out: Array  # (b, h, i, e)


@dataclass(frozen=True)
class Saved:
    """What `backward` reads; `levels` from the first on, and their weights `omega` (levels,)."""

    levels: tuple[Level, ...]
    omega: Array
    q: Array
    k: Array
    v: Array
    options: dict[str, Any]
    given: dict[str, tuple[int, ...]]


def tokens_of(n: int, stride: int, most: int, causal: bool) -> list[tuple[int, ...]]:
    """Return the tokens of each level, at most `most` levels."""
    found = [tuple(range(n))]
    while len(found) < most:
        block = stride ** len(found)
        ends = list(range(block - 1, n, block))
        if not causal and ends and ends[-1] != n - 1:
            ends.append(n - 1)
        if not ends or len(ends) >= len(found[-1]):
            break
        found.append(tuple(ends))
    return found


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    stride: int = 4,
    levels: int = 3,
    window: int | None = None,
    level_logits: Array | None = None,
    **options: Any,
) -> tuple[Array, Saved]:
    """Return the output (b, h, n, e) and what `backward` reads.

    Parameters
    ----------
    q, k, v
        As of the core, with as many queries as keys.
    stride, levels
        s above, and how many levels at most; `len(saved.levels)` tells how many there are.
    window
        How many earlier tokens of a level a token reads; needs causal scores.
    level_logits
        (levels,): None means that all levels count alike. Those of levels that are not there count for nothing.
    options
        `causal`, `form` and others of the core in state "token", with a bias (b, h, n, n) and a mu of each node, too.

    Raises
    ------
    TypeError, ValueError
        Where an argument does not fit.
    """
    xp = check_arrays(q=q, k=k, v=v)
    check_qkv(q, k, v)
    if raised(q).dtype != q.dtype:
        raise TypeError(f"q: got dtype {dtype_name(q)}, needs float32 or float64")
    n, causal = q.shape[2], options.get("causal", False) is not False
    check_whole("stride", stride, 2)
    check_whole("levels", levels, 1)
    if window is not None:
        check_whole("window", window, 1)
        if not causal:
            raise ValueError(f"window: got {window} without causal scores, needs causal=True")
    if wrong := [name for name in options if name not in (*TAKEN, "causal", "form")]:
        raise ValueError(f"{wrong[0]}: got an option that a hierarchy does not take")
    known = tokens_of(n, stride, levels, causal)
    if level_logits is None:
        omega = xp.full((len(known),), 1.0 / len(known), dtype=q.dtype, device=device(q))
    else:
        check_arrays(q=q, level_logits=level_logits)
        if tuple(level_logits.shape) != (levels,):
            raise ValueError(f"level_logits: got shape {tuple(level_logits.shape)}, needs ({levels},)")
        omega = softmax_forward(level_logits[: len(known)])
    values, out = repeat_heads(v, q.shape[1]), 0.0 * repeat_heads(v, q.shape[1])
    found: list[Level] = []
    for at, tokens in enumerate(known):
        level = _stage(q, k, v, values, tokens, options, window)
        out = out + omega[at] * level.out
        found.append(level)
        if at + 1 < len(known):
            values = _take(level.out, known[at + 1], 2)
    given = dict(found[0].core.options.numbers)
    if options.get("bias") is not None:
        given["bias"] = tuple(options["bias"].shape)
    given |= {} if level_logits is None else {"level_logits": tuple(level_logits.shape)}
    return out, Saved(tuple(found), omega, q, k, v, options, given)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v and of every number that was given, "level_logits" among them."""
    check_gradient("d_out", d_out, saved.levels[0].out.shape, saved.q)
    xp, n = namespace(d_out), saved.q.shape[2]
    d_omega: list[Array] = []
    gradients: dict[str, Array] = {}
    d_values = None
    for at in reversed(range(len(saved.levels))):
        level = saved.levels[at]
        # forward: out = out + omega[at] * level.out
        d_level = saved.omega[at] * d_out
        d_omega.insert(0, sum_wide(d_out * level.out))
        if d_values is not None:
            # forward: values = level.out at the tokens of the next level
            d_level = d_level + _spread(d_values, saved.levels[at + 1].tokens, n, 2)
        d_values, own = _stage_backward(saved, level, d_level)
        gradients = {name: x if name not in gradients else gradients[name] + x for name, x in own.items()}
    assert d_values is not None
    gradients["v"] = sum_heads(d_values, saved.v.shape[1])
    if "level_logits" in saved.given:
        # forward: omega = softmax(level_logits)
        d_logits = softmax_backward(saved.omega, xp.stack(d_omega))
        unused = zeros((saved.given["level_logits"][0] - len(saved.levels),), d_logits)
        gradients["level_logits"] = xp.concat([d_logits, unused])
    return {name: xp.reshape(gradients[name], saved.given.get(name, gradients[name].shape)) for name in gradients}


def _stage(
    q: Array,
    k: Array,
    v: Array,
    values: Array,
    tokens: tuple[int, ...],
    options: dict[str, Any],
    window: int | None,
) -> Level:
    """Return what all tokens read of a level, whose values are (b, h, j, e)."""
    xp, mu, bias = namespace(q), options.get("mu"), options.get("bias")
    own_q, own_k = _take(q, tokens, 2), _take(k, tokens, 2)
    own = dict(options)
    if _of_nodes(mu):
        own["mu"] = _take(mu, tokens, 1)
    if bias is not None:
        bias = _take(xp.broadcast_to(bias, (*q.shape[:3], q.shape[2])), tokens, 3)
        own["bias"] = _take(bias, tokens, 2)
    # What the level's own tokens would read is not wanted: a row that is emptied there is no error.
    threshold = FAMILIES["threshold"](options.get("threshold", defaults_of(core.forward)["threshold"]))
    own_v = _take(v, tokens, 2)
    _, flowed = core.forward(own_q, own_k, own_v, **{**own, "threshold": replace(threshold, empty="zero")})
    scores = q @ xp.matrix_transpose(repeat_heads(own_k, q.shape[1])) * flowed.options.scale
    scores = scores if bias is None else scores + bias
    read = _readable(range(q.shape[2]), tokens, q, window) if options.get("causal", False) is not False else None
    attention = softmax_forward(scores if read is None else xp.where(read, scores, -math.inf))
    chosen = replace(flowed.options, threshold=replace(flowed.options.threshold, empty=threshold.empty))
    tau = tau_of(chosen, None, flowed.scores)
    out, readout = dense.readout_forward(flowed.scores, attention, values, allowed=read, options=chosen, tau=tau)
    return Level(tokens, attention, flowed, readout, out)


def _stage_backward(saved: Saved, level: Level, d_out: Array) -> tuple[Array, dict[str, Array]]:
    """Return the gradients of a level's values, and those of q, k and the numbers."""
    xp, (q, k) = namespace(d_out), (saved.q, saved.k)
    n, tokens, scale = q.shape[2], level.tokens, level.core.options.scale
    d_x, d_attention, d_values, tau_terms = dense.readout_backward(level.readout, d_out, None)
    assert d_values is not None and d_attention is not None
    # forward: scores of the level = those of the core
    none = zeros(level.core.shape, d_out)
    d = core.backward(level.core, none, d_scores=d_x)
    # forward: attention = softmax(q @ own_k^T * scale + bias)
    d_scores = softmax_backward(level.attention, d_attention)
    d_product = d_scores @ repeat_heads(_take(k, tokens, 2), q.shape[1])
    d_own_k = sum_heads(xp.matrix_transpose(d_scores) @ q, k.shape[1]) * scale
    d["q"] = d_product * scale + _spread(d["q"], tokens, n, 2)
    d["k"] = _spread(d_own_k + d["k"], tokens, n, 2)
    if "scale" in d:
        d["scale"] = d["scale"] + sum_wide(d_product * q)
    if "tau" in d:
        tau = level.core.options.tau
        d["tau"] = d["tau"] + xp.reshape(summed_for(tau_terms, tau), d["tau"].shape)
    if "bias" in d:
        whole_bias = _spread(d_scores + _spread(d["bias"], tokens, n, 2), tokens, n, 3)
        d["bias"] = summed_to(whole_bias, saved.given["bias"])
    if _of_nodes(saved.options.get("mu")):
        d["mu"] = _spread(d["mu"], tokens, n, 1)
    return d_values, {name: x for name, x in d.items() if name != "v"}


def _of_nodes(mu: Any) -> bool:
    """Tell whether mu is (h, n), one for each node."""
    return is_array(mu) and len(mu.shape) == 2


def _readable(rows: Sequence[int], tokens: Sequence[int], like: Array, window: int | None) -> Array:
    """Tell which tokens of a level come no later than a row, and are among its last ones, as (1, 1, i, j)."""
    xp = namespace(like)
    at, known = (xp.asarray(list(x), dtype=xp.int64, device=device(like)) for x in (rows, tokens))
    seen = known[None, :] <= at[:, None]
    if window is not None:
        count = xp.sum(xp.astype(seen, xp.int64), axis=1, keepdims=True)
        seen = seen & (arange(0, known.shape[0], like)[None, :] >= count - window)
    return seen[None, None, ...]


def _take(x: Array, tokens: Sequence[int], axis: int) -> Array:
    xp = namespace(x)
    return xp.take(x, xp.asarray(list(tokens), dtype=xp.int64, device=device(x)), axis=axis)


def _spread(x: Array, tokens: Sequence[int], n: int, axis: int) -> Array:
    """Return x with 0 at all tokens but these."""
    xp, place = namespace(x), {token: at for at, token in enumerate(tokens)}
    there = xp.asarray([token in place for token in range(n)], dtype=xp.bool, device=device(x))
    shape = [1] * len(x.shape)
    shape[axis] = n
    return xp.where(xp.reshape(there, tuple(shape)), _take(x, [place.get(token, 0) for token in range(n)], axis), 0.0)
