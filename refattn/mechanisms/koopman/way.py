"""A chunk of queries on its way through all updates: what the shared form keeps, and what it makes of it.

Letters: b batch, h head, i query, c query of a chunk, j key, d width, o observable: the coordinates if augmented, then
the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.koopman import dense
from refattn.mechanisms.koopman.observables import Observables
from refattn.mechanisms.koopman.options import Numbers, Options
from refattn.mechanisms.koopman.perturbation import coefficients_of
from refattn.mechanisms.koopman.snapshots import Fitted
from refattn.mechanisms.koopman.space import Space
from refattn.mechanisms.koopman.trajectory import count, first_points, jitter_unit, pick
from refattn.mechanisms.koopman.whitening import Whitening
from refattn.ops.masks import allowed_pairs
from refattn.ops.solve import identity
from refattn.xp import Array, arange, namespace, zeros


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


def gram_of(
    k: Array, mask: Array | None, causal: bool, options: Options, numbers: Numbers
) -> tuple[Observables, Array]:
    """Return the observables of all queries together, and their Gram matrix (b, h, o, o), coordinates first."""
    xp = namespace(k)
    seen = zeros((*k.shape[:2], 1, k.shape[2]), k) == 0.0
    seen = seen if mask is None else xp.logical_and(seen, mask)
    observables = Observables(numbers.kernel(options), k[:, :, None, :, :], seen, options.augment)
    between = observables.kernel.values(k, k)
    delta = options.jitter_of(between) * jitter_unit(observables, between, causal)
    gram = observables.gram(between, delta)[:, :, 0, :, :]
    return observables, turned(turned(gram, k.shape[2], -1), k.shape[2], -2) if options.augment else gram


def turned(x: Array, first: int, axis: int) -> Array:
    """Return x with the first entries of an axis behind the others."""
    if axis == -2:
        return namespace(x).concat([x[..., first:, :], x[..., :first, :]], axis=-2)
    return namespace(x).concat([x[..., first:], x[..., :first]], axis=-1)


def space_of(saved: Saved, start: int, stop: int) -> tuple[Space, Array]:
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
    kernel = saved.numbers.kernel(options)
    if whitening is None:
        whitening, projected = Whitening(k, None), k  # of one update, which has no operator, and takes any mask
    else:
        coordinates = k if saved.mask is None else xp.where(xp.matrix_transpose(saved.mask), k, 0.0)
        if options.augment:
            own = identity(width, k) / kernel.linear_part() + zeros((*k.shape[:2], 1, 1), k)
            coordinates = xp.concat([own, coordinates], axis=-2)
        projected = whitening.factor @ coordinates
    return Space(kernel, k, seen, options.augment, whitening, past, projected), count(seen, k)[..., None]


class Way:
    """A chunk of queries on its way: points, what they attend, features and duals."""

    def __init__(self, saved: Saved, q: Array, start: int, stop: int) -> None:
        self.saved = saved
        self.space, self.seen_keys = space_of(saved, start, stop)
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
            ridge,
            self.factor(number),
            coefficients_of(options.perturbation, epsilon, saved.numbers.mix),
            options,
        )

    def factor(self, number: int) -> Any:
        """Return what multiplies the ridge of an update."""
        if self.options.ridge_scale == "sum":
            return 1.0
        return float(number - 1 - first_points(number, self.options.window)) * self.seen_keys
