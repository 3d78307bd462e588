"""Queries updated by a Koopman operator that is fitted to their own trajectory: the definition.

Every query attends (update 1). From update 2 on, the points x_0 ... x_L of its trajectory so far say how it moves, l to
l + 1. An operator K on functions is fitted to these transitions, in the span of the observables g_o(x) = k(k_o, x), the
kernel's sections at the keys that the query sees; phi = K pi, with the coordinates pi, is its one-step map. It predicts
from what the query attends, q': through psi = a pi + b phi, the query goes to where psi takes the value (K psi)(q'). An
operator moves functions, not points: a point can be read off its value of psi because psi is one to one, as pi is, of
which it is a perturbation. For a true operator of a map f, (K psi)(q') = psi(f(q')), and the query goes to f(q').

Equations (J(i) are the keys that query i sees; each update repeats KOOP.1 to KOOP.4 with the newest query x = q^{r-1},
and from the second on KOOP.7 to KOOP.17; P_op = <g_o, pi_p> is (k_o)_p)::

    [KOOP.1]  s_ij = x_i . k_j / sqrt(d)                   similarity "kernel": k(x_i, k_j)
    [KOOP.2]  m_ij = s_ij if j in J(i), else -inf
    [KOOP.3]  w_ij = exp(m_ij) / sum_j exp(m_ij)           0 where J(i) is empty
    [KOOP.4]  q'_i = sum_j w_ij v_j                        update 1: q^1 = q'
    [KOOP.5]  E_jj' = k(k_j, k_j')
    [KOOP.6]  G_jj' = E_jj' for j, j' in J(i), else 0; + 1 on the diagonal outside of J(i), + delta_i on all of it
    [KOOP.7]  B_lo = g_o(x_l)
    [KOOP.8]  Y_lo = g_o(x_{l+1}) - tau B_lo
    [KOOP.9]  N = B G^-1                                   not in the full space
    [KOOP.10]  Z = N B^T                                   full space: Z_lm = k(x_l, x_m)
    [KOOP.11]  A: Z A G + ridge A = Y                      one system of l o unknowns; separable: (Z + ridge) A G = Y
    [KOOP.12]  D = A P                                     phi(x) = tau x + D^T kappa(x) = (K pi)(x)
    [KOOP.13]  R = A B^T                                   (K phi)(x) = tau x + (2 tau D + R D)^T kappa(x)
    [KOOP.14]  H = (a + 2 tau b) D + b R D
    [KOOP.15]  c = kappa(q'), kappa(x) = N g(x)            full space: kappa_l(x) = k(x_l, x)
    [KOOP.16]  z = (K psi)(q') = (a + b) tau q' + H^T c
    [KOOP.17]  q^r = x: psi(x) = (a + b tau) x + b D^T kappa(x) = z

With delta_i = jitter (weight + 1) where the call is causal, with the kernel's weight, else the jitter times the mean of
E_jj over J(i). The operator is (K f)(x) = tau f(x) + kappa(x)^T A f(keys), with f(keys) the column of the values of f
at the keys; for the coordinates that is P itself. Its error over the observables and its Hilbert-Schmidt norm are those
of A alone, with Z and G symmetric and positive; |Z A G - Y|^2 + ridge tr(A^T Z A G) is least where KOOP.11 holds.
"separable" measures the error in the norm of the kernel's space instead. Both are unique for ridge > 0, and linear maps
from Y to A that are their own adjoints.

The perturbation has a = 1, b = epsilon ("identity"; the update tends to phi(q') as epsilon -> 0), a = epsilon, b = 1
("shift") or a = mix, b = epsilon ("pencil"): only a / b matters. `perturbation` inverts it.

Augmented, the coordinates are observables too, behind the keys: g(x) = (k(k_j, x), x), P = (k, I / n) and G has the
blocks k and I / n beside E, with n the factor of x . y in k (1 but for a polynomial). Where coordinates have ridges of
their own, A and R have an axis of them in front, and column p of D and R D is that of the operator with ridge_p.

Adjoints, for given d_o (u = kappa(q^r), J the Jacobian of psi there, k_x and k_y the derivatives of k(x, y) by its two
arguments, k_h that by the bandwidth, k2 that by the weight, <., .> sums of products of elements; dg(x) is the gradient
of g at a point x: dB_l at x_l, dY_l at x_{l+1}, N^T dc at q', N^T du at q^r). Sums over r are over updates::

    [dKOOP.17]  dq^s = sum_j ds_j k_j / sqrt(d) + sum_r sum_o dg_o(q^s) k_x(q^s, k_o)      of the last: + d_o
    [dKOOP.16]  dz = J^-T dq^r
    [dKOOP.15]  dc = H dz
    [dKOOP.14]  dH = c dz^T
    [dKOOP.12]  dD = (a + 2 tau b) dH + b R^T dH - b u dz^T
    [dKOOP.13]  dR = b dH D^T
    [dKOOP.11]  dA = dD P^T + dR B                         0 for observables that are not seen
    [dKOOP.8]  dY: Z dY G + ridge dY = dA                  separable: (Z + ridge) dY G = dA
    [dKOOP.10]  dZ = -dY G A^T
    [dKOOP.9]  dN = dZ B + du g(q^r)^T + dc g(q')^T, du = -b D dz
    [dKOOP.7]  dB = dR^T A + dZ^T N + dN G^-1 - tau dY     full space: dB = dR^T A - tau dY
    [dKOOP.6]  dG = -sum_r (A^T Z dY + N^T dN G^-1)        separable: Z A + ridge A in place of Z A
    [dKOOP.5]  dE_jj' = sum_i dG_jj' over j, j' in J(i)    not causal: + jitter sum_i tr(dG) / |J(i)| for j = j' in J(i)
    [dKOOP.4]  dq'_i = (a + b) tau dz + sum_o (N^T dc)_o k_x(q', k_o)          update 1: dq'_i = dq^1_i
    [dKOOP.3]  dw_ij = dq'_i . v_j
    [dKOOP.1]  ds_ij = w_ij (dw_ij - sum_j w_ij dw_ij)
    [dKOOP.q]  dq = dq^0 of dKOOP.17
    [dKOOP.k]  dk_j = sum_r sum_i (ds_ij x_i / sqrt(d) + (A^T dD)_j + sum_x dg_j(x) k_y(x, k_j)) + of KOOP.5
    [dKOOP.v]  dv_j = sum_r sum_i w_ij dq'_i
    [dKOOP.ridge]  dridge = -<dY, A>                       separable: -<dY, A G>
    [dKOOP.epsilon]  depsilon = db                         perturbation "shift": da
    [dKOOP.mix]  dmix = da                                 perturbation "pencil"
    [dKOOP.bandwidth]  dbandwidth = sum_r sum_x sum_j dg_j(x) k_h(x, k_j) + sum_jj' dE_jj' k_h(k_j, k_j')
    [dKOOP.weight]  dweight = sum_r sum_x sum_j dg_j(x) k2(x, k_j) + sum_jj' dE_jj' k2(k_j, k_j')

with da = dz . (tau q' - q^r) + <dH, D> and db = dz . (tau q' - tau q^r - D^T u) + <dH, 2 tau D + R D>; of KOOP.5 is
sum_j' (dE_jj' k_x(k_j, k_j') + dE_j'j k_y(k_j', k_j)). Where causal, dweight has jitter sum_i tr(dG) more. A ridge of
scale "mean" is multiplied by L |J(i)|, and so is dridge. Similarity "kernel" has k_x(x_i, k_j) and k_y(x_i, k_j) for
k_j / sqrt(d) and x_i / sqrt(d), and adds the products of ds_ij to dbandwidth and dweight. In the full space kappa and Z
are sections at the points, so that these move instead: dq^s and dq' have the derivatives of <dZ, Z> + <dc, kappa(q')> +
<du, kappa(q^r)>.

The root moves with everything that psi and z are made of, but not with itself: g(q^r) is a constant there. No
eigenvector is differentiated anywhere.

Axes: b batch, h query head, g key/value head, i query, j key, l transition, o observable, d width.

Source: N. Tie 2024, Koopman attention; Khosravi 2023 (arXiv:2208.01681), sections IV and V, for the operator;
"separable" is kernel ridge regression. How they are read, and where they leave a choice: docs/deviations.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman.kernel import Kernel, Observables
from refattn.mechanisms.koopman.perturbation import OneStep, a_and_b, failure_of, invert, not_finite, picked, placed
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_pairs
from refattn.ops.solve import identity, solve
from refattn.xp import Array, max_last, namespace, zeros


@dataclass(frozen=True)
class Options:
    """What is chosen, as the core was given it; its docstring says what each means."""

    updates: int
    similarity: str
    kernel: Kernel
    space: str
    jitter: float
    fit: str
    ridge: Array  # (candidates, updates - 1), or 1 in place of either; a third axis is that of the coordinates
    scale: str
    tau: float
    window: int | None
    perturbation: str
    epsilon: Array  # (candidates, updates - 1), or 1 in place of either
    mix: Array
    certify: bool

    @property
    def candidates(self) -> int:
        """How many candidates of ridge and epsilon there are."""
        return max(self.ridge.shape[0], self.epsilon.shape[0])

    def start_of(self, points: int) -> int:
        """Return the first of so many points that the operator is fitted to."""
        return 0 if self.window is None else max(0, points - self.window - 1)


@dataclass(frozen=True)
class Step:
    """What the backward of an update reads."""

    path: Array  # (b, h, i, l + 1, d): x_0 ... x_L
    attended: Array  # (b, h, i, d): q'
    root: Array  # (b, h, i, d): q^r
    a: Any
    b: Any
    ridge: Array  # () or (b, h, i, 1, 1), behind an axis of coordinates that have their own
    own: Array | None  # (d, 1, 1, 1, 1, d): the coordinate of each ridge; None: one ridge for all
    starts: Array  # (b, h, i, l, o): B
    dual: Array | None  # (b, h, i, l, o): N
    inner: Array  # (b, h, i, l, l): Z
    found: Array  # (b, h, i, l, o): A
    modes: Array  # (b, h, i, l, d): D
    koopman: Array  # (b, h, i, l, l): R
    turned: Array  # (b, h, i, l, d): R D
    lifted: Array  # (b, h, i, l, d): H
    section: Array  # (b, h, i, l): c


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense form reads."""

    options: Options
    causal: bool
    groups: int
    k: Array  # (b, h, j, d)
    v: Array  # (b, h, j, d)
    seen: Array  # (b, h, i, j)
    gram: Array | None  # (b, h, i, o, o)
    trajectory: tuple[Array, ...]  # q^0, q^1, ..., (b, h, i, d) each
    weights: tuple[Array, ...]  # (b, h, i, j) of each update
    updates: tuple[Step, ...]  # from the second on
    chosen: tuple[int, ...]  # the candidate of each of these


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, options: Options
) -> tuple[Array, Saved]:
    """Return the last query (b, h, i, d) and what `backward` reads; raise where no candidate of psi was inverted."""
    keys = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    values = repeat_heads(v, q.shape[1])  # (b, h, j, d): copies of v
    allowed = allowed_pairs(mask, offset, q.shape[2], k.shape[2], q)  # broadcasts to J
    everywhere = zeros((*q.shape[:3], k.shape[2]), q) == 0.0  # (b, h, i, j): True
    seen = everywhere if allowed is None else everywhere & allowed  # (b, h, i, j): whether j is in J(i)
    observables = Observables(options.kernel, keys, seen, options.space == "augmented")
    gram = None if options.updates == 1 else gram_of(observables, offset is not None, options)  # tagged there
    weights, attended = attend(q, keys, values, seen, options)  # tagged there
    trajectory, all_weights = [q, attended], [weights]
    steps: list[Step] = []
    chosen: list[int] = []
    while len(trajectory) <= options.updates:
        weights, attended = attend(trajectory[-1], keys, values, seen, options)  # tagged there
        for candidate in range(options.candidates):
            root, left, step = update(trajectory, attended, observables, gram, options, candidate)  # tagged there
            failure = failure_of(left, len(trajectory))
            if failure is None:
                break
        if failure is not None:
            raise failure
        trajectory.append(root)
        all_weights.append(weights)
        steps.append(step)
        chosen.append(candidate)
    parts = (keys, values, seen, gram, tuple(trajectory), tuple(all_weights), tuple(steps), tuple(chosen))
    return trajectory[-1], Saved(options, offset is not None, k.shape[1], *parts)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v and of every number, the tables ridge and epsilon among them."""
    xp, options, k, v = namespace(d_out), saved.options, saved.k, saved.v  # -, -, (b, h, j, d), (b, h, j, d)
    observables = Observables(options.kernel, k, saved.seen, options.space == "augmented")
    total: dict[str, Array] = {"k": xp.zeros_like(k), "v": xp.zeros_like(v)}
    d_points = [xp.zeros_like(x) for x in saved.trajectory]
    d_points[-1] = d_out  # (b, h, i, d): it came in
    numbers: list[dict[str, Array]] = []
    for number in range(options.updates, 0, -1):
        d_root = d_points[number]  # (b, h, i, d) [dKOOP.17]
        d: dict[str, Array] = {}
        if number > 1:
            # forward: root = update(points, attended, keys, gram, ...)
            d = update_backward(saved.updates[number - 2], observables, saved.gram, options, d_root)
            for n in range(options.start_of(number), number):
                d_points[n] = d_points[n] + d["path"][:, :, :, n - number, :]  # (b, h, i, d)
            add(total, {name: d[name] for name in ("k", "gram", "bandwidth", "weight", "norm")})
            numbers.insert(0, {name: d[name] for name in ("ridge", "a", "b")})
        d_attended = d["attended"] if number > 1 else d_root  # (b, h, i, d) [dKOOP.4]
        # forward: attended = attend(x, k, v)
        x, weights = saved.trajectory[number - 1], saved.weights[number - 1]  # (b, h, i, d), (b, h, i, j)
        d = attend_backward(x, k, v, weights, options, d_attended)
        d_points[number - 1] = d_points[number - 1] + d.pop("x")  # (b, h, i, d)
        add(total, d)
    if options.updates > 1:
        # forward: gram = gram_of(keys, ...)
        d_gram = total["gram"]  # (b, h, i, o, o) [dKOOP.6]
        add(total, gram_backward(observables, saved.causal, options, d_gram, total["norm"]))
    d_q = d_points[0]  # (b, h, i, d) [dKOOP.q]
    d_k = sum_heads(total["k"], saved.groups)  # (b, g, j, d) [dKOOP.k]
    d_v = sum_heads(total["v"], saved.groups)  # (b, g, j, d) [dKOOP.v]
    nothing = xp.sum(d_q) * 0.0  # (): of a kernel that was not used
    d_bandwidth = total.get("bandwidth", nothing)  # () [dKOOP.bandwidth]
    d_weight = total.get("weight", nothing)  # () [dKOOP.weight]
    found = {"q": d_q, "k": d_k, "v": d_v, "bandwidth": d_bandwidth, "weight": d_weight}
    return found | numbers_gradients(options, saved.chosen, numbers)


def attend(x: Array, k: Array, v: Array, seen: Array, options: Options) -> tuple[Array, Array]:
    """Return the weights (b, h, i, j) and what queries x (b, h, i, d) attend."""
    xp = namespace(x)
    if options.similarity == "dot":
        scores = x @ xp.matrix_transpose(k) / math.sqrt(x.shape[-1])  # (b, h, i, j) [KOOP.1]
    else:
        scores = options.kernel.values(x, k)  # (b, h, i, j) [KOOP.1]
    masked = xp.where(seen, scores, -math.inf)  # (b, h, i, j) [KOOP.2]
    top = max_last(masked)  # (b, h, i, 1): -inf where J(i) is empty
    powers = xp.exp(masked - xp.where(top == -math.inf, 0.0, top))  # (b, h, i, j)
    total = xp.sum(powers, axis=-1, keepdims=True)  # (b, h, i, 1)
    weights = powers / xp.where(total == 0.0, 1.0, total)  # (b, h, i, j) [KOOP.3]
    attended = weights @ v  # (b, h, i, d) [KOOP.4]
    return weights, attended


def attend_backward(
    x: Array, k: Array, v: Array, weights: Array, options: Options, d_attended: Array
) -> dict[str, Array]:
    """Return the gradients of x, k and v, and of the kernel's numbers where it is the similarity."""
    xp, transpose = namespace(x), namespace(x).matrix_transpose
    # forward: attended = weights @ v
    d_v = transpose(weights) @ d_attended  # (b, h, j, d): of this update
    d_weights = d_attended @ transpose(v)  # (b, h, i, j) [dKOOP.3]
    # forward: weights = softmax(scores)
    inner = xp.sum(weights * d_weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    d_scores = weights * (d_weights - inner)  # (b, h, i, j) [dKOOP.1]
    if options.similarity == "dot":
        # forward: scores = x @ k^T / sqrt(d)
        d_dot = d_scores / math.sqrt(x.shape[-1])  # (b, h, i, j)
        return {"x": d_dot @ k, "k": transpose(d_dot) @ x, "v": d_v}
    # forward: scores = k(x, k)
    d_x, d_k, d_bandwidth, d_weight = options.kernel.backward(x, k, d_scores)  # (b, h, i, d), (b, h, j, d), (), ()
    return {"x": d_x, "k": d_k, "v": d_v, "bandwidth": d_bandwidth, "weight": d_weight}


def gram_of(g: Observables, causal: bool, options: Options) -> Array:
    """Return G (b, h, i, o, o)."""
    xp = namespace(g.keys)
    between = g.kernel.values(g.keys, g.keys)  # (b, h, j, j) [KOOP.5]
    if causal:
        size = zeros((*g.seen.shape[:3], 1), between) + g.kernel.weight + 1.0  # (b, h, i, 1): delta / jitter
    else:
        diagonal = xp.sum(between * identity(between.shape[-1], between), axis=-1)  # (b, h, j)
        sizes = xp.where(g.seen, diagonal[:, :, None, :], 0.0)  # (b, h, i, j)
        size = xp.sum(sizes, axis=-1, keepdims=True) / g.count()  # (b, h, i, 1): delta / jitter
    delta = options.jitter * size  # (b, h, i, 1)
    gram = g.gram(between, delta)  # (b, h, i, o, o) [KOOP.6]
    return gram


def gram_backward(g: Observables, causal: bool, options: Options, d_gram: Array, d_corner: Array) -> dict[str, Array]:
    """Return the gradients of the keys (b, h, j, d) and the kernel's numbers, for those of G and of 1 / n in P."""
    xp, kernel, keys = namespace(d_gram), g.kernel, g.keys  # (b, h, j, d)
    # forward: gram = between where seen, + 1 elsewhere on the diagonal, + delta; the keys and 1 / n beside it
    d_seen, d_delta, d_beside, d_norm = g.gram_backward(d_gram)  # (b, h, j, j), (b, h, i, 1), (b, h, j, d), ()
    # forward: delta = jitter * (weight + 1), or jitter * the mean of between_jj over the seen keys
    d_unit = options.jitter * d_delta  # (b, h, i, 1)
    shares = xp.where(g.seen, 0.0 * d_unit if causal else d_unit / g.count(), 0.0)  # (b, h, i, j)
    d_between = d_seen + xp.sum(shares, axis=2)[..., None] * identity(keys.shape[2], keys)  # (b, h, j, j) [dKOOP.5]
    # forward: between = k(keys, keys)
    left, right, d_bandwidth, d_weight = kernel.backward(keys, keys, d_between)  # (b, h, j, d), (b, h, j, d), (), ()
    total = {"k": left + right + d_beside, "bandwidth": d_bandwidth, "weight": d_weight}
    if causal:
        add(total, {"weight": xp.sum(d_unit)})
    # forward: P and G have 1 / n, n = linear_part
    d_factor = -(d_norm + d_corner) / kernel.linear_part() ** 2  # ()
    d_bandwidth, d_weight = kernel.linear_part_backward(d_factor)  # (), ()
    add(total, {"bandwidth": d_bandwidth, "weight": d_weight})
    return total


def coefficients(fit: str, inner: Array, gram: Array, ridge: Any, targets: Array) -> Array:
    """Return A (..., l, o) of KOOP.11 for Z = `inner` (..., l, l), G = `gram` (..., o, o) and Y = `targets`.

    With Z and G transposed, which are symmetric but for rounding, it is its own adjoint.
    """
    xp = namespace(inner, gram, targets)
    targets = targets + 0.0 * ridge  # (..., l, o): with the axis in front that ridges by coordinate have
    if fit == "separable":
        left = solve(inner + ridge * identity(inner.shape[-1], inner), targets)  # (..., l, o)
        return xp.matrix_transpose(solve(xp.matrix_transpose(gram), xp.matrix_transpose(left)))
    # Row by row the elements of A are one vector: element (l, o) of Z A G takes Z_ll' G_o'o of element (l', o').
    rows, columns = targets.shape[-2:]
    product = inner[..., :, None, :, None] * xp.matrix_transpose(gram)[..., None, :, None, :]  # (..., l, o, l', o')
    system = xp.reshape(product, (*product.shape[:-4], rows * columns, rows * columns))  # (..., l o, l' o')
    flat = xp.reshape(targets, (*targets.shape[:-2], rows * columns, 1))  # (..., l o, 1)
    found = solve(system + ridge * identity(rows * columns, inner), flat)  # (..., l o, 1)
    return xp.reshape(found, (*found.shape[:-2], rows, columns))


def update(
    trajectory: list[Array], attended: Array, g: Observables, gram: Any, options: Options, candidate: int
) -> tuple[Array, Array, Step]:
    """Return (root, left, step) of one candidate of ridge and epsilon, after the points of a trajectory.

    They are the next query (b, h, i, d), how far psi is from having been inverted (b, h, i), as `invert` tells it, and
    what the backward reads.
    """
    xp, transpose, tau, number = namespace(attended), namespace(attended).matrix_transpose, options.tau, len(trajectory)
    path = xp.stack(trajectory[options.start_of(number) :], axis=3)  # x_0 ... x_L
    first, last = path[..., :-1, :], path[..., 1:, :]  # (b, h, i, l, d), (b, h, i, l, d): starts, ends
    a, b = a_and_b(options.perturbation, picked(options.epsilon, candidate, number), options.mix)  # (), or 1
    ridge, own = ridge_of(picked(options.ridge, candidate, number), g, first, options)  # as in `Step`
    starts = g.values(first)  # (b, h, i, l, o) [KOOP.7]
    targets = g.values(last) - tau * starts  # (b, h, i, l, o) [KOOP.8]
    if options.space == "full":
        dual = None
        inner = g.kernel.values(first, first)  # (b, h, i, l, l) [KOOP.10]
    else:
        dual = transpose(solve(gram, transpose(starts)))  # (b, h, i, l, o) [KOOP.9]
        inner = dual @ transpose(starts)  # (b, h, i, l, l) [KOOP.10]
    found = coefficients(options.fit, inner, gram, ridge, targets)  # (b, h, i, l, o) [KOOP.11]
    modes = summed(each(found @ g.coordinates(), own), own)  # (b, h, i, l, d) [KOOP.12]
    koopman = found @ transpose(starts)  # (b, h, i, l, l) [KOOP.13]
    turned = summed(each(koopman @ modes, own), own)  # (b, h, i, l, d): R D
    lifted = (a + 2.0 * tau * b) * modes + b * turned  # (b, h, i, l, d) [KOOP.14]
    phi = OneStep(g, dual, first, modes)
    section = phi.kappa(attended)  # (b, h, i, l) [KOOP.15]
    image = (a + b) * tau * attended + combined(section, lifted)  # (b, h, i, d) [KOOP.16]
    expected = tau * attended + combined(section, modes)  # (b, h, i, d): phi(q')
    alive = xp.any(g.seen, axis=-1)  # (b, h, i): whether the query sees a key
    if options.certify:
        phi.certify(a + b * tau, b, alive)

    def residual(x: Array) -> tuple[Array, Array, Array]:
        """Return psi(x) - z, the size of the terms that it sums, and J."""
        value, size, slope = phi.at(x)  # (b, h, i, d), (b, h, i, d), (b, h, i, d, d)
        terms = xp.abs((a + b * tau) * x) + xp.abs(b * size) + xp.abs(image)  # (b, h, i, d)
        jacobian = (a + b * tau) * identity(x.shape[-1], x) + b * slope  # (b, h, i, d, d)
        return (a + b * tau) * x + b * value - image, xp.sqrt(xp.sum(terms * terms, axis=-1)), jacobian

    lost = not_finite(g.keys, attended, trajectory[-1])  # (b, h, i): what is NaN
    reached, left = invert(residual, (expected, attended, trajectory[-1]), alive, lost)  # (b, h, i, d), (b, h, i)
    root = xp.where(alive[..., None], reached, 0.0)  # (b, h, i, d) [KOOP.17]
    fitted = (starts, dual, inner, found, modes, koopman, turned, lifted, section)
    return root, left, Step(path, attended, root, a, b, ridge, own, *fitted)


def update_backward(step: Step, g: Observables, gram: Any, options: Options, d_root: Array) -> dict[str, Array]:
    """Return the gradients of the path, q', the keys, G, the kernel's numbers, ridge, a, b and 1 / n."""
    xp, transpose, fit = namespace(d_root), namespace(d_root).matrix_transpose, options.fit
    tau, a, b, own, dual, modes = options.tau, step.a, step.b, step.own, step.dual, step.modes
    root, attended, inner, found = step.root, step.attended, step.inner, step.found  # (b, h, i, d), (b, h, i, d)
    first, last = step.path[..., :-1, :], step.path[..., 1:, :]  # (b, h, i, l, d), (b, h, i, l, d): starts, ends
    phi, eye = OneStep(g, dual, first, modes), identity(root.shape[-1], root)  # -, (d, d)
    # forward: psi(root) = (a + b tau) root + b modes^T kappa(root) = image
    value, _, slope = phi.at(root)  # (b, h, i, d), (b, h, i, d), (b, h, i, d, d)
    jacobian = (a + b * tau) * eye + b * slope  # (b, h, i, d, d): J
    alive = xp.any(g.seen, axis=-1)[..., None]  # (b, h, i, 1): whether there is a root
    regular = xp.where(alive[..., None], jacobian, eye)  # (b, h, i, d, d)
    d_image = solve(transpose(regular), xp.where(alive, d_root, 0.0)[..., None])[..., 0]  # (b, h, i, d) [dKOOP.16]
    d_at_root = -(b * modes @ d_image[..., None])[..., 0]  # (b, h, i, l): du
    # forward: image = (a + b) tau attended + lifted^T section
    d_section = (step.lifted @ d_image[..., None])[..., 0]  # (b, h, i, l) [dKOOP.15]
    d_lifted = step.section[..., None] * d_image[..., None, :]  # (b, h, i, l, d) [dKOOP.14]
    # forward: lifted = (a + 2 tau b) modes + b koopman @ modes
    d_turned = summed(transpose(step.koopman) @ each(d_lifted, own), own)  # (b, h, i, l, d): R^T dH
    of_psi = phi.kappa(root)[..., None] * d_image[..., None, :]  # (b, h, i, l, d): u dz^T
    d_modes = (a + 2.0 * tau * b) * d_lifted + b * (d_turned - of_psi)  # (b, h, i, l, d) [dKOOP.12]
    d_koopman = b * each(d_lifted, own) @ transpose(modes)  # (b, h, i, l, l) [dKOOP.13]
    # forward: modes = found @ P; koopman = found @ starts^T
    d_all = each(d_modes, own) @ transpose(g.coordinates()) + d_koopman @ step.starts  # (b, h, i, l, o)
    d_found = g.seen_alone(d_all)  # (b, h, i, l, o) [dKOOP.11]
    d_coordinates = xp.sum(summed(transpose(found) @ each(d_modes, own), own), axis=2)  # (b, h, o, d): dP
    # forward: Z A G + ridge A = Y, or (Z + ridge) A G = Y
    d_targets = coefficients(fit, transpose(inner), transpose(gram), step.ridge, d_found)  # (b, h, i, l, o) [dKOOP.8]
    d_inner = -summed(d_targets @ transpose(gram) @ transpose(found), own)  # (b, h, i, l, l) [dKOOP.10]
    left = inner @ found + (step.ridge * found if fit == "separable" else 0.0)  # (b, h, i, l, o)
    d_gram = -summed(transpose(left) @ d_targets, own)  # (b, h, i, o, o): but for what N passes
    of_ridge = -d_targets * (found @ gram if fit == "separable" else found)  # (b, h, i, l, o)
    by_query = xp.sum(of_ridge, axis=(-2, -1), keepdims=True) * factor_of(g, first, options)  # (b, h, i, 1, 1)
    d_ridge = xp.sum(by_query, axis=(-5, -4, -3, -2, -1))  # () or (d,): of the ridges of this update
    # forward: starts = g(first); targets = g(last) - tau starts
    d_last = summed(d_targets, own)  # (b, h, i, l, o): of g at the ends
    of_koopman = summed(transpose(d_koopman) @ found, own)  # (b, h, i, l, o): dR^T A
    evaluations = [("last", last, d_last)]
    if dual is None:
        d_starts = of_koopman - tau * d_last  # (b, h, i, l, o) [dKOOP.7]
        # forward: inner = k(first, first); kappa(x) = k(first, x), with a root that is given
        sections = [("first", first, d_inner)]
        sections += [("attended", attended[..., None, :], d_section[..., None])]
        sections += [("root", root[..., None, :], d_at_root[..., None])]
    else:
        # forward: inner = dual @ starts^T; dual = starts G^-1; kappa(x) = dual @ g(x), with a root that is given
        of_root = d_at_root[..., None] * g.values(root[..., None, :])  # (b, h, i, l, o)
        of_attended = d_section[..., None] * g.values(attended[..., None, :])  # (b, h, i, l, o)
        d_dual = d_inner @ step.starts + of_root + of_attended  # (b, h, i, l, o) [dKOOP.9]
        through = transpose(solve(transpose(gram), transpose(d_dual)))  # (b, h, i, l, o): dN G^-1
        d_starts = of_koopman + transpose(d_inner) @ dual + through - tau * d_last  # (b, h, i, l, o) [dKOOP.7]
        d_gram = d_gram - transpose(dual) @ through  # (b, h, i, o, o)
        evaluations += [("attended", attended[..., None, :], d_section[..., None, :] @ dual)]
        evaluations += [("root", root[..., None, :], d_at_root[..., None, :] @ dual)]
        sections = []
    total = {"k": d_coordinates[..., : g.keys.shape[2], :]}  # and by name what x is: of these, and of the kernel
    for name, x, d_values in (*evaluations, ("first", first, d_starts)):
        d_x, passed = g.backward(x, d_values)  # of one evaluation of g
        add(total, {name: d_x, **passed})
    for name, x, d_values in sections:
        d_first, d_x, d_bandwidth, d_weight = g.kernel.backward(first, x, d_values)  # of one evaluation of k
        add(total, {"first": d_first, "bandwidth": d_bandwidth, "weight": d_weight})
        add(total, {name: d_x})
    zero = xp.zeros_like(first[..., :1, :])  # (b, h, i, 1, d): the last point starts nothing, the first ends nothing
    total["path"] = xp.concat([total["first"], zero], axis=-2) + xp.concat([zero, total["last"]], axis=-2)  # as path
    total["attended"] = (a + b) * tau * d_image + total["attended"][..., 0, :]  # (b, h, i, d)
    # forward: a and b in psi, in image and in lifted
    d_a = xp.sum(d_image * (tau * attended - root)) + xp.sum(d_lifted * modes)  # (): da
    of_image = d_image * (tau * (attended - root) - value)  # (b, h, i, d)
    d_b = xp.sum(of_image) + xp.sum(d_lifted * (2.0 * tau * modes + step.turned))  # (): db
    d_norm = xp.sum(d_coordinates[..., g.keys.shape[2] :, :] * eye) if g.augmented else 0.0 * d_a  # (): of 1 / n
    return total | {"gram": d_gram, "ridge": d_ridge, "a": d_a, "b": d_b, "norm": d_norm}


def ridge_of(ridge: Array, g: Observables, first: Array, options: Options) -> tuple[Array, Array | None]:
    """Return the ridge of each query, for one () or those of the coordinates (d,), and `own` as `Step` has both."""
    factor = factor_of(g, first, options)  # 1 or (b, h, i, 1, 1)
    if ridge.shape == ():
        return ridge * factor, None
    own = identity(first.shape[-1], first)[:, None, None, None, None, :]  # (d, 1, 1, 1, 1, d)
    return ridge[:, None, None, None, None, None] * factor, own


def factor_of(g: Observables, first: Array, options: Options) -> Array | float:
    """Return what multiplies the ridge: 1, or for a mean error the number of its terms, (b, h, i, 1, 1)."""
    return 1.0 if options.scale == "sum" else float(first.shape[-2]) * g.count()[..., None]


def numbers_gradients(options: Options, chosen: tuple[int, ...], parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Return the gradients of ridge, epsilon and mix from those of the updates."""
    if not parts:
        return {}
    of_epsilon = "a" if options.perturbation == "shift" else "b"
    d_ridge = placed(options.ridge, chosen, [part["ridge"] for part in parts])  # [dKOOP.ridge]
    d_epsilon = placed(options.epsilon, chosen, [part[of_epsilon] for part in parts])  # [dKOOP.epsilon]
    if options.perturbation != "pencil":
        return {"ridge": d_ridge, "epsilon": d_epsilon}
    d_mix = sum(part["a"] for part in parts)  # () [dKOOP.mix]
    return {"ridge": d_ridge, "epsilon": d_epsilon, "mix": d_mix}


def combined(weights: Array, rows: Array) -> Array:
    """Return sum_l weights_l rows_l, (b, h, i, d)."""
    return namespace(rows).sum(rows * weights[..., None], axis=-2)


def each(x: Array, own: Array | None) -> Array:
    """Return x (b, h, i, l, d), for ridges by coordinate the column of each alone, with their axis in front."""
    return x if own is None else x * own


def summed(x: Array, own: Array | None) -> Array:
    """Return x (b, h, i, ...), for ridges by coordinate summed over their axis in front."""
    return x if own is None else namespace(x).sum(x, axis=0)


def add(total: dict[str, Array], parts: dict[str, Array]) -> None:
    """Add parts to a total that is the caller's own, name by name."""
    for name, part in parts.items():
        total[name] = total[name] + part if name in total else part  # of any shape
