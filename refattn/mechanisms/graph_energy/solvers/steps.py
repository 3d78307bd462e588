"""The steps of the flow in general: GE.point, GE.6 to GE.8 and their adjoints, however a step is taken.

Steps are those of the integrators, as in `.dense`, which takes explicit ones of one length with every pair at once, to
the same bits. Here a step may also

- sum over pairs in another implementation;
- be shorter than h, by a factor (b, h, 1, c) that the backward takes for a constant: 0 for a channel that has stopped
  (`.stopping`), for "rk45" what its errors allow (`.rk45`), less than 1 where an equation had no solution. Such choices
  are made for each channel from all its nodes, later tokens too, and so never where scores are causal and nodes are in
  one channel;
- be defined by an equation for where it ends (`.implicit_midpoint`, `.discrete_gradient`, solved by `.newton`): then it
  has one stage, and dv / h solves M^T dv / h = dx' + what the stage itself gives;
- be taken again by the backward, from the last checkpoint on, to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from refattn import equations
from refattn.mechanisms.graph_energy import dense
from refattn.mechanisms.graph_energy.dense import Graph
from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.options import (
    RK45,
    DiscreteGradient,
    ImplicitMidpoint,
    Options,
    Stage,
    Step,
    Sums,
    tau_of,
)
from refattn.mechanisms.graph_energy.solvers import discrete_gradient, implicit_midpoint, rk45
from refattn.mechanisms.graph_energy.solvers.newton import end_of_step, pulled_back
from refattn.mechanisms.graph_energy.solvers.stopping import still_flowing
from refattn.mechanisms.graph_energy.system import System, system_of, weights_of
from refattn.ops.sums import moved_by, plus, sum_of, summed_for
from refattn.xp import Array, concrete, namespace, sum_wide, zeros

SOLVED: dict[type, Any] = {ImplicitMidpoint: implicit_midpoint, DiscreteGradient: discrete_gradient}
"""The methods whose steps are equations."""


@dataclass(frozen=True)
class Taken(Step):
    """A step, with x and x' of an implicit one."""

    ends: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Flow:
    """What the backward reads; `states` are those after each step, where x starts first, or with checkpoints a few."""

    graph: Graph
    system: System
    tau: Number
    steps: tuple[Taken, ...]
    states: tuple[Array, ...]


def forward(
    q: Array, k: Array, v: Array, *, allowed: Array | None, options: Options, implementation: ModuleType
) -> tuple[Array, dense.Saved]:
    """Return the output and what `backward` reads: as in `.dense`, with these steps; `implementation` sums pairs."""
    page = equations.active(dense)
    graph = page.graph_forward(q, k, v, allowed=allowed, options=options)
    tau = tau_of(options, allowed, graph.start)
    x, flow = flow_forward(graph, tau, implementation=implementation)
    out, readout = page.readout_forward(x, graph.attention, v, allowed=allowed, options=options, tau=tau)
    return out, dense.Saved(graph, flow, readout)


def backward(saved: dense.Saved, d_out: Array, *, adjoint: Any = None, **read: Array | None) -> dict[str, Array]:
    """Return all gradients: as in `.dense`, with `flow_backward` or another adjoint of the flow."""
    page, back = equations.active(dense), flow_backward if adjoint is None else adjoint
    d_x, d_attention, d_v, tau_terms = page.readout_backward(saved.readout, d_out, read.get("weights"))
    d_b, d_w, numbers = back(saved.flow, sum_of(d_x, read.get("scores")), tau_terms)
    d_start = sum_of(d_b, read.get("start"))
    d_graph = sum_of(d_w, read.get("graph"))  # [dGE.links]
    d, d_begin = page.graph_backward(saved.graph, d_attention, d_graph, d_start, saved.readout.v, read.get("sums"))
    return {**d, **numbers, "v": plus(d_v, d_begin)}


def flow_forward(graph: Graph, tau: Number, *, implementation: Any) -> tuple[Array, Flow]:
    """Return the scores after the last step, and what `flow_backward` reads; `implementation` sums over pairs."""
    options = graph.options
    system, method = system_of(graph, implementation), options.integrator
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
        x, taken = step_forward(known, x, factor)  # (b, h, j, c)
        steps.append(taken if method.checkpoint is None else Taken((), factor=taken.factor))
        if method.checkpoint is None or len(steps) % method.checkpoint == 0:
            states.append(x)
    if method.checkpoint is not None and len(steps) % method.checkpoint:
        states.append(x)
    return x, replace(known, steps=tuple(steps), states=tuple(states))


def step_forward(flow: Flow, x: Array, factor: Number) -> tuple[Array, Taken]:
    """Return x' of a step whose length is a factor of h, and what its backward reads."""
    options, system, ends = flow.graph.options, flow.system, None
    solved: Any = SOLVED.get(type(options.integrator))
    points: tuple[Array, ...] = ()
    if solved is not None:
        end, factor = end_of_step(solved, system, x, options.step, factor)  # (b, h, j, c), -
        ends, system, points = (x, end), solved.forces(system), solved.stage(x, end)
    step = options.threshold.around(options.integrator, flow.tau)
    rate = functools.partial(stage_forward, system, points)
    x_next, stages = step.forward(rate, x, options.step * factor)  # (b, h, j, c) [GE.8], -
    return x_next, Taken(stages, x_next, factor, ends)


