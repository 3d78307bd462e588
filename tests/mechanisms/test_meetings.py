"""Cases in which features meet: all that can meet does, and each case shows each of its options."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.meetings import Table, columns, drawn, given, held, meetings, rows
from refattn.mechanisms.record import Case
from refattn.verify.outcome import Result
from refattn.verify.tolerance.budget import evaluate, truth, wide
from refattn.verify.tolerance.compare import judge

MECHANISMS = ("delta", "softmax")
SHOWS = 30.0
"""How far the result without an option is off, in units of the allowed error."""
MOVES = 3.0
"""The same where a window, a place or a length is off by one."""


def _of(mechanism: str) -> Any:
    return importlib.import_module(f"refattn.mechanisms.{mechanism}.testing.meetings")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_what_meets_in_any_call_meets_in_a_case_of_each_kernel(mechanism: str) -> None:
    table: Table = _of(mechanism).TABLE
    chosen = rows(table)
    assert not table.excludes(columns(table, chosen)).any()
    for strength, names in table.kernels:
        wanted = meetings(table, names, strength)
        of_kernel = [row for row in chosen if {*given(table, row)} <= {*names}]
        own = np.any(held(columns(table, of_kernel), wanted), axis=1)
        other = np.any(held(drawn(table, names, seed=1), wanted), axis=1)  # other draws
        missed = [some for some, has, may in zip(wanted, own.tolist(), other.tolist(), strict=True) if may and not has]
        assert not missed, (names, missed)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_row_is_the_same_call_whatever_else_is_in_the_table(mechanism: str) -> None:
    of = _of(mechanism)
    fewer = rows(replace(of.TABLE, kernels=of.TABLE.kernels[:1]))
    known = {case.name: case for case in of.MEETINGS}
    assert [known[case.name] for case in map(of.call, fewer)] == list(map(of.call, fewer))


def _without(call: dict[str, Any], case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the arguments of a call without each of its options, and with windows, places and lengths off by one."""
    gates = {name for name, x in case.inputs.items() if x.axes.startswith("bgn")}
    for name in {*case.inputs, *case.options} - {*"qkv"} - gates:
        yield name, {key: x for key, x in call.items() if key != name}
    if "window" in call:
        yield "window + 1", {**call, "window": tuple(None if n is None else n + 1 for n in call["window"])}
    if "offset" in call:
        yield "offset - 1", {**call, "offset": call["offset"] - 1}
    if "lengths" in call:
        first, *rest, last = call["lengths"]
        yield (
            "lengths - 1",
            {**call, "lengths": [first - 1, *rest, last + 1] if first else [first + 1, *rest, last - 1]},
        )
    for name, of in (("q_lengths", "q"), ("k_lengths", "k")):
        if name in call:
            yield f"{name} + 1", {**call, name: np.minimum(call[name] + 1, call[of].shape[2])}


@pytest.mark.parametrize("first", [pytest.param(n, marks=() if n == 0 else pytest.mark.slow) for n in range(4)])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_case_shows_each_of_its_options(mechanism: str, first: int) -> None:
    record = ra.mechanism(mechanism)
    hidden = []
    for case in _of(mechanism).MEETINGS[first::4]:
        known = truth(record, case, "float32", grad=False)
        for what, call in _without({**wide(known.inputs), **case.options}, case):
            if what == "causal" and case.inputs["q"].shape[2] == 1:
                continue  # the last query attends every key
            arrays = {name: x for name, x in call.items() if name in case.inputs}
            options = {name: x for name, x in call.items() if name in case.options}
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    out = evaluate(record, arrays, options, None)["out"]
            except (TypeError, ValueError):  # other options need this one
                continue
            verdict = judge(Result({"out": out.astype(np.float32)}, {"out": "float32"}), known)[0]
            moved = not what.isidentifier()
            if not verdict.share >= (MOVES if moved else SHOWS) and not (moved and "mask" in case.inputs):
                hidden.append((case.name, what, verdict.share))
    assert not hidden
