"""Graph energy attention with all options: what `.definition` says, put together from the objects of `.options`.

Equations of the graph, the flow and the readout (A(i) is the set of tokens that token i may attend; x starts at b). An
object of the call's options computes what stands behind "by", and its file has the equations; the formula here is that
of the default::

    [GE.1]  s_ij = scale q_i . k_j                  with a "bias" + bias_ij
    [GE.masked]  m_ij = s_ij if j in A(i), else -inf
    [GE.2]  a_ij = exp(m_ij) / sum_l exp(m_il)      0 if A(i) is empty
    [GE.3]  r_ij = (s_ij + s_ji) / 2                by `links`: what nodes are; -inf unless j is in A(i) and i in A(j)
    [GE.4]  n_ij = exp(r_ij) / sum_l exp(r_il)      only if links are made of it
    [GE.links]  w_ij = n_ij if i != j, else 0       by `links`
    [GE.5]  b_jc = sigmoid(s_jj)                    by `start`
    [GE.point]  y = x                               by `integrator`: where a stage of a step has come to
    [GE.6]  c_ic = sum_j w_ij g(y_jc - y_ic)        g = sin by "coupling"
    [GE.7]  rate = f(y; b) + kappa c                f(y; b) = mu (b - y) by "intrinsic"
    [GE.8]  x' = x + step rate                      by `integrator`, and by `threshold` if it acts on every step
    [GE.9]  y_jc = x_jc if x_jc >= tau, else 0      by `threshold`
    [GE.10]  u_ij = w_ij phi(y_ij)                  by `state`; phi(y) = max(y, 0), and y_ij = y_j1 for "token"
    [GE.11]  z_i = sum_j u_ij                       1 if i reads no token
    [GE.12]  p_ij = u_ij / z_i                      by `empty` if i reads no token
    [GE.13]  as in the definition                   "feature" has none of GE.10 to GE.13: o_i = y_i

Token i reads the j in A(i) with phi(y_ij) > 0. In GE.10 w_i is the softmax of m_i over these. In "query" m_jc is 1 if
query c may attend node j, else 0: m_jc f stands for f, and m_ic w_ij m_jc for w_ij.

Adjoints for given do (dGE.n is the gradient with respect to the value of GE.n), from the last step on; sums over steps
are over their stages, too::

    [dGE.v]  dv_j = sum_i p_ij do_i                 "feature": dv = db
    [dGE.12]  as in the definition
    [dGE.11]  dz_i = -sum_j dp_ij p_ij / z_i        0 if i reads no token
    [dGE.10]  du_ij = dp_ij / z_i + dz_i            0 if i reads no token
    [dGE.9]  dy_jc = sum_i du_ij w_ij if y_jc > 0   by `state`; "straight_through": if x_jc > 0
    [dGE.8]  dx' = dx                               of the step after; of the last by `threshold`, for dy of GE.9
    [dGE.7]  drate = step dx'                       by `integrator`
    [dGE.6]  dc = kappa drate
    [dGE.point]  dy_jc = f'(y_jc) drate_jc + sum_i g'(y_jc - y_ic) (w_ij dc_ic - w_ji dc_jc)
    [dGE.links]  dw_ij = sum over steps and channels of dc_ic g(y_jc - y_ic)
    [dGE.5]  db = dx of the first step + sum over steps of (df/db) drate
    [dGE.mu]  dmu = sum over steps of (df/dmu) drate
    [dGE.kappa]  dkappa = sum over steps of c drate
    [dGE.step]  dstep = sum over steps of rate drate / step
    [dGE.tau]  dtau = -sum dy sign(x)               by `threshold`; here of "soft", where |x| > tau
    [dGE.coefficients]  da_m = sum over steps of dc_ic sum_j w_ij (y_jc - y_ic)^(2m+1)     of a polynomial g
    [dGE.4]  dn_ij = dw_ij if i != j, else 0        by `links`
    [dGE.3]  as in the definition
    [dGE.2]  da_ij = 0                              with what `links`, `start` and `empty` add
    [dGE.masked]  dm_ij = a_ij (da_ij - sum_l a_il da_il)    with what GE.10 adds, the same of w_ij for du_ij phi(y_ij)
    [dGE.1]  ds_ij = dm_ij + (dr_ij + dr_ji) / 2    with what `start` adds, db_j b_j (1 - b_j) for i = j; `links`
    [dGE.q]  dq_i = scale sum_j ds_ij k_j
    [dGE.k]  dk_j = scale sum_i ds_ij q_i           with what `links` add over keys
    [dGE.scale]  dscale = sum_ij ds_ij q_i . k_j    with what `links` add over keys
    [dGE.start]  dstart = db                        summed over what a start that is given was broadcast to
    [dGE.bias]  dbias_ij = ds_ij                    summed over what the bias was broadcast to

If a loss reads p, x, b or w of "saved" beside o, that gradient is added to dp, dx', db, dw.

Axes: b batch, h query head, g key/value head, i token that attends, j token that is attended and node of the graph, c
channel of x, by default 1, d width of queries and keys, e width of values. Channels: i for "query", e for "feature".

Source: that of the definition. Links other than "kernel", states other than "token", and what becomes of emptied rows
are this library's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.graph_energy.equilibrium import rate_at_rest, still_flowing
from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.implementations.pairs import OverPairs
from refattn.mechanisms.graph_energy.implementations.separable import Factors
from refattn.mechanisms.graph_energy.options.call import Options, tau_of
from refattn.mechanisms.graph_energy.options.integrator import Stage, Step, Sums
from refattn.mechanisms.graph_energy.system import Graph, System, system_of, weights_of
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import own_pairs, where_allowed
from refattn.ops.softmax import softmax_and_sums, softmax_backward, softmax_forward
from refattn.ops.sums import moved_by, plus, summed_for, summed_to, with_transposed
from refattn.xp import Array, concrete, is_array, namespace, product, sum_wide, zeros


@dataclass(frozen=True)
class Flow:
    """What the backward of the flow reads; `states` are those after each step, where x starts first.

    With checkpoints there are a few of them.
    """

    graph: Graph
    system: System
    tau: Number
    steps: tuple[Step, ...]
    states: tuple[Array, ...]


@dataclass(frozen=True)
class Readout:
    """What the backward of the readout reads."""

    options: Options
    tau: Number
    allowed: Array | None
    v: Array  # (b, g, j, e)
    x: Array  # (b, h, j, c)
    kept: Array  # (b, h, j, c): the scores that the threshold has left
    near: Any = None  # (b, h, i, j): w of GE.10
    passed: Any = None  # (b, h, i, j): the derivative of u by phi(y)
    total: Any = None  # (b, h, i, 1)
    filled: Any = None  # (b, h, i, 1): whether the threshold left something
    weights: Any = None  # (b, h, i, j)


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    graph: Graph
    flow: Flow
    readout: Readout


def forward(
    q: Array, k: Array, v: Array, *, allowed: Array | None, options: Options, implementation: OverPairs
) -> tuple[Array, Saved]:
    """Return the output (b, h, i, e) and what `backward` reads; `implementation` sums over pairs.

    `allowed` (..., i, j) or None tells what is in A(i).
    """
    graph, masked = graph_forward(q, k, v, allowed=allowed, options=options)  # -, (b, h, i, j)
    tau = tau_of(options, allowed, graph.start)  # broadcasts to x
    x, flow = flow_forward(graph, tau, implementation)  # (b, h, j, c)
    more: Any = {"allowed": allowed, "options": options, "tau": tau}
    out, readout = readout_forward(x, masked, graph.attention, v, **more)  # (b, h, i, e)
    return out, Saved(graph, flow, readout)


def backward(saved: Saved, d_out: Array, **read: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v and of all numbers; `read` are those of what else a loss reads."""
    given = (saved.readout, d_out, read.get("weights"))
    d_x, d_read, d_attended, d_v, tau_terms = readout_backward(*given)  # (b, h, j, c)
    d_b, d_w, numbers = flow_backward(saved.flow, plus(d_x, read.get("scores")), tau_terms)  # (b, h, j, c)
    d_start = plus(d_b, read.get("start"))  # (b, h, j, c)
    d_graph = plus(d_w, read.get("graph"))  # (b, h, j, j) [dGE.links]
    begin = (saved.readout.v, read.get("sums"))
    d, d_begin = graph_backward(saved.graph, d_read, d_attended, d_graph, d_start, *begin)  # -, -
    return {**d, **numbers, "v": plus(d_v, d_begin)}


