"""Graph energy attention, the definition: scores flow on a graph of the tokens, down an energy, and weigh attention.

Equations of the graph, the flow and the readout (A(i) is the set of tokens that token i may attend; x starts at b)::

    [GE.1]  s_ij = scale q_i . k_j                      and with a "bias" + bias_ij
    [GE.masked]  m_ij = s_ij if j in A(i), else -inf    without a mask: m = s
    [GE.2]  a_ij = exp(m_ij) / sum_l exp(m_il)          a_i = 0 where A(i) is empty
    [GE.3]  r_ij = (s_ij + s_ji) / 2                    "kernel" alone; -inf unless j is in A(i) and i in A(j)
    [GE.4]  n_ij = exp(r_ij) / sum_l exp(r_il)          "kernel" alone
    [GE.links]  w_ij = n_ij if i != j, else 0           an edge to itself does nothing, for g(0) = 0
    [GE.5]  b_jc = sigmoid(s_jj) for "token"            or what is "given"; a_cj for "query"; v_jc for "feature"
    [GE.point]  y = x                                   "heun" and "rk4": see below
    [GE.6]  c_ic = sum_j w_ij g(y_jc - y_ic)
    [GE.7]  rate = f(y; b) + kappa c                    in default g = sin and f(y; b) = mu (b - y)
    [GE.8]  x' = x + h rate                             "proximal": of that z, z - h tau if z > h tau, else 0
    [GE.9]  y_jc = x_jc if x_jc >= tau, else 0          "soft": x_jc - tau if x_jc > tau, else 0; "proximal": x_jc
    [GE.10]  u_ij = a_ij phi(y_ij)                      "query": phi(y_ij) for j in A(i), else 0
    [GE.11]  z_i = sum_j u_ij                           1 where that is 0
    [GE.12]  p_ij = u_ij / z_i                          all u_ij 0: 1 at the largest a_ij x_j; by "dense" a_ij; "zero" 0
    [GE.13]  o_i = sum_j p_ij v_j                       "feature" has none of GE.10 to GE.13: o_i = y_i

"none" has a_ij in place of n_ij; "mean" (a_ij + a_ji) / 2; "min" the smaller of a_ij and a_ji; "causal_mirror" a_ij for
j < i and a_ji for j > i; a graph that is "given" the links that it says, where i may attend j. Over "keys" nodes are
the keys, and queries any number of others: r_jl = scale k_j . k_l, -inf unless some query may attend j and some query
l; GE.4 is computed for every graph, and links have n in place of a ("none": as "kernel").

By choice h is 1/3, and tau 0.4. A step of "euler" lowers the energy while h (sup |df/dx| + 2 kappa sup |g'| max_i
sum_j w_ij) is at most 2. The readout reads the last x, phi(y) = max(y, 0). The jump of a threshold has no part in any
gradient. For "token" y_ij is y_j1. For "query" it is y_ji. With "signed" |x| is compared, and the sign stays. With a
"jitter" x starts at b + m jitter. For "query" m_jc is 1 where query c may attend j, else 0: f, with its derivatives,
stands for m_jc f and w_ij for m_ic w_ij m_jc, but in dGE.links, where dc_ic stands for m_ic m_jc dc_ic. In "heun" and
"rk4" GE.point is y = x + h sum_l alpha_nl rate_l in stage n, GE.8 x' = x + h sum_n beta_n rate_n, dGE.7 drate_n =
h (beta_n dz + sum_{l>n} alpha_ln dy_l), from the last stage on, and the sum of dy_n stands for dy in dGE.8 and dGE.5;
sums over steps are over their stages, too.

Adjoints for given do (dGE.n is the gradient with respect to the value of GE.n), from the last step on::

    [dGE.v]  dv_j = sum_i p_ij do_i                     "feature": dv = db
    [dGE.12]  dp_ij = do_i . v_j
    [dGE.11]  dz_i = -sum_j dp_ij p_ij / z_i            0 where every u_ij is 0
    [dGE.10]  du_ij = dp_ij / z_i + dz_i                0 where every u_ij is 0
    [dGE.9]  dy_jc = sum_i du_ij a_ij where y_jc > 0    "query": du_ij; "feature": do
    [dGE.8]  dx' = dz + dy                              of the step after; of the last dy of GE.9 if x >= tau, else 0
    [dGE.7]  drate = h dz with dz = dx'                 "proximal": dz = 0 where x' = 0
    [dGE.6]  dc = kappa drate
    [dGE.point]  dy_jc = f'(y_jc) drate_jc + sum_i g'(y_jc - y_ic) (w_ij dc_ic - w_ji dc_jc)
    [dGE.links]  dw_ij = sum over steps and channels of dc_ic g(y_jc - y_ic)
    [dGE.5]  db = dz + dy of the first step + sum over steps of (df/db) drate
    [dGE.mu]  dmu = sum over steps of (df/dmu) drate
    [dGE.kappa]  dkappa = sum over steps of c drate
    [dGE.step]  dh = sum over steps of rate drate / h   "proximal": - tau sum over steps of dz sign(x')
    [dGE.tau]  dtau = -sum dy sign(x) where |x| > tau   of GE.9, "soft"; "proximal": -h sum over steps of dz sign(x')
    [dGE.coefficients]  da_m = sum over steps of dc_ic sum_j w_ij (y_jc - y_ic)^(2m+1)     of a polynomial g
    [dGE.4]  dn_ij = dw_ij for i != j                   "kernel" alone; over "keys" Q_ij
    [dGE.3]  dr_ij = n_ij (dn_ij - sum_l n_il dn_il)    "kernel" alone
    [dGE.2]  da_ij = du_ij phi(y_ij)                    for "token"; + db_ji for "query"; + Q_ij by "links"
    [dGE.masked]  dm_ij = a_ij (da_ij - sum_l a_il da_il)
    [dGE.1]  ds_ij = dm_ij + (dr_ij + dr_ji) / 2        and db_j b_j (1 - b_j) where i = j; not dr over "keys"
    [dGE.q]  dq_i = scale sum_j ds_ij k_j
    [dGE.k]  dk_j = scale sum_i ds_ij q_i               over "keys" and scale sum_l (dr_jl + dr_lj) k_l
    [dGE.scale]  dscale = sum_ij ds_ij q_i . k_j        over "keys" and sum_jl dr_jl k_j . k_l
    [dGE.start]  dstart = db                            summed over what a start that is given was broadcast to
    [dGE.bias]  dbias_ij = ds_ij                        summed over what the bias was broadcast to

With "straight_through" y > 0 reads x > 0, and dx' of the last step is dy, as it is by "proximal"; by "soft" it is dy
where x > tau, else 0. Where a loss reads p, x or w of "saved" beside o, that
gradient is added to dp, dx', dw.

With P_ij = dw_ij for i != j, Q is for "none" P_ij; "mean" (P_ij + P_ji) / 2; "min" P_ij + P_ji where a_ij < a_ji, half
of it where they are equal, else 0; "causal_mirror" P_ij + P_ji for j < i, else 0; for "given" 0. Where every u_ij of a
row is 0 and "empty" is "dense", da_ij has dp_ij, too.

Axes: b batch, h query head, g key/value head, i token that attends, j token that is attended and node of the graph, c
channel of x, by default 1, d width of queries and keys, e width of values. Channels: i for "query", e for "feature".

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium): graph, equation of a node, flow,
threshold; D. Sclosa (arXiv:2308.08311), equation 1. They say nothing of symmetry, weights of pairs or emptied rows. The
ways to symmetry, "kernel", "mean", "min" and "causal_mirror", are this library's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.options import Hard, Options, Proximal, Soft, tau_of
from refattn.ops.activations import soft_threshold
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import earlier_pairs, largest_of_rows, own_pairs, where_allowed
from refattn.ops.softmax import softmax_and_sums, softmax_backward, softmax_forward
from refattn.ops.sums import moved_by, plus, summed_for, summed_to, with_transposed
from refattn.xp import Array, is_array, namespace, product, sum_wide, zeros


@dataclass(frozen=True)
class Graph:
    """The graph of a call, and what its backward reads."""

    options: Options
    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    attention: Array | None  # (b, h, i, j); None where nobody reads it
    kernel: Array | None  # (b, h, j, j)
    links: Any  # (b, h, j, j), or a sparse graph
    start: Array  # (b, h, j, c)
    visible: Array | None  # (..., j, c): m, as numbers; None where every node exists
    rows: tuple[Array, Array] | None  # (b, h, j, 1): of "kernel", t_i = max_l r_il and sum_l exp(r_il - t_i)


@dataclass(frozen=True)
class Step:
    """What the backward of a step reads: y, c and rate of each stage, (b, h, j, c) each."""

    stages: tuple[tuple[Array, Array, Array], ...]
    factor: Number = 1.0  # of the length of the step, for other ways to take it
    shrunk: Array | None = None  # (b, h, j, c): x' where the threshold has acted


@dataclass(frozen=True)
class Flow:
    """What the backward of the flow reads."""

    graph: Graph
    tau: Number
    steps: tuple[Step, ...]
    states: tuple[Array, ...]  # after each step, where x starts first


@dataclass(frozen=True)
class Readout:
    """What the backward of the readout reads."""

    options: Options
    tau: Number
    attention: Any
    allowed: Array | None
    v: Array  # (b, g, j, e)
    x: Array  # (b, h, j, c)
    kept: Array  # (b, h, j, c): the scores that the threshold has left
    total: Any = None  # (b, h, i, 1)
    filled: Any = None  # (b, h, i, 1): whether the threshold left something
    weights: Any = None  # (b, h, i, j)


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    graph: Graph
    flow: Any  # a Flow, or what another way to take the steps has saved
    readout: Readout


def forward(q: Array, k: Array, v: Array, *, allowed: Array | None, options: Options) -> tuple[Array, Saved]:
    """Return the output (b, h, i, e) and what `backward` reads; `allowed` (..., i, j) or None tells what is in A(i)."""
    graph = graph_forward(q, k, v, allowed=allowed, options=options)
    tau = tau_of(options, allowed, graph.start)  # broadcasts to x
    x, flow = flow_forward(graph, tau)  # (b, h, j, c)
    out, readout = readout_forward(x, graph.attention, v, allowed=allowed, options=options, tau=tau)  # (b, h, i, e)
    return out, Saved(graph, flow, readout)


def backward(saved: Saved, d_out: Array, **read: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v and of all numbers; `read` are those of what else a loss reads."""
    d_x, d_attended, d_v, tau_terms = readout_backward(saved.readout, d_out, read.get("weights"))  # (b, h, j, c)
    d_b, d_w, more = flow_backward(saved.flow, plus(d_x, read.get("scores")), tau_terms)  # (b, h, j, c), (b, h, j, j)
    d_start = plus(d_b, read.get("start"))  # (b, h, j, c)
    d_graph = plus(d_w, read.get("graph"))  # (b, h, j, j) [dGE.links]
    d = graph_backward(saved.graph, d_attended, d_graph, d_start, read.get("sums"))
    if d_v is None:
        d_v = sum_heads(d_start, saved.readout.v.shape[1])  # (b, g, j, e): "feature" starts at v
    return {**d, **more, "v": d_v}


