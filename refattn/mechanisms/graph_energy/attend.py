"""Graph, flow and readout in turn: the whole map of q, k and v, and its adjoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from refattn import equations
from refattn.mechanisms.graph_energy import equilibrium, flow, graph, readout
from refattn.mechanisms.graph_energy.derived import law_of, threshold_of
from refattn.mechanisms.graph_energy.options import Options
from refattn.mechanisms.graph_energy.sparse import CSR
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, all_finite, namespace


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    v_shape: tuple[int, ...]
    graph: graph.Saved
    flow: flow.Saved
    readout: readout.Saved
    implicit: bool


def forward(
    q: Array, k: Array, v: Array, *, allowed: Array | None, options: Options, form: ModuleType
) -> tuple[Array, Saved]:
    """Return the output (b, h, i, e) and what `backward` reads."""
    xp = namespace(q, k, v)
    v_heads = repeat_heads(v, q.shape[1])
    graph_saved = equations.active(graph).forward(
        q,
        k,
        v_heads,
        allowed=allowed,
        scale=options.scale,
        symmetrise=options.symmetrise,
        state=options.state,
        given=options.graph,
        bias=options.bias,
        over_keys=options.over_keys,
        begin=options.start,
    )
    visible = None
    if options.state == "query" and allowed is not None:
        visible = xp.astype(xp.matrix_transpose(allowed), q.dtype)
    threshold = threshold_of(options, allowed, graph_saved.attention)
    law = law_of(options, graph_saved.graph, visible, balance_of(graph_saved), form, threshold)
    x, flow_saved = equations.active(flow).forward(law, graph_saved.graph, graph_saved.start, visible)
    out, readout_saved = equations.active(readout).forward(
        x,
        graph_saved.attention,
        v,
        allowed=allowed,
        state=options.state,
        threshold=threshold,
    )
    return out, Saved(tuple(v.shape), graph_saved, flow_saved, readout_saved, options.adjoint == "implicit")


def backward(saved: Saved, d_out: Array, read: Mapping[str, Array | None]) -> dict[str, Array]:
    """Return the gradients of q, k, v, scale, mu, kappa, step and tau.

    `read` are gradients of what else a loss may read: "weights", "scores" and "graph", or None.
    """
    d_x, d_attention, d_v, tau_terms = equations.active(readout).backward(saved.readout, d_out, read["weights"])
    d_x = _plus(d_x, read["scores"])
    module = equilibrium if saved.implicit and 0 not in d_x.shape else flow
    d_start, d_graph, numbers = equations.active(module).backward(saved.flow, d_x, tau_terms)
    d_links = _plus(d_graph, read["graph"])
    gradients = equations.active(graph).backward(saved.graph, d_attention, d_links, d_start)
    if d_v is None:
        d_v = sum_heads(d_start, saved.v_shape[1])  # "feature" starts at v
    return {**gradients, **numbers, "v": d_v}


def _plus(x: Array, more: Array | None) -> Array:
    return x if more is None else x + more


def balance_of(saved: graph.Saved) -> Array | None:
    """Return pi as (b, h, j, 1), adding up to 1; None where the graph is symmetric or has none."""
    if saved.balance is None:
        return None
    xp = namespace(saved.balance)
    total = xp.sum(saved.balance, axis=-2, keepdims=True)
    return saved.balance / xp.where(total > 0.0, total, 1.0)


def check_scores(inner: Saved) -> None:
    """Raise where finite scores have become infinite."""
    if all_finite(inner.readout.x) is not False:
        return
    links = inner.graph.graph.data if isinstance(inner.graph.graph, CSR) else inner.graph.graph
    if all_finite(inner.graph.start) is False or all_finite(links) is False:
        return  # so were the inputs
    at = next(n for n, x in enumerate(inner.flow.states) if all_finite(x) is False)
    raise FloatingPointError(f"the scores diverged at step {at}: reduce step, which is {inner.flow.law.step}")
