"""Levels of tokens: each level gathers the one below, and every token reads all of them.

The nodes of level l are every s^l-th token, the last of each s^l, without causality also where fewer are left. With
stage_l(o), graph energy attention in state "token" or "prefix" from all tokens to the nodes of level l, whose values
are v_l and whose scores flow on the graph of these nodes alone, p_ij is GE.12 of the definition, where A(i) are the
nodes that i reads. Equations, a pass for each level::

    [GE.level_weights]  omega_il = exp(a_l) / sum_k exp(a_k)  over the levels k of which i reads a node, else 0
    [GE.level_values]  v_lj = r_{l-1,j} at the nodes j of level l  of the first level: v_j
    [GE.level_reads]  r_li = sum_j p_ij v_lj             over the nodes j of level l
    [GE.mixed]  o_i = sum_l omega_il r_li

Adjoints for given do, from the last level on (q, k and the numbers gather those of all stages)::

    [dGE.level_reads]  dr_li = omega_il do_i + dv_{l+1,i}  the latter where i is a node of level l + 1
    [dGE.level_values]  dv_lj = sum_i p_ij dr_li
    [dGE.level_weights]  domega_il = do_i . r_li         summed over batch and heads
    [dGE.level_logits]  da_l = sum_i omega_il (domega_il - sum_k omega_ik domega_ik)

In state "prefix" the nodes that a node reads have scores for it, which flow on the graph of these nodes alone; a token
reads with the scores for the node c that stands for it, see below. So every level has an energy for each of its
prefixes, in causal models too.

The a_l are the level logits. The flow of a stage is GE.1 to GE.8 of the core on its nodes, once a level, under these
ids (what nodes read there, GE.9 to GE.13, is not wanted). What tokens read has none: it is the same equations with
other sizes, and an id has one value a pass. With a window of w a token, and a node in the graph, reads the last w nodes
that are no later; without causality those fewer than w nodes away. So a kernel needs n w numbers of a
level. Here all n^2 / s^l are computed, and a mask hides the others. All levels share their numbers.

Of n tokens node j of a level is the last of the s from s j on, and without causality the last of all where fewer are
left. Token i reads, with a window of w nodes::

    causal      j <= c, j > c - w    with c = (i + 1) div s - 1, the last node that is no later than i
    otherwise   |j - c| < w          with c = i div s, the node that stands for i

Axes: b batch, h query head, g key/value head, i tokens, j nodes of a level, d and e widths of a head.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), for a level that gathers the one
below; how tokens read levels is this library's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refattn.args import check_arrays, check_choice, check_mask, check_whole
from refattn.mechanisms.core_arguments import check_saved, defaults_of, enter, returned, upstream
from refattn.mechanisms.graph_energy import core, general
from refattn.mechanisms.graph_energy.layer.regularisers import OF_SCORES, added
from refattn.mechanisms.graph_energy.options.call import Options, tau_of
from refattn.mechanisms.graph_energy.options.state import STATES
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import Causal
from refattn.ops.softmax import softmax_backward, softmax_forward
from refattn.ops.sums import plus, sum_of, summed_for, summed_to
from refattn.xp import Array, arange, device, is_array, namespace, sum_wide, zeros


@dataclass(frozen=True)
class Level:
    """Every `every`-th of n tokens; `window` None means that a token reads all of them, or all earlier ones."""

    n: int
    every: int
    window: int | None
    causal: bool

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self.n // self.every if self.causal else -(-self.n // self.every)

    def positions(self, like: Array) -> Array:
        """Return which tokens are nodes, (j)."""
        last = arange(1, self.count + 1, like) * self.every - 1
        return namespace(like).where(last < self.n, last, self.n - 1)

    def read(self, tokens: Array, nodes: Array) -> Array:
        """Tell which tokens read which nodes, for their numbers; those that are none read nothing."""
        xp, there = namespace(tokens), (tokens < self.n) & (nodes >= 0) & (nodes < self.count)
        home = self.home(tokens)
        if self.causal:
            there = there & (nodes <= home)
        return there if self.window is None else there & (xp.abs(nodes - home) < self.window)

    def home(self, tokens: Array) -> Array:
        """Return the node c that stands for each token: -1 where there is none."""
        return (tokens + 1) // self.every - 1 if self.causal else tokens // self.every

    def first(self) -> int:
        """Return the first token that reads a node."""
        return self.every - 1 if self.causal else 0

    def take(self, x: Array, axis: int) -> Array:
        """Return what the nodes have of what tokens have."""
        return x if self.every == 1 else namespace(x).take(x, self.positions(x), axis=axis)

    def spread(self, x: Array, axis: int) -> Array:
        """Return what tokens have, 0 where they are no nodes: the adjoint of `take`."""
        if self.every == 1:
            return x
        xp, tokens = namespace(x), arange(0, self.n, x)
        node = tokens // self.every
        node = xp.where(node < self.count, node, self.count - 1)
        shape = tuple(self.n if at == axis else 1 for at in range(len(x.shape)))
        here = xp.reshape(xp.take(self.positions(x), node) == tokens, shape)
        return xp.where(here, xp.take(x, node, axis=axis), 0.0)


def levels_of(n: int, stride: int, most: int, window: int | None, causal: bool) -> tuple[Level, ...]:
    """Return the levels of n tokens, at most `most`; but the first, those that have a node."""
    every = [Level(n, stride**at, window, causal) for at in range(most)]
    return (every[0], *(level for level in every[1:] if level.count))


USUAL = defaults_of(core.forward)

TAKEN = tuple(name for name in USUAL if name not in ("start", "mask", "causal", "implementation"))
"""Options of the core that a hierarchy takes."""


@dataclass(frozen=True)
class Stage:
    """What the backward of a stage reads."""

    level: Level
    q: Array  # (b, h, i, d)
    k: Array  # (b, g, i, d)
    attention: Array  # (b, h, i, j)
    core: core.Saved
    readout: general.Readout

    @property
    def scores(self) -> Array:
        """The scores after the last step, (b, h, j, 1)."""
        return self.core.scores

    @property
    def rate(self) -> Array:
        """Their rate."""
        return self.core.system.rate(self.core.scores)


@dataclass(frozen=True)
class Saved:
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    levels
        The levels that there are, from the first on.
    omega
        (n, levels): how much each counts for each token.
    stages, read
        Of each level what its backward reads, and what tokens read of it, (b, h, i, e).
    """

    levels: tuple[Level, ...]
    omega: Array
    stages: tuple[Stage, ...]
    read: tuple[Array, ...]
    q: Array
    k: Array
    v: Array
    like: Array  # an input, for its dtype
    options: Options
    numbers: dict[str, tuple[int, ...]]


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    stride: int = 4,
    levels: int = 3,
    window: int | None = 16,
    mask: Array | None = None,
    key_mask: Array | None = None,
    causal: Causal = USUAL["causal"],
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
        How many nodes of a level a token reads, at most: the last ones, or without causality those fewer than so many
        away. None: all of them, or all earlier ones.
    mask
        As of the core: which token may attend which, on all levels. It has n by n elements itself.
    key_mask
        (b, n), boolean: True = a token. What is none reads nothing, is not read, and is no node.
    causal
        As of the core.
    level_logits
        (levels,): None means that all levels count alike. Those of levels that are not there count for nothing.
    options
        Others of the core in state "token" or "prefix", with a bias (b, h, n, n) and a mu of each node, too.

    Raises
    ------
    TypeError, ValueError
        Where an argument does not fit.
    FloatingPointError
        Where scores diverge.
    """
    call = enter(q, k, v, mask=mask, causal=causal)
    n = q.shape[2]
    check_whole("stride", stride, 2)
    check_whole("levels", levels, 1)
    if window is not None:
        check_whole("window", window, 1)
    if wrong := [name for name in options if name not in TAKEN]:
        raise ValueError(f"{wrong[0]}: got an option that a hierarchy does not take")
    if key_mask is not None:
        check_arrays(q=q, key_mask=key_mask)
        if tuple(key_mask.shape) != (q.shape[0], n):
            raise ValueError(f"key_mask: got shape {tuple(key_mask.shape)}, needs {(q.shape[0], n)} (True = a token)")
        check_mask(key_mask[:, None, None, :], call.plane, "key_mask")
    is_causal = call.offset is not None
    given: dict[str, Any] = {name: x for name, x in USUAL.items() if name in TAKEN} | options
    if n != k.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} tokens and {n} in q, needs as many: they are nodes of one graph")
    if (state := check_choice("state", given["state"], STATES)) not in ("token", "prefix"):
        raise ValueError(f'state: got "{state}" with levels, needs "token" or "prefix"')
    known = core.checked(call.q, call.k, call.v, masked=False, causal=is_causal, start=None, **given)
    if known.threshold.empty == "error":
        raise ValueError('threshold: got empty="error" with levels, of which a token may read nothing; needs another')
    found = levels_of(n, stride, levels, window, is_causal)
    numbers = dict(known.numbers)
    logits = zeros((levels,), call.q)  # a number for each level
    if level_logits is not None:
        check_arrays(q=q, level_logits=level_logits)
        if tuple(level_logits.shape) != (levels,):
            raise ValueError(f"level_logits: got shape {tuple(level_logits.shape)}, needs ({levels},)")
        numbers["level_logits"] = (levels,)
        logits = namespace(q).astype(level_logits, call.q.dtype)  # a number for each level
    omega = omega_of(logits, found, arange(0, n, q))  # [GE.level_weights]
    below = repeat_heads(call.v, q.shape[1])  # (b, h, i, e)
    stages: list[Stage] = []
    every: list[Array] = []
    for level in found:
        values = level.take(below, 2)  # [GE.level_values]
        masks = (call.mask, key_mask)
        read, stage = _forward(call.q, call.k, values, level, *masks, given, known)  # [GE.level_reads], -
        below = read  # (b, h, i, e)
        stages.append(stage)
        every.append(read)
    out = sum_of(*(omega[:, at, None] * read for at, read in enumerate(every)))  # (b, h, i, e) [GE.mixed]
    return call.back(out), Saved(found, omega, tuple(stages), tuple(every), call.q, call.k, call.v, q, known, numbers)


def backward(saved: Saved, d_out: Array, regulariser: str | None = None, strength: float = 1.0) -> dict[str, Array]:
    """Return the gradients of q, k, v and of every number that was given, "level_logits" among them.

    With a regulariser, "size", "roughness" or "level", they are those of the loss plus `strength` times the sum of it
    over the levels.
    """
    check_saved(saved, Saved)
    if regulariser is not None:
        check_choice("regulariser", regulariser, OF_SCORES)
    (d_out,) = upstream(saved.like, d_out=(d_out, tuple(saved.read[0].shape)))  # (b, h, i, e)
    xp = namespace(d_out)
    gradients: dict[str, Array] = {}
    d_below = None  # of what the level above takes
    for at in reversed(range(len(saved.levels))):
        # forward: out = sum of omega[:, at, None] * read; values of the next level = read at its nodes
        d_read = sum_of(saved.omega[:, at, None] * d_out, d_below)  # (b, h, i, e) [dGE.level_reads]
        # forward: read, stage = those of a level for its values
        stage = saved.stages[at]
        more = added(regulariser, strength, stage.core)
        d_values, own = _backward(stage, d_read, more)  # [dGE.level_values], -
        d_below = saved.levels[at].spread(d_values, 2)  # (b, h, i, e)
        if _of_nodes(saved.options.mu):
            own["mu"] = saved.levels[at].spread(own["mu"], 1)  # (h, i)
        gradients = {name: sum_of(gradients.get(name), x) for name, x in own.items()}
    assert d_below is not None
    gradients["v"] = sum_heads(d_below, saved.v.shape[1])  # (b, g, i, e)
    # forward: out = sum of omega[:, at, None] * read
    d_omega = xp.stack([xp.sum(d_out * read, axis=(0, 1, 3)) for read in saved.read], axis=1)  # [dGE.level_weights]
    if "level_logits" in saved.numbers:
        # forward: omega = softmax(logits) of the levels that a token reads
        known = xp.sum(softmax_backward(saved.omega, d_omega), axis=0)  # a number for each level that there is
        unused = zeros((saved.numbers["level_logits"][0] - len(saved.levels),), known)  # 0 for the others
        d_logits = xp.concat([known, unused])  # [dGE.level_logits]
        gradients["level_logits"] = d_logits
    gradients |= {name: xp.reshape(gradients[name], shape) for name, shape in saved.numbers.items()}
    return returned(gradients, ("q", "k", "v", *saved.numbers), saved.like)


def omega_of(logits: Array, levels: Sequence[Level], tokens: Array) -> Array:
    """Return how much each level counts for some tokens (i), as (i, levels)."""
    xp = namespace(logits)
    first = xp.asarray([level.first() for level in levels], dtype=tokens.dtype, device=device(tokens))  # of each level
    return softmax_forward(xp.where(tokens[:, None] >= first, logits[: len(levels)], -math.inf))


def _forward(
    q: Array,
    k: Array,
    values: Array,
    level: Level,
    mask: Array | None,
    key_mask: Array | None,
    given: dict[str, Any],
    options: Options,
) -> tuple[Array, Stage]:
    """Return what all tokens read of a level, whose values are (b, h, j, e), with all pairs at once."""
    xp, n, m = namespace(q), level.n, level.count  # j below are the nodes
    allowed = level.read(arange(0, n, q)[:, None], arange(0, m, q)[None, :])[None, None, ...]  # (1, 1, i, j)
    if mask is not None:
        pairs = xp.broadcast_to(mask, (*mask.shape[:2], n, n))  # of tokens
        allowed = allowed & level.take(pairs, 3)  # whether i reads j
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, :, None] & level.take(key_mask, 1)[:, None, None, :]  # whether i reads j
    own_q, own_k, own = level.take(q, 2), level.take(k, 2), dict(given)  # of nodes
    if _of_nodes(options.mu):
        own["mu"] = level.take(given["mu"], 1)  # of nodes
    matches = q @ xp.matrix_transpose(repeat_heads(own_k, q.shape[1])) * options.scale  # (b, h, i, j)
    if options.bias is not None:
        bias = level.take(xp.broadcast_to(options.bias, (*q.shape[:3], n)), 3)  # (b, h, i, j)
        matches, own["bias"] = matches + bias, level.take(bias, 2)  # (b, h, i, j), -
    # What the nodes themselves would read is not wanted, and so any values do.
    _, flowed = core.forward(own_q, own_k, own_k, mask=level.take(allowed, 2), causal=options.causal, **own)  # -, -
    allowed = xp.broadcast_to(allowed, matches.shape)  # (b, h, i, j)
    masked = xp.where(allowed, matches, -math.inf)  # (b, h, i, j)
    attention = softmax_forward(masked)  # (b, h, i, j)
    tau = tau_of(options, None, flowed.scores)  # what it is for all nodes
    more = {"allowed": allowed, "options": options, "tau": tau}
    scores_read = flowed.scores  # (b, h, j, c)
    if options.state.per_query:
        scores_read = scores_read @ xp.matrix_transpose(_stand_for(level, q))  # (b, h, j, i)
    out, readout = general.readout_forward(scores_read, masked, attention, values, **more)  # (b, h, i, e), -
    return out, Stage(level, q, k, attention, flowed, readout)


def _stand_for(level: Level, like: Array) -> Array:
    """Return 1 where a node (c) stands for a token (i), else 0, as (i, c)."""
    tokens, nodes = arange(0, level.n, like), arange(0, level.count, like)
    return namespace(like).astype(level.home(tokens)[:, None] == nodes, like.dtype)


def _backward(saved: Stage, d_out: Array, more: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Return the gradients of a level's values, and those of q, k and the numbers."""
    level, (q, k), options = saved.level, (saved.q, saved.k), saved.readout.options  # (b, h, i, d) and (b, g, i, d)
    xp = namespace(d_out)
    d_x, d_read, d_attention, d_values, tau_terms = general.readout_backward(saved.readout, d_out, None)  # of nodes
    assert d_values is not None
    if options.state.per_query:
        # forward: scores_read = scores @ stand_for^T
        d_x = d_x @ _stand_for(level, d_x)  # (b, h, j, c)
    d_x = plus(d_x, more.pop("d_scores", None))  # (b, h, j, c)
    # forward: scores of the level = those of the core
    d = core.backward(saved.core, zeros(saved.core.shape, d_out), d_scores=d_x, **more)
    # forward: attention = softmax(masked), which the readout reads, too; masked = q @ own_k^T * scale + bias
    d_softmax = None if d_attention is None else softmax_backward(saved.attention, d_attention)  # (b, h, i, j)
    d_scores = plus(d_read, d_softmax)  # (b, h, i, j)
    d_product = d_scores @ repeat_heads(level.take(k, 2), q.shape[1])  # (b, h, i, d)
    d_own_k = sum_heads(xp.matrix_transpose(d_scores) @ q, k.shape[1]) * options.scale  # (b, g, j, d)
    d["q"] = d_product * options.scale + level.spread(d["q"], 2)  # (b, h, i, d)
    d["k"] = level.spread(d_own_k + d["k"], 2)  # (b, g, i, d)
    if "scale" in d:
        d["scale"] = d["scale"] + sum_wide(d_product * q)  # ()
    if "tau" in d:
        d["tau"] = d["tau"] + xp.reshape(summed_for(tau_terms, options.tau), d["tau"].shape)  # as tau
    if options.bias is not None:
        d_bias = level.spread(d_scores + level.spread(d["bias"], 2), 3)  # of all pairs of tokens
        d["bias"] = summed_to(d_bias, options.bias.shape)  # as the bias
    return d_values, {name: x for name, x in d.items() if name != "v"}


def _of_nodes(mu: Any) -> bool:
    """Tell whether a mu that has been checked, (h, j, 1), is one for each node."""
    return is_array(mu) and len(mu.shape) == 3 and mu.shape[1] > 1