def graph_forward(q: Array, k: Array, v: Array, *, allowed: Array | None, options: Options) -> Graph:
    """Return the graph: attention, the links and where scores start."""
    xp, kind = namespace(q, k), options.links
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    scores = plus(product(q, xp.matrix_transpose(k_heads)) * options.scale, options.bias)  # (b, h, i, j) [GE.1]
    if allowed is None:
        masked = scores  # (b, h, i, j)
    else:
        masked = xp.where(allowed, scores, -math.inf)  # (b, h, i, j) [GE.masked]
    attention = kernel = rows = None
    if options.attends or options.state != "feature" or kind != "kernel" or options.over_keys:
        attention = softmax_forward(masked)  # (b, h, i, j) [GE.2]
    # Which nodes may be linked, and how similar they are.
    both, pairs = allowed, scores
    if options.over_keys:
        pairs = k_heads @ xp.matrix_transpose(k_heads) * options.scale  # (b, h, j, j)
        if allowed is not None:
            seen = xp.any(allowed, axis=-2, keepdims=True)  # (..., 1, j): whether some query may attend j
            both = seen & xp.matrix_transpose(seen)  # (..., j, j)
    if kind != "given" and (kind == "kernel" or options.over_keys):
        mean = pairs if options.over_keys else 0.5 * with_transposed(pairs)  # (b, h, j, j)
        each = None if both is None else both & xp.matrix_transpose(both)  # (..., j, j)
        mutual = where_allowed(each, mean, -math.inf)  # (b, h, j, j) [GE.3]
        kernel, top, total = softmax_and_sums(mutual)  # (b, h, j, j) [GE.4], (b, h, j, 1), (b, h, j, 1)
        rows = (top, total) if kind == "kernel" else None
    own = own_pairs(k.shape[2], k)  # (j, j): whether i = j
    if kind == "given" and not is_array(options.graph):
        links = options.graph  # a sparse one
    else:
        linked = _links_forward(attention if kernel is None else kernel, options, both, pairs)  # (b, h, j, j)
        links = xp.where(own, 0.0, linked)  # (b, h, j, j) [GE.links]
    if options.start is not None:
        start = options.start[..., None] + zeros((*k_heads.shape[:3], 1), k)  # (b, h, j, c) [GE.5]
    elif options.state == "token":
        to_itself = xp.sum(xp.where(own, scores, 0.0), axis=-1, keepdims=True)  # (b, h, j, 1): s_jj
        start = 0.5 + 0.5 * xp.tanh(0.5 * to_itself)  # (b, h, j, c) [GE.5]: the sigmoid
    elif options.state == "query":
        start = xp.matrix_transpose(attention)  # (b, h, j, c) [GE.5]
    else:
        start = repeat_heads(v, q.shape[1])  # (b, h, j, c) [GE.5]
    hides = options.state == "query" and allowed is not None
    visible = xp.astype(xp.matrix_transpose(allowed), q.dtype) if hides else None  # (..., j, c)
    return Graph(options, q, k, attention, kernel, links, start, visible, rows)


