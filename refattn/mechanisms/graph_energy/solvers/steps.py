"""The steps of the flow in general: GE.point, GE.6 to GE.8 and their adjoints, however a step is taken.

What the definition takes straight, explicit steps of one length with every pair at once, gives the same bits here. Here
a step may also

- sum over pairs in another form;
- be shorter than h, by a factor (b, h, 1, c) that the backward takes for a constant: 0 for a channel that has stopped
  (`.stopping`), for "rk45" what its errors allow (`.rk45`), less than 1 where an equation had no solution. Such choices
  are made for each channel from all its nodes, later tokens too, and so never where scores are causal and nodes are in
  one channel;
- be defined by an equation for where it ends (`.implicit_midpoint`, `.discrete_gradient`, solved by `.newton`): then it
  has one stage, and dv / h solves M^T dv / h = dx' + what the stage itself gives;
- be taken again by the backward, from the last checkpoint on, to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from refattn import equations
from refattn.mechanisms.graph_energy import dense
from refattn.mechanisms.graph_energy.dense import Graph, Step
from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.options import (
    RK45,
    DiscreteGradient,
    ImplicitMidpoint,
    Options,
    Proximal,
    tau_of,
)
from refattn.mechanisms.graph_energy.solvers import discrete_gradient, implicit_midpoint, rk45
from refattn.mechanisms.graph_energy.solvers.newton import end_of_step, pulled_back
from refattn.mechanisms.graph_energy.solvers.stopping import still_flowing
from refattn.mechanisms.graph_energy.system import System, system_of, weights_of
from refattn.ops.activations import soft_threshold
from refattn.ops.heads import sum_heads
from refattn.ops.sums import moved_by, sum_of, summed_for
from refattn.xp import Array, concrete, namespace, sum_wide, zeros

SOLVED: dict[type, Any] = {ImplicitMidpoint: implicit_midpoint, DiscreteGradient: discrete_gradient}
"""The methods whose steps are equations."""


@dataclass(frozen=True)
class Taken(Step):
    """A step, with x and x' of an implicit one, and what the form kept of each stage for its backward."""

    ends: tuple[Array, Array] | None = None
    kept: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Flow:
    """What the backward reads; `states` are those after each step, where x starts first, or with checkpoints a few."""

    graph: Graph
    system: System
    tau: Number
    steps: tuple[Taken, ...]
    states: tuple[Array, ...]


def forward(
    q: Array, k: Array, v: Array, *, allowed: Array | None, options: Options, form: ModuleType
) -> tuple[Array, dense.Saved]:
    """Return the output and what `backward` reads: as the definition, with these steps; `form` sums over pairs."""
    page = equations.active(dense)
    graph = page.graph_forward(q, k, v, allowed=allowed, options=options)
    tau = tau_of(options, allowed, graph.start)
    x, flow = flow_forward(graph, tau, form=form)
    out, readout = page.readout_forward(x, graph.attention, v, allowed=allowed, options=options, tau=tau)
    return out, dense.Saved(graph, flow, readout)


def backward(saved: dense.Saved, d_out: Array, *, adjoint: Any = None, **read: Array | None) -> dict[str, Array]:
    """Return all gradients: as the definition, with `flow_backward` or another adjoint of the flow."""
    page, back = equations.active(dense), flow_backward if adjoint is None else adjoint
    d_x, d_attention, d_v, tau_terms = page.readout_backward(saved.readout, d_out, read.get("weights"))
    d_b, d_w, numbers = back(saved.flow, sum_of(d_x, read.get("scores")), tau_terms)
    d_start = sum_of(d_b, read.get("start"))
    d_graph = sum_of(d_w, read.get("graph"))  # [dGE.links]
    d = page.graph_backward(saved.graph, d_attention, d_graph, d_start, read.get("sums"))
    return {**d, **numbers, "v": sum_heads(d_start, saved.readout.v.shape[1]) if d_v is None else d_v}


