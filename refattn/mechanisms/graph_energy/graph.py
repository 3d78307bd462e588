"""The graph on which scores flow, and where they start.

Equations (A(i) is the set of tokens that token i may attend; `symmetrise` chooses the graph, `state` the start)::

    [GE.1]  s_ij = scale q_i . k_j + bias_ij            without a bias: 0
    [GE.2]  m_ij = s_ij if j in A(i), else -inf         without a mask: m = s
    [GE.3]  a_ij = exp(m_ij) / sum_l exp(m_il)          a_i = 0 where A(i) is empty
    [GE.4]  r_ij = (s_ij + s_ji) / 2                    "kernel" alone; -inf unless j in A(i) and i in A(j)
    [GE.5]  n_ij = exp(r_ij) / sum_l exp(r_il)          "kernel" alone
    [GE.6]  w_ij = the link of i and j, as below, and 0 for i = j
    [GE.7]  b_jc = sigmoid(s_jj), or what is given, for "token"; a_cj for "query"; v_jc for "feature"

Links, by `symmetrise`: "kernel" n_ij; "none" a_ij; "mean" (a_ij + a_ji) / 2; "min" the smaller of a_ij and a_ji;
"causal_mirror" a_ij for j < i and a_ji for j > i, so that a link depends on nothing later than its later token.
A graph that is given has the links that it says, where i may attend j.

With `graph_scores` "kk" the nodes are the keys, and queries are any number of others: r_jl = scale k_j . k_l, -inf
unless some query may attend j and some query l, is symmetric by itself, GE.5 is computed for every graph, and links
have n in place of a ("none": as "kernel").

Adjoints, for given db (dGE.7), dw (dGE.6) and a part of da from the readout (dGE.n is the gradient with respect to the
value of GE.n)::

    [dGE.5]  dn_ij = dw_ij for i != j                   "kernel" alone; "kk": adjoint of GE.6 at dw
    [dGE.4]  dr_ij = n_ij (dn_ij - sum_l n_il dn_il + dl_i)    "kernel" alone; l_i = log pi_i, which the energy reads
    [dGE.3]  da = part of the readout + adjoint of GE.6 at dw + (db)^T for "query"
    [dGE.2]  dm_ij = a_ij (da_ij - sum_l a_il da_il)
    [dGE.1]  ds = dm + (dr + dr^T) / 2 + db_j b_j (1 - b_j) on the diagonal for "token"
    [dGE.q]  dq_i = scale sum_j ds_ij k_j
    [dGE.k]  dk_j = scale sum_i ds_ij q_i               "kk": and scale sum_l (dr_jl + dr_lj) k_l
    [dGE.scale]  dscale = sum_ij ds_ij q_i . k_j        "kk": and sum_jl dr_jl k_j . k_l
    [dGE.start]  db, summed over what it was broadcast to     of a start that was given
    [dGE.bias]  dbias_ij = ds_ij, summed over what the bias was broadcast to

With p_ij = dw_ij for i != j the adjoint of GE.6 is: "none" p; "mean" (p + p^T) / 2; "min" p + p^T where a_ij < a_ji,
half of it where they are equal, else 0; "causal_mirror" p + p^T for j < i, else 0.

The kernel of a symmetric matrix of scores has detailed balance, pi_i w_ij = pi_j w_ji with pi_i the sum of exp(r_il)
over l: its flow is a gradient flow in the inner product with the weights pi, as if it were symmetric. "mean", "min" and
"causal_mirror" are symmetric, "none" neither. A token's edge to itself is taken out, for it does nothing (g(0) = 0).

Axes: b batch, h query head, g key/value head, i and j tokens, of which j are nodes, d width of queries and keys, c
channel of the state.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), whose graph of tokens has
attention scores on its edges; the ways to make it symmetric are this library's.

How the source differs: it says nothing of symmetry, without which there is no energy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.graph_energy.links import (
    balance_of,
    both_seen,
    given_links,
    link_backward,
    link_forward,
    only_mutual,
    own_edges,
    sum_of,
    summed_to,
    with_transposed,
)
from refattn.mechanisms.graph_energy.rows import softmax_and_sums, softmax_backward, softmax_forward
from refattn.mechanisms.graph_energy.sparse import CSR
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, namespace, product, sum_wide, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the graph reads, and what the flow and the readout do."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    scale: float | Array
    bias: tuple[int, ...] | None  # its shape
    symmetrise: str
    state: str
    attention: Array | None  # (b, h, i, j); None where nobody reads it
    kernel: Array | None  # (b, h, j, j)
    graph: Array | CSR  # (b, h, j, j)
    start: Array  # (b, h, j, c)
    over_keys: bool
    begin: tuple[int, ...] | None  # the shape of a start that was given
    balance: Array | None  # (b, h, j, 1): pi up to a factor; None where the graph is symmetric or has none


def forward(
    q: Array,
    k: Array,
    values: Array,
    *,
    allowed: Array | None,
    scale: float | Array,
    symmetrise: str,
    state: str,
    given: Array | CSR | None = None,
    bias: Array | None = None,
    over_keys: bool = False,
    begin: Array | None = None,
) -> Saved:
    """Return attention, graph and start; `values` (b, h, j, e) are v, repeated, `allowed` tells which j are in A(i).

    With `over_keys` nodes are keys, and links come from their own scores; `begin`, a start of "token", broadcasts to
    (b, h, j).
    """
    xp = namespace(q, k)
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    similar = product(q, xp.matrix_transpose(k_heads)) * scale  # (b, h, i, j): GE.1 without its bias
    scores = similar if bias is None else similar + bias  # (b, h, i, j) [GE.1]
    if allowed is None:
        masked = scores  # (b, h, i, j): GE.2 without a mask
    else:
        masked = xp.where(allowed, scores, -math.inf)  # (b, h, i, j) [GE.2]
    attention = None
    if state != "feature" or symmetrise != "kernel" or over_keys or equations.is_active():
        attention = softmax_forward(masked)  # (b, h, i, j) [GE.3]
    kernel = balance = None
    # Which nodes see each other, and how alike they are.
    both = allowed  # whether i may attend j
    pairs = scores  # of nodes, where these are the tokens
    if over_keys:
        both = None if allowed is None else both_seen(allowed)  # whether both are nodes
        pairs = k_heads @ xp.matrix_transpose(k_heads) * scale  # (b, h, j, j): GE.4 of "kk" without a mask
    if symmetrise != "given" and (over_keys or symmetrise == "kernel"):
        average = pairs if over_keys else 0.5 * with_transposed(pairs)  # GE.4 without a mask
        mutual = average if both is None else only_mutual(average, both)  # (b, h, j, j) [GE.4]
        links, top, total = softmax_and_sums(mutual)  # the first is GE.5
        kernel = links  # (b, h, j, j) [GE.5]
    if symmetrise == "given":
        linked = given_links(given, both, pairs)  # (b, h, j, j): GE.6 with its diagonal
    elif symmetrise == "kernel":
        balance = balance_of(top, total)  # (b, h, j, 1): pi, which only energies need
        linked = kernel  # (b, h, j, j): GE.6 with its diagonal
    else:
        linked = link_forward(attention if kernel is None else kernel, symmetrise)  # GE.6 with its diagonal
    own = own_edges(pairs)  # (j, j): whether i = j
    graph = linked if isinstance(linked, CSR) else xp.where(own, 0.0, linked)  # (b, h, j, j) [GE.6]
    if begin is not None:
        begins = begin[..., None] + zeros((*k_heads.shape[:3], 1), k)  # (b, h, j, c): GE.7 that is given
    elif state == "token":
        logits = xp.sum(xp.where(own, scores, 0.0), axis=-1, keepdims=True)  # (b, h, j, 1): s_jj
        begins = 0.5 + 0.5 * xp.tanh(0.5 * logits)  # (b, h, j, c): GE.7 of "token"
    elif state == "query":
        begins = xp.matrix_transpose(attention)  # (b, h, j, c): GE.7 of "query"
    else:
        begins = values  # (b, h, j, c): GE.7 of "feature"
    start = begins  # (b, h, j, c) [GE.7]
    shapes = [None if x is None else tuple(x.shape) for x in (bias, begin)]
    results = (attention, kernel, graph, start, over_keys, shapes[1], balance)
    return Saved(q, k, scale, shapes[0], symmetrise, state, *results)


def backward(
    saved: Saved, d_attention_read: Array, d_graph: Array, d_start: Array, d_lse: Array | None = None
) -> dict[str, Array]:
    """Return the gradients of q, k and scale, for a part of da (b, h, i, j), and dw and db.

    `d_lse` (b, h, j, 1) is dl, where a loss reads the energy, which is weighted with pi.
    """
    q, k, scale, attention = saved.q, saved.k, saved.scale, saved.attention
    xp = namespace(q, k)
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    own = own_edges(xp.matrix_transpose(k))  # (j, j): whether i = j
    # forward: graph = where(own, 0.0, linked)
    d_linked = xp.where(own, 0.0, d_graph)  # (b, h, j, j): p, part of dGE.3 and dGE.5
    none = zeros((), q)  # what there is none of below
    d_attention_graph, d_average, d_pairs = none, none, none
    if saved.kernel is not None:
        # forward: linked = kernel, or links of it
        plain = saved.symmetrise == "kernel"
        d_links = d_linked if plain else link_backward(saved.kernel, saved.symmetrise, d_linked)  # dGE.5
        d_kernel = d_links  # (b, h, j, j) [dGE.5]
        # forward: kernel = softmax(mutual)
        d_weighted = none if d_lse is None else saved.kernel * d_lse  # part of dGE.4
        d_mutual = sum_of(softmax_backward(saved.kernel, d_kernel), d_weighted)  # (b, h, j, j) [dGE.4]
        # forward: mutual = (scores + scores^T) / 2, or scale k . k
        d_pairs = with_transposed(d_mutual)  # (b, h, j, j): part of dGE.1, or dGE.k
        d_average = d_average if saved.over_keys else 0.5 * d_pairs  # part of dGE.1
    elif saved.symmetrise != "given":
        d_attention_graph = link_backward(attention, saved.symmetrise, d_linked)  # part of dGE.3
    # forward: start = sigmoid(s_jj), attention^T or v
    if saved.state == "token" and saved.begin is None:
        slope = d_start * saved.start * (1.0 - saved.start)  # (b, h, j, 1): part of dGE.1
        d_own = xp.where(own, slope, 0.0)  # (b, h, i, j): part of dGE.1
        d_attention_start = zeros((), q)  # the start does not read a
    else:
        d_own = zeros((), q)  # the start does not read s
        d_attention_start = xp.matrix_transpose(d_start) if saved.state == "query" else d_own  # part of dGE.3
    d_masked = none  # where nobody has read a
    if attention is not None:
        d_attention = sum_of(d_attention_read, d_attention_graph, d_attention_start)  # (b, h, i, j) [dGE.3]
        # forward: attention = softmax(masked)
        d_masked = softmax_backward(attention, d_attention)  # (b, h, i, j) [dGE.2]
    d_scores = sum_of(d_masked, d_average, d_own)  # (b, h, i, j) [dGE.1]
    # forward: scores = q @ k_heads^T * scale + bias
    d_product = product(d_scores, k_heads)  # (b, h, i, d): dGE.q without its scale
    d_q = d_product * scale  # (b, h, i, d) [dGE.q]
    d_alike = product(xp.matrix_transpose(d_scores), q)  # (b, h, j, d): part of dGE.k
    d_scaled = sum_wide(d_product * q)  # (): part of dGE.scale
    if saved.over_keys and saved.kernel is not None:
        # forward: pairs = k_heads @ k_heads^T * scale
        d_own = d_pairs @ k_heads  # (b, h, j, d): part of dGE.k
        d_alike = d_alike + d_own  # (b, h, j, d): dGE.k by query head, without its scale
        d_scaled = d_scaled + 0.5 * sum_wide(d_own * k_heads)  # (): dGE.scale
    d_k = sum_heads(d_alike, k.shape[1]) * scale  # (b, g, j, d) [dGE.k]
    d_scale = d_scaled  # () [dGE.scale]
    gradients = {"q": d_q, "k": d_k, "scale": d_scale}
    if saved.bias is not None:
        d_bias = summed_to(d_scores, saved.bias)  # [dGE.bias]
        gradients["bias"] = d_bias
    if saved.begin is not None:
        d_given = summed_to(d_start[..., 0], saved.begin)  # [dGE.start]
        gradients["start"] = d_given
    return gradients