def _links_forward(a: Any, options: Options, both: Array | None, pairs: Array) -> Array:
    """Return the links w_ij of GE.links for weights a_ij, with an arbitrary diagonal."""
    xp = namespace(pairs)
    if options.links == "given":
        given = xp.astype(options.graph, pairs.dtype) + zeros(pairs.shape, pairs)  # (b, h, j, j)
        return where_allowed(both, given, 0.0)
    if options.links in ("kernel", "none"):
        return a
    if options.links == "mean":
        return 0.5 * (a + xp.matrix_transpose(a))
    if options.links == "min":
        return xp.minimum(a, xp.matrix_transpose(a))
    return xp.where(earlier_pairs(a.shape[-1], a), a, xp.matrix_transpose(a))  # "causal_mirror"


def _links_backward(a: Array, options: Options, d_linked: Array) -> Array:
    """Return Q: the gradient of the weights a_ij for that of the links."""
    xp = namespace(a)
    if options.links in ("kernel", "none"):
        return d_linked
    both = d_linked + xp.matrix_transpose(d_linked)  # (b, h, j, j)
    if options.links == "mean":
        return 0.5 * both
    if options.links == "min":
        other = xp.matrix_transpose(a)  # (b, h, j, j)
        return xp.where(a < other, both, xp.where(a == other, 0.5 * both, 0.0))
    return xp.where(earlier_pairs(a.shape[-1], a), both, 0.0)  # "causal_mirror"


