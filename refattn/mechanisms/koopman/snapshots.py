"""An update of a chunk of queries, by systems of as many unknowns as there are transitions; see `whitening`.

The equations are those of `update`, in features: with W of the rows w(x_l), P' = F P and D = A' P', R = A' W^T, the
observables appear in sections and features alone, which all updates share. The inverse has a Jacobian of low rank::

    J = own + b D^T K,  K the Jacobian of kappa,        J^-1 r = (r - b D^T (own + b K D^T)^-1 K r) / own

Adjoints, beside those of `update` (u = dz, q' what was attended, q the root)::

    dA' = dD P'^T + dR W,  dY' = the fit of dA',  dZ = -dY' A'^T
    dN F^T = dW' = dZ W + dw w(q)^T + dc w(q')^T
    dB F^-1 = dR^T A' + dZ^T W + dW' - tau dY'          the gradient of F^-T g at the starts of transitions
    dG = -F^T ((Z A')^T dY' + W^T dW') F                separable: Y' in place of Z A'

Letters: b batch, h head, c query of a chunk, l transition, o observable: the coordinates if augmented, then the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman.kernel import STEEPEST
from refattn.mechanisms.koopman.one_step import add, total
from refattn.mechanisms.koopman.operator import distinct
from refattn.mechanisms.koopman.options import Options
from refattn.mechanisms.koopman.perturbation import condition
from refattn.mechanisms.koopman.space import Space, combine, flat_outer, flat_product
from refattn.mechanisms.koopman.whitening import fit
from refattn.ops.solve import identity, solve
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Fit:
    """The operator of one ridge."""

    ridge: Array  # () or (b, h, c, 1, 1)
    own: Array | None  # (d,): 1 at the coordinates that have this ridge; None: all
    found: Array  # (b, h, c, l, o): A'
    modes: Array  # (b, h, c, l, d): D
    koopman: Array  # (b, h, c, l, l): R


class Fitted:
    """An operator fitted to points of a trajectory, one for each ridge, and psi made of it."""

    def __init__(
        self,
        space: Space,
        points: list[Array],  # x_0 ... x_L, (b, h, c, d) each
        features: list[Array],  # w of them, (b, h, c, o) each
        duals: list[Array],  # F^T w of all but the last
        attended: Array,
        ridge: Array,  # () or (d,)
        factor: Any,  # what multiplies it
        ab: tuple[Any, Any],
        options: Options,
    ) -> None:
        xp, transpose = namespace(attended), namespace(attended).matrix_transpose
        self.space, self.attended, self.factor, self.options = space, attended, factor, options
        (self.a, self.b), self.tau = ab, options.tau
        self.own = self.a + self.b * self.tau
        self.starts = xp.stack(features[:-1], axis=-2)  # (b, h, c, l, o): W
        self.targets = xp.stack(features[1:], axis=-2) - self.tau * self.starts  # (b, h, c, l, o): Y'
        self.full = options.space == "full"
        self.first = xp.stack(points[:-1], axis=-2)  # (b, h, c, l, d)
        self.dual = None if self.full else xp.stack(duals, axis=-2)  # (b, h, c, l, o): N
        self.inner = (
            space.kernel.values(self.first, self.first) if self.full else self.starts @ transpose(self.starts)
        )  # (b, h, c, l, l): Z
        self.fits = []
        for value, own in distinct(ridge):
            found = fit(self.inner, space.whitening.gains, value * factor, self.targets)
            modes = flat_product(found, space.coordinates)
            modes = modes if own is None else modes * own
            self.fits.append(Fit(value * factor, own, found, modes, found @ transpose(self.starts)))
        self.modes = total([one.modes for one in self.fits])  # (b, h, c, l, d): D
        self.turned = total([one.koopman @ one.modes for one in self.fits])  # (b, h, c, l, d): R D
        self.lifted = (self.a + 2.0 * self.tau * self.b) * self.modes + self.b * self.turned  # (b, h, c, l, d): H
        self.section = self.kappa(attended)  # (b, h, c, l): c
        self.image = (self.a + self.b) * self.tau * attended + combine(self.section, self.lifted)  # (b, h, c, d): z
        self.expected = self.tau * attended + combine(self.section, self.modes)  # (b, h, c, d): phi(q')

    def kappa(self, x: Array) -> Array:
        """Return kappa(x) (b, h, c, l)."""
        if self.dual is None:
            return self.space.kernel.values(self.first, x[..., None, :])[..., 0]
        return (self.dual @ self.space.sections(x)[..., None])[..., 0]

    def steepness(self) -> Array:
        """Return a bound on |D^T kappa(x) - D^T kappa(y)| / |x - y|, (b, h, c)."""
        xp, kernel, width = namespace(self.modes), self.space.kernel, self.attended.shape[-1]
        back, squares = xp.matrix_transpose(self.modes), self.modes @ xp.matrix_transpose(self.modes)
        if self.dual is None:
            linear, columns = back @ self.first, xp.sum(squares * identity(squares.shape[-1], squares), axis=-1)
        else:
            beyond = width if self.space.augment else 0
            at_keys = self.dual[..., beyond:]
            linear = back @ flat_product(at_keys, self.space.keys)
            linear = linear + back @ self.dual[..., :beyond] if beyond else linear
            columns = xp.sum(at_keys * (squares @ at_keys), axis=-2)  # |D^T N_j|^2
        bound = xp.linalg.matrix_norm(linear, ord=2)
        if kernel.name == "linear":
            return bound
        lengths = xp.sum(xp.sqrt(xp.where(columns > 0.0, columns, 0.0)), axis=-1)
        return bound + kernel.weight * STEEPEST[kernel.name] / kernel.bandwidth * lengths

    def look(self, x: Array) -> tuple[Array, Array, Array]:
        """Return kappa(x) (b, h, c, l), the sizes of its sums, and its Jacobian (b, h, c, l, d)."""
        xp, space, row = namespace(x), self.space, x[..., None, :]
        if self.dual is None:
            values, along, towards = space.kernel.all(self.first, row)
            value = values[..., 0]
            return value, xp.abs(value), (along - towards) * self.first + towards * row
        width = x.shape[-1] if space.augment else 0
        values, along, towards = space.kernel.all(x, space.keys)
        sections = space.sections_of(x, values)[..., None]
        value = (self.dual @ sections)[..., 0]
        size = (xp.abs(self.dual) @ xp.abs(sections))[..., 0]
        at_keys = self.dual[..., width:]
        jacobian = (
            flat_product(at_keys * (along - towards)[..., None, :], space.keys) + (at_keys @ towards[..., None]) * row
        )
        return value, size, jacobian + self.dual[..., :width] if space.augment else jacobian

    def evaluate(self, x: Array) -> tuple[Array, Array, Array]:
        """Return psi(x) - z, the size of the terms that it sums, and the Jacobian of kappa."""
        xp = namespace(x)
        value, size, jacobian = self.look(x)
        residual = self.own * x + self.b * combine(value, self.modes) - self.image
        summed = self.b * combine(size, xp.abs(self.modes))
        terms = xp.abs(self.own * x) + summed + xp.abs(self.image)
        return residual, xp.sqrt(xp.sum(terms * terms, axis=-1)), jacobian

    def step(self, jacobian: Array, residual: Array, taking: Array) -> Array:
        """Return J^-1 r where taking."""
        xp = namespace(residual)
        known = xp.where(taking[..., None], residual, 0.0)
        inner = solve(self._small(jacobian, taking), jacobian @ known[..., None])
        return self._divided(known - self.b * combine(inner[..., 0], self.modes))

    def last(self, jacobian: Array, residual: Array, near: Array) -> tuple[Array, Array]:
        """Return J^-1 r where near, and whether J is regular."""
        small = self._small(jacobian, near)
        return self.step(jacobian, residual, near), condition(small) & (abs(self.own) > 0.0)

    def step_adjoint(self, jacobian: Array, d_x: Array, taking: Array) -> Array:
        """Return J^-T d_x where taking."""
        xp, transpose = namespace(d_x), namespace(d_x).matrix_transpose
        known = xp.where(taking[..., None], d_x, 0.0)
        inner = solve(transpose(self._small(jacobian, taking)), self.modes @ known[..., None])
        return self._divided(known - self.b * combine(inner[..., 0], jacobian))

    def _small(self, jacobian: Array, taking: Array) -> Array:
        """Return own + b K D^T where taking, otherwise 1."""
        xp = namespace(jacobian)
        eye = identity(jacobian.shape[-2], jacobian)
        small = self.own * eye + self.b * (jacobian @ xp.matrix_transpose(self.modes))
        return xp.where(taking[..., None, None], small, eye)

    def _divided(self, x: Array) -> Array:
        """Return x / own, finite where own is 0 and psi has no inverse in this form."""
        xp = namespace(x)
        own = self.own + 0.0 * x
        return x / xp.where(own == 0.0, 1.0, own)

    def backward(
        self, root: Array, alive: Array, d_root: Array, of_root: Array | None, of_attended: Array | None
    ) -> Any:
        """Return the adjoints of the update by name; `of_root` and `of_attended` are features w(q) and w(q')."""
        xp, transpose = namespace(root), namespace(root).matrix_transpose
        tau, a, b, attended = self.tau, self.a, self.b, self.attended
        at_root, _, jacobian = self.look(root)
        d_image = self.step_adjoint(jacobian, d_root, alive)  # (b, h, c, d)
        d_at_root = -b * (self.modes @ d_image[..., None])[..., 0]  # (b, h, c, l)
        d_section = (self.lifted @ d_image[..., None])[..., 0]  # (b, h, c, l)
        d_lifted = self.section[..., None] * d_image[..., None, :]  # (b, h, c, l, d)
        fixed = at_root[..., None] * d_image[..., None, :]
        passed: dict[str, Array] = {}
        for one in self.fits:
            add(passed, self._fit_backward(one, d_lifted, fixed))
        d_targets, d_inner = passed["targets"], passed["inner"]
        d_starts, d_gram = passed["starts"] - tau * d_targets, passed["gram"]
        if not self.full:
            assert of_root is not None and of_attended is not None
            d_dual = d_inner @ self.starts + d_at_root[..., None] * of_root[..., None, :]
            d_dual = d_dual + d_section[..., None] * of_attended[..., None, :]
            d_starts = d_starts + transpose(d_inner) @ self.starts + d_dual
            d_gram = d_gram + flat_outer(self.starts, d_dual)
        value = combine(at_root, self.modes)
        own_a = xp.sum(d_image * (tau * attended - root)) + xp.sum(d_lifted * self.modes)
        own_b = xp.sum(d_image * (tau * (attended - root) - value))
        return {
            "starts": d_starts,
            "targets": d_targets,
            "gram": d_gram,
            "coordinates": passed["coordinates"],
            "inner": d_inner,
            "section": d_section,
            "at_root": d_at_root,
            "attended": (a + b) * tau * d_image,
            "ridge": passed["ridge"],
            "a": own_a,
            "b": own_b + xp.sum(d_lifted * (2.0 * tau * self.modes + self.turned)),
        }

    def _fit_backward(self, one: Fit, d_lifted: Array, fixed: Array) -> dict[str, Array]:
        """Return what the operator of one ridge passes on, by name."""
        xp, transpose, gains = namespace(fixed), namespace(fixed).matrix_transpose, self.space.whitening.gains
        d_modes = (self.a + 2.0 * self.tau * self.b) * d_lifted + self.b * (transpose(one.koopman) @ d_lifted - fixed)
        d_modes = d_modes if one.own is None else d_modes * one.own
        d_koopman = self.b * d_lifted @ transpose(one.modes)  # (b, h, c, l, l)
        d_found = flat_product(d_modes, transpose(self.space.coordinates)) + d_koopman @ self.starts
        d_targets = fit(self.inner, gains, one.ridge, self.space.visible(d_found))
        own = one.found if gains is None else one.found / gains
        if one.own is None:
            d_ridge = -xp.sum(xp.sum(d_targets * own, axis=(-2, -1))[..., None, None] * self.factor)
        else:
            slopes = fit(self.inner, gains, one.ridge, own)  # -dA' / dridge
            of_modes = d_modes * flat_product(slopes, self.space.coordinates)
            of_turned = self.b * d_lifted * (slopes @ transpose(self.starts) @ one.modes)
            d_ridge = -xp.sum((of_modes + of_turned) * one.own * self.factor, axis=(0, 1, 2, 3))
        left = self.targets if gains is None else self.inner @ one.found
        return {
            "targets": d_targets,
            "inner": -(d_targets @ transpose(one.found)),  # (b, h, c, l, l)
            "starts": transpose(d_koopman) @ one.found,
            "gram": flat_outer(left, d_targets),  # (b, h, o, o)
            "coordinates": flat_outer(one.found, d_modes),
            "ridge": d_ridge,
        }
