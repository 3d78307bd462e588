"""Queries updated by a Koopman operator that is fitted to their own trajectory, with all options.

Every query attends (update 1). From update 2 on, an operator K on functions is fitted to how the points x_0 ... x_L of
its trajectory moved, l to l + 1, in the span of the observables g_o(x) = k(k_o, x), the kernel's sections at the keys
that the query sees; phi = K pi, with the coordinates pi, is its one-step map. From what it attends, q', the query goes
to where psi = a pi + b phi takes the value (K psi)(q'): an operator moves functions, not points, but a point is read
off its value of psi, which is one to one, as pi is, of which it is a perturbation. For a true operator of a map f,
(K psi)(q') = psi(f(q')), and the query goes to f(q').

The paper's own case is `definition`; ids with numbers are its equations, and here they have options. Its n x n matrices
(KOOP.10, KOOP.11) and what is made of them (KOOP.12, KOOP.13) are not formed here; its mixtures (KOOP.7) are N. In the
functions kappa, of which each transition has one, the operator is the l x l matrix R. Every update repeats KOOP.2 to
KOOP.4 with the newest query x = q^{r-1}, and from the second on the others. J(i) are the keys that query i sees, and
P_op = <g_o, pi_p> is (k_o)_p::

    [KOOP.1]  G_oo' = k(k_o, k_o') + delta I_oo'
    [KOOP.visible]  G_oo'^i = G_oo' if o, o' in J(i), else (1 + delta) I_oo'       what is called G from here on
    [KOOP.2]  s_ij = x_i . k_j / sqrt(d)                   similarity "kernel": k(x_i, k_j)
    [KOOP.masked]  m_ij = s_ij if j in J(i), else -inf
    [KOOP.3]  w_ij = exp(m_ij) / sum_j exp(m_ij)           0 where J(i) is empty
    [KOOP.4]  q'_i = sum_j w_ij v_j                        update 1: q^1 = q'
    [KOOP.5]  B_lo = g_o(x_l)
    [KOOP.6]  Y_lo = g_o(x_{l+1}) - tau B_lo
    [KOOP.dual]  N = B G^-1                                not for "full"
    [KOOP.8]  Z = N B^T                                    "full": Z_lm = k(x_l, x_m)
    [KOOP.9]  A: Z A G + ridge A = Y                       one system of l o unknowns; "separable": (Z + ridge) A G = Y
    [KOOP.modes]  D = A P                                  phi(x) = tau x + D^T kappa(x) = (K pi)(x)
    [KOOP.operator]  R = A B^T                             (K phi)(x) = tau x + (2 tau D + R D)^T kappa(x)
    [KOOP.lifted]  H = (a + 2 tau b) D + b R D
    [KOOP.section]  c = kappa(q'), kappa(x) = N g(x)       "full": kappa_l(x) = k(x_l, x)
    [KOOP.14]  t = (K psi)(q') = (a + b) tau q' + H^T c
    [KOOP.15]  q^r = x: psi(x) = (a + b tau) x + b D^T kappa(x) = t

With delta = jitter (weight + 1), the kernel's weight, which is 0 of "linear". The operator is (K f)(x) = tau f(x) +
kappa(x)^T A f(keys), with f(keys) the column of the values of f at the keys: P for the coordinates. |Z A G - Y|^2 +
ridge tr(A^T Z A G), with its error over the observables and its Hilbert-Schmidt norm, is least where KOOP.9 holds: for
ridge > 0 at one A, which is linear in Y, and its own adjoint. Kinds of options are objects of
`refattn.mechanisms.koopman.options`, where their own equations stand: of kernels and spaces, of the fit "separable",
whose operator may be limited in its norm or rank, and of perturbations, which have a and b.

In "augmented" the coordinates are observables too, behind the keys: g(x) = (k(k_j, x), x), P = (k, I / n) and G has the
blocks k and I / n + delta I beside that of the keys, with n the factor of x . y in k (1 but for a polynomial). `apart`:
where coordinates have ridges of their own, A and R have an axis of them in front, and column p of D and R D is that of
ridge_p's operator.

Adjoints, for given d_o (u = kappa(q^r), J the Jacobian of psi there, k_x, k_y, k_h and k2 the derivatives of k(x, y) by
x, y, the bandwidth and the weight, <., .> sums of products of elements; dg(x) is the gradient of g at a point x: dB_l
at x_l, dY_l at x_{l+1}, N^T dc at q', N^T du at q^r). Sums over r are over updates::

    [dKOOP.15]  dq^s = sum_j ds_j k_j / sqrt(d) + sum_r sum_o dg_o(q^s) k_x(q^s, k_o)      of the last: + d_o
    [dKOOP.14]  dt = J^-T dq^r
    [dKOOP.section]  dc = H dt
    [dKOOP.lifted]  dH = c dt^T
    [dKOOP.operator]  dR = b dH D^T
    [dKOOP.modes]  dD = (a + 2 tau b) dH + b R^T dH - b u dt^T
    [dKOOP.9]  dA = dD P^T + dR B                          0 for observables that are not seen
    [dKOOP.6]  dY: Z dY G + ridge dY = dA                  "separable": (Z + ridge) dY G = dA
    [dKOOP.8]  dZ = -dY G A^T
    [dKOOP.dual]  dN = dZ B + du g(q^r)^T + dc g(q')^T, du = -b D dt
    [dKOOP.5]  dB = dR^T A + dZ^T N + dN G^-1 - tau dY     "full": dB = dR^T A - tau dY
    [dKOOP.visible]  dG = -sum_r (A^T Z dY + N^T dN G^-1)  "separable": Z A + ridge A in place of Z A
    [dKOOP.4]  dq'_i = (a + b) tau dt + sum_o (N^T dc)_o k_x(q', k_o)      update 1: dq'_i = dq^1_i
    [dKOOP.3]  dw_ij = dq'_i . v_j
    [dKOOP.2]  ds_ij = w_ij (dw_ij - sum_j w_ij dw_ij)
    [dKOOP.1]  dG = (S + S^T) / 2, S_oo' = sum_i dG_oo' of dKOOP.visible, over o, o' in J(i)
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman.options.fits import Solver
from refattn.mechanisms.koopman.options.kernel import Kernel
from refattn.mechanisms.koopman.options.perturbation import Perturbation, certify, invert, left_of
from refattn.mechanisms.koopman.options.ridges import OneRidge, factor_of
from refattn.mechanisms.koopman.options.similarity import Similarity
from refattn.mechanisms.koopman.options.spaces import AtPoints, Observables, Projected, Space
from refattn.mechanisms.koopman.rounding_error import grown, unchanged
from refattn.ops.solve import identity, solve
from refattn.xp import Array, arange, max_last, namespace, transpose, zeros


@dataclass(frozen=True)
class Options:
    """What is chosen, as the core was given it; its docstring says what each means."""

    updates: int
    similarity: Similarity
    kernel: Kernel
    space: Space
    jitter: float
    fit: Solver
    ridge: Array  # (updates - 1), for each update after the first; a second axis is that of the coordinates
    ridges: OneRidge
    scale: str
    tau: float
    window: int | None
    perturbation: Perturbation
    epsilon: Array  # (updates - 1)
    certify: bool
    nudge: Callable[[Array], Array] = unchanged  # of what rounding may move most, see `rounding_error`


@dataclass(frozen=True)
class Lift:
    """What psi becomes under the operator of an update, and where: the same in all implementations."""

    attended: Array  # (b, h, i, d): q'
    starts: Array  # (b, h, i, l, o): B
    found: Array  # (b, h, i, l, o): A
    modes: Array  # (b, h, i, l, d): D
    koopman: Array  # (b, h, i, l, l): R
    twice: Array  # (b, h, i, l, d): R D
    lifted: Array  # (b, h, i, l, d): H
    section: Array  # (b, h, i, l): c
    image: Array  # (b, h, i, d): t
    expected: Array  # (b, h, i, d): phi(q')
    numbers: tuple[Any, Array, Array]  # tau, epsilon, ridge


@dataclass(frozen=True)
class Step(Lift):
    """What the backward of an update reads."""

    points: Array  # (b, h, i, l + 1, d): x_0 ... x_L
    root: Array  # (b, h, i, d): q^r
    left: Array  # (b, h, i): how far psi is from having been inverted, see `left_of`
    condition: Array  # (b, h, i): of J
    jacobian: Array  # (b, h, i, d, d): J, the identity where there is nothing to solve
    targets: Array  # (b, h, i, l, o): Y
    kappa: Projected | AtPoints
    inner: Array  # (b, h, i, l, l): Z


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense implementation reads."""

    options: Options
    groups: int
    v: Array  # (b, h, j, d)
    g: Observables
    visible: Array | None  # (b, h, i, o, o): the Gram matrix of each query
    trajectory: tuple[Array, ...]  # q^0, q^1, ..., (b, h, i, d) each
    weights: tuple[Array, ...]  # (b, h, i, j) of each update
    updates: tuple[Step, ...]  # from the second on

    @property
    def left(self) -> tuple[Array, ...]:
        """How far psi is from having been inverted, of each update from the second on."""
        return tuple(step.left for step in self.updates)

    @property
    def error(self) -> Array:
        """What the norms say of the relative error of the last point, (b, h, i): see `rounding_error.grown`."""
        error = 0.0 * self.trajectory[0][..., 0]  # (b, h, i)
        for step in self.updates:
            size = namespace(error).linalg.matrix_norm(self.visible)  # (b, h, i)
            error = grown(error, step, step.kappa.dual, step.inner, size, self.options, step.condition)  # (b, h, i)
        return error


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
    g = options.space.observables(options.kernel, keys, seen)
    visible = None
    if options.updates > 1:
        visible = gram_of(g, keys, options.jitter)  # tagged there
    return moved(q, keys, values, g, visible, groups, options)  # tagged there


