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
from typing import Any

from refattn.mechanisms.koopman import dense
from refattn.mechanisms.koopman.observables import Observables
from refattn.mechanisms.koopman.one_step import add, certify, full_backward
from refattn.mechanisms.koopman.options import Numbers, Options
from refattn.mechanisms.koopman.perturbation import KoopmanInverseError, invert, not_finite
from refattn.mechanisms.koopman.trajectory import first_points
from refattn.mechanisms.koopman.way import Saved, Way, gram_of, turned
from refattn.mechanisms.koopman.whitening import whiten
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.solve import identity
from refattn.xp import Array, namespace

CHUNK = 2**18
"""Elements (queries times observables, of all batches and heads) of a chunk; some tens of such arrays exist at once."""


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, options: Options, numbers: Numbers
) -> tuple[Array, Saved]:
    """Return the last query (b, h, i, d) and what `backward` reads; `offset` is that of `causal_offset`."""
    xp = namespace(q)
    k_heads, v_heads = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    whitening = None
    if options.updates > 1:
        observables, gram = gram_of(k_heads, mask, offset is not None, options, numbers)
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


def _advance(saved: Saved, q: Array, start: int, stop: int) -> list[Array]:
    """Return the trajectory of a chunk of queries."""
    way, xp = Way(saved, q, start, stop), namespace(q)
    way.points.append(way.attend(way.points[0])[1])
    for number in range(2, saved.options.updates + 1):
        _, attended = way.attend(way.points[-1])
        fitted = way.fitted(number, attended)
        if saved.options.certify:
            certify(fitted.steepness(), fitted.own, fitted.b, way.alive)
        starts = (fitted.expected, attended, way.points[-1])
        try:
            lost = not_finite(saved.k, attended, way.points[-1])
            root = invert(fitted.evaluate, starts, way.alive, lost, number, fitted)
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
        observables, _ = gram_of(saved.k, saved.mask, saved.causal, options, saved.numbers)
        # forward: F^T F = G^-1, of a gram with the coordinates first; projected = F @ coordinates
        d_gram = -saved.whitening.back(xp.matrix_transpose(saved.whitening.back(xp.matrix_transpose(total["gram"]))))
        d_coordinates = xp.matrix_transpose(saved.whitening.factor) @ total["coordinates"]
        width = saved.k.shape[3] if options.augment else 0
        if options.augment:
            d_gram = turned(turned(d_gram, width, -1), width, -2)
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
    way = Way(saved, saved.trajectory[0], start, stop)
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
            add(d_ab[number - 2], {"a": step["a"], "b": step["b"], "ridge": step["ridge"]})
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
