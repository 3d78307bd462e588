"""All queries by one factorisation of the Gram matrix of the keys, in chunks of queries.

The dense form solves a system for every query. Here the Gram matrix of a head is factored once (see `whitening`), and
an update of a query solves systems of as many unknowns as it has transitions (see `snapshots`). A chunk of queries goes
through all updates before the next one starts; the backward goes through them once more, from the trajectory alone. So
memory is that of the keys' Gram matrix, of one chunk, and of the trajectories.

Queries may see different keys where the future is hidden and the fit is "separable"; otherwise all see the same.

Letters: b batch, h head, i query, c query of a chunk, j key, d width, o observable: the coordinates if augmented, then
the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman import dense
from refattn.mechanisms.koopman.observables import Observables
from refattn.mechanisms.koopman.one_step import add, full_backward
from refattn.mechanisms.koopman.options import Numbers, Options
from refattn.mechanisms.koopman.perturbation import KoopmanInverseError, coefficients_of, invert
from refattn.mechanisms.koopman.snapshots import Fitted, Space
from refattn.mechanisms.koopman.trajectory import count, first_points, jitter_unit, pick
from refattn.mechanisms.koopman.whitening import Whitening, whiten
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_pairs
from refattn.ops.solve import identity
from refattn.xp import Array, arange, namespace, zeros

CHUNK = 2**18
"""Elements (queries times observables, of all batches and heads) of a chunk; some tens of such arrays exist at once."""


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    options: Options
    numbers: Numbers
    offset: int | None
    groups: int
    mask: Array | None
    k: Array  # (b, h, j, d)
    v: Array  # (b, h, j, d)
    whitening: Whitening | None
    trajectory: tuple[Array, ...]  # q^0, q^1, ..., (b, h, i, d) each
    chosen: tuple[int, ...]  # the candidate of each update after the first

    @property
    def causal(self) -> bool:
        """Whether the future is hidden."""
        return self.offset is not None


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, options: Options, numbers: Numbers
) -> tuple[Array, Saved]:
    """Return the last query (b, h, i, d) and what `backward` reads; `offset` is that of `causal_offset`."""
    xp = namespace(q)
    k_heads, v_heads = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    whitening = None
    if options.updates > 1:
        observables, gram = _gram(k_heads, mask, offset is not None, options, numbers)
        whitening = whiten(gram, options.fit == "stein")
    rows = max(table.shape[0] for table in (numbers.ridge, numbers.epsilon))
    chosen = [0] * (options.updates - 1)
    while True:
        saved = Saved(options, numbers, offset, k.shape[1], mask, k_heads, v_heads, whitening, (q,), tuple(chosen))
        try:
            chunks = [_advance(saved, q, start, stop) for start, stop in _chunks(saved, q.shape[2])]
        except KoopmanInverseError as error:
            # A candidate is one for all queries: those after it are tried again with the next.
            at = error.update - 2
            if chosen[at] == rows - 1:
                raise
            chosen[at:] = [chosen[at] + 1, *[0] * (len(chosen) - at - 1)]
            continue
        trajectory = tuple(xp.concat(parts, axis=2) for parts in zip(*chunks, strict=True))
        parts = (options, numbers, offset, k.shape[1], mask, k_heads, v_heads, whitening, trajectory, tuple(chosen))
        return trajectory[-1], Saved(*parts)


def _chunks(saved: Saved, queries: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last-plus-one query of every chunk."""
    b, h, keys, width = saved.k.shape
    observables = keys + (width if saved.options.augment else 0)
    size = max(8, CHUNK // max(b * h * observables, 1))
    for start in range(0, queries, size):
        yield start, min(start + size, queries)


def _gram(k: Array, mask: Array | None, causal: bool, options: Options, numbers: Numbers) -> tuple[Observables, Array]:
    """Return the observables of all queries together, and their Gram matrix (b, h, o, o), coordinates first."""
    xp = namespace(k)
    seen = zeros((*k.shape[:2], 1, k.shape[2]), k) == 0.0
    seen = seen if mask is None else xp.logical_and(seen, mask)
    observables = Observables(numbers.kernel(options), k[:, :, None, :, :], seen, options.augment)
    between = observables.kernel.values(k, k)
    delta = options.jitter_of(between) * jitter_unit(observables, between, causal)
    gram = observables.gram(between, delta)[:, :, 0, :, :]
    return observables, _turned(_turned(gram, k.shape[2], -1), k.shape[2], -2) if options.augment else gram


def _turned(x: Array, first: int, axis: int) -> Array:
    """Return x with the first entries of an axis behind the others."""
    if axis == -2:
        return namespace(x).concat([x[..., first:, :], x[..., :first, :]], axis=-2)
    return namespace(x).concat([x[..., first:], x[..., :first]], axis=-1)


def _space(saved: Saved, start: int, stop: int) -> tuple[Space, Array]:
    """Return the space of a chunk, and how much a mean multiplies its ridges by for each transition (b, h, c, 1, 1)."""
    k, options, whitening = saved.k, saved.options, saved.whitening
    xp, width = namespace(k), k.shape[3] if options.augment else 0
    rows = (start, stop)
    seen = zeros((*k.shape[:2], stop - start, k.shape[2]), k) == 0.0
    allowed = allowed_pairs(saved.mask, saved.offset, rows, (0, k.shape[2]), k)
    seen = seen if allowed is None else xp.logical_and(seen, allowed)
    past = None
    if saved.offset is not None:
        i, o = arange(start, stop, k)[:, None], arange(0, width + k.shape[2], k)[None, :]
        past = o <= i + (saved.offset + width)
        past = past | (o < width)
    coordinates = k if saved.mask is None else xp.where(xp.matrix_transpose(saved.mask), k, 0.0)
    kernel = saved.numbers.kernel(options)
    if options.augment:
        own = identity(width, k) / kernel.linear_part() + zeros((*k.shape[:2], 1, 1), k)
        coordinates = xp.concat([own, coordinates], axis=-2)
    if whitening is None:
        whitening, projected = Whitening(k, None), k  # of one update, which has no operator
    else:
        projected = whitening.factor @ coordinates
    return Space(kernel, k, seen, options.augment, whitening, past, projected), count(seen, k)[..., None]


class _Way:
    """A chunk of queries on its way: points, what they attend, features and duals."""

    def __init__(self, saved: Saved, q: Array, start: int, stop: int) -> None:
        self.saved = saved
        self.space, self.seen_keys = _space(saved, start, stop)
        self.v, self.options = saved.v, saved.options
        self.alive = namespace(q).any(self.space.seen, axis=-1)
        self.points = [q[:, :, start:stop, :]]
        self.features: list[Array] = []
        self.duals: list[Array] = []

    def attend(self, x: Array) -> tuple[Array, Array]:
        """Return the weights and what the queries x attend."""
        return dense.attend(x, self.space.keys, self.v, self.space.seen, self.space.kernel, self.options)

    def fitted(self, number: int, attended: Array) -> Fitted:
        """Return the operator of an update from 2 on, once there are `number` points."""
        saved, options = self.saved, self.options
        while len(self.features) < number:
            self.features.append(self.space.features(self.points[len(self.features)]))
        while len(self.duals) < number - 1 and options.space != "full":
            self.duals.append(self.space.whitening.back(self.features[len(self.duals)]))
        start = first_points(number, options.window)
        candidate = saved.chosen[number - 2]
        ridge, epsilon = (pick(table, candidate, number - 2) for table in (saved.numbers.ridge, saved.numbers.epsilon))
        return Fitted(
            self.space,
            self.points[start:number],
            self.features[start:number],
            self.duals[start : number - 1],
            attended,
            ridge * self.factor(number),
            coefficients_of(options.perturbation, epsilon, saved.numbers.mix),
            options,
        )

    def factor(self, number: int) -> Any:
        """Return what multiplies the ridge of an update."""
        if self.options.ridge_scale == "sum":
            return 1.0
        return float(number - 1 - first_points(number, self.options.window)) * self.seen_keys


def _advance(saved: Saved, q: Array, start: int, stop: int) -> list[Array]:
    """Return the trajectory of a chunk of queries."""
    way, xp = _Way(saved, q, start, stop), namespace(q)
    way.points.append(way.attend(way.points[0])[1])
    for number in range(2, saved.options.updates + 1):
        _, attended = way.attend(way.points[-1])
        fitted = way.fitted(number, attended)
        starts = (fitted.expected, attended, way.points[-1])
        try:
            root = invert(fitted.evaluate, starts, way.alive, number, fitted)
        except KoopmanInverseError as error:
            places = [(b, h, i + start) for b, h, i in error.positions]
            raise KoopmanInverseError(places, error.count, error.residual, number) from None
        way.points.append(xp.where(way.alive[..., None], root, 0.0))
    return way.points


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v and of every number, the tables ridge and epsilon among them."""
    xp, options = namespace(d_out), saved.options
    total: dict[str, Array] = {"k": xp.zeros_like(saved.k), "v": xp.zeros_like(saved.v)}
    d_q: list[Array] = []
    d_ab: list[dict[str, Array]] = [{} for _ in saved.chosen]
    for start, stop in _chunks(saved, d_out.shape[2]):
        d_q.append(_chunk_backward(saved, d_out[:, :, start:stop, :], start, stop, total, d_ab))
    numbers = {}
    if options.updates > 1:
        assert saved.whitening is not None
        observables, _ = _gram(saved.k, saved.mask, saved.causal, options, saved.numbers)
        # forward: F^T F = G^-1, of a gram with the coordinates first; projected = F @ coordinates
        d_gram = -saved.whitening.back(xp.matrix_transpose(saved.whitening.back(xp.matrix_transpose(total["gram"]))))
        d_coordinates = xp.matrix_transpose(saved.whitening.factor) @ total["coordinates"]
        width = saved.k.shape[3] if options.augment else 0
        if options.augment:
            d_gram = _turned(_turned(d_gram, width, -1), width, -2)
        d_keys = d_coordinates[..., width:, :]
        seen = xp.matrix_transpose(observables.seen[:, :, :, :])
        add(total, {"k": xp.where(seen, d_keys, 0.0)})
        d_norm = xp.sum(d_coordinates[..., :width, :] * identity(width, d_out)) if width else xp.sum(d_keys) * 0.0
        add(total, dense.gram_backward(saved, observables, d_gram[:, :, None, :, :], d_norm))
        numbers = dense.numbers_gradients(saved, d_ab)
    nothing = xp.sum(d_out) * 0.0
    return {
        **numbers,
        "q": xp.concat(d_q, axis=2),
        "k": sum_heads(total["k"], saved.groups),
        "v": sum_heads(total["v"], saved.groups),
        "bandwidth": total.get("bandwidth", nothing),
        "weight": total.get("weight", nothing),
    }


def _chunk_backward(
    saved: Saved, d_out: Array, start: int, stop: int, total: dict[str, Array], d_ab: list[dict[str, Array]]
) -> Array:
    """Return the gradient of the queries of a chunk, and add the others to `total` and `d_ab`."""
    xp, transpose, options = namespace(d_out), namespace(d_out).matrix_transpose, saved.options
    way = _Way(saved, saved.trajectory[0], start, stop)
    way.points = [x[:, :, start:stop, :] for x in saved.trajectory]
    space = way.space
    d_points: list[Any] = [xp.zeros_like(d_out) for _ in saved.trajectory]
    d_points[-1] = d_out
    d_features: list[Any] = [None] * len(saved.trajectory)

    def sections_backward(x: Array, d_sections: Array) -> Array:
        d_x, d_keys, d_bandwidth, d_weight = space.sections_backward(x, d_sections)
        add(total, {"k": d_keys, "bandwidth": d_bandwidth, "weight": d_weight})
        return d_x

    for number in range(options.updates, 0, -1):
        if d_features[number] is not None:
            # forward: features = F @ sections
            d_points[number] = d_points[number] + sections_backward(
                way.points[number], space.whitening.back(d_features[number])
            )
        x, d_attended = way.points[number - 1], d_points[number]
        weights, attended = way.attend(x)
        if number > 1:
            # forward: root = the root of psi(x) = z
            fitted, root, at = way.fitted(number, attended), way.points[number], first_points(number, options.window)
            features = (None, None) if fitted.full else (space.features(root), space.features(attended))
            step = fitted.backward(root, way.alive, d_points[number], *features)
            for n in range(fitted.starts.shape[-2]):
                for name, place in (("starts", at + n), ("targets", at + n + 1)):
                    part, known = step[name][:, :, :, n, :], d_features[place]
                    d_features[place] = part if known is None else known + part
            d_attended = step["attended"]
            if fitted.dual is None:
                kernel_space = Observables(space.kernel, space.keys[:, :, None, :, :], space.seen, False)
                full = full_backward(
                    kernel_space,
                    (fitted.first, attended, root),
                    (step["inner"], step["section"], step["at_root"]),
                )
                add(total, {"bandwidth": full["bandwidth"], "weight": full["weight"]})
                d_attended = d_attended + full["attended"][..., 0, :]
                for n in range(fitted.starts.shape[-2]):
                    d_points[at + n] = d_points[at + n] + full["first"][:, :, :, n, :]
            else:
                # forward: section = dual @ sections(attended); with a given root its sections move with the keys
                d_attended = d_attended + sections_backward(
                    attended, (step["section"][..., None, :] @ fitted.dual)[..., 0, :]
                )
                sections_backward(root, (step["at_root"][..., None, :] @ fitted.dual)[..., 0, :])
            add(total, {"gram": step["gram"], "coordinates": step["coordinates"]})
            add(d_ab[number - 2], {"a": step["a"], "b": step["b"], "ridge": xp.sum(step["ridge"] * way.factor(number))})
        # forward: attended = weights @ v; weights = softmax(scores)
        add(total, {"v": transpose(weights) @ d_attended})
        d_weights = d_attended @ transpose(saved.v)
        d_scores = weights * (d_weights - xp.sum(weights * d_weights, axis=-1, keepdims=True))
        if options.similarity == "dot":
            part = d_scores / math.sqrt(x.shape[-1])
            d_x, d_k = part @ saved.k, transpose(part) @ x
            add(total, {"k": d_k})
        else:
            d_x, d_k, d_bandwidth, d_weight = space.kernel.all_backward(x, saved.k, d_scores)
            add(total, {"k": d_k, "bandwidth": d_bandwidth, "weight": d_weight})
        d_points[number - 1] = d_points[number - 1] + d_x
    if d_features[0] is None:
        return d_points[0]
    return d_points[0] + sections_backward(way.points[0], space.whitening.back(d_features[0]))