def stage_forward(
    system: System, points: tuple[Array, ...], x: Array, h: Number, alpha: Sequence[float], rates: Sequence[Array]
) -> Stage:
    """Return the point of a stage, the pull there, the rate, and what is kept; `points` of a solved step."""
    begin, *others = points or (x,)
    point = moved_by(begin, h, alpha, rates)  # (b, h, j, c) [GE.point]
    coupled, kept = system.coupled_keeping(point, *others)  # (b, h, j, c) [GE.6]
    rate = system.rate(point, *others, coupled=coupled)  # (b, h, j, c) [GE.7]
    return point, coupled, rate, kept


def _last_first(flow: Flow) -> Iterator[Taken]:
    """Yield the steps from the last to the first; those that were not kept are taken again, a few at a time."""
    every = flow.graph.options.integrator.checkpoint
    if every is None:
        yield from reversed(flow.steps)
        return
    for begin in reversed(range(0, len(flow.steps), every)):
        x, again = flow.states[begin // every], []
        for known in flow.steps[begin : begin + every]:
            x, taken = step_forward(flow, x, known.factor)
            again.append(taken)
        yield from reversed(again)


def flow_backward(saved: Flow, d_x: Array, tau_terms: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the start and of the links, and those of the numbers; `tau_terms` are of the readout."""
    options, tau, start, system = saved.graph.options, saved.tau, saved.graph.start, saved.system
    step = options.threshold.around(options.integrator, tau)
    none = zeros(start.shape, start)  # (b, h, j, c)
    sums = Sums(start=none, mu=none, kappa=none, step=none, tau=tau_terms, edges=None)
    sums["powers"] = [zeros((), start)] * len(system.coupling.powers)
    for taken in _last_first(saved):
        d_next = d_x  # (b, h, j, c) [dGE.8]
        rate_backward = functools.partial(stage_backward, saved, taken, sums)
        d_x = step.backward(rate_backward, taken, options.step * taken.factor, d_next, sums)
    d_links = system.implementation.links_gradient(sums["edges"], system.links)
    # forward: x = start, and start is b
    d_start = d_x + sums["start"]  # (b, h, j, c) [dGE.5]
    d_mu = summed_for(sums["mu"], system.mu)  # [dGE.mu]
    d_kappa = summed_for(sums["kappa"], system.kappa)  # [dGE.kappa]
    d_step = summed_for(sums["step"], options.step)  # [dGE.step]
    numbers = {"mu": d_mu, "kappa": d_kappa, "step": d_step}
    if options.tau is not None:
        d_tau = summed_for(sums["tau"], tau)  # [dGE.tau]
        numbers["tau"] = d_tau
    if system.coupling.powers:
        d_coefficients = namespace(d_x).stack(sums["powers"])  # [dGE.coefficients]
        numbers["coefficients"] = d_coefficients
    return d_start, d_links, numbers


def stage_backward(saved: Flow, taken: Taken, sums: Sums, stage: Stage, inner: Array) -> Array:
    """Return the gradient of the point of a stage for drate / h; those of all steps are added to `sums`."""
    point, coupled, rate, kept = stage  # (b, h, j, c) each, -
    options, start, h = saved.graph.options, saved.graph.start, saved.graph.options.step * taken.factor
    solved: Any = SOLVED.get(type(options.integrator))
    system, others = saved.system, tuple[Array, ...]()
    if taken.ends is not None:
        inner = pulled_back(solved, system, *taken.ends, h, inner)
        system, others = solved.forces(system), solved.stage(*taken.ends)[1:]
    f: Any = system.intrinsic  # of a point, or between two
    implementation, mu, visible = system.implementation, system.mu, system.visible
    d_rate = h * inner  # (b, h, j, c) [dGE.7]
    sums.add("step", taken.factor * inner * rate)
    # forward: rate = m f(point; start) + kappa coupled
    d_own = system.seen(d_rate)
    sums.add("start", d_own * f.d_b(point, *others, start, mu))
    sums.add("mu", d_own * f.d_mu(point, *others, start, mu))
    sums.add("kappa", d_rate * coupled)
    d_coupled = system.kappa * d_rate  # (b, h, j, c) [dGE.6]
    # forward: coupled = m sum_j w_ij m_jc g(y_jc - y_ic)
    powers = [
        implementation.couple_forward(power, system.links, visible, point, *others) for power in system.coupling.powers
    ]
    sums["powers"] = [a + sum_wide(d_coupled * pulled) for a, pulled in zip(sums["powers"], powers, strict=True)]
    more = {} if kept is None else {"kept": kept}
    d_pull, d_edges = implementation.couple_backward(
        system.coupling, system.links, visible, d_coupled, point, *others, **more
    )
    sums["edges"] = implementation.gathered(sums["edges"], d_edges)
    d_point = d_own * f.d_x(point, *others, start, mu) + d_pull  # (b, h, j, c) [dGE.point]
    return d_point
