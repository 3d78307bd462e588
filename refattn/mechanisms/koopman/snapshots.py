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

from refattn.mechanisms.koopman.kernel import Kernel
from refattn.mechanisms.koopman.options import Options
from refattn.mechanisms.koopman.perturbation import condition
from refattn.mechanisms.koopman.whitening import Whitening, fit
from refattn.ops.solve import identity, solve
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Space:
    """What a chunk of queries sees: kernel sections at keys, and the coordinates if augmented."""

    kernel: Kernel
    keys: Array  # (b, h, j, d)
    seen: Array  # (b, h, c, j)
    augment: bool
    whitening: Whitening
    past: Array | None  # (c, o): where the future is hidden, the features that a query sees
    coordinates: Array  # (b, h, o, d): P' = F P

    def sections(self, x: Array) -> Array:
        """(b, h, c, d) -> (b, h, c, o): g(x)."""
        return self._sections(x, self.kernel.values(x, self.keys))

    def _sections(self, x: Array, values: Array) -> Array:
        xp = namespace(x)
        at_keys = xp.where(self.seen, values, 0.0)
        return xp.concat([x, at_keys], axis=-1) if self.augment else at_keys

    def visible(self, features: Array) -> Array:
        """Return features (b, h, c, o) or (b, h, c, l, o) with 0 for those of the future."""
        if self.past is None:
            return features
        past = self.past if len(features.shape) == 4 else self.past[:, None, :]
        return namespace(features).where(past, features, 0.0)

    def features(self, x: Array) -> Array:
        """(b, h, c, d) -> (b, h, c, o): w(x)."""
        return self.visible(self.whitening.features(self.sections(x)))

    def sections_backward(self, x: Array, d_sections: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients with respect to x, the keys, the bandwidth and the weight."""
        xp, width = namespace(x), x.shape[-1] if self.augment else 0
        # forward: sections = concat(x, k(x, keys) where seen)
        d_values = xp.where(self.seen, d_sections[..., width:], 0.0)
        d_x, d_keys, d_bandwidth, d_weight = self.kernel.all_backward(x, self.keys, d_values)
        return (d_x + d_sections[..., :width] if self.augment else d_x), d_keys, d_bandwidth, d_weight


class Fitted:
    """An operator fitted to points of a trajectory, and psi made of it."""

    def __init__(
        self,
        space: Space,
        points: list[Array],  # x_0 ... x_L, (b, h, c, d) each
        features: list[Array],  # w of them, (b, h, c, o) each
        duals: list[Array],  # F^T w of all but the last
        attended: Array,
        ridge: Array,
        ab: tuple[Any, Any],
        options: Options,
    ) -> None:
        xp, transpose = namespace(attended), namespace(attended).matrix_transpose
        self.space, self.attended, self.ridge, self.options = space, attended, ridge, options
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
        self.found = fit(self.inner, space.whitening.gains, ridge, self.targets)  # (b, h, c, l, o): A'
        self.modes = flat_product(self.found, space.coordinates)  # (b, h, c, l, d): D
        self.koopman = self.found @ transpose(self.starts)  # (b, h, c, l, l): R
        self.turned = self.koopman @ self.modes  # (b, h, c, l, d): R D
        self.lifted = (self.a + 2.0 * self.tau * self.b) * self.modes + self.b * self.turned  # (b, h, c, l, d): H
        self.section = self.kappa(attended)  # (b, h, c, l): c
        self.image = (self.a + self.b) * self.tau * attended + combine(self.section, self.lifted)  # (b, h, c, d): z
        self.expected = self.tau * attended + combine(self.section, self.modes)  # (b, h, c, d): phi(q')

    def kappa(self, x: Array) -> Array:
        """Return kappa(x) (b, h, c, l)."""
        if self.dual is None:
            return self.space.kernel.values(self.first, x[..., None, :])[..., 0]
        return (self.dual @ self.space.sections(x)[..., None])[..., 0]

    def look(self, x: Array) -> tuple[Array, Array, Array]:
        """Return kappa(x) (b, h, c, l), the sizes of its sums, and its Jacobian (b, h, c, l, d)."""
        xp, space, row = namespace(x), self.space, x[..., None, :]
        if self.dual is None:
            values, along, towards = space.kernel.all(self.first, row)
            value = values[..., 0]
            return value, xp.abs(value), (along - towards) * self.first + towards * row
        width = x.shape[-1] if space.augment else 0
        values, along, towards = space.kernel.all(x, space.keys)
        sections = space._sections(x, values)[..., None]
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
        d_modes = (a + 2.0 * tau * b) * d_lifted + b * (transpose(self.koopman) @ d_lifted - fixed)
        d_koopman = b * d_lifted @ transpose(self.modes)  # (b, h, c, l, l)
        d_found = flat_product(d_modes, transpose(self.space.coordinates)) + d_koopman @ self.starts
        d_targets = fit(self.inner, self.space.whitening.gains, self.ridge, self.space.visible(d_found))
        gains = self.space.whitening.gains
        own = self.found if gains is None else self.found / gains
        left = self.targets if gains is None else self.inner @ self.found
        d_inner = -(d_targets @ transpose(self.found))  # (b, h, c, l, l)
        d_starts = transpose(d_koopman) @ self.found - tau * d_targets
        d_gram = flat_outer(left, d_targets)  # (b, h, o, o)
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
            "coordinates": flat_outer(self.found, d_modes),
            "inner": d_inner,
            "section": d_section,
            "at_root": d_at_root,
            "attended": (a + b) * tau * d_image,
            "ridge": -xp.sum(d_targets * own, axis=(-2, -1))[..., None, None],
            "a": own_a,
            "b": own_b + xp.sum(d_lifted * (2.0 * tau * self.modes + self.turned)),
        }


def combine(weights: Array, rows: Array) -> Array:
    """(b, h, c, l), (b, h, c, l, d) -> (b, h, c, d)."""
    return (weights[..., None, :] @ rows)[..., 0, :]


def flat_product(x: Array, y: Array) -> Array:
    """(b, h, c, l, o), (b, h, o, d) -> (b, h, c, l, d), as one matrix product a head."""
    xp = namespace(x)
    b, h, c, rows, columns = x.shape
    return xp.reshape(xp.reshape(x, (b, h, c * rows, columns)) @ y, (b, h, c, rows, y.shape[-1]))


def flat_outer(x: Array, y: Array) -> Array:
    """(b, h, c, l, o), (b, h, c, l, p) -> (b, h, o, p), summed over queries and transitions."""
    xp = namespace(x)
    b, h, c, rows, columns = x.shape
    flat = xp.reshape(x, (b, h, c * rows, columns))
    return xp.matrix_transpose(flat) @ xp.reshape(y, (b, h, c * rows, y.shape[-1]))
