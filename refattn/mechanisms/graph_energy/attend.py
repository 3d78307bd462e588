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
from refattn.mechanisms.graph_energy.total_energy import energy_backward
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, all_finite, concrete, namespace


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

    `read` are gradients of what else a loss may read: "weights", "scores", "graph" and "energy", or None.
    """
    d = None
    if read["energy"] is not None:
        inner, balance = saved.flow, weights_of(saved.graph)
        x = inner.states[-1]
        d = energy_backward(inner.law, inner.graph, inner.start, inner.visible, balance, x, read["energy"])
    d_x, d_attention, d_v, tau_terms = equations.active(readout).backward(saved.readout, d_out, read["weights"])
    d_x = _plus(_plus(d_x, read["scores"]), None if d is None else d.x)
    module = equilibrium if saved.implicit and 0 not in d_x.shape else flow
    d_start, d_graph, numbers = equations.active(module).backward(saved.flow, d_x, tau_terms)
    d_links = _plus(d_graph, read["graph"])
    d_lse = None
    if d is not None:
        d_links, d_start = d_links + d.graph, d_start + d.start
        numbers |= {name: numbers[name] + more for name, more in d.numbers.items()}
        if (pi := balance_of(saved.graph)) is not None:
            # forward: pi = exp(lse) / sum of exp(lse)
            d_lse = pi * (d.balance - namespace(pi).sum(pi * d.balance, axis=-2, keepdims=True))
    gradients = equations.active(graph).backward(saved.graph, d_attention, d_links, d_start, d_lse)
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


def weights_of(saved: graph.Saved) -> Array | float:
    """Return pi as (b, h, j, 1), or 1 where the graph is symmetric; raise ValueError where it has no such weights."""
    links = saved.graph
    if isinstance(links, CSR):
        raise ValueError("saved: got a flow on a sparse graph, whose energy is not computed; needs a dense one")
    if (balance := balance_of(saved)) is not None:
        return balance
    xp = namespace(links)
    if saved.symmetrise in ("none", "given"):
        asymmetry = xp.max(xp.abs(links - xp.matrix_transpose(links))) if links.shape[-1] else 0.0
        if not concrete(asymmetry == 0.0):
            raise ValueError(
                f"an energy exists only for graphs with detailed balance; |w_ij - w_ji| is up to {asymmetry}"
            )
    return 1.0


def check_scores(inner: Saved) -> None:
    """Raise where finite scores have become infinite."""
    if all_finite(inner.readout.x) is not False:
        return
    links = inner.graph.graph.data if isinstance(inner.graph.graph, CSR) else inner.graph.graph
    if all_finite(inner.graph.start) is False or all_finite(links) is False:
        return  # so were the inputs
    at = next(n for n, x in enumerate(inner.flow.states) if all_finite(x) is False)
    raise FloatingPointError(f"the scores diverged at step {at}: reduce step, which is {inner.flow.law.step}")