# --- the graph


def graph_forward(q: Array, k: Array, v: Array, *, allowed: Array | None, options: Options) -> tuple[Graph, Array]:
    """Return the graph (attention, the links and where scores start), and the masked matches (b, h, i, j)."""
    xp, linking = namespace(q, k), options.links
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    matches = plus(product(q, xp.matrix_transpose(k_heads)) * options.scale, options.bias)  # (b, h, i, j) [GE.1]
    if allowed is None:
        masked = matches  # (b, h, i, j)
    else:
        masked = xp.where(allowed, matches, -math.inf)  # (b, h, i, j) [GE.masked]
    attention = kernel = rows = None
    if options.reads_attention:
        attention = softmax_forward(masked)  # (b, h, i, j) [GE.2]
    pairs, both = linking.nodes.pairs(matches, k_heads, options.scale, allowed)  # (b, h, j, j), -
    if linking.of_alike:
        each = None if both is None else both & xp.matrix_transpose(both)  # (..., j, j): both ways
        mutual = where_allowed(each, linking.nodes.alike(pairs), -math.inf)  # (b, h, j, j) [GE.3]
        kernel, top, total = softmax_and_sums(mutual)  # (b, h, j, j) [GE.4], (b, h, j, 1), (b, h, j, 1)
        rows = (top, total) if linking.balanced else None
    own = own_pairs(k.shape[2], k)  # (j, j): whether i = j
    links = linking.forward(attention if kernel is None else kernel, both, pairs)  # (b, h, j, j)
    if is_array(links):
        links = xp.where(own, 0.0, links)  # (b, h, j, j) [GE.links]: a sparse graph has none on the diagonal
    start = options.starts.forward(matches, attention, v, own)  # (b, h, j, c) [GE.5]
    return Graph(options, q, k, attention, kernel, links, start, options.state.visible(allowed, q), rows), masked


