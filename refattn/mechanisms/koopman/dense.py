"""Queries updated by a Koopman operator that is fitted to their own trajectory: the definition.

Every query attends (update 1); from update 2 on, its trajectory so far says how the queries move, an operator is fitted
to these transitions in the span of the kernel's sections at the keys that it sees, and predicts from what it attends.

Equations (J(i) are the keys that query i sees; each update repeats KOOP.1 to KOOP.4 with the newest query x = q^{r-1},
and from the second on KOOP.7 to KOOP.17 of `update`)::

    [KOOP.1]  s_ij = x_i . k_j / sqrt(d)                   similarity "kernel": k(x_i, k_j)
    [KOOP.2]  m_ij = s_ij if j in J(i), else -inf
    [KOOP.3]  w_ij = exp(m_ij) / sum_j exp(m_ij)           0 where J(i) is empty
    [KOOP.4]  q'_i = sum_j w_ij v_j                        update 1: q^1 = q'
    [KOOP.5]  E_jj' = k(k_j, k_j')
    [KOOP.6]  G_jj' = E_jj' for j, j' in J(i), else 0; + 1 on the diagonal outside of J(i), + delta_i on all of it

With delta_i = jitter (weight + 1) where the call is causal, else the jitter times the mean of E_jj over J(i).

Adjoints, for given d_o::

    [dKOOP.17]  dq^r = d_o of the last query, of others what later updates leave
    [dKOOP.4]  dq'_i = what the update leaves; update 1: dq^1
    [dKOOP.3]  dw_ij = dq'_i . v_j
    [dKOOP.1]  ds_ij = w_ij (dw_ij - sum_j w_ij dw_ij)
    [dKOOP.6]  dG = sum over updates: -A^T Z dY - N^T dN G^-1     separable: Z A + ridge A in place of Z A
    [dKOOP.5]  dE_jj' = sum_i dG_jj' over j, j' in J(i), + d delta_i / dE
    [dKOOP.q]  dq = what the updates leave to q^0
    [dKOOP.k]  dk = through KOOP.1, KOOP.5, P and every g
    [dKOOP.v]  dv_j = sum_i w_ij dq'_i over updates
    [dKOOP.ridge]  dridge = -<dY, A>                       separable: -<dY, A G>
    [dKOOP.epsilon]  depsilon = db                         perturbation "shift": da
    [dKOOP.mix]  dmix = da                                 perturbation "pencil"
    [dKOOP.bandwidth]  dbandwidth = through every k
    [dKOOP.weight]  dweight = through every k, and delta_i where causal

Axes: b batch, h query head, g key/value head, i query, j key, o observable, d width.

Source: N. Tie 2024, Koopman attention; Khosravi 2023 (arXiv:2208.01681) for the operator. How they are read, and where
they leave a choice: docs/deviations.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.koopman import update
from refattn.mechanisms.koopman.kernel import Kernel
from refattn.mechanisms.koopman.observables import Observables
from refattn.mechanisms.koopman.one_step import add
from refattn.mechanisms.koopman.options import Numbers, Options
from refattn.mechanisms.koopman.trajectory import advance, first_points, jitter_backward, jitter_unit, table_gradient
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_pairs
from refattn.xp import Array, max_last, namespace, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense form reads."""

    options: Options
    numbers: Numbers
    causal: bool
    groups: int
    k: Array  # (b, h, j, d)
    v: Array  # (b, h, j, d)
    seen: Array  # (b, h, i, j)
    gram: Array | None  # (b, h, i, o, o)
    trajectory: tuple[Array, ...]  # q^0, q^1, ..., (b, h, i, d) each
    weights: tuple[Array, ...]  # (b, h, i, j) of each update
    updates: tuple[update.Saved, ...]  # from the second on
    chosen: tuple[int, ...]  # the candidate of each of these


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, options: Options, numbers: Numbers
) -> tuple[Array, Saved]:
    """Return the last query (b, h, i, d) and what `backward` reads; `offset` is that of `causal_offset`."""
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    v_heads = repeat_heads(v, q.shape[1])  # (b, h, j, d): copies of v
    seen = visible(mask, offset, q, k_heads)  # (b, h, i, j): whether j is in J(i)
    kernel = numbers.kernel(options)
    observables = Observables(kernel, k_heads[:, :, None, :, :], seen, options.augment)
    gram = None if options.updates == 1 else gram_of(observables, offset is not None, options)  # tagged there
    weights, attended = attend(q, k_heads, v_heads, seen, kernel, options)  # tagged there
    trajectory, all_weights = [q, attended], [weights]
    steps: list[update.Saved] = []
    chosen: list[int] = []
    while len(trajectory) <= options.updates:
        weights, attended = attend(trajectory[-1], k_heads, v_heads, seen, kernel, options)  # tagged there
        root, step, candidate = advance(trajectory, attended, observables, gram, numbers, options)  # there
        trajectory.append(root)
        all_weights.append(weights)
        steps.append(step)
        chosen.append(candidate)
    parts = (k_heads, v_heads, seen, gram, tuple(trajectory), tuple(all_weights), tuple(steps), tuple(chosen))
    return trajectory[-1], Saved(options, numbers, offset is not None, k.shape[1], *parts)