def moved(
    q: Array, keys: Array, values: Array, g: Observables, visible: Array | None, groups: int, options: Options
) -> tuple[Array, Saved]:
    """Return what `forward` does, for the observables and their Gram matrices."""
    xp = namespace(q)
    trajectory, all_weights, steps = tuple[Array, ...]((q,)), tuple[Array, ...](), tuple[Step, ...]()
    for n in range(options.updates):
        weights, attended = attend(trajectory[-1], keys, values, g.seen, options)  # tagged there
        all_weights = (*all_weights, weights)
        root = attended  # (b, h, i, d)
        if n > 0:
            recent = trajectory if options.window is None else trajectory[-options.window - 1 :]
            numbers = options.tau, options.epsilon[n - 1, ...], options.ridge[n - 1, ...]
            step = update(xp.stack(recent, axis=3), attended, g, visible, options, numbers)  # tagged there
            root, steps = step.root, (*steps, step)
        trajectory = (*trajectory, root)
    return trajectory[-1], Saved(options, groups, values, g, visible, trajectory, all_weights, steps)


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
            # forward: root = update(points, attended, g, visible, ...)
            step = saved.updates[n - 1]
            d_path, passed, found = update_backward(step, g, saved.visible, options, d_root)  # as its points, -, -
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
    if saved.visible is not None:
        d_visible = d["gram"]  # (b, h, i, o, o) [dKOOP.visible]
        # forward: visible = gram_of(g, keys, jitter)
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
    if "mix" in d_numbers[0]:
        d_mix = sum(part["mix"] for part in d_numbers)  # () [dKOOP.mix]
        gradients |= {"mix": d_mix}
    return gradients | {"ridge": d_ridge, "epsilon": d_epsilon}