def graph_backward(
    saved: Graph, d_attended: Array | None, d_graph: Array, d_start: Array, d_sums: Array | None = None
) -> dict[str, Array]:
    """Return the gradients of the graph: of q, k, scale, bias and a start that is given."""
    options, q, k, scale, attention = saved.options, saved.q, saved.k, saved.options.scale, saved.attention
    xp = namespace(q, k)
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    own = own_pairs(k.shape[2], k)  # (j, j): whether i = j
    d_attention_links = d_attention_start = d_mean = d_own = d_masked = d_both = None  # of parts that there are not
    # forward: links = where(own, 0.0, linked)
    d_linked = xp.where(own, 0.0, d_graph)  # (b, h, j, j): P
    if saved.kernel is not None:
        # forward: linked = links of kernel
        d_kernel = _links_backward(saved.kernel, options, d_linked)  # (b, h, j, j) [dGE.4]
        # forward: kernel = softmax(mutual)
        d_read = None if d_sums is None else saved.kernel * d_sums  # (b, h, j, j)
        d_mutual = plus(softmax_backward(saved.kernel, d_kernel), d_read)  # (b, h, j, j) [dGE.3]
        # forward: mutual = (scores + scores^T) / 2, or scale k . k
        d_both = with_transposed(d_mutual)  # (b, h, j, j)
        d_mean = None if options.over_keys else 0.5 * d_both  # (b, h, i, j)
    elif options.links != "given":
        # forward: linked = links of attention
        d_attention_links = _links_backward(attention, options, d_linked)  # (b, h, i, j)
    # forward: start = sigmoid(s_jj), attention^T, v, or what is given
    if options.state == "token" and options.start is None:
        d_own = xp.where(own, d_start * saved.start * (1.0 - saved.start), 0.0)  # (b, h, i, j)
    elif options.state == "query":
        d_attention_start = xp.matrix_transpose(d_start)  # (b, h, i, j)
    if attention is not None:
        d_attention = plus(plus(d_attended, d_attention_links), d_attention_start)  # (b, h, i, j) [dGE.2]
        # forward: attention = softmax(masked)
        d_masked = softmax_backward(attention, d_attention)  # (b, h, i, j) [dGE.masked]
    d_scores = plus(plus(d_masked, d_mean), d_own)  # (b, h, i, j) [dGE.1]
    # forward: scores = q @ k_heads^T * scale + bias
    d_product = product(d_scores, k_heads)  # (b, h, i, d): dGE.q without its scale
    d_times = d_product * q  # (b, h, i, d): the terms of dGE.scale
    d_q = d_product * scale  # (b, h, i, d) [dGE.q]
    d_alike = product(xp.matrix_transpose(d_scores), q)  # (b, h, j, d): by query head, without its scale
    if options.over_keys and d_both is not None:
        # forward: pairs = k_heads @ k_heads^T * scale
        d_keys = d_both @ k_heads  # (b, h, j, d)
        d_alike = d_alike + d_keys  # (b, h, j, d)
        d_scale = sum_wide(d_times) + 0.5 * sum_wide(d_keys * k_heads)  # () [dGE.scale]
    else:
        d_scale = sum_wide(d_times)  # () [dGE.scale]
    d_k = sum_heads(d_alike, k.shape[1]) * scale  # (b, g, j, d) [dGE.k]
    gradients = {"q": d_q, "k": d_k, "scale": d_scale}
    if options.bias is not None:
        d_bias = summed_to(d_scores, options.bias.shape)  # [dGE.bias]
        gradients["bias"] = d_bias
    if options.start is not None:
        d_given = summed_to(d_start[..., 0], options.start.shape)  # [dGE.start]
        gradients["start"] = d_given
    return gradients


