"""Queries updated by a Koopman operator that is fitted to their own trajectory: the definition.

Every query attends (update 1). From update 2 on, an operator K on functions is fitted to how the points x_0 ... x_L of
its trajectory moved, l to l + 1, in the span of the observables g_o(x) = k(k_o, x), the kernel's sections at the keys
that the query sees; phi = K pi, with the coordinates pi, is its one-step map. From what it attends, q', the query goes
to where psi = a pi + b phi takes the value (K psi)(q'): an operator moves functions, not points, but a point is read
off its value of psi, which is one to one, as pi is, of which it is a perturbation. For a true operator of a map f,
(K psi)(q') = psi(f(q')), and the query goes to f(q').

The definition, the paper's own case, is `definition`; ids with numbers are its equations, and here they have options.
Every update repeats KOOP.2 to KOOP.4 with the newest query x = q^{r-1}, and from the second on KOOP.5 to KOOP.15. J(i)
are the keys that query i sees, and P_op = <g_o, pi_p> is (k_o)_p::

    [KOOP.1]  G_oo' = k(k_o, k_o') + delta I_oo'
    [KOOP.visible]  G_oo' for o, o' in J(i), else (1 + delta) I_oo'         the G of the equations below
    [KOOP.2]  s_ij = x_i . k_j / sqrt(d)                   similarity "kernel": k(x_i, k_j)
    [KOOP.masked]  m_ij = s_ij if j in J(i), else -inf
    [KOOP.3]  w_ij = exp(m_ij) / sum_j exp(m_ij)           0 where J(i) is empty
    [KOOP.4]  q'_i = sum_j w_ij v_j                        update 1: q^1 = q'
    [KOOP.5]  B_lo = g_o(x_l)
    [KOOP.6]  Y_lo = g_o(x_{l+1}) - tau B_lo
    [KOOP.7]  N = B G^-1                                   not for "full"
    [KOOP.8]  Z = N B^T                                    "full": Z_lm = k(x_l, x_m)
    [KOOP.9]  A: Z A G + ridge A = Y                       one system of l o unknowns; "separable": (Z + ridge) A G = Y
    [KOOP.10]  D = A P                                     phi(x) = tau x + D^T kappa(x) = (K pi)(x)
    [KOOP.11]  R = A B^T                                   (K phi)(x) = tau x + (2 tau D + R D)^T kappa(x)
    [KOOP.12]  H = (a + 2 tau b) D + b R D
    [KOOP.13]  c = kappa(q'), kappa(x) = N g(x)            "full": kappa_l(x) = k(x_l, x)
    [KOOP.14]  t = (K psi)(q') = (a + b) tau q' + H^T c
    [KOOP.15]  q^r = x: psi(x) = (a + b tau) x + b D^T kappa(x) = t

With delta = jitter (weight + 1), the kernel's weight, which is 0 of "linear". The operator is (K f)(x) = tau f(x) +
kappa(x)^T A f(keys), with f(keys) the column of the values of f at the keys: P for the coordinates. |Z A G - Y|^2 +
ridge tr(A^T Z A G), with its error over the observables and its Hilbert-Schmidt norm, is least where KOOP.9 holds: for
ridge > 0 at one A, which is linear in Y, and its own adjoint. "separable" measures the error in the norm of the
kernel's space instead, as kernel ridge regression does; where its norm or rank is limited A, and its adjoint, are those
of `refattn.mechanisms.koopman.limited`. "identity" has a = 1, b = epsilon: the update tends to phi(q') as epsilon -> 0.
"shift" has a = epsilon, b = 1. "pencil" has a = mix, b = epsilon. Only a / b matters.

In "augmented" the coordinates are observables too, behind the keys: g(x) = (k(k_j, x), x), P = (k, I / n) and G has the
blocks k and I / n + delta I beside that of the keys, with n the factor of x . y in k (1 but for a polynomial). `apart`:
where coordinates have ridges of their own, A and R have an axis of them in front, and column p of D and R D is that of
ridge_p's operator.

Adjoints, for given d_o (u = kappa(q^r), J the Jacobian of psi there, k_x, k_y, k_h and k2 the derivatives of k(x, y) by
x, y, the bandwidth and the weight, <., .> sums of products of elements; dg(x) is the gradient of g at a point x: dB_l
at x_l, dY_l at x_{l+1}, N^T dc at q', N^T du at q^r). Sums over r are over updates::

    [dKOOP.15]  dq^s = sum_j ds_j k_j / sqrt(d) + sum_r sum_o dg_o(q^s) k_x(q^s, k_o)      of the last: + d_o
    [dKOOP.14]  dt = J^-T dq^r
    [dKOOP.13]  dc = H dt
    [dKOOP.12]  dH = c dt^T
    [dKOOP.11]  dR = b dH D^T
    [dKOOP.10]  dD = (a + 2 tau b) dH + b R^T dH - b u dt^T
    [dKOOP.9]  dA = dD P^T + dR B                          0 for observables that are not seen
    [dKOOP.6]  dY: Z dY G + ridge dY = dA                  "separable": (Z + ridge) dY G = dA
    [dKOOP.8]  dZ = -dY G A^T
    [dKOOP.7]  dN = dZ B + du g(q^r)^T + dc g(q')^T, du = -b D dt
    [dKOOP.5]  dB = dR^T A + dZ^T N + dN G^-1 - tau dY     "full": dB = dR^T A - tau dY
    [dKOOP.visible]  dG = -sum_r (A^T Z dY + N^T dN G^-1)  "separable": Z A + ridge A in place of Z A
    [dKOOP.4]  dq'_i = (a + b) tau dt + sum_o (N^T dc)_o k_x(q', k_o)      update 1: dq'_i = dq^1_i
    [dKOOP.3]  dw_ij = dq'_i . v_j
    [dKOOP.2]  ds_ij = w_ij (dw_ij - sum_j w_ij dw_ij)
    [dKOOP.1]  dG_oo' = sum_i dG_oo' of dKOOP.visible, over o, o' in J(i)
    [dKOOP.q]  dq = dq^0 of dKOOP.15
    [dKOOP.k]  dk_j = sum_r sum_i (ds_ij x_i / sqrt(d) + (A^T dD)_j + sum_x dg_j(x) k_y(x, k_j)) + of KOOP.1
    [dKOOP.v]  dv_j = sum_r sum_i w_ij dq'_i
    [dKOOP.ridge]  dridge = -<dY, A>                       "separable": -<dY, A G>
    [dKOOP.epsilon]  depsilon = db                         perturbation "shift": da
    [dKOOP.mix]  dmix = da                                 perturbation "pencil"
    [dKOOP.bandwidth]  dbandwidth = sum_r sum_x sum_j dg_j(x) k_h(x, k_j) + sum_jj' dG_jj' k_h(k_j, k_j')
    [dKOOP.weight]  dweight = sum_r sum_x sum_j dg_j(x) k2(x, k_j) + sum_jj' dG_jj' k2(k_j, k_j') + jitter tr(dG)

with da = dt . (tau q' - q^r) + <dH, D> and db = dt . (tau q' - tau q^r - D^T u) + <dH, 2 tau D + R D>; of KOOP.1 is
sum_j' (dG_jj' k_x(k_j, k_j') + dG_j'j k_y(k_j', k_j)). The root moves with everything that psi and t are made of, but
not with itself: g(q^r) is a constant there. A ridge of scale "mean" is multiplied by L |J(i)|, and so is dridge.
Similarity "kernel" has k_x(x_i, k_j) and k_y(x_i, k_j) for k_j / sqrt(d) and x_i / sqrt(d), and adds the products of
ds_ij to dbandwidth and dweight. For "full" kappa and Z are sections at the points, so that these move instead: dq^s and
dq' have the derivatives of <dZ, Z> + <dc, kappa(q')> + <du, kappa(q^r)>.

Axes: b batch, h query head, g key/value head, i query, j key, l transition, o observable, d width.

Source: N. Tie 2024; for the operator Khosravi 2023 (arXiv:2208.01681). How they are read: docs/deviations.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman.kernel import (
    Kernel,
    Observables,
    centres_of,
    coordinates,
    look,
    observables,
    observed,
    observed_backward,
    visible,
)
from refattn.mechanisms.koopman.perturbation import a_and_b, certify, invert, left_of, steepness
from refattn.ops.solve import identity, solve
from refattn.xp import Array, arange, max_last, namespace, transpose, zeros


@dataclass(frozen=True)
class Options:
    """What is chosen, as the core was given it; its docstring says what each means."""

    updates: int
    similarity: str
    kernel: Kernel
    space: str
    jitter: float
    fit: str
    ridge: Array  # (updates - 1), for each update after the first; a second axis is that of the coordinates
    scale: str
    tau: float
    window: int | None
    limit: Any  # the fit where its operator is limited
    perturbation: str
    epsilon: Array  # (updates - 1)
    mix: Array
    certify: bool
    by_coordinate: bool  # whether coordinates have ridges, and so operators, of their own


@dataclass(frozen=True)
class Step:
    """What the backward of an update reads."""

    points: Array  # (b, h, i, l + 1, d): x_0 ... x_L
    attended: Array  # (b, h, i, d): q'
    root: Array  # (b, h, i, d): q^r
    left: Array  # (b, h, i): how far psi is from having been inverted, see `invert`
    jacobian: Array  # (b, h, i, d, d): J, the identity where there is nothing to solve
    starts: Array  # (b, h, i, l, o): B
    dual: Array  # (b, h, i, l, o): N; in the full space the identity (l, l)
    inner: Array  # (b, h, i, l, l): Z
    found: Array  # (b, h, i, l, o): A
    modes: Array  # (b, h, i, l, d): D
    koopman: Array  # (b, h, i, l, l): R
    lifted: Array  # (b, h, i, l, d): H
    section: Array  # (b, h, i, l): c
    numbers: tuple[Any, Array, Array]  # tau, epsilon, ridge


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense form reads."""

    options: Options
    groups: int
    v: Array  # (b, h, j, d)
    g: Observables
    gram: Array | None  # (b, h, i, o, o)
    trajectory: tuple[Array, ...]  # q^0, q^1, ..., (b, h, i, d) each
    weights: tuple[Array, ...]  # (b, h, i, j) of each update
    updates: tuple[Step, ...]  # from the second on

    @property
    def left(self) -> tuple[Array, ...]:
        """How far psi is from having been inverted, of each update from the second on."""
        return tuple(left_of(step.left, step.jacobian) for step in self.updates)


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, options: Options
) -> tuple[Array, Saved]:
    """Return the last query (b, h, i, d), NaN where psi was not inverted, and what `backward` reads."""
    xp = namespace(q)
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]  # key/value heads, and query heads of each
    keys, values = xp.repeat(k, shared, axis=1), xp.repeat(v, shared, axis=1)  # (b, h, j, d), (b, h, j, d)
    seen = zeros((*q.shape[:3], k.shape[2]), q) == 0.0  # (b, h, i, j): True
    if offset is not None:
        seen = seen & (arange(0, k.shape[2], q) <= arange(0, q.shape[2], q)[:, None] + offset)  # (b, h, i, j)
    seen = seen if mask is None else seen & mask  # (b, h, i, j): whether j is in J(i)
    g = observables(options.kernel, keys, seen, options.space == "augmented")
    gram = None
    if options.updates > 1:
        gram = gram_of(g, keys, options.jitter)  # tagged there
    trajectory, all_weights, steps = tuple[Array, ...]((q,)), tuple[Array, ...](), tuple[Step, ...]()
    for n in range(options.updates):
        weights, attended = attend(trajectory[-1], keys, values, seen, options)  # tagged there
        all_weights = (*all_weights, weights)
        root = attended  # (b, h, i, d)
        if n > 0:
            recent = trajectory if options.window is None else trajectory[-options.window - 1 :]
            numbers = options.tau, options.epsilon[n - 1, ...], options.ridge[n - 1, ...]
            step = update(xp.stack(recent, axis=3), attended, g, gram, options, numbers)  # tagged there
            root, steps = step.root, (*steps, step)
        trajectory = (*trajectory, root)
    return trajectory[-1], Saved(options, groups, values, g, gram, trajectory, all_weights, steps)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v and of every number; of ridge and epsilon one for each later update."""
    xp, options, g = namespace(d_out), saved.options, saved.g
    k, v, nothing = g.keys[:, :, 0, :, :], saved.v, xp.sum(d_out) * 0.0  # (b, h, j, d), (b, h, j, d), ()
    d = {"bandwidth": nothing, "weight": nothing}
    d_points, d_numbers = [*(xp.zeros_like(x) for x in saved.trajectory[:-1]), d_out], list[dict[str, Array]]()
    for n in range(len(saved.weights) - 1, -1, -1):
        d_root = d_points[n + 1]  # (b, h, i, d) [dKOOP.15]
        passed = {"attended": d_root}
        if n > 0:
            # forward: root = update(points, attended, g, gram, ...)
            d_path, passed, found = update_backward(saved.updates[n - 1], g, saved.gram, options, d_root)  # as points
            for at in range(1, d_path.shape[3] + 1):
                d_points[n + 1 - at] = d_points[n + 1 - at] + d_path[:, :, :, -at, :]  # (b, h, i, d)
            d_numbers = [found, *d_numbers]
        d_attended = passed.pop("attended")  # (b, h, i, d) [dKOOP.4]
        d |= {name: d.get(name, 0.0) + part for name, part in passed.items()}
        x, weights = saved.trajectory[n], saved.weights[n]  # (b, h, i, d), (b, h, i, j)
        # forward: attended = attend(x, k, v)
        d_x, passed = attend_backward(x, k, v, weights, options, d_attended)  # (b, h, i, d), -
        d_points[n] = d_points[n] + d_x  # (b, h, i, d)
        d |= {name: d.get(name, 0.0) + part for name, part in passed.items()}
    if saved.gram is not None:
        d_visible = d["gram"]  # (b, h, i, o, o) [dKOOP.visible]
        # forward: visible = gram_of(g, ...)
        passed = gram_backward(g, k, options.jitter, d_visible, d.get("norm", nothing))
        d |= {name: d.get(name, 0.0) + part for name, part in passed.items()}
    d_q = d_points[0]  # (b, h, i, d) [dKOOP.q]
    grouped = (k.shape[0], saved.groups, -1, *k.shape[2:])  # the query heads of a key/value head beside each other
    d_k = xp.sum(xp.reshape(d["k"], grouped), axis=2)  # (b, g, j, d) [dKOOP.k]
    d_v = xp.sum(xp.reshape(d["v"], grouped), axis=2)  # (b, g, j, d) [dKOOP.v]
    d_bandwidth, d_weight = d["bandwidth"], d["weight"]  # () [dKOOP.bandwidth], () [dKOOP.weight]
    gradients = {"q": d_q, "k": d_k, "v": d_v, "bandwidth": d_bandwidth, "weight": d_weight}
    if not d_numbers:
        return gradients
    d_ridge = xp.stack([part["ridge"] for part in d_numbers])  # [dKOOP.ridge]
    d_epsilon = xp.stack([part["epsilon"] for part in d_numbers])  # [dKOOP.epsilon]
    if options.perturbation == "pencil":
        d_mix = sum(part["mix"] for part in d_numbers)  # () [dKOOP.mix]
        gradients |= {"mix": d_mix}
    return gradients | {"ridge": d_ridge, "epsilon": d_epsilon}


def attend(x: Array, k: Array, v: Array, seen: Array, options: Options) -> tuple[Array, Array]:
    """Return the weights (b, h, i, j) and what queries x (b, h, i, d) attend."""
    xp = namespace(x)
    if options.similarity == "dot":
        scores = x @ transpose(k) / math.sqrt(x.shape[-1])  # (b, h, i, j) [KOOP.2]
    else:
        scores = options.kernel.values(x, k)  # (b, h, i, j) [KOOP.2]
    masked = xp.where(seen, scores, -math.inf)  # (b, h, i, j) [KOOP.masked]
    top = max_last(masked)  # (b, h, i, 1): -inf where J(i) is empty
    powers = xp.exp(masked - xp.where(top == -math.inf, 0.0, top))  # (b, h, i, j)
    total = xp.sum(powers, axis=-1, keepdims=True)  # (b, h, i, 1)
    weights = powers / xp.where(total == 0.0, 1.0, total)  # (b, h, i, j) [KOOP.3]
    attended = weights @ v  # (b, h, i, d) [KOOP.4]
    return weights, attended


def attend_backward(
    x: Array, k: Array, v: Array, weights: Array, options: Options, d_attended: Array
) -> tuple[Array, dict[str, Array]]:
    """Return the gradient of x, and by name those of k, v, and of the kernel's numbers where it is the similarity."""
    xp = namespace(x)
    # forward: attended = weights @ v
    d_v = transpose(weights) @ d_attended  # (b, h, j, d): of this update
    d_weights = d_attended @ transpose(v)  # (b, h, i, j) [dKOOP.3]
    # forward: weights = softmax(scores)
    mean = xp.sum(weights * d_weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    d_scores = weights * (d_weights - mean)  # (b, h, i, j) [dKOOP.2]
    if options.similarity == "dot":
        # forward: scores = x @ k^T / sqrt(d)
        d_dot = d_scores / math.sqrt(x.shape[-1])  # (b, h, i, j)
        return d_dot @ k, {"k": transpose(d_dot) @ x, "v": d_v}
    # forward: scores = k(x, k)
    d_x, d_k, d_bandwidth, d_weight = options.kernel.backward(x, k, d_scores)  # (b, h, i, d), (b, h, j, d), (), ()
    return d_x, {"k": d_k, "v": d_v, "bandwidth": d_bandwidth, "weight": d_weight}


def gram_of(g: Observables, keys: Array, jitter: float) -> Array:
    """Return G of what each query sees (b, h, i, o, o)."""
    xp = namespace(keys)
    delta = jitter * (g.kernel.weight + 1.0)  # ()
    between = g.kernel.look(keys, keys)[0] + delta * identity(keys.shape[2], keys)  # (b, h, j, j)
    if g.augmented:
        corner = (1.0 / g.kernel.linear_part() + delta) * identity(keys.shape[3], keys)  # (d, d)
        corner = corner + zeros((*keys.shape[:2], 1, 1), keys)  # (b, h, d, d)
        upper = xp.concat([between, keys], axis=-1)  # (b, h, j, o)
        lower = xp.concat([transpose(keys), corner], axis=-1)  # (b, h, d, o)
        gram = xp.concat([upper, lower], axis=-2)  # (b, h, o, o) [KOOP.1]
    else:
        gram = between  # (b, h, o, o) [KOOP.1]
    alone = (1.0 + delta) * identity(gram.shape[-1], keys)  # (o, o)
    part = xp.where(pairs(g), gram[:, :, None, :, :], alone)  # (b, h, i, o, o) [KOOP.visible]
    return part


def gram_backward(g: Observables, keys: Array, jitter: float, d_visible: Array, d_norm: Array) -> dict[str, Array]:
    """Return the gradients of the keys and the kernel's numbers, for those of G and, if augmented, of 1 / n in P."""
    xp, j = namespace(d_visible), keys.shape[2]
    # forward: visible = gram where both are seen, else what does not move but with the jitter
    d_gram = xp.sum(xp.where(pairs(g), d_visible, 0.0), axis=2)  # (b, h, o, o) [dKOOP.1]
    # forward: gram = k(keys, keys) + jitter (weight + 1)
    left, right, of_bandwidth, of_weight = g.kernel.backward(keys, keys, d_gram[..., :j, :j])  # as keys twice, (), ()
    traces = d_gram * identity(d_gram.shape[-1], d_gram)  # (b, h, o, o): its diagonal
    of_weight = of_weight + jitter * xp.sum(traces)  # ()
    total = {"k": left + right, "bandwidth": of_bandwidth, "weight": of_weight}
    if g.augmented:
        # forward: gram = [[gram, keys], [keys^T, I / n + delta I]]; P has 1 / n, too
        beside = d_gram[..., :j, j:] + transpose(d_gram[..., j:, :j])  # (b, h, j, d)
        d_factor = -(d_norm + xp.sum(traces[..., j:, j:])) / g.kernel.linear_part() ** 2  # (): of n
        d_bandwidth, d_weight = g.kernel.linear_part_backward(d_factor)  # (), ()
        beyond = {"k": beside, "bandwidth": d_bandwidth, "weight": d_weight}
        total = {name: part + beyond[name] for name, part in total.items()}
    return total


def pairs(g: Observables) -> Array:
    """Return whether a query sees both of two observables (b, h, i, o, o)."""
    xp, seen = namespace(g.keys), g.seen  # -, (b, h, i, j)
    if g.augmented:
        seen = xp.concat([seen, zeros((*seen.shape[:3], g.keys.shape[-1]), g.keys) == 0.0], axis=-1)  # (b, h, i, o)
    return seen[..., :, None] & seen[..., None, :]


def coefficients(fit: str, inner: Array, gram: Array, ridge: Any, targets: Array) -> Array:
    """Return A (..., l, o) of KOOP.9 for Z, G and Y; with Z and G transposed it is its own adjoint, Y to A."""
    xp, (rows, columns) = namespace(inner), targets.shape[-2:]
    if fit == "separable":
        return transpose(solve(transpose(gram), transpose(solve(inner + ridge * identity(rows, inner), targets))))
    # Row by row the elements of A are one vector: element (l, o) of Z A G takes Z_ll' G_o'o of element (l', o').
    product = inner[..., :, None, :, None] * transpose(gram)[..., None, :, None, :]  # (..., l, o, l', o')
    system = xp.reshape(product, (*product.shape[:-4], rows * columns, rows * columns))  # (..., l o, l' o')
    system = system + ridge * identity(rows * columns, inner)  # (..., l o, l' o')
    found = solve(system, xp.reshape(targets, (*targets.shape[:-2], rows * columns, 1)))  # (..., l o, 1)
    return xp.reshape(found, (*found.shape[:-2], rows, columns))


def update(points: Array, attended: Array, g: Observables, gram: Any, options: Options, numbers: Any) -> Step:
    """Return the fit to points x_0 ... x_L, and the next query: where psi is (K psi)(q')."""
    xp = namespace(attended)
    tau, epsilon, ridge = numbers  # (), (), () or (d,)
    a, b = a_and_b(options.perturbation, epsilon, options.mix)  # (), ()
    first, at_points = points[..., :-1, :], observed(g, points)  # (b, h, i, l, d), (b, h, i, l + 1, o)
    starts = at_points[..., :-1, :]  # (b, h, i, l, o) [KOOP.5]
    targets = at_points[..., 1:, :] - tau * starts  # (b, h, i, l, o) [KOOP.6]
    centres = centres_of(first, g, options.space)
    if options.space == "full":
        dual = identity(first.shape[3], first)  # (l, l)
        inner = observed(centres, first)  # (b, h, i, l, l) [KOOP.8]
    else:
        dual = transpose(solve(gram, transpose(starts)))  # (b, h, i, l, o) [KOOP.7]
        inner = dual @ transpose(starts)  # (b, h, i, l, l) [KOOP.8]
    lam = ridge_of(ridge, options, g, first)  # (), or it broadcasts to (b, h, i, l, o) behind an axis of coordinates
    if options.limit is None:
        found = coefficients(options.fit, inner, gram, lam, targets)  # (b, h, i, l, o) [KOOP.9]
    else:
        found = options.limit.coefficients(inner, gram, lam, targets)  # (b, h, i, l, o) [KOOP.9]
    modes = joined(found @ coordinates(g), options)  # (b, h, i, l, d) [KOOP.10]
    koopman = found @ transpose(starts)  # (b, h, i, l, l) [KOOP.11]
    lifted = (a + 2.0 * tau * b) * modes + b * joined(koopman @ modes, options)  # (b, h, i, l, d) [KOOP.12]
    section = (dual @ transpose(observed(centres, attended[..., None, :])))[..., 0]  # (b, h, i, l) [KOOP.13]
    image = (a + b) * tau * attended + xp.sum(lifted * section[..., None], axis=-2)  # (b, h, i, d) [KOOP.14]
    expected = tau * attended + xp.sum(modes * section[..., None], axis=-2)  # (b, h, i, d): phi(q')
    own, factors = a + b * tau, transpose(modes) @ dual  # (), of D^T kappa(x) = factors g(x)
    alive, eye = xp.any(g.seen, axis=-1), identity(points.shape[-1], points)  # (b, h, i), (d, d)
    if options.certify:
        certify(steepness(centres, factors), own, b, alive)

    def psi(x: Array) -> tuple[Array, Array, Array]:
        """Return psi(x) - t, the size of the terms that it sums, and J."""
        value, size, slope = look(centres, x, factors)  # (b, h, i, d), (b, h, i, d), (b, h, i, d, d)
        terms = xp.abs(own * x) + xp.abs(b * size) + xp.abs(image)  # (b, h, i, d)
        return own * x + b * value - image, xp.sqrt(xp.sum(terms * terms, axis=-1)), own * eye + b * slope

    reached, left = invert(psi, (expected, attended, points[..., -1, :]), alive)  # (b, h, i, d), (b, h, i)
    root = xp.where(alive[..., None], reached, 0.0)  # (b, h, i, d) [KOOP.15]
    jacobian = xp.where(alive[..., None, None], psi(root)[2], eye)  # (b, h, i, d, d): J
    return Step(
        points, attended, root, left, jacobian, starts, dual, inner, found, modes, koopman, lifted, section, numbers
    )


def update_backward(
    step: Step, g: Observables, gram: Any, options: Options, d_root: Array
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Return the gradients of the points, by name those of q' and of what all updates share, and of the numbers."""
    xp = namespace(d_root)
    tau, epsilon, ridge = step.numbers  # (), (), () or (d,)
    a, b = a_and_b(options.perturbation, epsilon, options.mix)  # (), ()
    points, attended, root = step.points, step.attended, step.root  # (b, h, i, l + 1, d), (b, h, i, d), (b, h, i, d)
    fit, starts, dual, inner, found, modes = options.fit, step.starts, step.dual, step.inner, step.found, step.modes
    centres = centres_of(points[..., :-1, :], g, options.space)
    beside = xp.stack([attended, root], axis=-2)  # (b, h, i, 2, d): q' and q^r
    at_beside = observed(centres, beside)  # of all observables there
    # forward: psi(root) = (a + b tau) root + b modes^T kappa(root) = image
    d_alive = xp.where(xp.any(g.seen, axis=-1)[..., None], d_root, 0.0)  # (b, h, i, d): of a query that sees a key
    d_image = solve(transpose(step.jacobian), d_alive[..., None])[..., 0]  # (b, h, i, d) [dKOOP.14]
    at_root = (dual @ transpose(at_beside[..., 1:, :]))[..., 0]  # (b, h, i, l): u
    d_at_root = -(b * modes @ d_image[..., None])[..., 0]  # (b, h, i, l): du
    # forward: image = (a + b) tau attended + lifted^T section
    d_section = (step.lifted @ d_image[..., None])[..., 0]  # (b, h, i, l) [dKOOP.13]
    d_lifted = step.section[..., None] * d_image[..., None, :]  # (b, h, i, l, d) [dKOOP.12]
    # forward: lifted = (a + 2 tau b) modes + b koopman @ modes
    d_twice = summed(transpose(step.koopman) @ apart(d_lifted, options), options)  # (b, h, i, l, d): R^T dH
    of_psi = at_root[..., None] * d_image[..., None, :]  # (b, h, i, l, d): u dt^T
    d_modes = (a + 2.0 * tau * b) * d_lifted + b * (d_twice - of_psi)  # (b, h, i, l, d) [dKOOP.10]
    d_koopman = b * apart(d_lifted, options) @ transpose(modes)  # (b, h, i, l, l) [dKOOP.11]
    # forward: modes = found @ P; koopman = found @ starts^T
    d_fitted = apart(d_modes, options) @ transpose(coordinates(g)) + d_koopman @ starts  # (b, h, i, l, o)
    d_found = visible(g, d_fitted)  # (b, h, i, l, o) [dKOOP.9]
    d_coordinates = xp.sum(summed(transpose(found) @ apart(d_modes, options), options), axis=2)  # (b, h, o, d): dP
    # forward: Z A G + ridge A = Y, or (Z + ridge) A G = Y
    lam = ridge_of(ridge, options, g, points[..., :-1, :])  # (), or it broadcasts
    if options.limit is None:
        d_targets = coefficients(fit, transpose(inner), transpose(gram), lam, d_found)  # (b, h, i, l, o) [dKOOP.6]
        d_inner = -summed(d_targets @ transpose(gram) @ transpose(found), options)  # (b, h, i, l, l) [dKOOP.8]
        left = inner @ found + lam * found if fit == "separable" else inner @ found  # (b, h, i, l, o)
        d_gram = -summed(transpose(left) @ d_targets, options)  # (b, h, i, o, o): but for what N passes
        of_ridge = -d_targets * (found @ gram if fit == "separable" else found)  # (b, h, i, l, o)
    else:
        fitted = options.limit.adjoint(inner, gram, lam, observed(g, points[..., 1:, :]) - tau * starts, d_found)
        d_targets, of_ridge = fitted[0], fitted[3]  # (b, h, i, l, o) [dKOOP.6], (b, h, i, 1, 1)
        d_inner = summed(fitted[1], options)  # (b, h, i, l, l) [dKOOP.8]
        d_gram = summed(fitted[2], options)  # (b, h, i, o, o)
    if options.scale == "mean":
        of_ridge = of_ridge * (float(inner.shape[-1]) * g.count[..., None])  # (b, h, i, l, o)
    d_ridge = xp.sum(of_ridge, axis=(-5, -4, -3, -2, -1))  # () or (d,): of the ridges of this update
    # forward: starts = g(first); targets = g(last) - tau starts; koopman = found @ starts^T
    d_last = summed(d_targets, options)  # (b, h, i, l, o): of g at the ends
    d_kappa = xp.stack([d_section, d_at_root], axis=-2)  # (b, h, i, 2, l): dc and du
    of_koopman = summed(transpose(d_koopman) @ found, options)  # (b, h, i, l, o): dR^T A
    if options.space == "full":
        d_starts = of_koopman - tau * d_last  # (b, h, i, l, o) [dKOOP.5]
    else:
        # forward: inner = dual @ starts^T; dual = starts G^-1; kappa(x) = dual @ g(x), at q' and at a given root
        d_dual = d_inner @ starts + transpose(d_kappa) @ at_beside  # (b, h, i, l, o) [dKOOP.7]
        through = transpose(solve(transpose(gram), transpose(d_dual)))  # (b, h, i, l, o): dN G^-1
        d_starts = of_koopman + transpose(d_inner) @ dual + through - tau * d_last  # (b, h, i, l, o) [dKOOP.5]
        d_gram = d_gram - transpose(dual) @ through  # (b, h, i, o, o)
    none = xp.zeros_like(d_last[..., :1, :])  # (b, h, i, 1, o): no transition starts at x_L, and none ends at x_0
    d_path = xp.concat([d_starts, none], axis=-2) + xp.concat([none, d_last], axis=-2)  # (b, h, i, l + 1, o)
    # forward: g or, in the full space, sections at first, at q' and at q^r
    if options.space == "full":
        d_points, d_k, d_bandwidth, d_weight = observed_backward(g, points, d_path)  # as points, keys of each query
        at = xp.concat([points[..., :-1, :], beside], axis=-2)  # where the sections were evaluated
        d_at = xp.concat([d_inner, d_kappa], axis=-2)  # of each section there
        d_x, d_first, more_bandwidth, more_weight = observed_backward(centres, at, d_at)  # as at, as first
        d_bandwidth, d_weight = d_bandwidth + more_bandwidth, d_weight + more_weight  # (), ()
        moved = [d_x[..., :-2, :] + d_first, xp.zeros_like(d_first[..., :1, :])]  # as points
        d_points = d_points + xp.concat(moved, axis=-2)  # (b, h, i, l + 1, d)
    else:
        x = xp.concat([points, beside], axis=-2)  # (b, h, i, l + 3, d): where g was evaluated
        d_g = xp.concat([d_path, d_kappa @ dual], axis=-2)  # (b, h, i, l + 3, o): of each observable there
        d_x, d_k, d_bandwidth, d_weight = observed_backward(g, x, d_g)  # as x
        d_points = d_x[..., :-2, :]  # (b, h, i, l + 1, d)
    d_attended = (a + b) * tau * d_image + d_x[..., -2, :]  # (b, h, i, d)
    # forward: a and b in psi, in image and in lifted
    d_a = xp.sum(d_image * (tau * attended - root)) + xp.sum(d_lifted * modes)  # (): da
    of_image = d_image * (tau * (attended - root) - xp.sum(modes * at_root[..., None], axis=-2))  # (b, h, i, d)
    d_b = xp.sum(of_image) + xp.sum(d_lifted * (2.0 * tau * modes + joined(step.koopman @ modes, options)))  # (): db
    d_numbers = {"ridge": d_ridge, "epsilon": d_a if options.perturbation == "shift" else d_b}
    if options.perturbation == "pencil":
        d_numbers |= {"mix": d_a}
    d_k = xp.sum(d_k, axis=2) + d_coordinates[..., : g.keys.shape[3], :]  # (b, h, j, d)
    passed = {"attended": d_attended, "k": d_k, "gram": d_gram, "bandwidth": d_bandwidth, "weight": d_weight}
    if g.augmented:
        passed |= {"norm": xp.sum(d_coordinates[..., g.keys.shape[3] :, :] * identity(root.shape[-1], root))}
    return d_points, passed, d_numbers


def ridge_of(ridge: Array, options: Options, g: Observables, first: Array) -> Array:
    """Return the ridge of an update (), or what broadcasts to (b, h, i, l, o), behind an axis of the coordinates."""
    if options.scale == "sum" and not options.by_coordinate:
        return ridge
    factor = 1.0 if options.scale == "sum" else float(first.shape[-2]) * g.count[..., None]  # 1 or (b, h, i, 1, 1)
    return (ridge[:, None, None, None, None, None] if options.by_coordinate else ridge) * factor


def apart(x: Array, options: Options) -> Array:
    """Return x (b, h, i, l, d); where coordinates have ridges of their own, the column of each, their axis in front."""
    if not options.by_coordinate:
        return x
    return x * identity(x.shape[-1], x)[:, None, None, None, None, :]


def joined(x: Array, options: Options) -> Array:
    """Return x (b, h, i, l, d); where coordinates have ridges of their own, of each the column: `apart`'s adjoint."""
    return summed(apart(x, options), options)


def summed(x: Array, options: Options) -> Array:
    """Return x (b, h, i, ...); where coordinates have ridges of their own, summed over their axis in front."""
    return namespace(x).sum(x, axis=0) if options.by_coordinate else x