def flow_forward(graph: Graph, tau: Number, *, form: Any) -> tuple[Array, Flow]:
    """Return the scores after the last step, and what `flow_backward` reads; `form` sums over pairs."""
    options = graph.options
    system, method = system_of(graph, form), options.integrator
    x = graph.start if options.jitter is None else graph.start + system.seen(options.jitter)  # (b, h, j, c)
    known = Flow(graph, system, tau, (), ())
    states, flows = [x], None
    steps: list[Taken] = []
    energies: list[Array] = []
    factors: list[Number] = [1.0] * options.steps
    if isinstance(method, RK45):
        factors = [*rk45.plan(method, system, x, options.step, options.steps)]
    balance = weights_of(graph) if method.reads_energy else 1.0
    for factor in factors:
        if method.stops:
            flows = still_flowing(method, system, balance, x, energies, flows)
            if concrete(namespace(x).any(flows > 0.0)) is False:
                break
            factor = factor * flows  # (b, h, 1, c): 0 for a channel that has stopped
        x, taken = _step(known, x, factor)  # (b, h, j, c)
        steps.append(taken if method.checkpoint is None else Taken((), factor=taken.factor))
        if method.checkpoint is None or len(steps) % method.checkpoint == 0:
            states.append(x)
    if method.checkpoint is not None and len(steps) % method.checkpoint:
        states.append(x)
    return x, replace(known, steps=tuple(steps), states=tuple(states))


