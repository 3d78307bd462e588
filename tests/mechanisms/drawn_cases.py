"""Cases by Hypothesis: a designed case with options of others, their numbers put together anew, in any small size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

import refattn as ra
from refattn.mechanisms.delta.implementations import chunked as delta_chunked
from refattn.mechanisms.graph_energy.implementations import pairs
from refattn.mechanisms.higher_order.implementations import schedule
from refattn.mechanisms.higher_order.layer import stream as higher_order_stream
from refattn.mechanisms.koopman.implementations import shared
from refattn.mechanisms.record import Case
from refattn.ops import tiles
from refattn.verify.selfcheck.samples import resized, resized_by, sample, shrunk, sizes_of

REFUSED = (TypeError, ValueError, ArithmeticError)
"""What a core raises that cannot do what its options say together."""

SLOW = re.compile("norm=|nuclear=")
"""In the text of an option: a result that a descent finds slowly, and that depends on where it stops."""

CORES = [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None]


def kinds(name: str, option: str) -> list[str]:
    """Return the kinds of an option, which it names where it gets none of them."""
    core: Any = ra.mechanism(name).core
    try:
        core.forward(*np.ones((3, 1, 2, 3, 4)), **{option: "nothing"})
    except REFUSED as error:
        found = re.search(r"needs one of (.*)", str(error))
        return [kind for kind in found[1].split(", ") if kind.isidentifier()] if found else []
    return []


@functools.cache
def values(name: str) -> dict[str, list[Any]]:
    """Return what each option may be: its default, what a case gives it, every kind, and few where it is a number."""
    record, found = ra.mechanism(name), {}
    for option, usual in record.defaults.items():
        given = [case.options[option] for case in (*record.cases, *record.kernel_sizes) if option in case.options]
        plain = [True, False] if type(usual) is bool else [1, 2, 3] if type(usual) is int else []
        several = [*([] if usual is None else [usual]), *plain, *given, *kinds(name, option)]
        several = [value for value in several if not SLOW.search(str(value))]
        found[option] = list({repr(value): value for value in several}.values())
    return {option: several for option, several in found.items() if several and option != "implementation"}


def _fields(made: Any) -> dict[str, Any]:
    """Return the numbers of a kind; not `straight_through`, whose gradient is meant to be another."""
    names = [field.name for field in dataclasses.fields(made) if field.init] if dataclasses.is_dataclass(made) else []
    found = {name: getattr(made, name) for name in names if name != "straight_through"}
    return {name: x for name, x in found.items() if type(x) in (bool, int, float)}


@functools.cache
def numbers(name: str) -> dict[str, list[Any]]:
    """Return what each number of a kind may be: what it is in some case."""
    record, found = ra.mechanism(name), dict[str, set[Any]]()
    for option, make in record.families.items():
        for value in values(name).get(option, []):
            for number, x in _fields(make(value)).items():
                found.setdefault(number, set()).update({True, False} if type(x) is bool else {x})
    return {number: sorted(several) for number, several in found.items()}


def renumbered(draw: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Give some kinds one or two other numbers: no case has, say, plain=True beside delta=0.5."""
    record, found = ra.mechanism(name), dict(options)
    for option in sorted({*record.families} & {*options}):
        made = record.families[option](options[option])
        if (own := sorted({*_fields(made)} & {*numbers(name)})) and draw(st.booleans()):
            chosen = draw(st.lists(st.sampled_from(own), min_size=1, max_size=2, unique=True))
            found[option] = replace(made, **{number: draw(st.sampled_from(numbers(name)[number])) for number in chosen})
    return found


def resizable(case: Case) -> bool:
    """Tell whether no option is slow and the sizes of arrays are known: by letters, or they are of the scores."""
    if any(SLOW.search(str(value)) for value in case.options.values()):
        return False
    known = {*"qkv", "mask", "key_mask", "bias", "sink", "keep", "q_lengths", "k_lengths", "offset"}
    return bool(case.inputs["q"].axes) or not {*case.inputs} - known


@st.composite
def cases(draw: Any, name: str) -> Case:
    """Draw a designed case with up to three options of others, in any small size; the core refuses none of them."""
    record, known = ra.mechanism(name), values(name)
    base = draw(st.sampled_from([c for c in record.cases if not (c.given or c.exact) and resizable(c)]))
    chosen = draw(st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True))
    usual = {option: record.defaults[option] for option in record.families}
    options = {**usual, **base.options, **{option: draw(st.sampled_from(known[option])) for option in chosen}}
    try:
        options = renumbered(draw, name, {n: x for n, x in options.items() if x is not None})
    except REFUSED:
        reject()
    if (
        options.get("updates") == 1
    ):  # attention, of which some adjoints are copies: a last bit is beyond what these err by
        reject()
    case = shrunk(replace(base, options=options, name=f"drawn {draw(st.integers(0, 99))}", kind="drawn"))
    size, few = st.integers(1, 7), st.integers(1, 2)
    if case.inputs["q"].axes:
        packed = options.get("lengths") is not None  # sequences of a batch of 1
        case = resized_by(case, {**sizes_of(case), "b": 1 if packed else draw(few), "n": draw(size)})
    else:
        rows, columns, d, e = (draw(size) for _ in range(4))
        # The layer norm of two numbers is -1 and 1, whatever they are: gradients are rounding alone.
        d = max(d, 3) if options.get("layer_norm", record.defaults.get("layer_norm")) else d
        rows = columns if record.one_sequence else rows
        e = d if all(one.inputs["v"].shape[3] == one.inputs["q"].shape[3] for one in record.cases) else e
        case = resized(case, draw(few), draw(few), draw(few), rows, columns, d, e)
    try:
        sample(record, case)
    except (ArithmeticError, RuntimeWarning):  # some numbers have no result, or overflow
        reject()
    except REFUSED:
        if options == base.options:
            raise
        reject()
    return case


SMALL: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "higher_order": [
        (schedule, {"SHORTEST": 3, "LONGEST": 3, "FEWER": 3, "HEADS": 1}),
        (higher_order_stream, {"BUFFER": 3}),
    ],
    "koopman": [(shared, {"CHUNK": 1})],
    "delta": [(delta_chunked, {"AT_ONCE": 4})],
    "graph_energy": [(pairs, {"ELEMENTS": 9})],
}
"""The sizes of parts that are no tiles, by module."""


@contextlib.contextmanager
def small_parts(name: str) -> Iterator[None]:
    """Cut all that is computed in parts in parts of 2 or 3 tokens, so that small arrays have several."""

    def plan(q: Any, k: Any, most: int = 0) -> tiles.Plan:
        heads = [(slice(b, b + 1), slice(g, g + 1)) for b in range(q.shape[0]) for g in range(k.shape[1])]
        whole = tuple(tiles.Tile(*own, (0, q.shape[2])) for own in heads)
        rows = [(n, min(n + 3, q.shape[2])) for n in range(0, q.shape[2], 3)]
        return tiles.Plan(whole, tuple(replace(tile, rows=own) for tile in whole for own in rows), 2)

    with contextlib.ExitStack() as stack:
        for module in [m for n, m in sys.modules.items() if n.startswith("refattn.mechanisms.")]:
            if getattr(module, "plan", None) is tiles.plan:
                stack.enter_context(mock.patch.object(module, "plan", plan))
        for module, sizes in SMALL.get(name, []):
            stack.enter_context(mock.patch.multiple(module, **sizes))
        yield
