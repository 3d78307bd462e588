"""Errors that are read off what was got: they have no numbers of their own, and explain what only looks like them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from refattn import equations
from refattn.verify.blame.bank import Bank
from refattn.verify.blame.evidence import Evidence
from refattn.verify.blame.known import Known, Values, right_outputs
from refattn.verify.judge.budget import evaluate

EMPTY_ROWS = "empty rows"
"""The question of conventions that an error of rows without a key is an answer to."""

UNWRITTEN = "parts of the outputs are 0 where they should not be, and all that is not 0 is right"


def seen_in(failing: Sequence[Evidence]) -> Iterator[Known]:
    """Yield what the failing cases show by themselves, with what was got where they show it."""
    got = {one.bank.case.name: one.result.tensors for one in failing}

    def empty_rows(bank: Bank, grad: bool) -> Values:
        values, found = right_outputs(bank), got.get(bank.case.name, {})
        empty = np.isneginf(bank.truth.values["lse"])[..., None]
        return values | {"out": np.where(empty, found["out"], values["out"])} if "out" in found else values

    def unwritten(bank: Bank, grad: bool) -> Values:
        found = got.get(bank.case.name, {})
        same = {name: x for name, x in right_outputs(bank).items() if name in found and found[name].shape == x.shape}
        return right_outputs(bank) | {name: np.where(found[name] == 0.0, 0.0, x) for name, x in same.items()}

    if all("lse" in one.bank.truth.values for one in failing):
        told = "rows that may attend nothing hold something else than 0, and all other rows are right"
        yield Known(told, "storing", (EMPTY_ROWS,), EMPTY_ROWS, "", False, empty_rows)
    if any("out" in one.wrong for one in failing):
        yield Known(
            UNWRITTEN,
            "storing",
            (_written(min(failing, key=lambda one: one.bank.size).bank),),
            UNWRITTEN,
            "",
            False,
            unwritten,
        )


def _written(bank: Bank) -> str:
    """Return the equation whose value the output is; the last one, where it is put together of several."""
    with equations.trace() as traced:
        out = evaluate(bank.mechanism, bank.inputs, bank.case.options, None)["out"]
    same = [key for key, x in traced.items() if np.array_equal(x, out, equal_nan=True)]
    return (same or list(traced))[-1].partition("[")[0]
