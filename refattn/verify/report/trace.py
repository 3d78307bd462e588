"""A traced run as text: what ``refattn trace`` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import has_gradient
from refattn.verify.traced import Step, Traced

WHOLE = 64
"""Arrays of up to so many elements are printed whole."""

_DIGITS = 5


def text(found: Traced, only: Sequence[str] = (), *, width: int = 120, colour: bool = False) -> str:
    """Return the run as text: arguments, each equation in order, and results; or only the equations of these ids."""
    if only:
        chosen = [step for step in found.steps if {step.id, step.id.partition("[")[0]} & {*only}]
        return "\n".join(line for step in chosen for line in (*_step(step, width, colour), "")).rstrip("\n")
    where = f"case {found.case}" if found.case else "one step"
    what = f"the general code, since {found.why}" if found.why else f"the {found.part}"
    head = f"{found.title}: {what}, {where}, {found.dtype} on {found.backend}"
    lines = [head, "", *_title("Arguments", colour)]
    for name, option in found.options.items():
        lines.append(f"{name} = {option}")
    for name, x in found.arguments.items():
        lines += _array(name, x, width)
    for name, steps in (("Forward", found.forward), ("Backward", found.backward)):
        lines += ["", *_title(name, colour)]
        for step in steps:
            lines += [*_step(step, width, colour), ""]
        lines.pop()
    lines += ["", *_title("Results", colour)]
    same: dict[Any, list[str]] = {}
    for step in found.steps:
        same.setdefault(_content(step.value), []).append(step.id)
    for name, x in found.results.items():
        ids = same.get(_content(x), [])
        # Two equations with the value of a result, zeros say: it is not told which of them it is.
        lines += [f"{name} = {ids[0]}"] if len(ids) == 1 else _array(name, x, width)
    return "\n".join(lines)


def _content(x: NDArray[Any]) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.tobytes()


def _title(name: str, colour: bool) -> Iterator[str]:
    yield _bold(name, colour)
    yield "-" * len(name)


def _step(step: Step, width: int, colour: bool) -> Iterator[str]:
    place = step.place
    yield f"{_bold(step.id, colour)}  {re.sub(' {2,}', '   ', place.formula)}".rstrip()
    first, *more = place.code.splitlines()
    yield f"    {place.file}:{place.line}: {first}{' ...' if more else ''}"
    axes = f" ({', '.join(place.axes)})" if place.axes is not None else ""
    yield f"    {place.variable}{axes} = {step.value.shape}"
    yield from _value(step.value, width)


def _array(name: str, x: NDArray[Any], width: int) -> Iterator[str]:
    yield f"{name} {x.shape}"
    yield from _value(x, width)


def _value(x: NDArray[Any], width: int) -> Iterator[str]:
    """Yield the whole array where it is small, otherwise what describes it and its first elements."""
    if x.size <= WHOLE:
        shown = np.array2string(x, precision=_DIGITS, suppress_small=True, max_line_width=width - 4, threshold=WHOLE)
        yield from (f"    {line}" for line in shown.splitlines() if line.strip())
        return
    first = ", ".join(_number(value) for value in x.reshape(-1)[:4])
    if not has_gradient(x):
        yield f"    {int(np.sum(x))} of {x.size} true; first {first}"
        return
    finite = x[np.isfinite(x)].astype(np.float64)
    some = f"; {x.size - finite.size} not finite" if finite.size < x.size else ""
    if finite.size:
        with np.errstate(over="ignore"):  # of the largest numbers of a type
            norm = float(np.sqrt(finite @ finite))
            facts = {"min": finite.min(), "mean": finite.mean(), "max": finite.max(), "norm": norm}
        yield f"    {', '.join(f'{name} {_number(value)}' for name, value in facts.items())}{some}; first {first}"
    else:
        yield f"    {some.removeprefix('; ')}; first {first}"


def _number(x: Any) -> str:
    return str(x) if isinstance(x, np.bool_) else f"{float(x):.{_DIGITS}g}"


def _bold(word: str, colour: bool) -> str:
    return f"\x1b[1m{word}\x1b[0m" if colour else word
