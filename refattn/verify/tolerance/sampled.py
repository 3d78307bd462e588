"""Calls whose scores the definition cannot hold all at once: the truth by tiles, the budget from samples.

Every element is compared with the truth in float64 that an implementation of linear memory gives. What may be off by
how much is known exactly where the definition is run on a part of the call: some queries with all keys, and some keys
with all queries (`refattn.mechanisms.softmax.testing.parts`), with disturbances as for any other case. These parts are
chosen at random, where all four statistics are judged, and once more where the errors are largest, in units of what the
sample is granted and relative to the truth, where elements and rows are. So an error anywhere is seen if it is among
the largest, or if it is everywhere; how closely the two truths agree is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import philox
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import stored
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.outcome import Floats, Result, Truth, Verdict
from refattn.verify.tolerance import quantised
from refattn.verify.tolerance.budget import NONE, Roundings, disturbances, evaluate, finite, granted, ratio, wide
from refattn.verify.tolerance.compare import compare, wrong_at_once

FULL = 1 << 20
"""Scores up to which the definition is run on the whole call."""

REPEATED = 1 << 24
"""Numbers of keys and values up to which the same: the definition has those of a group once for each query head."""

WHOLE_AT_MOST = 1 << 24
"""The same for a mechanism whose calls cannot be cut."""

PAIRS = 1 << 20
"""Scores of all parts that are chosen at random, queries and keys each."""

COMBINATIONS = 8
"""Key/value heads of sequences that parts are chosen from."""

CHOSEN = 8
"""Rows that are looked at for their errors, by each of two measures."""

Index = tuple[int, ...]


class TooLargeError(Exception):
    """A call is too large for what can judge it; the message says what would fit."""


@dataclass(frozen=True)
class _Piece:
    """A tensor of one part: where it stands, its truth, its variance, its bias, and the root mean square of that."""

    at: tuple[Any, ...]
    value: Floats
    variance: Floats
    bias: float


def is_long(mechanism: Mechanism, case: Case) -> bool:
    """Tell whether a case is judged by samples.

    Raises
    ------
    TooLargeError
        Where it would have to be, and the mechanism cannot be cut.
    """
    if "q" not in case.inputs or case.inputs["q"].axes:
        return False
    (b, h, queries, width), keys = case.inputs["q"].shape, case.inputs["k"].shape[2]
    pairs = b * h * queries * keys
    if mechanism.parts is not None:
        return pairs > FULL or b * h * keys * (width + case.inputs["v"].shape[3]) > REPEATED
    if pairs <= FULL:
        return False
    if pairs > WHOLE_AT_MOST:
        raise TooLargeError(
            f"{case.name}: got {pairs} scores, needs at most {WHOLE_AT_MOST}: the definition of {mechanism.name} holds "
            "all at once"
        )
    return False


def long_truth(
    mechanism: Mechanism, case: Case, dtype: str, *, grad: bool, seed: int = 0, further: Iterable[str] = ()
) -> Truth:
    """Return inputs and true results of a long case; their variance is not known yet."""
    inputs = make(mechanism.name, case, dtype, seed=seed)
    rows = case.inputs["q"].shape[:3]
    upstream = {}
    for name in ("out", *further) if grad else ():
        shape = (*rows, case.inputs["v"].shape[3]) if name == "out" else rows
        pull = make_upstream(mechanism.name, case, name, shape, dtype, seed=seed)
        upstream[f"d_{name}"] = stored(pull.astype(np.float64), dtype)
    d_out = upstream.pop("d_out", None)
    lean = replace(mechanism, outputs={n: id for n, id in mechanism.outputs.items() if n in mechanism.pulled})
    pulled = None if d_out is None else d_out.astype(np.float64)
    values = evaluate(lean, wide(inputs), case.options, pulled, mechanism.implementations[-1], wide(upstream))
    values = {name: x for name, x in values.items() if name in ("out", "d_q", "d_k", "d_v") or name in lean.outputs}
    types = {name: "float32" if name in lean.outputs and dtype != "float64" else dtype for name in values}
    return Truth(inputs, d_out, values, {}, {}, types, further=upstream)


def judge_long(
    mechanism: Mechanism,
    case: Case,
    dtype: str,
    known: Truth,
    result: Result,
    roundings: Roundings = NONE,
    seed: int = 0,
) -> tuple[tuple[Verdict, ...], str]:
    """Return the verdicts on a long case, and in words what they stand on."""
    found: dict[str, Verdict] = {}
    errors: dict[str, Floats] = {}
    targets: dict[str, Floats] = {}
    for name, x in result.tensors.items():
        if name in known.values:
            at_once = wrong_at_once(name, x, result.dtypes[name], known)
            if isinstance(at_once, Verdict):
                found[name] = at_once
            else:
                errors[name], targets[name] = finite(at_once[0]) - finite(at_once[1]), at_once[1]
    if not errors:
        return tuple(found.values()), "truth by tiles"
    cut = _Cut(mechanism, case, dtype, known, roundings, seed)
    pieces, told = _at_random(cut, case, seed, any(name in ("d_k", "d_v") for name in errors))
    sampled = {name: _verdict(name, pieces[name], result, known, False) for name in errors}
    extreme, largest = _at_worst(cut, pieces, errors, targets)
    for name in errors:
        verdicts = [sampled[name], *([_verdict(name, extreme[name], result, known, True)] if extreme[name] else [])]
        found[name] = max(verdicts, key=lambda verdict: verdict.share)
    apart = 0.0
    for name in errors:
        for piece in pieces[name]:
            distance = np.abs(finite(piece.value) - finite(known.values[name][piece.at]))
            apart = max(apart, float(np.max(ratio(distance, np.sqrt(piece.variance)), initial=0.0)))
    note = f"truth by tiles; budget from {told}, and {largest} with the largest errors"
    note += f"; there the truth by tiles is off the definition by {apart:.2g} of the noise that is granted"
    return tuple(found[name] for name in result.tensors if name in found), note


class _Cut:
    """The parts of one call, judged by the definition."""

    def __init__(self, mechanism: Mechanism, case: Case, dtype: str, known: Truth, roundings: Roundings, seed: int):
        self.mechanism, self.case, self.dtype, self.known = mechanism, case, dtype, known
        self.roundings, self.seed = roundings, seed
        self.upstream = wide({} if known.upstream is None else {"d_out": known.upstream, **known.further})
        self.of_int8 = quantised.factors_of_int8(known.inputs, roundings)
        self._known: dict[Any, dict[str, _Piece]] = {}

    @cached_property
    def inputs(self) -> dict[str, NDArray[Any]]:
        """All inputs in float64, which only the gradients of keys need at once."""
        return wide(self.known.inputs)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Sequences, key/value heads, and the query heads that share one."""
        b, h = self.known.inputs["q"].shape[:2]
        g = self.known.inputs["k"].shape[1]
        return b, g, h // g

    def piece(self, side: str, batch: int, group: int, at: NDArray[np.int64]) -> dict[str, _Piece]:
        """Return `queries` or `keys`, each part once: of few queries the largest errors are among those chosen."""
        key = side, batch, group, *at.tolist()
        if key not in self._known:
            self._known[key] = (self.queries if side == "queries" else self.keys)(batch, group, at)
        return self._known[key]

    def queries(self, batch: int, group: int, at: NDArray[np.int64]) -> dict[str, _Piece]:
        """Return `out`, `lse` and `d_q` of some queries."""
        assert self.mechanism.parts is not None
        part = self.mechanism.parts.of_queries(self.known.inputs, self.case.options, self.upstream, batch, group, at)
        part = replace(part, inputs=wide(part.inputs))
        shared = self.heads[2]
        heads = np.arange(group * shared, (group + 1) * shared)
        place = np.ix_(np.asarray([batch]), heads, at)
        return self._pieces(part, ("out", *self.mechanism.outputs, "d_q"), place, group)

    def keys(self, batch: int, group: int, at: NDArray[np.int64]) -> dict[str, _Piece]:
        """Return `d_k` and `d_v` of some keys."""
        assert self.mechanism.parts is not None
        given = self.inputs, self.case.options, self.upstream, self.known.values
        part = self.mechanism.parts.of_keys(*given, batch, group, at)
        return self._pieces(part, ("d_k", "d_v"), np.ix_(np.asarray([batch]), np.asarray([group]), at), group)

    def _pieces(self, part: Any, names: Iterable[str], at: tuple[Any, ...], group: int) -> dict[str, _Piece]:
        """Return results of a part, without the key and the column of the values that stand for all others."""
        case = replace(self.case, options=part.options)
        given = case, self.dtype, part.inputs, part.upstream, self.roundings, self.seed
        batch, shared = at[0].reshape(-1), self.heads[2]
        own = {"q": slice(group * shared, (group + 1) * shared)}
        of_int8 = {name: x[batch, own.get(name, slice(group, group + 1))] for name, x in self.of_int8.items()}
        values, errors = disturbances(self.mechanism, *given, grown=part.grown, of_int8=of_int8)
        types = {name: self.known.stored.get(name, self.dtype) for name in values}
        variance, bias = granted(values, errors, types, self.dtype)
        found = {}
        for name in names:
            if name in values and name in self.known.values:
                shape = (*np.broadcast_shapes(*(x.shape for x in at)), *self.known.values[name].shape[3:])
                rows = tuple(map(slice, shape))
                found[name] = _Piece(at, values[name][rows], variance[name][rows], bias[name])
        return found


