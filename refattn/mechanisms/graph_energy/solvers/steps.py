"""The flow of scores on a graph: odd coupling along its edges, an intrinsic force, and steps of a Runge-Kutta method.

Equations (w, b of the graph; m_jc is 1 where node j exists in channel c, else 0; each stage of a step is a pass of GE.8
to GE.10, each step one of GE.11)::

    [GE.8]  y = x + h sum_l alpha_nl v_l                 stage n; the first stage, and so the only one of Euler: y = x
    [GE.9]  c_ic = m_ic sum_j w_ij m_jc g(y_jc - y_ic)
    [GE.10]  v = m f(y; b) + kappa c
    [GE.11]  x' = x + h sum_n beta_n v_n                 "proximal": of that z, z - h tau if z > h tau, else 0

Adjoints, from the last step to the first and in each from the last stage; dx' of the last step came in, and after the
first step dx is the gradient of the start::

    [dGE.11]  dx'                                        of an earlier step: dz + sum_n dy_n of the step after it
    [dGE.10]  dv_n = h (beta_n dz + sum_{l>n} alpha_ln dy_l)   with dz = dx', for "proximal" 0 where x' = 0
    [dGE.9]  dc = kappa dv
    [dGE.8]  dy_jc = m f'(y_jc) dv_jc + m sum_i m g'(y_jc - y_ic) (w_ij dc_ic - w_ji dc_jc)
    [dGE.6]  dw_ij = sum over stages and channels of m m dc_ic g(y_jc - y_ic)
    [dGE.7]  db = dx + sum over stages of m (df/db) dv
    [dGE.mu]  dmu = sum over stages of m (df/dmu) dv
    [dGE.kappa]  dkappa = sum over stages of c dv
    [dGE.step]  dh = sum over stages of v dv / h         "proximal": - tau sum over steps of dz sign(x')
    [dGE.tau]  dtau = -sum dy sign(x) where |x| > tau    of GE.12, "soft"; "proximal": -h sum over steps of dz sign(x')
    [dGE.coefficients]  da_m = sum over stages of dc_ic m_ic sum_j w_ij m_jc (y_jc - y_ic)^(2m+1)     for a polynomial g

"implicit_midpoint" has one stage with y = (x + x') / 2, and so dv = h (dx' + dy / 2). In "discrete_gradient" y runs
from x to x', and wherever y stands the mean over that way is meant; dv = h (dx' + (dv/dx')^T dv). Both are equations
for x', and for dv, which `refattn.mechanisms.graph_energy.implicit` solves.

A step may be shorter than h, by a factor that the backward takes for a constant: 0 for a channel that has stopped
(`refattn.mechanisms.graph_energy.stopping`), for "rk45" what its errors allow (`.adaptive`). Such choices are made for
each channel from all its nodes, later tokens too, and so never where scores are causal and nodes are in one channel.

With "proximal" steps are those of the iterative shrinkage-thresholding algorithm, which lower E + tau sum |x| where
h <= 1/L; with `signed` |z| > h tau keeps z - h tau sign(z).

The first x is b, or with a jitter b + m jitter: a constant of the backward, which takes scores away from where they
would rest but not stay, such as the ridge between two wells.

This is the adjoint of the steps that were taken, not that of the differential equation.

Where w is symmetric v = -grad E with E(x) = sum F(x; b) + kappa/2 sum_ij w_ij G(x_j - x_i), F' = -f and G' = g; with
detailed balance in the inner product with weights pi (`refattn.mechanisms.graph_energy.energies`). An Euler step then
lowers E where h <= 2/L, L = sup |f'| + 2 kappa sup |g'| max_i sum_j w_ij.

Axes: b batch, h query head, i and j nodes, c channel.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium): the equation of a node and the
gradient flow; D. Sclosa (arXiv:2308.08311), equation 1.

How the source differs: it uses f and g for forces and for energies; here g and f are forces, G and F their potentials.
The graph stays as it is while scores flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refattn.mechanisms.graph_energy import adaptive
from refattn.mechanisms.graph_energy.implicit import end_of_step, pulled_back
from refattn.mechanisms.graph_energy.intrinsic import Number
from refattn.mechanisms.graph_energy.law import Law
from refattn.mechanisms.graph_energy.means import along
from refattn.mechanisms.graph_energy.sparse import CSR
from refattn.mechanisms.graph_energy.stopping import still_flowing
from refattn.mechanisms.graph_energy.tableaus import (
    TABLEAUS,
    Tableau,
    first,
    moved,
    plus,
    seen,
    shrink,
    summed,
    weighted,
)
from refattn.xp import Array, concrete, namespace, sum_wide, zeros


@dataclass(frozen=True)
class Step:
    """What the backward of a step reads: by stage the points (b, h, j, c), their couplings and rates; or not kept."""

    factor: Number  # of the step, a float or (b, h, 1, c)
    points: tuple[Array, ...]
    couplings: tuple[Array, ...]
    rates: tuple[Array, ...]
    ends: tuple[Array, Array] | None  # x and x' of an implicit step
    shrunk: Array | None = None  # x' where the threshold acts after every step


@dataclass(frozen=True)
class Saved:
    """What the backward of the flow reads."""

    law: Law
    graph: Array | CSR
    start: Array
    visible: Array | None
    steps: tuple[Step, ...]
    states: tuple[Array, ...]  # after each step, the start first; with checkpoints, those and the last


def forward(law: Law, graph: Array, start: Array, visible: Array | None) -> tuple[Array, Saved]:
    """Return the scores after the last step, and what `backward` reads."""
    x = first(law, start, visible)  # (b, h, j, c): GE.7, and a jitter
    states, flows = [x], None
    steps: list[Step] = []
    energies: list[Array] = []
    factors: list[Number] = [1.0] * law.steps
    if law.integrator == "rk45":
        factors = [*adaptive.plan(law, graph, start, visible)]
    for factor in factors:
        if law.stop is not None:
            flows = still_flowing(law, graph, start, visible, x, energies, flows)  # 1 or 0 by channel
            if concrete(namespace(x).any(flows > 0.0)) is False:
                break
            factor = factor * flows  # (b, h, 1, c): 0 for a channel that has stopped
        x, step = _step(law, graph, start, visible, x, factor)  # GE.11, tagged there
        steps.append(step if law.checkpoint is None else Step(step.factor, (), (), (), None))
        if law.checkpoint is None or len(steps) % law.checkpoint == 0:
            states.append(x)
    if law.checkpoint is not None and len(steps) % law.checkpoint:
        states.append(x)
    return x, Saved(law, graph, start, visible, tuple(steps), tuple(states))


def _step(law: Law, graph: Array, start: Array, visible: Array | None, x: Array, factor: Number) -> tuple[Array, Step]:
    tableau, f = TABLEAUS[law.integrator], law.intrinsic.force
    ends = after = None
    if tableau.implicit:
        end, factor = end_of_step(law, graph, start, visible, x, factor)  # GE.11
        ends = (x, end)
        after = end if law.integrator == "discrete_gradient" else None  # GE.11
    h = law.step * factor  # of this step
    ys: list[Array] = []
    cs: list[Array] = []
    vs: list[Array] = []
    for row in tableau.stages:
        between = x if ends is None or after is not None else 0.5 * (x + ends[1])  # where y begins
        point = moved(between, h, weighted(row, vs))  # (b, h, j, c) [GE.8]
        coupled = law.form.couple_forward(law.coupling, graph, visible, point, after)  # (b, h, j, c) [GE.9]
        rate = seen(visible, along(f, point, after, start, law.mu)) + law.kappa * coupled  # (b, h, j, c) [GE.10]
        ys, cs, vs = [*ys, point], [*cs, coupled], [*vs, rate]
    there = moved(x, h, weighted(tableau.weights, vs))  # (b, h, j, c): GE.11 before a threshold
    x_next = shrink(law.threshold, h, there)  # (b, h, j, c) [GE.11]
    return x_next, Step(factor, tuple(ys), tuple(cs), tuple(vs), ends, x_next if law.shrinks else None)


def _last_first(saved: Saved) -> Iterator[Step]:
    """Yield the steps from the last to the first; those that were not kept are taken again, a few at a time."""
    law, every = saved.law, saved.law.checkpoint
    if every is None:
        yield from reversed(saved.steps)
        return
    for begin in reversed(range(0, len(saved.steps), every)):
        x, again = saved.states[begin // every], []  # GE.11
        for known in saved.steps[begin : begin + every]:
            x, step = _step(law, saved.graph, saved.start, saved.visible, x, known.factor)  # GE.11
            again.append(step)
        yield from reversed(again)


def backward(saved: Saved, d_x: Array, tau_terms: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the start and of the graph, and those of the numbers; `tau_terms` are of the readout."""
    law, start, visible = saved.law, saved.start, saved.visible
    f, tableau = law.intrinsic, TABLEAUS[law.integrator]
    zero = zeros(start.shape, start)  # (b, h, j, c): nothing yet
    edges = None
    d_anchor, mu_terms, kappa_terms, step_terms = zero, zero, zero, zero
    powers = [sum_wide(zero)] * len(law.coupling.powers)
    for step in _last_first(saved):
        h, ys = law.step * step.factor, step.points  # of this step
        after = step.ends[1] if step.ends and law.integrator == "discrete_gradient" else None  # x'
        d_next = d_x  # (b, h, j, c) [dGE.11]
        d_end = d_next  # (b, h, j, c): dz
        if step.shrunk is not None and law.threshold is not None:
            # forward: x = sign(there) (|there| - h tau) where that is positive
            d_end = namespace(d_x).where(step.shrunk == 0.0, 0.0, d_next)  # (b, h, j, c): dz
            pushed = d_end * namespace(d_x).sign(step.shrunk)  # (b, h, j, c): part of dGE.tau and dGE.step
            tau_terms = tau_terms - h * pushed  # (b, h, j, c): part of dGE.tau
            step_terms = step_terms - law.threshold.tau * step.factor * pushed  # (b, h, j, c): of dGE.step
        d_x = d_end  # (b, h, j, c): part of dGE.11 of the step before
        d_ys: list[Array | None] = [None] * len(ys)
        for n in reversed(range(len(ys))):
            # forward: x = x + h sum_n beta_n v_n; point = x + h sum_l alpha_nl v_l
            inner = _inner(saved, step, tableau, n, d_end, d_ys)  # (b, h, j, c): dGE.10 without h
            d_rate = h * inner  # (b, h, j, c) [dGE.10]
            step_terms = step_terms + step.factor * inner * step.rates[n]  # (b, h, j, c): part of dGE.step
            # forward: rate = m f(point; start) + kappa coupled
            d_coupled = law.kappa * d_rate  # (b, h, j, c) [dGE.9]
            for m, power in enumerate(law.coupling.powers):
                pulled = law.form.couple_forward(power, saved.graph, visible, ys[n], after)  # (b, h, j, c): of x^(2m+1)
                powers[m] = powers[m] + sum_wide(d_coupled * pulled)  # (): part of dGE.coefficients
            d_force = seen(visible, d_rate)  # (b, h, j, c): part of dGE.8, dGE.7 and dGE.mu
            slopes = [along(df, ys[n], after, start, law.mu) for df in (f.d_b, f.d_mu, f.d_x)]
            d_anchor = d_anchor + d_force * slopes[0]  # (b, h, j, c): part of dGE.7
            mu_terms = mu_terms + d_force * slopes[1]  # (b, h, j, c): part of dGE.mu
            kappa_terms = kappa_terms + d_rate * step.couplings[n]  # (b, h, j, c): part of dGE.kappa
            # forward: coupled = m sum_j w_ij m_jc g(y_jc - y_ic)
            d_pull, d_edges = law.form.couple_backward(
                law.coupling, saved.graph, visible, ys[n], after, d_coupled
            )  # parts of dGE.8 and dGE.6
            edges = law.form.gathered(edges, d_edges)  # part of dGE.6, in some form
            d_point = d_force * slopes[2] + d_pull  # (b, h, j, c) [dGE.8]
            d_ys[n] = d_point
            d_x = d_x + d_point  # (b, h, j, c): dGE.11 of the step before
    d_graph = law.form.graph_gradient(edges, saved.graph)  # (b, h, j, j) [dGE.6]
    # forward: x = start, and start is b
    d_start = d_x + d_anchor  # (b, h, j, c) [dGE.7]
    d_mu = summed(mu_terms, law.mu)  # [dGE.mu]
    d_kappa = summed(kappa_terms, law.kappa)  # [dGE.kappa]
    numbers = {"mu": d_mu, "kappa": d_kappa}
    if law.given:
        d_step = summed(step_terms, law.step)  # [dGE.step]
        numbers["step"] = d_step
    if law.threshold is not None and law.threshold.given:
        d_tau = summed(tau_terms, law.threshold.tau)  # [dGE.tau]
        numbers["tau"] = d_tau
    if powers:
        d_coefficients = namespace(d_x).stack(powers)  # [dGE.coefficients]
        numbers["coefficients"] = d_coefficients
    return d_start, d_graph, numbers


def _inner(saved: Saved, step: Step, tableau: Tableau, n: int, d_end: Array, d_ys: list[Array | None]) -> Array:
    """Return dv_n / h."""
    later = [tableau.stages[m][n] for m in range(n + 1, len(d_ys))]
    inner = plus(tableau.weights[n] * d_end, 1.0, weighted(later, d_ys[n + 1 :]))  # of later stages
    if step.ends is None:
        return inner
    law = saved.law
    return pulled_back(law, saved.graph, saved.start, saved.visible, *step.ends, law.step * step.factor, inner)
