"""Levels of tokens: each level gathers the one below, and every token reads all of them.

L_0 are all n tokens, L_l every s^l-th (the last of each block of s^l tokens; without causality the last token, too), up
to a level without a token, or with as many as the one below. With stage(R, K, o), graph energy attention in state
"token" from queries of R to keys of K, whose values are o and whose scores flow on the graph of K alone::

    o_0 = v
    o_{l+1} = stage(L_{l+1}, L_l, o_l)
    o = sum_l omega_l stage(L_0, L_l, o_l),    omega = softmax(level_logits)

A token reads no later one where scores are causal, and with a `window` of the earlier ones the last so many of a level.
All levels share their numbers. What a query reads does not depend on other queries: o_{l+1} are rows of what all tokens
read of L_l, so that one stage a level is enough. The adjoint quotes each line below, from the last level to the first.

Axes: b batch, h query head, g key/value head, i tokens, j tokens of a level, d and e widths of a head.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), for a level that gathers the one
below; how tokens read levels is this library's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.arguments import check_arrays, check_gradient, check_qkv
from refattn.mechanisms.graph_energy import flow, graph, readout
from refattn.mechanisms.graph_energy.attend import balance_of
from refattn.mechanisms.graph_energy.derived import law_of, threshold_of
from refattn.mechanisms.graph_energy.forms import form_of, module_of
from refattn.mechanisms.graph_energy.links import summed_to
from refattn.mechanisms.graph_energy.options import NUMBERS, USUAL, Options, check_options
from refattn.mechanisms.graph_energy.rows import softmax_backward, softmax_forward
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, arange, device, dtype_name, namespace, raised, sum_wide, zeros

NOT_TAKEN = ("state", "graph", "graph_scores", "start", "jitter", "adjoint") + (
    "stop_force",
    "stop_plateau",
    "stop_level",
)
"""Options of the core that a hierarchy does not take."""


@dataclass(frozen=True)
class Level:
    """One level: its tokens, and what the backward of its stage reads."""

    tokens: tuple[int, ...]
    attention: Array  # (b, h, i, j)
    graph: graph.Saved
    flow: flow.Saved
    readout: readout.Saved
    out: Array  # (b, h, i, e)


@dataclass(frozen=True)
class Saved:
    """What `backward` reads; `levels` from the first on, and their weights `omega` (levels,)."""

    levels: tuple[Level, ...]
    omega: Array
    q: Array
    k: Array
    v: Array
    options: Options
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
    causal: bool = False,
    form: str = "auto",
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
    causal, form, options
        As of the core in state "token", with a bias (b, h, n, n) and a mu of each node, too.

    Raises
    ------
    TypeError, ValueError
        Where an argument does not fit.
    """
    xp = check_arrays(q=q, k=k, v=v)
    check_qkv(q, k, v)
    if raised(q).dtype != q.dtype:
        raise TypeError(f"q: got dtype {dtype_name(q)}, needs float32 or float64")
    n = q.shape[2]
    for name, number, least in (("stride", stride, 2), ("levels", levels, 1), ("window", window, 1)):
        whole = isinstance(number, int) and not isinstance(number, bool) and number >= least
        if not whole and not (name == "window" and number is None):
            raise ValueError(f"{name}: got {number!r}, needs a whole number of at least {least}")
    if window is not None and not causal:
        raise ValueError(f"window: got {window} without causal scores, needs causal=True")
    if wrong := [name for name in options if name not in USUAL or name in NOT_TAKEN]:
        raise ValueError(f"{wrong[0]}: got an option that a hierarchy does not take")
    chosen = check_options(q, n, causal=causal, **(USUAL | options))
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
        level = _stage(q, k, values, tokens, chosen, causal, window, form)
        out = out + omega[at] * level.out
        found.append(level)
        if at + 1 < len(known):
            values = _take(level.out, known[at + 1], 2)
    numbers = {**(USUAL | options), "level_logits": level_logits}
    shapes = {x: tuple(getattr(numbers[x], "shape", ())) for x in (*NUMBERS, "level_logits") if numbers[x] is not None}
    return out, Saved(tuple(found), omega, q, k, v, chosen, shapes)


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
        gradients = own if not gradients else {name: x + own[name] for name, x in gradients.items()}
    assert d_values is not None
    gradients["v"] = sum_heads(d_values, saved.v.shape[1])
    if "level_logits" in saved.given:
        # forward: omega = softmax(level_logits)
        d_logits = softmax_backward(saved.omega, xp.stack(d_omega))
        unused = zeros((saved.given["level_logits"][0] - len(saved.levels),), d_logits)
        gradients["level_logits"] = xp.concat([d_logits, unused])
    return {name: xp.reshape(x, saved.given.get(name, x.shape)) for name, x in gradients.items()}