def graph_backward(
    saved: Graph,
    d_read: Array | None,
    d_attended: Array | None,
    d_graph: Array,
    d_start: Array,
    v: Array,
    d_sums: Array | None = None,
) -> tuple[dict[str, Array], Array | None]:
    """Return the gradients of q, k, scale, bias and a start that is given, and of v if scores start there."""
    options, q, k, attention, kernel = saved.options, saved.q, saved.k, saved.attention, saved.kernel
    xp, linking, scale = namespace(q, k), options.links, options.scale
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    own = own_pairs(k.shape[2], k)  # (j, j): whether i = j
    d_made = d_mean = d_keys = d_scale_keys = None  # of parts that there are not
    # forward: start = options.starts.forward(matches, attention, v, own)
    begun = options.starts.backward(saved.start, own, d_start, v.shape[1])
    d_own, d_of_start, d_v = begun  # (b, h, i, j), (b, h, i, j), -
    # forward: links = where(own, 0.0, linking.forward(attention, or kernel))
    d_linked = xp.where(own, 0.0, d_graph)  # (b, h, j, j)
    if kernel is None:
        d_made = linking.backward(attention, d_linked)  # (b, h, i, j)
    else:
        d_kernel = linking.backward(kernel, d_linked)  # (b, h, j, j) [dGE.4]
        # forward: kernel = softmax(mutual)
        d_summed = None if d_sums is None else kernel * d_sums  # (b, h, j, j)
        d_mutual = plus(softmax_backward(kernel, d_kernel), d_summed)  # (b, h, j, j) [dGE.3]
        # forward: mutual = linking.nodes.alike(pairs)
        d_both = with_transposed(d_mutual)  # (b, h, j, j)
        d_mean, d_keys, d_scale_keys = linking.nodes.backward(d_both, k_heads)  # (b, h, i, j), (b, h, j, d), ()
    d_masked = d_read  # (b, h, i, j)
    if attention is not None:
        given = plus(plus(d_attended, d_made), d_of_start)  # (b, h, i, j)
        d_attention = zeros(attention.shape, attention) if given is None else given  # (b, h, i, j) [dGE.2]
        # forward: attention = softmax(masked), and the readout reads masked, too
        d_masked = plus(d_read, softmax_backward(attention, d_attention))  # (b, h, i, j) [dGE.masked]
    d_matches = plus(plus(d_masked, d_mean), d_own)  # (b, h, i, j) [dGE.1]
    # forward: matches = q @ k_heads^T * scale + bias; over keys pairs = k_heads @ k_heads^T * scale
    d_product = product(d_matches, k_heads)  # (b, h, i, d): dGE.q without its scale
    d_q = d_product * scale  # (b, h, i, d) [dGE.q]
    d_alike = plus(product(xp.matrix_transpose(d_matches), q), d_keys)  # (b, h, j, d): by query head, without its scale
    d_k = sum_heads(d_alike, k.shape[1]) * scale  # (b, g, j, d) [dGE.k]
    d_scale = plus(sum_wide(d_product * q), d_scale_keys)  # () [dGE.scale]
    found = {"q": d_q, "k": d_k, "scale": d_scale}
    if options.bias is not None:
        d_bias = summed_to(d_matches, options.bias.shape)  # [dGE.bias]
        found["bias"] = d_bias
    if options.start is not None:
        d_given = summed_to(d_start[..., 0], options.start.shape)  # [dGE.start]
        found["start"] = d_given
    return found, d_v