def flow_forward(graph: Graph, tau: Number) -> tuple[Array, Flow]:
    """Return the flow: the scores (b, h, j, c) after the last step, and what `flow_backward` reads."""
    xp, options, start = namespace(graph.start), graph.options, graph.start  # -, -, (b, h, j, c)
    h = options.step  # broadcasts to x
    g, f, m = options.coupling, options.intrinsic, graph.visible  # -, -, (..., j, c)
    alphas, beta = options.integrator.alphas, options.integrator.beta  # of Euler ((),) and (1.0,)
    edges = graph.links[..., None]  # (b, h, j, j, 1): w_ij
    if m is not None:
        edges = edges * (m[:, :, None, :, :] * m[:, :, :, None, :])  # (b, h, j, j, c): m_ic w_ij m_jc
    x = start  # (b, h, j, c)
    if options.jitter is not None:
        x = start + hidden(m, options.jitter)  # (b, h, j, c)
    taken: tuple[Step, ...] = ()
    states: tuple[Array, ...] = (x,)
    for _ in range(options.steps):
        stages: tuple[tuple[Array, Array, Array], ...] = ()
        rates: tuple[Array, ...] = ()
        for alpha in alphas:
            point = moved_by(x, h, alpha, rates) if alpha else x  # (b, h, j, c) [GE.point]
            between = point[:, :, None, :, :] - point[:, :, :, None, :]  # (b, h, j, j, c): y_j - y_i
            coupled = xp.sum(edges * g.force(between), axis=3)  # (b, h, j, c) [GE.6]
            rate = hidden(m, f.force(point, start, options.mu)) + options.kappa * coupled  # (b, h, j, c) [GE.7]
            stages, rates = (*stages, (point, coupled, rate)), (*rates, rate)
        if isinstance(options.threshold, Proximal):
            there = moved_by(x, h, beta, rates)  # (b, h, j, c): z
            x = soft_threshold(there, h * tau, signed=options.signed)  # (b, h, j, c) [GE.8]
            taken = (*taken, Step(stages, shrunk=x))
        elif len(beta) == 1:
            x = x + h * rate  # (b, h, j, c) [GE.8]
            taken = (*taken, Step(stages))
        else:
            x = moved_by(x, h, beta, rates)  # (b, h, j, c) [GE.8]
            taken = (*taken, Step(stages))
        states = (*states, x)
    return x, Flow(graph, tau, taken, states)