def attend(x: Array, k: Array, v: Array, seen: Array, options: Options) -> tuple[Array, Array]:
    """Return the weights (b, h, i, j) and what queries x (b, h, i, d) attend."""
    xp = namespace(x)
    scores = options.similarity.forward(x, k)  # (b, h, i, j) [KOOP.2]
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
    """Return the gradient of x, and by name those of k, v, and of the numbers of the similarity."""
    xp = namespace(x)
    # forward: attended = weights @ v
    d_v = transpose(weights) @ d_attended  # (b, h, j, d): of this update
    d_weights = d_attended @ transpose(v)  # (b, h, i, j) [dKOOP.3]
    # forward: weights = softmax(scores)
    mean = xp.sum(weights * d_weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    d_scores = weights * (d_weights - mean)  # (b, h, i, j) [dKOOP.2]
    # forward: scores = similarity(x, k)
    d_x, passed = options.similarity.backward(x, k, d_scores)  # (b, h, i, d), -
    return d_x, passed | {"v": d_v}


def gram_of(g: Observables, keys: Array, jitter: float) -> Array:
    """Return G of what each query sees (b, h, i, o, o)."""
    delta = jitter * g.kernel.unit()  # ()
    gram = g.gram(keys, delta)  # (b, h, o, o) [KOOP.1]
    seen = g.observed()  # (b, h, i, o)
    pairs = seen[..., :, None] & seen[..., None, :]  # (b, h, i, o, o)
    alone = (1.0 + delta) * identity(gram.shape[-1], keys)  # (o, o)
    visible = namespace(keys).where(pairs, gram[:, :, None, :, :], alone)  # (b, h, i, o, o) [KOOP.visible]
    return visible


def gram_backward(g: Observables, keys: Array, jitter: float, d_visible: Array, d_norm: Array) -> dict[str, Array]:
    """Return the gradients of the keys and the kernel's numbers, for those of G and, from P, of 1 / n."""
    xp, seen = namespace(d_visible), g.observed()  # -, (b, h, i, o)
    # forward: visible = gram where both are seen, else what does not move but with the jitter
    pairs = seen[..., :, None] & seen[..., None, :]  # (b, h, i, o, o)
    total = xp.sum(xp.where(pairs, d_visible, 0.0), axis=2)  # (b, h, o, o): S
    d_gram = (total + transpose(total)) / 2.0  # (b, h, o, o) [dKOOP.1]
    # forward: gram = g.gram(keys, delta), with delta = jitter * unit on the diagonal
    passed = g.gram_backward(keys, d_gram, d_norm)
    trace = xp.sum(d_gram * identity(d_gram.shape[-1], d_gram))  # ()
    return passed | {"weight": passed["weight"] + g.kernel.unit_backward(jitter * trace)}


def dual_of(starts: Array, visible: Array) -> Array:
    """Return N (b, h, i, l, o)."""
    dual = transpose(solve(visible, transpose(starts)))  # (b, h, i, l, o) [KOOP.dual]
    return dual


def dual_backward(starts: Array, visible: Array, d_inner: Array, d_kappa: Array, at_kappa: Array) -> Array:
    """Return dN G^-1 (b, h, i, l, o), for the gradients of Z and of kappa(x), where the observables are `at_kappa`."""
    # forward: inner = dual @ starts^T; kappa(x) = dual @ g(x)
    d_dual = d_inner @ starts + transpose(d_kappa) @ at_kappa  # (b, h, i, l, o) [dKOOP.dual]
    # forward: dual = starts G^-1
    return transpose(solve(transpose(visible), transpose(d_dual)))


def update(points: Array, attended: Array, g: Observables, visible: Any, options: Options, numbers: Any) -> Step:
    """Return the fit to points x_0 ... x_L, and the next query: where psi is (K psi)(q')."""
    xp, (tau, epsilon, ridge) = namespace(attended), numbers  # -, ((), (), () or (d,))
    first, at_points = points[..., :-1, :], g.forward(points)  # (b, h, i, l, d), (b, h, i, l + 1, o)
    starts = at_points[..., :-1, :]  # (b, h, i, l, o) [KOOP.5]
    targets = at_points[..., 1:, :] - tau * starts  # (b, h, i, l, o) [KOOP.6]
    kappa = options.space.kappa(g, first, starts, visible, dual_of)  # tagged there
    inner = options.nudge(kappa.inner())  # (b, h, i, l, l) [KOOP.8]
    lam = options.ridges.spread(ridge) * factor_of(options.scale, first.shape[-2], g.count)  # () or (d, 1, 1, 1, 1, 1)
    found = options.fit.forward(inner, visible, lam, targets)  # (b, h, i, l, o) [KOOP.9]
    own = lift(attended, starts, found, found @ g.coordinates(), kappa.at, options, numbers)  # tagged there
    a, b = options.perturbation.shares(epsilon)  # (), ()
    share, factors = a + b * tau, transpose(own.modes) @ kappa.dual  # (), of D^T kappa(x) = factors g(x)
    alive, eye = xp.any(g.seen, axis=-1), identity(points.shape[-1], points)  # (b, h, i), (d, d)
    if options.certify:
        certify(kappa.centres.steepness(factors), share, b, alive)

    def psi(x: Array) -> tuple[Array, Array, Array]:
        """Return psi(x) - t, the size of the terms that it sums, and J."""
        value, size, slope = kappa.centres.look(x, factors)  # (b, h, i, d), (b, h, i, d), (b, h, i, d, d)
        terms = xp.abs(share * x) + xp.abs(b * size) + xp.abs(own.image)  # (b, h, i, d)
        return share * x + b * value - own.image, xp.sqrt(xp.sum(terms * terms, axis=-1)), share * eye + b * slope

    reached, left = invert(psi, (own.expected, attended, points[..., -1, :]), alive)  # (b, h, i, d), (b, h, i)
    root = xp.where(alive[..., None], reached, 0.0)  # (b, h, i, d) [KOOP.15]
    jacobian = xp.where(alive[..., None, None], psi(root)[2], eye)  # (b, h, i, d, d): J
    left, condition = left_of(left, jacobian)  # (b, h, i), (b, h, i)
    rest = {"points": points, "root": root, "left": left, "condition": condition, "jacobian": jacobian}
    return Step(**vars(own), **rest, targets=targets, kappa=kappa, inner=inner)


def lift(
    attended: Array, starts: Array, found: Array, at_coordinates: Array, kappa: Any, options: Options, numbers: Any
) -> Lift:
    """Return (K psi)(q'), and what it is made of, for A, A P and the functions kappa."""
    xp, ridges, (tau, epsilon, _) = namespace(attended), options.ridges, numbers
    a, b = options.perturbation.shares(epsilon)  # (), ()
    modes = options.nudge(ridges.joined(at_coordinates))  # (b, h, i, l, d) [KOOP.modes]
    koopman = options.nudge(found @ transpose(starts))  # (b, h, i, l, l) [KOOP.operator]
    twice = ridges.joined(koopman @ modes)  # (b, h, i, l, d): R D
    lifted = (a + 2.0 * tau * b) * modes + b * twice  # (b, h, i, l, d) [KOOP.lifted]
    section = options.nudge(kappa(attended))  # (b, h, i, l) [KOOP.section]
    image = (a + b) * tau * attended + xp.sum(lifted * section[..., None], axis=-2)  # (b, h, i, d) [KOOP.14]
    expected = tau * attended + xp.sum(modes * section[..., None], axis=-2)  # (b, h, i, d): phi(q')
    return Lift(attended, starts, found, modes, koopman, twice, lifted, section, image, expected, numbers)


def lift_backward(step: Lift, d_image: Array, root: Array, at_root: Array, options: Options) -> dict[str, Array]:
    """Return by name the adjoints of what `lift` makes, of u = kappa(q^r), of q', and of epsilon and mix."""
    xp, ridges, (tau, epsilon, _) = namespace(d_image), options.ridges, step.numbers
    a, b = options.perturbation.shares(epsilon)  # (), ()
    modes, attended = step.modes, step.attended  # (b, h, i, l, d), (b, h, i, d)
    # forward: psi(root) = (a + b tau) root + b modes^T kappa(root) = image
    d_at_root = -(b * modes @ d_image[..., None])[..., 0]  # (b, h, i, l): du
    # forward: image = (a + b) tau attended + lifted^T section
    d_section = (step.lifted @ d_image[..., None])[..., 0]  # (b, h, i, l) [dKOOP.section]
    d_lifted = step.section[..., None] * d_image[..., None, :]  # (b, h, i, l, d) [dKOOP.lifted]
    # forward: lifted = (a + 2 tau b) modes + b koopman @ modes
    d_twice = ridges.summed(transpose(step.koopman) @ ridges.apart(d_lifted))  # (b, h, i, l, d): R^T dH
    of_psi = at_root[..., None] * d_image[..., None, :]  # (b, h, i, l, d): u dt^T
    d_modes = (a + 2.0 * tau * b) * d_lifted + b * (d_twice - of_psi)  # (b, h, i, l, d) [dKOOP.modes]
    d_koopman = b * ridges.apart(d_lifted) @ transpose(modes)  # (b, h, i, l, l) [dKOOP.operator]
    # forward: a and b in psi, in image and in lifted
    d_a = xp.sum(d_image * (tau * attended - root)) + xp.sum(d_lifted * modes)  # (): da
    of_image = d_image * (tau * (attended - root) - xp.sum(modes * at_root[..., None], axis=-2))  # (b, h, i, d)
    d_b = xp.sum(of_image) + xp.sum(d_lifted * (2.0 * tau * modes + step.twice))  # (): db
    of_operator = {"at_root": d_at_root, "section": d_section, "modes": d_modes, "koopman": d_koopman}
    d_attended = (a + b) * tau * d_image  # (b, h, i, d): its part in the image
    return of_operator | {"attended": d_attended} | options.perturbation.shares_backward(d_a, d_b)


def update_backward(
    step: Step, g: Observables, visible: Any, options: Options, d_root: Array
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Return the gradients of the points, by name those of q' and of what all updates share, and of the numbers."""
    xp, ridges, (tau, _, ridge) = namespace(d_root), options.ridges, step.numbers
    points, attended, root = step.points, step.attended, step.root  # (b, h, i, l + 1, d), (b, h, i, d), (b, h, i, d)
    kappa, starts, inner, found = step.kappa, step.starts, step.inner, step.found
    beside = xp.stack([attended, root], axis=-2)  # (b, h, i, 2, d): q' and q^r
    at_beside = kappa.centres.forward(beside)  # of all observables there
    # forward: psi(root) = image
    d_alive = xp.where(xp.any(g.seen, axis=-1)[..., None], d_root, 0.0)  # (b, h, i, d): of a query that sees a key
    d_image = solve(transpose(step.jacobian), d_alive[..., None])[..., 0]  # (b, h, i, d) [dKOOP.14]
    at_root = (kappa.dual @ transpose(at_beside[..., 1:, :]))[..., 0]  # (b, h, i, l): u
    d = lift_backward(step, d_image, root, at_root, options)  # tagged there
    d_modes, d_koopman = d.pop("modes"), d.pop("koopman")  # (b, h, i, l, d), (b, h, i, l, l)
    d_kappa = xp.stack([d.pop("section"), d.pop("at_root")], axis=-2)  # (b, h, i, 2, l): dc and du
    # forward: modes = found @ P; koopman = found @ starts^T
    d_fitted = ridges.apart(d_modes) @ transpose(g.coordinates()) + d_koopman @ starts  # (b, h, i, l, o)
    d_found = g.visible(d_fitted)  # (b, h, i, l, o) [dKOOP.9]
    d_coordinates = xp.sum(ridges.summed(transpose(found) @ ridges.apart(d_modes)), axis=2)  # (b, h, o, d): dP
    # forward: found = fit(inner, visible, lam, targets)
    factor = factor_of(options.scale, starts.shape[-2], g.count)  # 1 or (b, h, i, 1, 1)
    given = inner, visible, ridges.spread(ridge) * factor, step.targets, found
    d_targets, rest = options.fit.backward(*given, d_found)  # (b, h, i, l, o) [dKOOP.6], -
    of_inner, d_gram, of_ridge = rest(d_targets)  # (b, h, i, l, l), (b, h, i, o, o), as the ridge
    d_inner = ridges.summed(of_inner)  # (b, h, i, l, l) [dKOOP.8]
    d_ridge = xp.sum(of_ridge * factor, axis=(-5, -4, -3, -2, -1))  # () or (d,): of the ridges of this update
    # forward: starts = g(first); targets = g(last) - tau starts; koopman = found @ starts^T
    d_last = ridges.summed(d_targets)  # (b, h, i, l, o): of g at the ends
    of_koopman = ridges.summed(transpose(d_koopman) @ found)  # (b, h, i, l, o): dR^T A
    # forward: inner = kappa(first); section = kappa(attended); at_root = kappa(root)
    d_gram = ridges.summed(d_gram)  # (b, h, i, o, o)
    of_kappa = d_inner, d_kappa, at_beside
    d_own, d_gram = kappa.starts_backward(of_koopman, d_gram, *of_kappa, dual_backward)  # (b, h, i, l, o), as before
    d_starts = d_own - tau * d_last  # (b, h, i, l, o) [dKOOP.5]
    none = xp.zeros_like(d_last[..., :1, :])  # (b, h, i, 1, o): no transition starts at x_L, and none ends at x_0
    d_path = xp.concat([d_starts, none], axis=-2) + xp.concat([none, d_last], axis=-2)  # (b, h, i, l + 1, o)
    of_points = kappa.points_backward(g, points, beside, d_path, d_inner, d_kappa)  # of points, beside, k, numbers
    d_points, d_beside, d_k, d_bandwidth, d_weight = of_points
    d_attended = d.pop("attended") + d_beside[..., 0, :]  # (b, h, i, d)
    # forward: P = g.coordinates()
    of_coordinates = g.coordinates_backward(d_coordinates)
    passed = of_coordinates | {"k": xp.sum(d_k, axis=2) + of_coordinates["k"], "attended": d_attended}
    return d_points, passed | {"gram": d_gram, "bandwidth": d_bandwidth, "weight": d_weight}, d | {"ridge": d_ridge}
