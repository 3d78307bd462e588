"""All queries by one factorisation of the Gram matrix of the keys, in chunks of queries.

The dense implementation solves a system for every query. Here the Gram matrix of a head is factored once (see
`whitening`), and an update of a query solves systems of as many unknowns as it has transitions. A chunk of queries goes
through all updates before the next one starts; the backward goes through them once more, from the trajectory alone. So
memory is that of the keys' Gram matrix, of one chunk, and of the trajectories.

Queries may see different keys where the future is hidden and the fit is "separable"; otherwise all see the same.

The equations are those of `dense`, in features w(x) = F g(x): with W of the rows w(x_l), P' = F P and D = A' P',
R = A' W^T, the observables appear in sections and features alone. The inverse has a Jacobian of low rank::

    J = own + b D^T K,  K the Jacobian of kappa,        J^-1 r = (r - b D^T (own + b K D^T)^-1 K r) / own

Adjoints, beside those of `dense` (q' what was attended, q the root)::

    dA' = dD P'^T + dR W,  dY' = the fit of dA',  dZ = -dY' A'^T
    dN F^T = dW' = dZ W + du w(q)^T + dc w(q')^T
    dB F^-1 = dR^T A' + dZ^T W + dW' - tau dY'          the gradient of F^-T g at the starts of transitions
    dG = -F^T ((Z A')^T dY' + W^T dW') F                separable: Y' in place of Z A'

Letters: b batch, h head, i query of a chunk, l transition, j key, d width, o observable, or one of as many features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.koopman import dense
from refattn.mechanisms.koopman.implementations.whitening import Whitening, fit, whiten
from refattn.mechanisms.koopman.options.fits import Stein
from refattn.mechanisms.koopman.options.limited import Limited
from refattn.mechanisms.koopman.options.perturbation import certify, invert, is_regular, left_of
from refattn.mechanisms.koopman.options.ridges import factor_of
from refattn.mechanisms.koopman.options.spaces import AtPoints, Observables
from refattn.mechanisms.koopman.rounding_error import grown
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_in_tile
from refattn.ops.solve import condition, identity, solve
from refattn.xp import Array, arange, concrete, namespace, transpose, zeros

CHUNK = 2**18
"""Elements (queries times observables, of all batches and heads) of a chunk; some tens of such arrays exist at once."""


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    options: dense.Options
    offset: int | None
    groups: int
    mask: Array | None
    k: Array  # (b, h, j, d)
    v: Array  # (b, h, j, d)
    whitening: Whitening
    trajectory: tuple[Array, ...]  # q^0, q^1, ..., (b, h, i, d) each
    left: tuple[Array, ...]  # (b, h, i) of each update after the first, see `left_of`
    error: Array  # (b, h, i): what the norms say of the relative error of the last point


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, options: dense.Options
) -> tuple[Array, Saved]:
    """Return the last query (b, h, i, d) and what `backward` reads; `offset` is that of `causal_offset`."""
    xp = namespace(q)
    keys, values = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    whitening = Whitening(keys, None)  # of one update, which has no operator, and takes any mask
    if options.updates > 1:
        g = of_all(keys, mask, options)
        gram = dense.gram_of(g, keys, options.jitter)[:, :, 0, :, :]
        whitening = whiten(gram, isinstance(options.fit, Stein), options.space.size(0, q.shape[3]))
    saved = Saved(options, offset, k.shape[1], mask, keys, values, whitening, (q,), (), q[..., 0])
    chunks = [advance(saved, q, start, stop) for start, stop in chunks_of(saved, q.shape[2])]
    points, left, errors = zip(*chunks, strict=True)
    trajectory, left = (
        tuple(xp.concat(list(parts), axis=2) for parts in zip(*each, strict=True)) for each in (points, left)
    )
    return trajectory[-1], replace(saved, trajectory=trajectory, left=left, error=xp.concat(list(errors), axis=2))


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v and of every number, the tables ridge and epsilon among them."""
    xp, options = namespace(d_out), saved.options
    total: dict[str, Array] = {"k": xp.zeros_like(saved.k), "v": xp.zeros_like(saved.v)}
    d_q: list[Array] = []
    numbers: list[dict[str, Array]] = [{} for _ in saved.left]
    for start, stop in chunks_of(saved, d_out.shape[2]):
        d_q.append(chunk_backward(saved, d_out[:, :, start:stop, :], start, stop, total, numbers))
    nothing = xp.sum(d_out) * 0.0
    if options.updates > 1:
        g, whitening = of_all(saved.k, saved.mask, options), saved.whitening
        # forward: F^T F = G^-1; projected = F @ coordinates
        d_gram = -whitening.back(transpose(whitening.back(transpose(total["gram"]))))
        d_coordinates = transpose(whitening.factor) @ total["coordinates"]
        of = g.coordinates_backward(d_coordinates)
        add(total, {"k": xp.where(transpose(g.seen), of["k"], 0.0)})
        d_visible = d_gram[:, :, None, :, :]
        add(total, dense.gram_backward(g, saved.k, options.jitter, d_visible, of.get("norm", nothing)))
    found = {name: total.get(name, nothing) for name in ("bandwidth", "weight")}
    found |= {"q": xp.concat(d_q, axis=2), **{name: sum_heads(total[name], saved.groups) for name in ("k", "v")}}
    for name in ("ridge", "epsilon") if numbers else ():
        found |= {name: xp.stack([part[name] for part in numbers])}
    mixes = [part["mix"] for part in numbers if "mix" in part]
    return found | ({"mix": sum(mixes)} if mixes else {})