def _at_random(cut: _Cut, case: Case, seed: int, keys: bool) -> tuple[dict[str, list[_Piece]], str]:
    """Return pieces of random parts by tensor, and how many rows they have, in words."""
    (b, g, shared), n_q, n_k = cut.heads, cut.known.inputs["q"].shape[2], cut.known.inputs["k"].shape[2]
    purpose = f"sampled.{case.name}"
    order = np.argsort(philox.uniform((b * g,), seed=seed, purpose=purpose))[:COMBINATIONS]
    pieces: dict[str, list[_Piece]] = {}
    counts = []
    for side, rows, others in (("queries", n_q, n_k), ("keys", n_k, n_q)):
        if side == "keys" and not keys:
            continue
        size = int(min(rows, max(4, PAIRS // (len(order) * shared * others))))
        for number in order:
            chance = philox.uniform((rows,), seed=seed, purpose=f"{purpose}.{side}.{number}")
            at = np.sort(np.argsort(chance)[:size]).astype(np.int64)
            for name, piece in cut.piece(side, *divmod(int(number), g), at).items():
                pieces.setdefault(name, []).append(piece)
        heads = shared if side == "queries" else 1
        counts.append(f"{size * len(order) * heads} of {b * g * heads * rows} {side}")
    return pieces, " and ".join(counts)


def _at_worst(
    cut: _Cut, pieces: Mapping[str, list[_Piece]], errors: Mapping[str, Floats], targets: Mapping[str, Floats]
) -> tuple[dict[str, list[_Piece]], str]:
    """Return pieces of the parts with the largest errors by tensor, and how many rows they have, in words."""
    shared = cut.heads[2]
    chosen: dict[str, dict[tuple[int, int], set[int]]] = {"queries": {}, "keys": {}}
    for name, error in errors.items():
        side = "keys" if name in ("d_k", "d_v") else "queries"
        size = _row_sizes(error)
        noise = math.sqrt(max(float(np.mean([np.mean(p.variance) for p in pieces[name]])), 1e-300))
        for measure in (size / noise, ratio(size, _row_sizes(finite(targets[name])))):
            largest = np.argsort(measure, axis=None)[::-1][:CHOSEN]
            for flat in largest[measure.reshape(-1)[largest] > 0.0]:
                batch, head, row = (int(n) for n in np.unravel_index(int(flat), measure.shape))
                group = head if side == "keys" else head // shared
                chosen[side].setdefault((batch, group), set()).add(row)
    found: dict[str, list[_Piece]] = {name: [] for name in errors}
    for side, of_heads in chosen.items():
        for place, rows in of_heads.items():
            for name, piece in cut.piece(side, *place, np.asarray(sorted(rows), dtype=np.int64)).items():
                if name in found:
                    found[name].append(piece)
    counts = {side: sum(map(len, of_heads.values())) for side, of_heads in chosen.items()}
    return found, " and ".join(f"{count} {side}" for side, count in counts.items() if count) or "none"


def _row_sizes(x: Floats) -> Floats:
    """Return the root mean square of each row; a tensor (b, h, i) has rows of one number."""
    return np.abs(x) if x.ndim == 3 else np.sqrt(np.mean(x * x, axis=-1))


def _verdict(name: str, pieces: list[_Piece], result: Result, known: Truth, extremes: bool) -> Verdict:
    """Judge a tensor on some of its parts, as one tensor of rows; the index is that in the whole tensor."""

    def joined(parts: Iterable[NDArray[Any]]) -> NDArray[Any]:
        flat = [x.reshape(-1) if known.values[name].ndim == 3 else x.reshape(-1, x.shape[-1]) for x in parts]
        return np.concatenate(flat)

    values = joined(piece.value for piece in pieces)
    bias = math.sqrt(float(np.mean([piece.bias**2 for piece in pieces])))
    part = replace(
        known,
        values={name: values},
        variance={name: joined(piece.variance for piece in pieces)},
        bias={name: bias},
    )
    got = joined(result.tensors[name][piece.at] for piece in pieces)
    verdict = compare(name, got, result.dtypes[name], part, extremes=extremes)
    places = np.concatenate([_places(piece, known.values[name].shape[:3]) for piece in pieces])
    row = np.unravel_index(int(places[verdict.index[0]]), known.values[name].shape[:3]) if verdict.index else ()
    return replace(verdict, index=(*(int(n) for n in row), *verdict.index[1:]))


def _places(piece: _Piece, shape: Index) -> NDArray[np.int64]:
    """Return where the rows of a piece stand in the whole tensor, counted through."""
    b, h, i = piece.at
    return np.broadcast_to((b * shape[1] + h) * shape[2] + i, (b.size, h.size, i.size)).reshape(-1)