def _method(options: Options) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Return alpha and beta; a step that is an equation has one stage."""
    how = options.integrator
    return (rk45.ALPHAS, rk45.BETA) if isinstance(how, RK45) else (how.alphas, how.beta)


def _step(flow: Flow, x: Array, factor: Number) -> tuple[Array, Taken]:
    options, system = flow.graph.options, flow.system
    alphas, beta = _method(options)
    solved: Any = SOLVED.get(type(options.integrator))
    ends = None
    if solved is not None:
        end, factor = end_of_step(solved, system, x, options.step, factor)  # (b, h, j, c)
        ends, system = (x, end), solved.forces(system)
    h = options.step * factor
    stages: list[tuple[Array, Array, Array]] = []
    every: list[Any] = []
    for alpha in alphas:
        points = (x,) if ends is None else solved.stage(*ends)
        point = moved_by(points[0], h, alpha, [rate for _, _, rate in stages])  # (b, h, j, c) [GE.point]
        coupled, kept = system.coupled_keeping(point, *points[1:])  # (b, h, j, c) [GE.6]
        rate = system.rate(point, *points[1:], coupled=coupled)  # (b, h, j, c) [GE.7]
        stages.append((point, coupled, rate))
        every.append(kept)
    if isinstance(options.threshold, Proximal):
        there = moved_by(x, h, beta, [rate for _, _, rate in stages])  # (b, h, j, c)
        x_next = soft_threshold(there, h * flow.tau, signed=options.signed)  # (b, h, j, c) [GE.8]
        return x_next, Taken(tuple(stages), factor, x_next, kept=tuple(every))
    x_next = moved_by(x, h, beta, [rate for _, _, rate in stages])  # (b, h, j, c) [GE.8]
    return x_next, Taken(tuple(stages), factor, None, ends, tuple(every))


def _last_first(flow: Flow) -> Iterator[Taken]:
    """Yield the steps from the last to the first; those that were not kept are taken again, a few at a time."""
    every = flow.graph.options.integrator.checkpoint
    if every is None:
        yield from reversed(flow.steps)
        return
    for begin in reversed(range(0, len(flow.steps), every)):
        x, again = flow.states[begin // every], []
        for known in flow.steps[begin : begin + every]:
            x, taken = _step(flow, x, known.factor)
            again.append(taken)
        yield from reversed(again)


def flow_backward(saved: Flow, d_x: Array, tau_terms: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the start and of the links, and those of the numbers; `tau_terms` are of the readout."""
    options, tau, start, visible = saved.graph.options, saved.tau, saved.graph.start, saved.system.visible
    xp, (alphas, beta) = namespace(d_x), _method(options)
    solved: Any = SOLVED.get(type(options.integrator))
    system = saved.system if solved is None else solved.forces(saved.system)
    g, form, mu = system.coupling, system.form, system.mu
    f: Any = system.intrinsic  # of a point, or between two
    edges = None
    d_anchor = mu_terms = kappa_terms = step_terms = zeros(start.shape, start)  # (b, h, j, c)
    powers = [zeros((), start)] * len(g.powers)
    d_points: list[Array] = []  # of the step after, as d_end
    d_end = d_x  # (b, h, j, c)
    for step in _last_first(saved):
        h = options.step * step.factor
        d_next = sum_of(d_end, *d_points)  # (b, h, j, c) [dGE.8]
        d_end = d_next
        if step.shrunk is not None:
            # forward: x = sign(there) (|there| - h tau) where that is positive
            d_end = xp.where(step.shrunk == 0.0, 0.0, d_next)
            pushed = d_end * xp.sign(step.shrunk)
            tau_terms = tau_terms - h * pushed
            step_terms = step_terms - tau * step.factor * pushed
        d_points = []
        for n in reversed(range(len(beta))):
            point, coupled, rate = step.stages[n]
            points = (point,) if step.ends is None else (point, *solved.stage(*step.ends)[1:])
            # forward: x = x + h sum_n beta_n rate_n; point = x + h sum_l alpha_nl rate_l
            later = [alphas[m][n] for m in reversed(range(n + 1, len(beta)))]
            inner = moved_by(beta[n] * d_end, 1.0, later, d_points)
            if step.ends is not None:
                inner = pulled_back(solved, saved.system, *step.ends, h, inner)
            d_rate = h * inner  # (b, h, j, c) [dGE.7]
            step_terms = step_terms + step.factor * inner * rate
            # forward: rate = m f(point; start) + kappa coupled
            d_own = system.seen(d_rate)
            d_anchor = d_anchor + d_own * f.d_b(*points, start, mu)
            mu_terms = mu_terms + d_own * f.d_mu(*points, start, mu)
            kappa_terms = kappa_terms + d_rate * coupled
            d_coupled = system.kappa * d_rate  # (b, h, j, c) [dGE.6]
            # forward: coupled = m sum_j w_ij m_jc g(y_jc - y_ic)
            for m, power in enumerate(g.powers):
                pulled = form.couple_forward(power, system.links, visible, *points)
                powers[m] = powers[m] + sum_wide(d_coupled * pulled)
            kept = {} if step.kept[n] is None else {"kept": step.kept[n]}
            d_pull, d_edges = form.couple_backward(g, system.links, visible, d_coupled, *points, **kept)
            edges = form.gathered(edges, d_edges)
            d_point = d_own * f.d_x(*points, start, mu) + d_pull  # (b, h, j, c) [dGE.point]
            d_points.append(d_point)
    d_links = form.links_gradient(edges, system.links)
    # forward: x = start, and start is b
    d_start = sum_of(d_end, *d_points, d_anchor)  # (b, h, j, c) [dGE.5]
    d_mu = summed_for(mu_terms, mu)  # [dGE.mu]
    d_kappa = summed_for(kappa_terms, system.kappa)  # [dGE.kappa]
    d_step = summed_for(step_terms, options.step)  # [dGE.step]
    numbers = {"mu": d_mu, "kappa": d_kappa, "step": d_step}
    if options.tau is not None:
        d_tau = summed_for(tau_terms, tau)  # [dGE.tau]
        numbers["tau"] = d_tau
    if powers:
        d_coefficients = xp.stack(powers)  # [dGE.coefficients]
        numbers["coefficients"] = d_coefficients
    return d_start, d_links, numbers