def of_all(keys: Array, mask: Array | None, options: dense.Options) -> Observables:
    """Return the observables of all queries together, as those of a single one."""
    seen = zeros((*keys.shape[:2], 1, keys.shape[2]), keys) == 0.0
    seen = seen if mask is None else namespace(keys).logical_and(seen, mask)
    return options.space.observables(options.kernel, keys, seen)


def chunks_of(saved: Saved, queries: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last-plus-one query of every chunk."""
    b, h, keys, width = saved.k.shape
    observables = saved.options.space.size(keys, width)
    size = max(8, CHUNK // max(b * h * observables, 1))
    for start in range(0, queries, size):
        yield start, min(start + size, queries)


# --- a chunk of queries on its way


@dataclass(frozen=True)
class Chunk:
    """The observables of the queries of a chunk, and their features."""

    options: dense.Options
    g: Observables
    whitening: Whitening
    past: Array | None  # (i, o): where the future is hidden, the features that a query sees
    coordinates: Array  # (b, h, o, d): P' = F P

    @property
    def keys(self) -> Array:
        """The keys (b, h, j, d)."""
        return self.g.keys[:, :, 0, :, :]

    def sections(self, x: Array) -> Array:
        """(b, h, i, d) -> (b, h, i, o): g(x)."""
        return self.sections_of(x, self.g.kernel.values(x, self.keys))

    def sections_of(self, x: Array, values: Array) -> Array:
        """Return g(x) for values (b, h, i, j) of the kernel between x and the keys."""
        xp = namespace(x)
        return self.g.beside(xp.where(self.g.seen, values, 0.0), x)

    def sections_backward(self, x: Array, d_sections: Array) -> tuple[Array, dict[str, Array]]:
        """Return the gradient of x, and those of the keys and the kernel's numbers."""
        at_keys, beyond = self.g.parts(d_sections)
        # forward: sections = concat(k(x, keys) where seen, x)
        d_values = namespace(x).where(self.g.seen, at_keys, 0.0)
        d_x, d_keys, d_bandwidth, d_weight = self.g.kernel.backward(x, self.keys, d_values)
        return d_x + beyond, {"k": d_keys, "bandwidth": d_bandwidth, "weight": d_weight}

    def features(self, x: Array) -> Array:
        """(b, h, i, d) -> (b, h, i, o): w(x)."""
        return self.visible(self.whitening.features(self.sections(x))[..., None, :])[..., 0, :]

    def visible(self, features: Array) -> Array:
        """Return features (..., i, l, o) with 0 for those of the future."""
        return features if self.past is None else namespace(features).where(self.past[:, None, :], features, 0.0)


def chunk_of(saved: Saved, start: int, stop: int) -> Chunk:
    """Return what a chunk of queries sees."""
    k, options, whitening = saved.k, saved.options, saved.whitening
    xp = namespace(k)
    seen = zeros((*k.shape[:2], stop - start, k.shape[2]), k) == 0.0
    allowed = allowed_in_tile(saved.mask, saved.offset, (start, stop), (0, k.shape[2]), k)
    seen = seen if allowed is None else xp.logical_and(seen, allowed)
    g = options.space.observables(options.kernel, k, seen)
    if options.updates == 1:
        return Chunk(options, g, whitening, None, k)
    past, width = None, options.space.size(0, k.shape[3])
    if saved.offset is not None:
        # Features have the coordinates first, see `whiten`.
        i, o = arange(start, stop, k)[:, None], arange(0, width + k.shape[2], k)[None, :]
        past = (o <= i + (saved.offset + width)) | (o < width)
    keys = k if saved.mask is None else xp.where(transpose(saved.mask), k, 0.0)
    at_coordinates = options.space.observables(options.kernel, keys, seen).coordinates()[:, :, 0, :, :]
    return Chunk(options, g, whitening, past, whitening.factor @ at_coordinates)


class Way:
    """The points of a chunk so far, and of those that were needed the features w and the duals F^T w."""

    def __init__(self, chunk: Chunk, points: list[Array]) -> None:
        self.chunk, self.points = chunk, points
        self.features: list[Array] = []
        self.duals: list[Array] = []

    def to(self, number: int) -> None:
        """Compute the features of so many points, and the duals of all of these but the last."""
        while len(self.features) < number:
            self.features.append(self.chunk.features(self.points[len(self.features)]))
        while len(self.duals) < number - 1 and not self.chunk.options.space.full:
            self.duals.append(self.chunk.whitening.back(self.features[len(self.duals)]))


def advance(saved: Saved, q: Array, start: int, stop: int) -> tuple[list[Array], list[Array], Array]:
    """Return the trajectory of a chunk of queries, how far psi is from having been inverted in each update, and e."""
    options, chunk, xp = saved.options, chunk_of(saved, start, stop), namespace(q)
    alive = xp.any(chunk.g.seen, axis=-1)
    points, lefts = [q[:, :, start:stop, :]], list[Array]()
    error = 0.0 * points[0][..., 0]
    points.append(dense.attend(points[0], saved.k, saved.v, chunk.g.seen, options)[1])
    way = Way(chunk, points)
    for number in range(2, options.updates + 1):
        _, attended = dense.attend(points[-1], saved.k, saved.v, chunk.g.seen, options)
        step = Step(way, attended, number)
        if options.certify:
            certify(step.steepness(), step.own_part, step.b, alive)
        root, left = invert(step.residual, (step.lift.expected, attended, points[-1]), alive, step.step)
        points.append(xp.where(alive[..., None], root, 0.0))
        lefts.append(step.judged(left, root))
        error = step.grown(error)
    return points, lefts, error


def chunk_backward(
    saved: Saved, d_out: Array, start: int, stop: int, total: dict[str, Array], numbers: list[dict[str, Array]]
) -> Array:
    """Return the gradient of the queries of a chunk, and add the others to `total` and `numbers`."""
    xp, options, chunk = namespace(d_out), saved.options, chunk_of(saved, start, stop)
    way = Way(chunk, [x[:, :, start:stop, :] for x in saved.trajectory])
    alive = xp.any(chunk.g.seen, axis=-1)
    d_points: list[Any] = [xp.zeros_like(d_out) for _ in saved.trajectory]
    d_points[-1] = d_out
    d_features: list[Any] = [None] * len(saved.trajectory)

    def sections_backward(x: Array, d_sections: Array) -> Array:
        d_x, passed = chunk.sections_backward(x, d_sections)
        add(total, passed)
        return d_x

    for number in range(options.updates, 0, -1):
        if d_features[number] is not None:
            # forward: features = F @ sections
            d_sections = chunk.whitening.back(d_features[number])
            d_points[number] = d_points[number] + sections_backward(way.points[number], d_sections)
        x, d_attended = way.points[number - 1], d_points[number]
        weights, attended = dense.attend(x, saved.k, saved.v, chunk.g.seen, options)
        if number > 1:
            # forward: root = the root of psi(x) = t
            root, at = way.points[number], start_of(options, number)
            step = Step(way, attended, number)
            d = step.backward(root, alive, d_points[number])
            for n in range(number - 1 - at):
                for name, place in (("starts", at + n), ("targets", at + n + 1)):
                    part, known = d[name][:, :, :, n, :], d_features[place]
                    d_features[place] = part if known is None else known + part
            d_attended = d["attended"]
            if step.kappa is not None:
                # forward: inner = k(first, first); kappa(x) = k(first, x), with a root that is given
                beside, d_kappa = (xp.stack(x, axis=-2) for x in ([attended, root], [d["section"], d["at_root"]]))
                d_first, d_beside, d_bandwidth, d_weight = step.kappa.sections_backward(beside, d["inner"], d_kappa)
                d_attended = d_attended + d_beside[..., 0, :]
                add(total, {"bandwidth": d_bandwidth, "weight": d_weight})
                for n in range(number - 1 - at):
                    d_points[at + n] = d_points[at + n] + d_first[:, :, :, n, :]
            else:
                # forward: section = dual @ sections(attended); with a given root its sections move with the keys
                d_attended = d_attended + sections_backward(
                    attended, (d["section"][..., None, :] @ step.dual)[..., 0, :]
                )
                sections_backward(root, (d["at_root"][..., None, :] @ step.dual)[..., 0, :])
            add(total, {name: d[name] for name in ("gram", "coordinates")})
            add(numbers[number - 2], {name: d[name] for name in ("ridge", "epsilon", "mix") if name in d})
        # forward: attended = attend(x, k, v)
        d_x, passed = dense.attend_backward(x, saved.k, saved.v, weights, options, d_attended)
        d_points[number - 1] = d_points[number - 1] + d_x
        add(total, passed)
    if d_features[0] is None:
        return d_points[0]
    return d_points[0] + sections_backward(way.points[0], chunk.whitening.back(d_features[0]))


# --- one update


def start_of(options: dense.Options, points: int) -> int:
    """Return the first of so many points that the operator is fitted to."""
    return 0 if options.window is None else max(0, points - options.window - 1)


class Step:
    """What `dense.update` computes, in features: an operator fitted to points of a trajectory, and psi made of it."""

    def __init__(self, way: Way, attended: Array, number: int) -> None:
        xp = namespace(attended)
        chunk, options, at = way.chunk, way.chunk.options, start_of(way.chunk.options, number)
        way.to(number)
        epsilon, ridge = (table[number - 2, ...] for table in (options.epsilon, options.ridge))
        self.chunk, numbers = chunk, (options.tau, epsilon, ridge)
        self.first = xp.stack(way.points[at : number - 1], axis=-2)  # (b, h, i, l, d)
        self.a, self.b = options.perturbation.shares(epsilon)
        self.own_part = self.a + self.b * options.tau
        self.solved = identity(number - 1 - at, attended)  # of the last step that each query took
        self.factor = factor_of(options.scale, self.first.shape[-2], chunk.g.count)
        self.ridge = options.ridges.spread(ridge) * self.factor
        starts = xp.stack(way.features[at : number - 1], axis=-2)  # (b, h, i, l, o): W
        self.targets = xp.stack(way.features[at + 1 : number], axis=-2) - options.tau * starts  # (b, h, i, l, o): Y'
        self.kappa: AtPoints | None = None
        if options.space.full:
            self.kappa = options.space.kappa(chunk.g, self.first, starts, starts, dense.dual_of)
            self.inner = options.nudge(self.kappa.inner())  # (b, h, i, l, l): Z
        else:
            self.dual = xp.stack(way.duals[at : number - 1], axis=-2)  # (b, h, i, l, o): N
            self.inner = options.nudge(starts @ transpose(starts))  # (b, h, i, l, l): Z
        self.before = self.targets  # (b, h, i, l, o): B of a fit that is limited
        if isinstance(options.fit, Limited):
            found, self.before = options.fit.within(self.inner, self.ridge, self.targets)
        else:
            found = fit(self.inner, chunk.whitening.gains, self.ridge, self.targets)  # (b, h, i, l, o): A'
        self.lift = dense.lift(
            attended, starts, found, flat_product(found, chunk.coordinates), self.kappa_at, options, numbers
        )

    def kappa_at(self, x: Array) -> Array:
        """Return kappa(x) (b, h, i, l)."""
        if self.kappa is not None:
            return self.kappa.at(x)
        return (self.dual @ self.chunk.sections(x)[..., None])[..., 0]

    def look(self, x: Array) -> tuple[Array, Array, Array]:
        """Return kappa(x) (b, h, i, l), the sizes of the terms of its sums, and its Jacobian (b, h, i, l, d)."""
        if self.kappa is not None:
            return self.kappa.centres.look(x, self.kappa.dual)
        xp, g, keys, row = namespace(x), self.chunk.g, self.chunk.keys, x[..., None, :]
        values, cross, own, *_ = g.kernel.look(x, keys)  # (b, h, i, j)
        sections = self.chunk.sections_of(x, values)[..., None]
        value, size = (self.dual @ sections)[..., 0], (xp.abs(self.dual) @ xp.abs(sections))[..., 0]
        at_keys, beyond = g.parts(self.dual)
        jacobian = flat_product(at_keys * cross[..., None, :], keys)
        jacobian = jacobian + xp.sum(at_keys * own[..., None, :], axis=-1)[..., None] * row
        return value, size, jacobian + (beyond + g.kernel.more(row, g.keys, at_keys))

    def steepness(self) -> Array:
        """Return a bound on |D^T kappa(x) - D^T kappa(y)| / |x - y|, (b, h, i)."""
        modes = self.lift.modes
        if self.kappa is not None:
            return self.kappa.centres.steepness(transpose(modes))
        xp, g = namespace(modes), self.chunk.g
        at_keys, beyond = g.parts(self.dual)
        linear = transpose(modes) @ (flat_product(at_keys, self.chunk.keys) + beyond)
        columns = xp.sum(at_keys * (modes @ transpose(modes) @ at_keys), axis=-2)  # |D^T N_j|^2
        lengths = xp.sum(xp.sqrt(xp.where(columns > 0.0, columns, 0.0)), axis=-1)
        return xp.linalg.matrix_norm(linear, ord=2) + g.kernel.slope_bound() * lengths

    def residual(self, x: Array) -> tuple[Array, Array, Array]:
        """Return psi(x) - t, the size of the terms that it sums, and the Jacobian of kappa."""
        xp, modes, image = namespace(x), self.lift.modes, self.lift.image
        value, size, jacobian = self.look(x)
        residual = self.own_part * x + self.b * combined(value, modes) - image
        terms = xp.abs(self.own_part * x) + self.b * combined(size, xp.abs(modes)) + xp.abs(image)
        return residual, xp.sqrt(xp.sum(terms * terms, axis=-1)), jacobian

    def step(self, jacobian: Array, residual: Array, taking: Array) -> Array:
        """Return J^-1 r where taking, and keep in `solved` what is singular where J is."""
        xp = namespace(residual)
        known, small = xp.where(taking[..., None], residual, 0.0), self._small(jacobian, taking)
        inner = solve(small, jacobian @ known[..., None])
        # 0 where there is no inverse in this implementation
        inverse = xp.astype(abs(self.own_part + 0.0 * small) > 0.0, small.dtype)
        self.solved = xp.where(taking[..., None, None], small * inverse, self.solved)
        return self._divided(known - self.b * combined(inner[..., 0], self.lift.modes))

    def judged(self, left: Array, root: Array) -> Array:
        """Return `left` of `invert`, infinite where psi is singular at its root, or this implementation has no inverse.

        Points that hardly differ are poor coordinates: what is solved may be ill conditioned where the Jacobian is not.
        """
        xp, self.condition = namespace(left), condition(self.solved)
        regular = is_regular(self.condition, self.solved.shape[-1])
        own = self.own_part + xp.zeros_like(left)
        if concrete(xp.all(regular)) is not True:
            modes = self.lift.modes
            jacobian = own[..., None, None] * identity(root.shape[-1], root)
            jacobian = jacobian + self.b * (transpose(modes) @ self.look(root)[2])
            left = xp.where(regular, left, left_of(left, jacobian)[0])
        return xp.where(regular | (xp.abs(own) > 0.0), left, math.inf)

    def grown(self, error: Array) -> Array:
        """Return the relative error of the root, by norms, for that of the points; see `rounding_error.grown`."""
        dual = self.dual if self.kappa is None else self.kappa.dual
        size = self.chunk.whitening.size
        return grown(error, self.lift, dual, self.inner, size, self.chunk.options, self.condition)

    def step_adjoint(self, jacobian: Array, d_x: Array, taking: Array) -> Array:
        """Return J^-T d_x where taking."""
        known = namespace(d_x).where(taking[..., None], d_x, 0.0)
        inner = solve(transpose(self._small(jacobian, taking)), self.lift.modes @ known[..., None])
        return self._divided(known - self.b * combined(inner[..., 0], jacobian))

    def _small(self, jacobian: Array, taking: Array) -> Array:
        """Return own + b K D^T where taking, otherwise 1."""
        eye = identity(jacobian.shape[-2], jacobian)
        small = self.own_part * eye + self.b * (jacobian @ transpose(self.lift.modes))
        return namespace(jacobian).where(taking[..., None, None], small, eye)

    def _divided(self, x: Array) -> Array:
        """Return x / own, finite where own is 0 and psi has no inverse in this implementation."""
        own = self.own_part + 0.0 * x
        return x / namespace(x).where(own == 0.0, 1.0, own)

    def backward(self, root: Array, alive: Array, d_root: Array) -> dict[str, Array]:
        """Return the adjoints of the update by name, those of `dense.update_backward`."""
        xp, chunk, options, lift = namespace(root), self.chunk, self.chunk.options, self.lift
        gains, ridges, starts, found = chunk.whitening.gains, options.ridges, lift.starts, lift.found
        # forward: psi(root) = image
        at_root, _, jacobian = self.look(root)
        d_image = self.step_adjoint(jacobian, d_root, alive)  # (b, h, i, d)
        d = dense.lift_backward(lift, d_image, root, at_root, options)
        d_modes, d_koopman = d.pop("modes"), d.pop("koopman")  # (b, h, i, l, d), (b, h, i, l, l)
        # forward: modes = found @ P'; koopman = found @ starts^T
        d_all = flat_product(ridges.apart(d_modes), transpose(chunk.coordinates)) + d_koopman @ starts
        d["coordinates"] = ridges.summed(flat_outer(found, ridges.apart(d_modes)))  # (b, h, o, d)
        # forward: found = fit(inner, gains, ridge, targets)
        d_found = chunk.visible(d_all)
        if not isinstance(options.fit, Limited):
            d_targets = fit(self.inner, gains, self.ridge, d_found)  # (b, h, i, l, o)
            d_inner = -ridges.summed(d_targets @ transpose(found))  # (b, h, i, l, l)
            left = self.targets if gains is None else self.inner @ found  # (b, h, i, l, o)
            d_gram = ridges.summed(flat_outer(left, d_targets))  # (b, h, o, o)
            of_ridge = -d_targets * (found if gains is None else found / gains)  # (b, h, i, l, o)
        else:
            fitted = options.fit.within_backward(self.inner, self.ridge, found, self.before, d_found)
            d_targets, d_inner, of_ridge = fitted[0], ridges.summed(fitted[1]), fitted[2]
            targets = self.targets + 0.0 * d_targets  # with the axis in front that ridges by coordinate have
            d_gram = 0.5 * ridges.summed(flat_outer(d_targets, targets) + flat_outer(found, d_found))
        # forward: inner = starts @ starts^T; kappa(x) = starts @ features(x), with a root that is given
        d_last = ridges.summed(d_targets)  # (b, h, i, l, o)
        d_starts = ridges.summed(transpose(d_koopman) @ found) - options.tau * d_last
        if self.kappa is None:
            d_dual = d_inner @ starts + d["at_root"][..., None] * chunk.features(root)[..., None, :]
            d_dual = d_dual + d["section"][..., None] * chunk.features(lift.attended)[..., None, :]
            d_starts = d_starts + transpose(d_inner) @ starts + d_dual
            d_gram = d_gram + flat_outer(starts, d_dual)
        d_ridge = xp.sum(of_ridge * self.factor, axis=(-5, -4, -3, -2, -1))
        return d | {"starts": d_starts, "targets": d_last, "inner": d_inner, "gram": d_gram, "ridge": d_ridge}


def combined(weights: Array, rows: Array) -> Array:
    """(b, h, i, l), (b, h, i, l, d) -> (b, h, i, d)."""
    return (weights[..., None, :] @ rows)[..., 0, :]


def flat_product(x: Array, y: Array) -> Array:
    """(..., b, h, i, l, o), (b, h, o, d) -> (..., b, h, i, l, d), as one matrix product a head."""
    xp = namespace(x)
    *front, queries, rows, columns = x.shape
    flat = xp.reshape(x, (*front, queries * rows, columns)) @ y
    return xp.reshape(flat, (*front, queries, rows, y.shape[-1]))


def flat_outer(x: Array, y: Array) -> Array:
    """(..., b, h, i, l, o), (..., b, h, i, l, p) -> (..., b, h, o, p), summed over queries and transitions."""
    xp = namespace(x)
    flat = [xp.reshape(z, (*z.shape[:-3], z.shape[-3] * z.shape[-2], z.shape[-1])) for z in (x, y)]
    return transpose(flat[0]) @ flat[1]


def add(total: dict[str, Array], parts: dict[str, Array]) -> None:
    """Add parts to a total that is the caller's own, name by name."""
    total.update({name: total.get(name, 0.0) + part for name, part in parts.items()})
