"""Where results are wrong, in words: batches, heads, rows and columns, and what the cases that fail have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from refattn.mechanisms.case_features import features
from refattn.mechanisms.record import Case
from refattn.verify.diagnose.residuals import Residuals
from refattn.verify.outcome import Place
from refattn.verify.tolerance.budget import rounded
from refattn.verify.tolerance.compare import ELEMENT

TILES = (16, 32, 64, 128)
"""Tile sizes that are looked for."""


def places_of(failing: Sequence[Residuals]) -> tuple[Place, ...]:
    """Return where each result that disagrees in some case is wrong."""
    names = dict.fromkeys(name for one in failing for name in one.wrong)
    return tuple(place for name in names if (place := _place(name, failing)))


def _place(name: str, failing: Sequence[Residuals]) -> Place | None:
    marks = [(one, _marked(name, one)) for one in failing if name in one.wrong]
    marks = [(one, mark) for one, mark in marks if mark.any() and mark.ndim > 2]
    if not marks:
        return None
    said = [words(mark, "keys" if name in ("d_k", "d_v") else "rows") for _, mark in marks]
    some = [one for one in said if one]  # where all is wrong, one tile may be all that there is
    few = 2 * len(some) < len(said)
    common = () if few else tuple(word for word in some[0] if all(word in other for other in some))
    one, mark = max(marks, key=lambda pair: int(pair[1].sum()))

    def at(axis: int) -> tuple[int, ...]:
        return tuple(int(n) for n in np.flatnonzero(_along(mark, axis))) if axis < mark.ndim else ()

    return Place(name, common, one.case.name, at(0), at(1), at(2), at(3), float(np.mean(mark)))


def _marked(name: str, one: Residuals) -> NDArray[np.bool_]:
    """Return which elements of a result are wrong, by what judged it: bits where it has to be exact."""
    if name in one.truth.exact:
        got = one.result.tensors[name]
        return np.asarray(got != rounded(one.truth, name).astype(got.dtype))
    error = np.abs(one.errors[name]).reshape(one.templates.targets[name].shape)
    return np.asarray(error > min(ELEMENT, float(np.max(error)) / 2.0))


def _along(mark: NDArray[np.bool_], axis: int) -> NDArray[np.bool_]:
    return np.any(mark, axis=tuple(n for n in range(mark.ndim) if n != axis))


def words(mark: NDArray[np.bool_], rows: str = "rows") -> list[str]:
    """Return what can be said of where a result is wrong: (batch, heads, rows) or (batch, heads, rows, columns)."""
    names = (("batch", "batches"), ("head", "heads"), (rows.removesuffix("s"), rows), ("column", "columns"))
    return [word for axis, name in enumerate(names[: mark.ndim]) for word in _of(_along(mark, axis), *name)]


def _of(wrong: NDArray[np.bool_], singular: str, plural: str) -> Iterable[str]:
    """Yield what can be said of the indices that are wrong, the most special first; nothing where all are."""
    at, count = np.flatnonzero(wrong), len(wrong)
    if len(at) == count or not len(at):
        return
    first, last = int(at[0]), int(at[-1])
    if len(at) == 1:
        yield f"only {singular} {first}"
        if last == count - 1 > 1:
            yield f"only the last {singular}"
        if count == 2 and plural in ("rows", "keys"):  # what a larger case says of its other rows
            yield f"all {plural} but the {'first' if first else 'last'}"
    elif last == count - 1 and len(at) == last - first + 1:
        for tile in TILES if plural in ("rows", "keys") else ():
            if first % tile == 0 and count - first < tile:
                yield f"only the {plural} of the last tile of {tile}, which is not full"
        if first == (count + 1) // 2 or first == count // 2:
            yield f"only the second half of the {plural}"
        yield f"only {plural} from {first} on" if first > 1 else f"all {plural} but the first"
    elif first == 0 and len(at) == last + 1:
        yield f"only {plural} before {last + 1}" if last + 1 < count - 1 else f"all {plural} but the last"
    elif len(at) > 2 and len({*np.diff(at).tolist()}) == 1:
        step = int(at[1] - at[0])
        yield f"every {({2: 'second', 3: 'third'}).get(step, f'{step}th')} of the {plural}, from {first} on"
    elif 1 < len(at) <= 4:
        yield f"only {plural} {', '.join(map(str, at))}"


ENOUGH = 3
"""Cases of which something general is said; of two it would be a guess."""

SAME = 3
"""Descriptions of the cases that fail that are told, if several are true."""

FINER = (16, 32)
"""Numbers of queries and keys beside those that cases are designed by."""


def _told(case: Case) -> frozenset[str]:
    """Return what may be told of a case: its features, and finer ones of its sizes and its mask."""
    (_, h, n_q, d), n_k = case.inputs["q"].shape, case.inputs["k"].shape[2]
    mask = case.inputs["mask"].shape if "mask" in case.inputs else ()
    finer = {
        "a mask that differs between batches": len(mask) > 3 and mask[-4] > 1,
        "a mask that differs between heads": len(mask) > 2 and mask[-3] > 1,
        "more than one head": h > 1,
        "a width that is no power of two": bool(d & (d - 1)),
        **{f"more than {size} keys": n_k > size for size in FINER},
        **{f"more than {size} queries": n_q > size for size in (*FINER, 128)},
        "a number of keys that is no multiple of 16": n_k % 16 != 0,
        "a number of queries that is no multiple of 16": n_q % 16 != 0,
    }
    return features(case) | {name for name, has in finer.items() if has}


def which_cases(failing: Sequence[Case], agreeing: Sequence[Case], suspected: str = "") -> str:
    """Return what the cases that fail have in common, and those that agree have not, in words; "" where nothing.

    That is one feature, or two that meet. If several say the same of the cases that ran, three of them are told, first
    those that are in the words of what is suspected.
    """
    every = (*failing, *agreeing)
    if not failing or not agreeing or len(every) < ENOUGH or any({*"qkv"} - {*case.inputs} for case in every):
        return ""
    seen = [_told(case) for case in agreeing]
    of_cases = [features(case) for case in (*failing, *agreeing)]
    options = {name for case in (*failing, *agreeing) for name in (*case.options, *case.inputs)}
    designed = frozenset().union(*of_cases)
    common = sorted(frozenset.intersection(*map(_told, failing)), key=lambda name: (name not in options, name))

    def left(*names: str) -> int:
        return sum({*names} <= one for one in seen)

    def rank(names: tuple[str, ...]) -> tuple[int, int, bool, int]:
        """Fewest others first, then what cases are designed by, what is suspected, an option alone or beside a size."""
        finer, given = sum(name not in designed for name in names), sum(name in options for name in names)
        return left(*names), finer, not {*names} & {*suspected.split()}, abs(given - 1)

    best: list[tuple[str, ...]] = sorted(((name,) for name in common), key=rank)
    if not best:
        return ""
    if others := left(*best[0]):  # there are many pairs: one is told if it is far better than a feature alone
        pairs: list[tuple[str, ...]] = sorted(combinations(common, 2), key=rank)
        best = pairs if pairs and 2 * left(*pairs[0]) < others else best
    others = left(*best[0])
    said = [" and ".join(names) for names in best if rank(names)[:2] == rank(best[0])[:2]]
    if others == 0:
        more = f" and {len(said) - SAME} more" if len(said) > SAME else ""
        also = f" (also: {'; '.join(said[1:SAME])}{more})" if len(said) > 1 else ""
        return f"the cases that fail are those with {said[0]}{also}"
    return f"only cases with {said[0]} fail, not all of them" if others < len(agreeing) / 2 else ""


def place_in_words(place: Place) -> str:
    """Return a place in words."""
    everywhere = (
        "everywhere" if place.part > 0.9 else f"in {100.0 * place.part:.0f} % of its elements (case {place.case})"
    )
    return f"{place.tensor}: {', '.join(place.words) or everywhere}"


def in_words(places: Iterable[Place]) -> str:
    """Return the places in a line, results with the same words together."""
    found: dict[str, list[str]] = {}
    for place in places:
        name, _, words = place_in_words(place).partition(": ")
        found.setdefault(words, []).append(name)
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in found.items())