# --- the flow


def flow_forward(graph: Graph, tau: Number, implementation: OverPairs) -> tuple[Array, Flow]:
    """Return the scores (b, h, j, c) after the last step, and what `flow_backward` reads.

    `implementation` sums over pairs. A channel that has stopped takes steps of length 0: its factor of h,
    (b, h, 1, c), is 0, else 1, and a constant of the backward. It depends on all nodes of the channel.
    """
    options, method = graph.options, graph.options.integrator
    system = system_of(graph, implementation)
    x = graph.start  # (b, h, j, c)
    if options.jitter is not None:
        x = x + system.seen(options.jitter)  # (b, h, j, c)
    known = Flow(graph, system, tau, (), ())
    states, flows = [x], None
    steps: list[Step] = []
    energies: list[Array] = []
    stops = method.stops is not None
    balance = weights_of(graph) if method.reads_energy else 1.0  # one of each node, or 1
    for _ in range(options.steps):
        factor: Number = 1.0
        if stops:
            flows = still_flowing(method, system, balance, x, energies, flows)  # (b, h, 1, c)
            if concrete(namespace(x).any(flows > 0.0)) is False:
                break
            factor = flows  # (b, h, 1, c)
        x, taken = step_forward(known, x, factor)  # (b, h, j, c), -
        steps.append(taken if method.checkpoint is None else Step((), factor=taken.factor))
        if method.checkpoint is None or len(steps) % method.checkpoint == 0:
            states.append(x)
    if method.checkpoint is not None and len(steps) % method.checkpoint:
        states.append(x)
    return x, replace(known, steps=tuple(steps), states=tuple(states))


def step_forward(flow: Flow, x: Array, factor: Number) -> tuple[Array, Step]:
    """Return x' of a step whose length is a factor of h, and what its backward reads."""
    options = flow.graph.options
    step = options.threshold.around(options.integrator, flow.tau)
    rate = functools.partial(stage_forward, flow.system)
    x_next, stages = step.forward(rate, x, options.step * factor)  # (b, h, j, c) [GE.8], -
    return x_next, Step(stages, x_next, factor)


def stage_forward(system: System, x: Array, h: Number, alpha: Sequence[float], rates: Sequence[Array]) -> Stage:
    """Return the point of a stage, the pull there, the rate and what is kept; earlier stages had `rates`."""
    point = moved_by(x, h, alpha, rates) if rates else x  # (b, h, j, c) [GE.point]
    coupled, kept = system.coupled_keeping(point)  # (b, h, j, c) [GE.6], -
    rate = system.rate(point, coupled)  # (b, h, j, c) [GE.7]
    return point, coupled, rate, kept