def _stage(
    q: Array,
    k: Array,
    values: Array,
    tokens: tuple[int, ...],
    options: Options,
    causal: bool,
    window: int | None,
    form: str,
) -> Level:
    """Return what all tokens read of a level, whose values are (b, h, j, e)."""
    xp, scale = namespace(q), options.scale
    own_q, own_k = _take(q, tokens, 2), _take(k, tokens, 2)
    own = replace(options, mu=options.mu if _is_plain(options.mu) else _take(options.mu, tokens, 1))
    allowed = _readable(tokens, tokens, q, None) if causal else None
    bias = None if options.bias is None else _take(_whole(options.bias, q), tokens, 3)
    inner = None if bias is None else _take(bias, tokens, 2)
    links = graph.forward(
        own_q, own_k, values, allowed=allowed, scale=scale, symmetrise=own.symmetrise, state="token", bias=inner
    )
    scores = q @ xp.matrix_transpose(repeat_heads(own_k, q.shape[1])) * scale
    scores = scores if bias is None else scores + bias
    read = _readable(range(q.shape[2]), tokens, q, window) if causal else None
    attention = softmax_forward(scores if read is None else xp.where(read, scores, -math.inf))
    threshold = threshold_of(own, read, attention)
    module = module_of(form_of(form, own, own_q, values))
    law = law_of(own, links.graph, None, balance_of(links), module, threshold)
    x, flowed = flow.forward(law, links.graph, links.start, None)
    out, reading = readout.forward(x, attention, values, allowed=read, state="token", threshold=threshold)
    return Level(tokens, attention, links, flowed, reading, out)


def _stage_backward(saved: Saved, level: Level, d_out: Array) -> tuple[Array, dict[str, Array]]:
    """Return the gradients of a level's values, and those of q, k and the numbers."""
    xp, (q, k) = namespace(d_out), (saved.q, saved.k)
    n, tokens, scale = q.shape[2], level.tokens, saved.options.scale
    d_x, d_attention, d_values, tau_terms = readout.backward(level.readout, d_out, None)
    assert d_values is not None
    d_start, d_graph, numbers = flow.backward(level.flow, d_x, tau_terms)
    d = graph.backward(level.graph, 0.0 * d_graph, d_graph, d_start)
    # forward: attention = softmax(q @ own_k^T * scale + bias)
    d_scores = softmax_backward(level.attention, d_attention)
    d_product = d_scores @ repeat_heads(_take(k, tokens, 2), q.shape[1])
    d_own_k = sum_heads(xp.matrix_transpose(d_scores) @ q, k.shape[1]) * scale
    d["q"] = d_product * scale + _spread(d["q"], tokens, n, 2)
    d["k"] = _spread(d_own_k + d["k"], tokens, n, 2)
    d["scale"] = d["scale"] + sum_wide(d_product * q)
    if "bias" in d:
        whole = _spread(d_scores + _spread(d["bias"], tokens, n, 2), tokens, n, 3)
        d["bias"] = summed_to(whole, saved.given["bias"])
    if not _is_plain(saved.options.mu):
        numbers["mu"] = _spread(xp.reshape(numbers["mu"], (q.shape[1], len(tokens))), tokens, n, 1)
    return d_values, {name: x for name, x in {**d, **numbers}.items() if name in ("q", "k", *saved.given)}


def _is_plain(mu: Any) -> bool:
    """Tell whether mu is the same for all nodes of a head."""
    return isinstance(mu, float) or len(mu.shape) == 0 or mu.shape[1] == 1


def _whole(bias: Array, q: Array) -> Array:
    """Return a bias with all its axes."""
    return namespace(q).broadcast_to(bias, (*q.shape[:3], q.shape[2]))


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