def hidden(visible: Array | None, x: Array) -> Array:
    """Return m x: 0 where a node does not exist."""
    return x if visible is None else visible * x


def flow_backward(saved: Flow, d_x: Array, tau_terms: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the flow: of the start, of the links and of the numbers; `tau_terms` are given."""
    graph, h, tau = saved.graph, saved.graph.options.step, saved.tau  # h and tau broadcast to x
    xp, options, m = namespace(d_x), graph.options, graph.visible  # -, -, (..., j, c)
    g, f = options.coupling, options.intrinsic
    start, mu, kappa = graph.start, options.mu, options.kappa  # (b, h, j, c), -, -
    alphas, beta = options.integrator.alphas, options.integrator.beta  # of Euler ((),) and (1.0,)
    edges, both = graph.links[..., None], None  # (b, h, j, j, 1): w_ij
    if m is not None:
        both = m[:, :, None, :, :] * m[:, :, :, None, :]  # (..., j, j, c): m_i m_j
        edges = edges * both  # (b, h, j, j, c): m_ic w_ij m_jc
    d_anchor = mu_terms = kappa_terms = step_terms = zeros(start.shape, start)  # (b, h, j, c)
    d_graph = zeros(graph.links.shape, start)  # (b, h, j, j): dGE.links
    powers = [zeros((), start)] * len(g.powers)
    d_point = None  # (b, h, j, c): of the first stage of the step after
    for step in reversed(saved.steps):
        d_x = plus(d_x, d_point)  # (b, h, j, c) [dGE.8]
        if isinstance(options.threshold, Proximal):
            # forward: x = sign(there) (|there| - h tau) where that is positive
            d_x = xp.where(step.shrunk == 0.0, 0.0, d_x)  # (b, h, j, c): dz
            pushed = d_x * xp.sign(step.shrunk)  # (b, h, j, c)
            tau_terms = tau_terms - h * pushed  # (b, h, j, c)
            step_terms = step_terms - tau * pushed  # (b, h, j, c)
        d_there = d_x  # (b, h, j, c)
        d_points: tuple[Array, ...] = ()  # of later stages, the last one first
        for n in reversed(range(len(beta))):
            point, coupled, rate = step.stages[n]  # (b, h, j, c), (b, h, j, c), (b, h, j, c)
            # forward: there = x + h sum_n beta_n rate_n; point = x + h sum_l alpha_nl rate_l
            if len(beta) == 1:
                inner = d_there  # (b, h, j, c): drate / h
            else:
                later = [alphas[l][n] for l in reversed(range(n + 1, len(beta)))]
                inner = moved_by(beta[n] * d_there, 1.0, later, d_points)  # (b, h, j, c): drate / h
            d_rate = h * inner  # (b, h, j, c) [dGE.7]
            step_terms = step_terms + inner * rate  # (b, h, j, c)
            # forward: rate = m f(point; start) + kappa coupled
            d_own = hidden(m, d_rate)  # (b, h, j, c)
            d_anchor = d_anchor + d_own * f.d_b(point, start, mu)  # (b, h, j, c)
            mu_terms = mu_terms + d_own * f.d_mu(point, start, mu)  # (b, h, j, c)
            kappa_terms = kappa_terms + d_rate * coupled  # (b, h, j, c)
            d_coupled = kappa * d_rate  # (b, h, j, c) [dGE.6]
            # forward: coupled_i = sum_j edges_ij g(y_j - y_i)
            between = point[:, :, None, :, :] - point[:, :, :, None, :]  # (b, h, j, j, c): y_j - y_i
            received = d_coupled[:, :, :, None, :]  # (b, h, j, 1, c): dc_i
            d_between = received * edges * g.slope(between)  # (b, h, j, j, c)
            d_graph = d_graph + xp.sum(hidden(both, received) * g.force(between), axis=4)  # (b, h, j, j)
            if g.powers:
                pulls = [xp.sum(edges * power.force(between), axis=3) for power in g.powers]  # (b, h, j, c) each
                powers = [a + sum_wide(d_coupled * pull) for a, pull in zip(powers, pulls, strict=True)]  # () each
            d_pull = xp.sum(d_between, axis=2) - xp.sum(d_between, axis=3)  # (b, h, j, c)
            d_point = d_own * f.d_x(point, start, mu) + d_pull  # (b, h, j, c) [dGE.point]
            if n > 0:
                d_x, d_points = d_x + d_point, (*d_points, d_point)  # (b, h, j, c), -
    # forward: x = start, and start is b
    d_start = plus(d_x, d_point) + d_anchor  # (b, h, j, c) [dGE.5]
    d_mu, d_kappa = summed_for(mu_terms, mu), summed_for(kappa_terms, kappa)  # [dGE.mu], [dGE.kappa]
    d_step = summed_for(step_terms, h)  # [dGE.step]
    numbers = {"mu": d_mu, "kappa": d_kappa, "step": d_step}
    if options.tau is not None:
        d_tau = summed_for(tau_terms, tau)  # [dGE.tau]
        numbers["tau"] = d_tau
    if g.powers:
        d_coefficients = xp.stack(powers)  # [dGE.coefficients]
        numbers["coefficients"] = d_coefficients
    return d_start, d_graph, numbers


def readout_forward(
    x: Array, attention: Any, v: Array, *, allowed: Array | None, options: Options, tau: Number
) -> tuple[Array, Readout]:
    """Return the readout: the output (b, h, i, e) for scores x (b, h, j, c), and what `readout_backward` reads."""
    xp = namespace(x)
    if isinstance(options.threshold, Hard):
        kept = xp.where((xp.abs(x) if options.signed else x) < tau, 0.0, x)  # (b, h, j, c) [GE.9]: NaN stays
    else:
        soft = isinstance(options.threshold, Soft)
        kept = soft_threshold(x, tau, signed=options.signed) if soft else x  # (b, h, j, c) [GE.9]
    if options.state == "feature":
        alive = None if allowed is None else xp.any(allowed, axis=-1, keepdims=True)  # (..., i, 1)
        out = where_allowed(alive, kept, 0.0)  # (b, h, i, e)
        return out, Readout(options, tau, attention, allowed, v, x, kept)
    rows = xp.matrix_transpose(xp.maximum(kept, zeros((), x)))  # (b, h, c, j): phi(y)
    if options.state == "token":
        parts = attention * rows  # (b, h, i, j) [GE.10]
    else:
        parts = where_allowed(allowed, rows, 0.0)  # (b, h, i, j) [GE.10]
    sums = xp.sum(parts, axis=-1, keepdims=True)  # (b, h, i, 1)
    filled = sums != 0.0  # (b, h, i, 1): whether something is left; NaN propagates
    total = xp.where(filled, sums, 1.0)  # (b, h, i, 1) [GE.11]
    empty = options.threshold.empty
    if empty == "dense":
        instead = attention  # (b, h, i, j)
    elif empty in ("zero", "error"):
        instead = zeros(attention.shape, x)  # (b, h, i, j)
    else:
        rank = xp.matrix_transpose(x)  # (b, h, c, j)
        if isinstance(options.threshold, Proximal):
            rank = attention  # (b, h, i, j): for every x is 0
        elif options.state == "token":
            rank = attention * xp.matrix_transpose(x)  # (b, h, i, j)
        instead = largest_of_rows(rank, allowed)  # (b, h, i, j)
    weights = xp.where(filled, parts / total, instead)  # (b, h, i, j) [GE.12]
    v_heads = repeat_heads(v, x.shape[1])  # (b, h, j, e): copies of v
    out = weights @ v_heads  # (b, h, i, e) [GE.13]
    return out, Readout(options, tau, attention, allowed, v, x, kept, total, filled, weights)


def readout_backward(saved: Readout, d_out: Array, read: Array | None) -> tuple[Array, Any, Array | None, Array]:
    """Return the gradients of the readout: of x, a part of that of attention, of v, and the terms of that of tau."""
    xp, options, threshold = namespace(d_out), saved.options, saved.options.threshold
    attention, d_v = saved.attention, None  # (b, h, i, j)
    through = isinstance(threshold, Hard) and threshold.straight_through
    d_attended = None if attention is None else zeros(attention.shape, d_out)  # (b, h, i, j)
    if options.state == "feature":
        # forward: out = kept
        alive = None if saved.allowed is None else xp.any(saved.allowed, axis=-1, keepdims=True)  # (..., i, 1)
        d_kept = where_allowed(alive, d_out, 0.0)  # (b, h, j, c) [dGE.9]
    else:
        # forward: out = weights @ v_heads
        weights, total, filled = saved.weights, saved.total, saved.filled  # (b, h, i, j), (b, h, i, 1), (b, h, i, 1)
        v_heads = repeat_heads(saved.v, d_out.shape[1])  # (b, h, j, e): copies of v
        d_v = sum_heads(xp.matrix_transpose(weights) @ d_out, saved.v.shape[1])  # (b, g, j, e) [dGE.v]
        d_weights = plus(d_out @ xp.matrix_transpose(v_heads), read)  # (b, h, i, j) [dGE.12]
        # forward: weights = parts / total
        inner = xp.sum(d_weights * weights, axis=-1, keepdims=True)  # (b, h, i, 1)
        d_total = xp.where(filled, -inner / total, 0.0)  # (b, h, i, 1) [dGE.11]
        # forward: total = sum(parts)
        d_parts = xp.where(filled, d_weights / total + d_total, 0.0)  # (b, h, i, j) [dGE.10]
        # forward: parts = attention * rows, or rows
        if options.state == "token":
            rows = xp.matrix_transpose(xp.maximum(saved.kept, zeros((), d_out)))  # (b, h, c, j): phi(y)
            d_attended = d_parts * rows  # (b, h, i, j): part of dGE.2
            d_rows = xp.sum(d_parts * attention, axis=2)[..., None]  # (b, h, j, c)
        else:
            d_rows = xp.matrix_transpose(where_allowed(saved.allowed, d_parts, 0.0))  # (b, h, j, c)
        if threshold.empty == "dense":
            d_attended = d_attended + xp.where(filled, 0.0, d_weights)  # (b, h, i, j)
        # forward: rows = max(kept, 0)
        positive = saved.x if through else saved.kept  # (b, h, j, c): where this is
        d_kept = xp.where(positive <= 0.0, 0.0, d_rows)  # (b, h, j, c) [dGE.9]
    # forward: kept = threshold(x)
    size = xp.abs(saved.x) if options.signed else saved.x  # (b, h, j, c)
    d_x, tau_terms = d_kept, zeros(d_kept.shape, d_kept)  # (b, h, j, c), (b, h, j, c)
    if isinstance(threshold, Soft):
        d_x = xp.where(size <= saved.tau, 0.0, d_kept)  # (b, h, j, c)
        tau_terms = -d_x * xp.sign(saved.x) if options.signed else -d_x  # (b, h, j, c)
    elif isinstance(threshold, Hard) and not through:
        d_x = xp.where(size < saved.tau, 0.0, d_kept)  # (b, h, j, c)
    return d_x, d_attended, d_v, tau_terms