def flow_backward(saved: Flow, d_x: Array, tau_terms: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the flow: of the start, of the links and of the numbers; `tau_terms` are given."""
    graph, options, tau, system = saved.graph, saved.graph.options, saved.tau, saved.system  # tau broadcasts to x
    none = zeros(graph.start.shape, graph.start)  # (b, h, j, c)
    no_powers = [zeros((), graph.start)] * len(options.coupling.powers)
    sums = Sums(start=none, mu=none, kappa=none, step=none, tau=tau_terms, edges=None, powers=no_powers)
    if options.integrator.adjoint == "implicit" and 0 not in d_x.shape:
        x = saved.states[-1]  # (b, h, j, c)
        d_rate = rate_at_rest(system, x, d_x)  # (b, h, j, c)
        rate_backward(system, sums, x, system.coupled(x), None, d_rate)
        d_x = none if system.visible is None else (1.0 - system.visible) * d_x  # (b, h, j, c): of nodes that stay
    else:
        step = options.threshold.around(options.integrator, tau)
        for taken in _last_first(saved):
            # forward: x_next, stages = step.forward(rate, x, h)
            d_next = d_x  # (b, h, j, c) [dGE.8]
            back = functools.partial(stage_backward, saved, taken, sums)
            d_x = step.backward(back, taken, options.step * taken.factor, d_next, sums)  # (b, h, j, c)
    shape = graph.links.shape if is_array(graph.links) else ()
    none, edges = zeros(shape, graph.start), sums["edges"]  # (b, h, j, j), as the implementation has them
    d_links = none if edges is None else edges.whole() if isinstance(edges, Factors) else edges  # (b, h, j, j)
    # forward: x = start, and start is b
    d_start = d_x + sums["start"]  # (b, h, j, c) [dGE.5]
    d_mu = summed_for(sums["mu"], options.mu)  # [dGE.mu]
    d_kappa = summed_for(sums["kappa"], options.kappa)  # [dGE.kappa]
    d_step = summed_for(sums["step"], options.step)  # [dGE.step]
    numbers = {"mu": d_mu, "kappa": d_kappa, "step": d_step}
    if options.tau is not None:
        d_tau = summed_for(sums["tau"], tau)  # [dGE.tau]
        numbers["tau"] = d_tau
    if options.coupling.powers:
        d_coefficients = namespace(d_x).stack(sums["powers"])  # [dGE.coefficients]
        numbers["coefficients"] = d_coefficients
    return d_start, d_links, numbers


def _last_first(flow: Flow) -> Iterator[Step]:
    """Yield the steps from the last to the first; those that were not kept are taken again, a few at a time."""
    every = flow.graph.options.integrator.checkpoint
    if every is None:
        yield from reversed(flow.steps)
        return
    for begin in reversed(range(0, len(flow.steps), every)):
        x, again = flow.states[begin // every], []  # (b, h, j, c), -
        for known in flow.steps[begin : begin + every]:
            x, taken = step_forward(flow, x, known.factor)  # (b, h, j, c), -
            again.append(taken)
        yield from reversed(again)


def stage_backward(saved: Flow, taken: Step, sums: Sums, stage: Stage, inner: Array) -> Array:
    """Return the gradient of the point of a stage for drate / h; those of all steps are added to `sums`."""
    point, coupled, rate, kept = stage  # (b, h, j, c) each, -
    h = saved.graph.options.step * taken.factor  # a number, or one of each channel
    d_rate = h * inner  # (b, h, j, c) [dGE.7]
    sums.add("step", taken.factor * inner * rate)
    return rate_backward(saved.system, sums, point, coupled, kept, d_rate)


def rate_backward(system: System, sums: Sums, point: Array, coupled: Array, kept: Any, d_rate: Array) -> Array:
    """Return the gradient of the point at which a rate was taken; the others are added to `sums`."""
    implementation, links, m, start, mu = system.implementation, system.links, system.visible, system.start, system.mu
    f = system.intrinsic
    # forward: rate = m f(point; start) + kappa coupled
    d_own = system.seen(d_rate)  # (b, h, j, c)
    sums.add("start", d_own * f.d_b(point, start, mu))
    sums.add("mu", d_own * f.d_mu(point, start, mu))
    sums.add("kappa", d_rate * coupled)
    d_coupled = system.kappa * d_rate  # (b, h, j, c) [dGE.6]
    # forward: coupled_i = sum_j w_ij g(y_j - y_i)
    pulls = [implementation.couple_forward(power, links, m, point) for power in system.coupling.powers]
    sums["powers"] = [a + sum_wide(d_coupled * pull) for a, pull in zip(sums["powers"], pulls, strict=True)]
    more = {} if kept is None else {"kept": kept}
    d_pull, d_edges = implementation.couple_backward(
        system.coupling, links, m, d_coupled, point, **more
    )  # (b, h, j, c), -
    sums["edges"] = plus(sums["edges"], d_edges)  # as the implementation has them
    d_point = d_own * f.d_x(point, start, mu) + d_pull  # (b, h, j, c) [dGE.point]
    return d_point


# --- the readout


def readout_forward(
    x: Array, masked: Any, attention: Any, v: Array, *, allowed: Array | None, options: Options, tau: Number
) -> tuple[Array, Readout]:
    """Return the readout: the output (b, h, i, e) for scores x (b, h, j, c), and what `readout_backward` reads."""
    xp, state, threshold = namespace(x), options.state, options.threshold
    kept = threshold.forward(x, tau)  # (b, h, j, c) [GE.9]
    known = Readout(options, tau, allowed, v, x, kept)
    if not state.weighs:
        return _read(allowed, kept), known
    rows = xp.matrix_transpose(xp.maximum(kept, zeros((), x)))  # (b, h, c, j): phi(y)
    dropped = xp.matrix_transpose(x) if threshold.passes_dropped else None  # (b, h, c, j): x, if all get a gradient
    near, passed, filled = state.near(masked, rows, allowed, dropped)  # (b, h, i, j), (b, h, i, j), (b, h, i, 1)
    parts = near * rows  # (b, h, i, j) [GE.10]
    total = xp.where(filled, xp.sum(parts, axis=-1, keepdims=True), 1.0)  # (b, h, i, 1) [GE.11]
    instead = threshold.emptied.forward(threshold, state, attention, x, allowed)  # (b, h, i, j)
    weights = xp.where(filled, parts / total, instead)  # (b, h, i, j) [GE.12]
    v_heads = repeat_heads(v, x.shape[1])  # (b, h, j, e): copies of v
    out = weights @ v_heads  # (b, h, i, e) [GE.13]
    return out, Readout(options, tau, allowed, v, x, kept, near, passed, total, filled, weights)


def readout_backward(
    saved: Readout, d_out: Array, read: Array | None
) -> tuple[Array, Array | None, Array | None, Array | None, Array]:
    """Return the gradients of the readout: of x, parts of those of the masked matches and of attention, where there are
    such, of v, and the terms of that of tau."""
    xp, state, threshold = namespace(d_out), saved.options.state, saved.options.threshold
    weights, total, filled = saved.weights, saved.total, saved.filled
    if not state.weighs:
        d_kept = _read(saved.allowed, d_out)  # (b, h, j, c) [dGE.9]
        d_x, tau_terms = threshold.backward(saved.x, saved.tau, d_kept)  # (b, h, j, c), (b, h, j, c)
        return d_x, None, None, None, tau_terms
    # forward: out = weights @ v_heads
    v_heads = repeat_heads(saved.v, d_out.shape[1])  # (b, h, j, e): copies of v
    d_v = sum_heads(xp.matrix_transpose(weights) @ d_out, saved.v.shape[1])  # (b, g, j, e) [dGE.v]
    d_weights = plus(d_out @ xp.matrix_transpose(v_heads), read)  # (b, h, i, j) [dGE.12]
    # forward: weights = where(filled, parts / total, instead)
    inner = xp.sum(d_weights * weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    d_total = xp.where(filled, -inner / total, 0.0)  # (b, h, i, 1) [dGE.11]
    # forward: total = sum(parts)
    d_parts = xp.where(filled, d_weights / total + d_total, 0.0)  # (b, h, i, j) [dGE.10]
    # forward: parts = near * rows; near = softmax(masked) over what is read
    rows = xp.matrix_transpose(xp.maximum(saved.kept, zeros((), d_out)))  # (b, h, c, j): phi(y)
    d_read, d_rows = state.backward(saved.near, saved.passed, rows, d_parts)  # (b, h, i, j), (b, h, j, c)
    # forward: instead = threshold.emptied.forward(...)
    d_attended = threshold.emptied.backward(filled, d_weights)  # (b, h, i, j)
    # forward: rows = max(kept, 0)^T
    d_kept = xp.where(threshold.positive(saved.x, saved.kept) <= 0.0, 0.0, d_rows)  # (b, h, j, c) [dGE.9]
    # forward: kept = threshold.forward(x, tau)
    d_x, tau_terms = threshold.backward(saved.x, saved.tau, d_kept)  # (b, h, j, c), (b, h, j, c)
    return d_x, d_read, d_attended, d_v, tau_terms


def _read(allowed: Array | None, x: Array) -> Array:
    """Return x, but 0 for a token that may attend nothing: scores that are the output, or their gradient."""
    alive = None if allowed is None else namespace(x).any(allowed, axis=-1, keepdims=True)  # (..., i, 1)
    return where_allowed(alive, x, 0.0)