def visible(mask: Array | None, offset: int | None, q: Array, k: Array) -> Array:
    """Return whether query i sees key j, (b, h, i, j)."""
    xp = namespace(q)
    allowed = allowed_pairs(mask, offset, (0, q.shape[2]), (0, k.shape[2]), q)  # broadcasts to J
    everywhere = zeros((*q.shape[:3], k.shape[2]), q) == 0.0  # (b, h, i, j): True
    return everywhere if allowed is None else xp.logical_and(everywhere, allowed)


def attend(x: Array, k: Array, v: Array, seen: Array, kernel: Kernel, options: Options) -> tuple[Array, Array]:
    """Return the weights (b, h, i, j) and what queries x (b, h, i, d) attend."""
    xp = namespace(x)
    if options.similarity == "dot":
        raw = x @ xp.matrix_transpose(k) / math.sqrt(x.shape[-1])  # (b, h, i, j): KOOP.1
    else:
        raw = kernel.values(x, k)  # (b, h, i, j): KOOP.1
    scores = raw  # (b, h, i, j) [KOOP.1]
    masked = xp.where(seen, scores, -math.inf)  # (b, h, i, j) [KOOP.2]
    top = max_last(masked)  # (b, h, i, 1): for the exponential
    powers = xp.exp(masked - xp.where(top == -math.inf, 0.0, top))  # (b, h, i, j): numerators of KOOP.3
    total = xp.sum(powers, axis=-1, keepdims=True)  # (b, h, i, 1): denominators of KOOP.3
    weights = powers / xp.where(total == 0.0, 1.0, total)  # (b, h, i, j) [KOOP.3]
    attended = weights @ v  # (b, h, i, d) [KOOP.4]
    return weights, attended


