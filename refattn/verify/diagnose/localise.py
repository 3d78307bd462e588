"""Where results are wrong, in words: batches, heads, rows and columns, and what the cases that fail have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from refattn.mechanisms.record import Case
from refattn.verify.diagnose.residuals import Residuals
from refattn.verify.outcome import Place
from refattn.verify.tolerance.compare import ELEMENT

TILES = (16, 32, 64, 128)
"""Tile sizes that are looked for."""


def places_of(failing: Sequence[Residuals]) -> tuple[Place, ...]:
    """Return where each result that disagrees in some case is wrong."""
    names = dict.fromkeys(name for one in failing for name in one.wrong)
    return tuple(place for name in names if (place := _place(name, failing)))


def _place(name: str, failing: Sequence[Residuals]) -> Place | None:
    found = [
        (one, np.abs(one.errors[name]).reshape(one.templates.targets[name].shape))
        for one in failing
        if name in one.wrong
    ]
    marks = [(one, error > min(ELEMENT, float(np.max(error)) / 2.0)) for one, error in found]
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
        yield f"every {int(at[1] - at[0])}th of the {plural}, from {first} on".replace("every 2th", "every second")
    elif 1 < len(at) <= 4:
        yield f"only {plural} {', '.join(map(str, at))}"


Feature = Callable[[Case], bool]


def _sizes(case: Case) -> tuple[int, ...]:
    (b, h, n_q, d), (_, g, n_k, _), e = case.inputs["q"].shape, case.inputs["k"].shape, case.inputs["v"].shape[3]
    return b, h, g, n_q, n_k, d, e


def _size(test: Callable[..., bool]) -> Feature:
    return lambda case: test(*_sizes(case))


FEATURES: dict[str, Feature] = {
    "a mask": lambda case: "mask" in case.inputs,
    "a mask and causal": lambda case: "mask" in case.inputs and case.options.get("causal", False) is not False,
    "a mask that differs between batches": lambda case: "mask" in case.inputs and _leading(case, 4) > 1,
    "a mask that differs between heads": lambda case: "mask" in case.inputs and _leading(case, 3) > 1,
    "causal": lambda case: case.options.get("causal", False) is not False,
    "causal with other lengths of queries and keys": lambda case: (
        case.options.get("causal", False) is not False and _sizes(case)[3] != _sizes(case)[4]
    ),
    "a soft-cap": lambda case: "softcap" in case.options,
    "a soft-cap and a mask": lambda case: "softcap" in case.options and "mask" in case.inputs,
    "a given scale": lambda case: "scale" in case.options,
    "grouped heads": _size(lambda b, h, g, *_: g < h),
    "more than one batch": _size(lambda b, *_: b > 1),
    "more than one head": _size(lambda b, h, *_: h > 1),
    "other lengths of queries and keys": _size(lambda b, h, g, n_q, n_k, *_: n_q != n_k),
    "values of another width": _size(lambda b, h, g, n_q, n_k, d, e: d != e),
    "a width that is no power of two": _size(lambda b, h, g, n_q, n_k, d, e: bool(d & (d - 1))),
    "one query": _size(lambda b, h, g, n_q, *_: n_q == 1),
    **{f"more than {size} keys": _size(lambda b, h, g, n_q, n_k, d, e, size=size: n_k > size) for size in TILES},
    **{f"more than {size} queries": _size(lambda b, h, g, n_q, n_k, d, e, size=size: n_q > size) for size in TILES},
    "a number of keys that is no multiple of 16": _size(lambda b, h, g, n_q, n_k, d, e: n_k % 16 != 0),
    "a number of queries that is no multiple of 16": _size(lambda b, h, g, n_q, n_k, d, e: n_q % 16 != 0),
}
"""What cases may have in common."""


def _leading(case: Case, axis: int) -> int:
    shape = case.inputs["mask"].shape
    return shape[-axis] if len(shape) >= axis else 1


def which_cases(failing: Sequence[Case], agreeing: Sequence[Case]) -> str:
    """Return what the cases that fail have in common, and those that agree have not, in words; "" where nothing."""
    if not failing or not agreeing or any({*"qkv"} - {*case.inputs} for case in (*failing, *agreeing)):
        return ""
    common = [name for name, has in FEATURES.items() if all(has(case) for case in failing)]
    others = {name: sum(FEATURES[name](case) for case in agreeing) for name in common}
    if not others:
        return ""
    best = min(others, key=lambda name: others[name])
    if others[best] == 0:
        return f"the cases that fail are those with {best}"
    return f"only cases with {best} fail, not all of them" if others[best] < len(agreeing) / 2 else ""


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
