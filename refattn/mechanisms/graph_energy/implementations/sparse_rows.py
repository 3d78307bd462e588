"""Calls on a sparse graph, in memory linear in the number of tokens: attention is there for a few rows at a time.

The flow reads the edges alone. In state "feature" its end is the output, and no score is computed: such a call is
linear in the edges in time, too. In state "token" a query attends all tokens, as everywhere: its rows of scores, of
attention and of the readout are made, read and forgotten, and the backward makes them again. State "query", whose
matches are as many as pairs, and a bias, which is as large, are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from refattn import equations
from refattn.mechanisms.graph_energy import general
from refattn.mechanisms.graph_energy.general import Readout, Saved, flow_backward, flow_forward
from refattn.mechanisms.graph_energy.implementations.pairs import OverPairs
from refattn.mechanisms.graph_energy.options.call import Options, tau_of
from refattn.mechanisms.graph_energy.system import Graph
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_in_tile
from refattn.ops.softmax import softmax_backward, softmax_forward
from refattn.ops.sums import plus, summed_to
from refattn.xp import Array, namespace, product, sum_wide, zeros

ELEMENTS = 2**18
"""Scores of one head that are there at once, unless a single row has more."""


def fits(options: Options) -> bool:
    """Tell whether a call on a sparse graph needs nothing of n by n elements."""
    return not options.state.per_query and options.bias is None


def forward(
    q: Array, k: Array, v: Array, *, allowed: None, options: Options, implementation: OverPairs
) -> tuple[Array, Saved]:
    """Return the output and what `backward` reads; `implementation` sums over the edges."""
    xp, heads = namespace(q), q.shape[1]
    if options.start is not None:
        start = options.start[..., None] + zeros((q.shape[0], heads, k.shape[2], 1), k)
    elif options.state.weighs:
        to_itself = options.scale * xp.sum(q * repeat_heads(k, heads), axis=-1, keepdims=True)
        start = 0.5 + 0.5 * xp.tanh(0.5 * to_itself)
    else:
        start = repeat_heads(v, heads)
    graph = Graph(options, q, k, None, None, options.graph, start, None, None)
    tau = tau_of(options, None, start)
    x, flow = flow_forward(graph, tau, implementation)
    whole = Readout(options, tau, None, v, x, x)
    if not options.state.weighs:
        out, whole = equations.active(general).readout_forward(x, None, None, v, allowed=None, options=options, tau=tau)
        return out, Saved(graph, flow, whole)
    outs, filled = [], []
    for rows in _tiles(q):
        out, readout, _ = _row(graph, whole, rows)
        outs.append(out)
        filled.append(readout.filled)
    return xp.concat(outs, axis=2), Saved(graph, flow, replace(whole, filled=xp.concat(filled, axis=2)))


def backward(saved: Saved, d_out: Array, **read: Array | None) -> dict[str, Array]:
    """Return the gradients that the definition returns."""
    page, graph, known = equations.active(general), saved.graph, saved.readout
    options, q, k, scale = graph.options, graph.q, graph.k, graph.options.scale
    xp, heads = namespace(d_out), q.shape[1]
    d_q, d_k = zeros(q.shape, q), zeros((*q.shape[:2], *k.shape[2:]), k)
    d_x, d_v, tau_terms = read.get("scores"), None, zeros(known.x.shape, q)
    if not options.state.weighs:
        d_kept, _, _, _, tau_terms = page.readout_backward(known, d_out, None)
        d_x = plus(d_kept, d_x)
    else:
        k_heads, every = repeat_heads(k, heads), []
        for rows in _tiles(q):
            _, readout, attention = _row(graph, known, rows)
            d_part, d_scores, d_attention, d_values, d_tau = page.readout_backward(readout, d_out[:, :, rows, :], None)
            d_x, d_v, tau_terms = plus(d_x, d_part), plus(d_v, d_values), tau_terms + d_tau
            # forward: matches = q @ k_heads^T * scale; attention = softmax(matches)
            if d_attention is not None:
                d_scores = d_scores + softmax_backward(attention, d_attention)
            every.append(product(d_scores, k_heads))
            d_k = d_k + product(xp.matrix_transpose(d_scores), q[:, :, rows, :])
        d_q = xp.concat(every, axis=2)
    d_begin, _, numbers = flow_backward(saved.flow, d_x, tau_terms)
    d_start = plus(d_begin, read.get("start"))
    if options.start is not None:
        numbers["start"] = summed_to(d_start[..., 0], options.start.shape)
    elif options.state.weighs:
        # forward: start = sigmoid(scale q_j . k_j)
        d_own = d_start * graph.start * (1.0 - graph.start)
        d_q, d_k = d_q + d_own * repeat_heads(k, heads), d_k + d_own * q
    if d_v is None:
        d_v = sum_heads(d_start, known.v.shape[1])
    return {"q": d_q * scale, "k": sum_heads(d_k, k.shape[1]) * scale, "scale": sum_wide(d_q * q), "v": d_v, **numbers}


def _row(graph: Graph, whole: Readout, rows: slice) -> tuple[Array, Readout, Array]:
    """Return the output of some tokens, what the backward of their readout reads, and their attention."""
    options, q, k = graph.options, graph.q, graph.k
    xp, n = namespace(q), k.shape[2]
    matches = product(q[:, :, rows, :], xp.matrix_transpose(repeat_heads(k, q.shape[1]))) * options.scale
    allowed = allowed_in_tile(None, 0 if options.causal else None, (rows.start, rows.stop), (0, n), q)
    if allowed is not None:
        allowed = xp.broadcast_to(allowed, matches.shape)
        matches = xp.where(allowed, matches, -math.inf)
    attention, page = softmax_forward(matches), equations.active(general)
    more = {"allowed": allowed, "options": options, "tau": whole.tau}
    return *page.readout_forward(whole.x, matches, attention, whole.v, **more), attention


def _tiles(q: Array) -> Iterator[slice]:
    n = q.shape[2]
    rows = max(1, ELEMENTS // max(n, 1))
    return (slice(first, min(first + rows, n)) for first in range(0, max(n, 1), rows))