def gram_of(observables: Observables, causal: bool, options: Options) -> Array:
    """Return G (b, h, i, o, o)."""
    keys = observables.keys[:, :, 0, :, :]  # (b, h, j, d): the keys
    between = observables.kernel.values(keys, keys)  # (b, h, j, j) [KOOP.5]
    delta = options.jitter_of(between) * jitter_unit(observables, between, causal)  # (b, h, i, 1): delta
    gram = observables.gram(between, delta)  # (b, h, i, o, o) [KOOP.6]
    return gram


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v and of every number, the tables ridge and epsilon among them."""
    xp, transpose, options = namespace(d_out), namespace(d_out).matrix_transpose, saved.options
    k, v = saved.k, saved.v
    kernel = saved.numbers.kernel(options)
    observables = Observables(kernel, k[:, :, None, :, :], saved.seen, options.augment)
    total: dict[str, Array] = {"k": xp.zeros_like(k), "v": xp.zeros_like(v)}
    d_points = [xp.zeros_like(x) for x in saved.trajectory]
    d_points[-1] = d_out  # (b, h, i, d): it came in
    d_ab: list[dict[str, Array]] = []
    for number in range(options.updates, 0, -1):
        d_root = d_points[number]  # (b, h, i, d) [dKOOP.17]
        left = d_root  # (b, h, i, d): dKOOP.4 of update 1
        if number > 1:
            # forward: root = update(points, attended, keys, gram, ...)
            step = equations.active(update).backward(
                saved.updates[number - 2], observables, saved.gram, options, d_root
            )
            start = first_points(number, options.window)
            for n in range(start, number):
                one = step["points"][:, :, :, n - start, :]  # (b, h, i, d): part of dKOOP.17
                d_points[n] = d_points[n] + one  # (b, h, i, d): part of dKOOP.17
            names = ("bandwidth", "weight", "norm")
            add(total, {"k": step["keys"][:, :, 0, :, :], "gram": step["gram"], **{name: step[name] for name in names}})
            d_ab.insert(0, {name: step[name] for name in ("ridge", "a", "b")})
            left = step["attended"]  # (b, h, i, d): dKOOP.4 of later updates
        d_attended = left  # (b, h, i, d) [dKOOP.4]
        # forward: attended = weights @ v
        weights = saved.weights[number - 1]  # (b, h, i, j): w of this update
        x = saved.trajectory[number - 1]  # (b, h, i, d): q^{r-1}
        add(total, {"v": transpose(weights) @ d_attended})
        d_weights = d_attended @ transpose(v)  # (b, h, i, j) [dKOOP.3]
        # forward: weights = softmax(scores)
        inner = xp.sum(weights * d_weights, axis=-1, keepdims=True)  # (b, h, i, 1): part of dKOOP.1
        d_scores = weights * (d_weights - inner)  # (b, h, i, j) [dKOOP.1]
        # forward: scores = x @ k^T / sqrt(d), or k(x, k)
        if options.similarity == "dot":
            part = d_scores / math.sqrt(x.shape[-1])  # (b, h, i, j): of x . k
            d_x, d_k = part @ k, transpose(part) @ x  # parts of dKOOP.17 and dKOOP.k
        else:
            d_x, d_k = kernel.backward(x, k, d_scores)  # parts of dKOOP.17 and dKOOP.k
            d_wide, d_heavy = kernel.numbers_backward(x, k, d_scores)  # parts of the numbers
            add(total, {"bandwidth": d_wide, "weight": d_heavy})
        d_points[number - 1] = d_points[number - 1] + d_x  # (b, h, i, d): part of dKOOP.17
        add(total, {"k": d_k})
    numbers = {}
    if options.updates > 1:
        add(total, gram_backward(saved, observables, total["gram"], total["norm"]))
        numbers = numbers_gradients(saved, d_ab)
    d_q = d_points[0]  # (b, h, i, d) [dKOOP.q]
    d_keys = sum_heads(total["k"], saved.groups)  # (b, g, j, d) [dKOOP.k]
    d_v = sum_heads(total["v"], saved.groups)  # (b, g, j, d) [dKOOP.v]
    nothing = xp.sum(d_q) * 0.0  # (): of a kernel that was not used
    d_bandwidth = total.get("bandwidth", nothing)  # () [dKOOP.bandwidth]
    d_weight = total.get("weight", nothing)  # () [dKOOP.weight]
    return {**numbers, "q": d_q, "k": d_keys, "v": d_v, "bandwidth": d_bandwidth, "weight": d_weight}


def gram_backward(saved: Any, observables: Observables, d_total: Array, d_norm: Array) -> dict[str, Array]:
    """Return what G passes on: gradients of k (b, h, j, d) and of the kernel's numbers."""
    keys, kernel, options = saved.k, observables.kernel, saved.options
    between = kernel.values(keys, keys)  # (b, h, j, j): E
    d_gram = d_total  # (b, h, i, o, o) [dKOOP.6]
    # forward: gram = between where seen, + 1 elsewhere on the diagonal, + jitter * unit
    direct, d_delta, d_beside, d_corner = observables.gram_backward(d_gram)  # parts of what follows
    d_unit = options.jitter_of(between) * d_delta  # (b, h, i, 1): of delta / jitter
    d_mean, d_weight = jitter_backward(observables, between, saved.causal, d_unit)  # parts of what follows
    d_between = direct if d_mean is None else direct + d_mean  # (b, h, j, j) [dKOOP.5]
    # forward: between = k(keys, keys)
    left, right = kernel.backward(keys, keys, d_between)  # parts of dKOOP.k
    d_bandwidth, own = kernel.numbers_backward(keys, keys, d_between)  # parts of numbers
    total = {"k": left + right + d_beside[:, :, 0, :, :], "bandwidth": d_bandwidth, "weight": own}
    if d_weight is not None:
        add(total, {"weight": d_weight})
    # forward: coordinates and gram have 1 / linear_part, for augment
    d_factor = -(d_corner + d_norm) / kernel.linear_part() ** 2  # (): of linear_part
    d_bandwidth, own = kernel.linear_part_backward(d_factor)  # parts of numbers
    add(total, {"bandwidth": d_bandwidth, "weight": own})
    return total


def numbers_gradients(saved: Any, parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Return the gradients of ridge, epsilon and mix from those of the updates."""
    numbers, chosen, kind = saved.numbers, saved.chosen, saved.options.perturbation
    d_each_ridge = [part["ridge"] for part in parts]
    d_each = [part["a" if kind == "shift" else "b"] for part in parts]
    d_ridge = table_gradient(numbers.ridge, chosen, d_each_ridge)  # [dKOOP.ridge]
    d_epsilon = table_gradient(numbers.epsilon, chosen, d_each)  # [dKOOP.epsilon]
    found = {"ridge": d_ridge, "epsilon": d_epsilon}
    if kind == "pencil":
        d_mix = sum(part["a"] for part in parts)  # () [dKOOP.mix]
        found["mix"] = d_mix
    return found
