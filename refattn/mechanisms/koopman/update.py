"""One Koopman update of all queries: an operator is fitted to the trajectory so far, and predicts the next query.

Equations (x_0 ... x_L are the points of the trajectory, g_o the observables, G their Gram matrix, P_op = <g_o, pi_p>
their products with the coordinate functions; a and b those of psi = a pi + b phi)::

    [KOOP.7]  B_lo = g_o(x_l)
    [KOOP.8]  Y_lo = g_o(x_{l+1}) - tau B_lo
    [KOOP.9]  N = B G^-1                                   not in the full space
    [KOOP.10]  Z = N B^T                                   full space: Z_lm = k(x_l, x_m)
    [KOOP.11]  A: Z A G + ridge A = Y                      separable: (Z + ridge) A G = Y
    [KOOP.12]  D = A P                                     phi(x) = tau x + D^T kappa(x) = (K pi)(x)
    [KOOP.13]  R = A B^T                                   (K phi)(x) = tau x + (2 tau D + R D)^T kappa(x)
    [KOOP.14]  H = (a + 2 tau b) D + b R D
    [KOOP.15]  c = kappa(q'), kappa(x) = N g(x)            full space: kappa_l(x) = k(x_l, x)
    [KOOP.16]  z = (K psi)(q') = (a + b) tau q' + H^T c
    [KOOP.17]  q^r = x: psi(x) = (a + b tau) x + b D^T kappa(x) = z

Adjoints, for a given dq^r (w = kappa(q^r), J the Jacobian of psi there)::

    [dKOOP.16]  dz = J^-T dq^r
    [dKOOP.15]  dc = H dz
    [dKOOP.14]  dH = c dz^T
    [dKOOP.12]  dD = (a + 2 tau b) dH + b R^T dH - b w dz^T
    [dKOOP.13]  dR = b dH D^T
    [dKOOP.11]  dA = dD P^T + dR B
    [dKOOP.8]  dY: Z dY G + ridge dY = dA                  separable: (Z + ridge) dY G = dA
    [dKOOP.10]  dZ = -dY G A^T
    [dKOOP.9]  dN = dZ B + dw g(q^r)^T + dc g(q')^T, dw = -b D dz
    [dKOOP.7]  dB = dR^T A + dZ^T N + dN G^-1 - tau dY     full space: dB = dR^T A - tau dY

The root moves with everything that psi and z are made of, but not with itself: g(q^r) in dN is a constant. No
eigenvector is differentiated anywhere.

Where coordinates have ridges of their own, there is an operator for each value of them: KOOP.11 to KOOP.14 and their
adjoints are repeated, D has the columns of the coordinates with this ridge alone, and further on D and H are the sums.

Axes: b batch, h query head, i query, l transition, o observable, d width.

Source: Tie 2024; Khosravi 2023 (arXiv:2208.01681) for A; docs/deviations.md says how they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman import operator
from refattn.mechanisms.koopman.observables import Observables
from refattn.mechanisms.koopman.one_step import OneStep, add, certify, full_backward, kappa, ridge_factor, total
from refattn.mechanisms.koopman.options import Options
from refattn.mechanisms.koopman.perturbation import coefficients_of, invert, not_finite
from refattn.ops.solve import identity, solve
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Fit:
    """The operator of one ridge."""

    ridge: Array  # () or (b, h, i, 1, 1)
    own: Array | None  # (d,): 1 at the coordinates that have this ridge; None: all
    found: Array  # (b, h, i, l, o): A
    modes: Array  # (b, h, i, l, d): D
    koopman: Array  # (b, h, i, l, l): R
    lifted: Array  # (b, h, i, l, d): H


@dataclass(frozen=True)
class Saved:
    """What the backward of an update reads."""

    points: Array  # (b, h, i, l + 1, d)
    attended: Array  # (b, h, i, d)
    root: Array  # (b, h, i, d)
    alive: Array  # (b, h, i)
    ab: tuple[Any, Any]
    starts: Array  # (b, h, i, l, o): B
    dual: Array | None  # (b, h, i, l, o): N
    inner: Array  # (b, h, i, l, l): Z
    fits: tuple[Fit, ...]
    modes: Array  # (b, h, i, l, d): D
    lifted: Array  # (b, h, i, l, d): H
    section: Array  # (b, h, i, l): c

    @property
    def found(self) -> Array:
        """Return A (b, h, i, l, o), of the first ridge."""
        return self.fits[0].found

    @property
    def koopman(self) -> Array:
        """Return R (b, h, i, l, l), of the first ridge."""
        return self.fits[0].koopman


def forward(
    points: Array,
    attended: Array,
    observables: Observables,
    gram: Array,
    *,
    ridge: Array,
    epsilon: Array,
    mix: Array,
    options: Options,
    update: int,
) -> tuple[Array, Saved]:
    """Return the next query (b, h, i, d) and what `backward` reads, for points (b, h, i, l + 1, d) and q' (b, h, i, d).

    Raises
    ------
    KoopmanInverseError
        Where psi was not inverted.
    """
    xp, transpose = namespace(points), namespace(points).matrix_transpose
    tau = options.tau
    ab = coefficients_of(options.perturbation, epsilon, mix)
    a, b = ab
    first = points[..., :-1, :]  # (b, h, i, l, d): where the transitions start
    alive = xp.any(observables.seen, axis=-1)  # (b, h, i): whether the query sees a key
    factor = ridge_factor(options, observables, first)  # what multiplies the ridge of each query
    starts = observables.values(first)  # (b, h, i, l, o) [KOOP.7]
    targets = observables.values(points[..., 1:, :]) - tau * starts  # (b, h, i, l, o) [KOOP.8]
    dual = None
    if options.space == "keys":
        dual = transpose(solve(gram, transpose(starts)))  # (b, h, i, l, o) [KOOP.9]
    inner = (
        observables.kernel.values(first, first) if dual is None else dual @ transpose(starts)
    )  # (b, h, i, l, l) [KOOP.10]
    fits = []
    for value, own in operator.distinct(ridge):
        weight = value * factor  # the ridge of each query
        found = operator.coefficients(options.fit, inner, gram, weight, targets)  # (b, h, i, l, o) [KOOP.11]
        all_modes = found @ observables.coordinates()  # (b, h, i, l, d): of all coordinates
        modes = all_modes if own is None else all_modes * own  # (b, h, i, l, d) [KOOP.12]
        koopman = found @ transpose(starts)  # (b, h, i, l, l) [KOOP.13]
        lifted = (a + 2.0 * tau * b) * modes + b * (koopman @ modes)  # (b, h, i, l, d) [KOOP.14]
        fits.append(Fit(weight, own, found, modes, koopman, lifted))
    modes = total([fit.modes for fit in fits])  # (b, h, i, l, d): D of all ridges
    lifted = total([fit.lifted for fit in fits])  # (b, h, i, l, d): H of all ridges
    section = kappa(observables, dual, first, attended)  # (b, h, i, l) [KOOP.15]
    predicted = xp.sum(lifted * section[..., None], axis=-2)  # (b, h, i, d): part of KOOP.16
    image = (a + b) * tau * attended + predicted  # (b, h, i, d) [KOOP.16]
    expected = tau * attended + xp.sum(modes * section[..., None], axis=-2)  # (b, h, i, d): phi(q')
    one_step = OneStep(observables, dual, first, modes)
    if options.certify:
        certify(one_step.steepness(), a + b * tau, b, alive)

    def evaluate(x: Array) -> tuple[Array, Array, Array]:
        value, size, jacobian = one_step.at(x)  # D^T kappa(x) and what it sums
        residual = (a + b * tau) * x + b * value - image  # of KOOP.17
        terms = xp.abs((a + b * tau) * x) + xp.abs(b * size) + xp.abs(image)  # what the residual sums
        eye = identity(x.shape[-1], x)  # 1 on the diagonal
        slope = (a + b * tau) * eye + b * jacobian  # J
        return residual, xp.sqrt(xp.sum(terms * terms, axis=-1)), slope

    last = points[..., -1, :]  # (b, h, i, d): the newest query
    lost = not_finite(observables.keys[:, :, 0, :, :], attended, last)  # (b, h, i): what is NaN
    found_root = invert(evaluate, (expected, attended, last), alive, lost, update)  # KOOP.17
    root = xp.where(alive[..., None], found_root, 0.0)  # (b, h, i, d) [KOOP.17]
    parts = (points, attended, root, alive, ab, starts, dual, inner, tuple(fits), modes, lifted, section)
    return root, Saved(*parts)


def backward(saved: Saved, observables: Observables, gram: Array, options: Options, d_root: Array) -> dict[str, Array]:
    """Return the gradients of points, attended, keys, gram, bandwidth, weight, ridge, a, b and 1 / linear_part."""
    xp, transpose = namespace(d_root), namespace(d_root).matrix_transpose
    tau, (a, b) = options.tau, saved.ab
    first = saved.points[..., :-1, :]  # (b, h, i, l, d): where the transitions start
    last = saved.points[..., 1:, :]  # (b, h, i, l, d): where they end
    dual, modes = saved.dual, saved.modes
    one_step = OneStep(observables, dual, first, modes)
    # forward: psi(root) = image
    eye = identity(d_root.shape[-1], d_root)  # (d, d): 1 on the diagonal
    value, _, slope = one_step.at(saved.root)  # D^T kappa at the root, and its Jacobian
    jacobian = (a + b * tau) * eye + b * slope  # (b, h, i, d, d): J
    safe = xp.where(saved.alive[..., None, None], jacobian, eye)  # (b, h, i, d, d): J where there is a root
    given = xp.where(saved.alive[..., None], d_root, 0.0)[..., None]  # (b, h, i, d, 1): it came in
    d_image = solve(transpose(safe), given)[..., 0]  # (b, h, i, d) [dKOOP.16]
    at_root = kappa(observables, dual, first, saved.root)  # (b, h, i, l): w
    d_at_root = -(b * modes @ d_image[..., None])[..., 0]  # (b, h, i, l): dw
    # forward: image = (a + b) * tau * attended + lifted^T section
    d_section = (saved.lifted @ d_image[..., None])[..., 0]  # (b, h, i, l) [dKOOP.15]
    d_lifted = saved.section[..., None] * d_image[..., None, :]  # (b, h, i, l, d) [dKOOP.14]
    # forward: psi(root) has b * modes^T w
    fixed = at_root[..., None] * d_image[..., None, :]  # (b, h, i, l, d): part of dKOOP.12
    coordinates = observables.coordinates()  # (b, h, 1, o, d): P
    factor = ridge_factor(options, observables, first)  # what multiplies the ridge of each query
    passed: dict[str, Array] = {}
    for fit in reversed(saved.fits):
        # forward: lifted = (a + 2 tau b) modes + b koopman @ modes
        turned = transpose(fit.koopman) @ d_lifted  # (b, h, i, l, d): part of dKOOP.12
        all_modes = (a + 2.0 * tau * b) * d_lifted + b * (turned - fixed)  # (b, h, i, l, d): if all were own
        d_modes = all_modes if fit.own is None else all_modes * fit.own  # (b, h, i, l, d) [dKOOP.12]
        d_koopman = b * d_lifted @ transpose(fit.modes)  # (b, h, i, l, l) [dKOOP.13]
        # forward: modes = found @ coordinates; koopman = found @ starts^T
        everywhere = d_modes @ transpose(coordinates) + d_koopman @ saved.starts  # (b, h, i, l, o): dKOOP.11
        d_found = observables.seen_observables(everywhere)  # (b, h, i, l, o) [dKOOP.11]
        d_coordinates = xp.sum(transpose(fit.found) @ d_modes, axis=2, keepdims=True)  # dP
        # forward: Z A G + ridge A = Y
        d_targets = operator.adjoint(options.fit, saved.inner, gram, fit.ridge, d_found)  # (b, h, i, l, o) [dKOOP.8]
        d_inner = operator.d_inner(options.fit, gram, fit.ridge, fit.found, d_targets)  # (b, h, i, l, l) [dKOOP.10]
        d_gram = operator.d_gram(options.fit, saved.inner, fit.ridge, fit.found, d_targets)  # of dKOOP.6
        if fit.own is None:
            d_own = operator.d_ridge(options.fit, gram, fit.found, d_targets)[..., None, None]  # of a query
            d_ridge = xp.sum(d_own * factor)  # (): part of dKOOP.ridge
        else:
            # Coordinates of one ridge share its solution, and what each loses by the ridge is found from its slope.
            slopes = operator.slope(options.fit, saved.inner, gram, fit.ridge, fit.found)  # -dA / dridge
            of_modes = d_modes * (slopes @ coordinates)  # (b, h, i, l, d): through D
            of_turned = b * d_lifted * (slopes @ transpose(saved.starts) @ fit.modes)  # through R
            d_ridge = -xp.sum((of_modes + of_turned) * fit.own * factor, axis=(0, 1, 2, 3))  # (d,): likewise
        d_starts = transpose(d_koopman) @ fit.found  # (b, h, i, l, o): part of dKOOP.7
        one = {"targets": d_targets, "inner": d_inner, "gram": d_gram, "coordinates": d_coordinates}
        add(passed, {**one, "ridge": d_ridge, "starts": d_starts})
    d_targets, d_inner, d_gram = passed["targets"], passed["inner"], passed["gram"]  # of all ridges
    d_coordinates = passed["coordinates"]  # of all ridges
    # forward: inner = dual @ starts^T; dual = starts G^-1; section = dual @ g(q')
    rest = -tau * d_targets  # (b, h, i, l, o): part of dKOOP.7
    parts = [(last, d_targets, "last")]
    if dual is not None:
        at_points = [observables.values(x[..., None, :]) for x in (saved.root, saved.attended)]
        sides = (d_at_root[..., None] * at_points[0], d_section[..., None] * at_points[1])
        d_dual = d_inner @ saved.starts + sides[0] + sides[1]  # (b, h, i, l, o) [dKOOP.9]
        through = transpose(solve(transpose(gram), transpose(d_dual)))  # (b, h, i, l, o): dN G^-1
        rest = rest + transpose(d_inner) @ dual + through  # (b, h, i, l, o): part of dKOOP.7
        d_gram = d_gram - transpose(dual) @ through  # (b, h, i, o, o): part of dKOOP.6
        parts += [
            (saved.attended[..., None, :], transpose(d_section[..., None]) @ dual, "attended"),
            (saved.root[..., None, :], transpose(d_at_root[..., None]) @ dual, "root"),
        ]
    d_starts = passed["starts"] + rest  # (b, h, i, l, o) [dKOOP.7]
    # forward: starts = g(first); targets = g(last) - tau * starts; and g at q' and at the root
    parts += [(first, d_starts, "first")]
    sums = {"keys": d_coordinates[..., : observables.keys.shape[-2], :]}
    for x, d_values, name in parts:
        d_x, d_keys = observables.values_backward(x, d_values)  # of one evaluation of g
        d_bandwidth, d_weight = observables.numbers_backward(x, d_values)  # of one evaluation of g
        add(sums, {name: d_x, "keys": d_keys, "bandwidth": d_bandwidth, "weight": d_weight})
    if dual is None:
        add(sums, full_backward(observables, (first, saved.attended, saved.root), (d_inner, d_section, d_at_root)))
    zero = xp.zeros_like(first[..., :1, :])  # (b, h, i, 1, d): nothing
    shifted = (xp.concat([sums["first"], zero], axis=-2), xp.concat([zero, sums["last"]], axis=-2))
    direct = (a + b) * tau * d_image  # (b, h, i, d): through (a + b) tau q'
    own = d_image * (tau * saved.attended - saved.root)  # (b, h, i, d): da, but for what H passes
    d_a = xp.sum(own) + xp.sum(d_lifted * modes)  # (): of dKOOP.epsilon or dKOOP.mix
    own_b = d_image * (tau * (saved.attended - saved.root) - value)  # (b, h, i, d): db, likewise
    all_turned = total([fit.koopman @ fit.modes for fit in saved.fits])  # (b, h, i, l, d): R D
    d_b = xp.sum(own_b) + xp.sum(d_lifted * (2.0 * tau * modes + all_turned))  # (): as d_a
    beyond = d_coordinates[..., observables.keys.shape[-2] :, :]  # of the coordinates, if augmented
    d_norm = xp.sum(beyond * eye) if observables.augment else d_a * 0.0  # (): of 1 / linear_part
    return {
        "points": shifted[0] + shifted[1],
        "attended": direct + sums["attended"][..., 0, :],
        "keys": sums["keys"],
        "gram": d_gram,
        "bandwidth": sums["bandwidth"],
        "weight": sums["weight"],
        "ridge": passed["ridge"],
        "a": d_a,
        "b": d_b,
        "norm": d_norm,
    }
