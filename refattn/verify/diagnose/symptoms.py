"""Errors that are read off what was got: they have no numbers of their own, and explain what only looks like them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from refattn import equations
from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.diagnose.error_templates import Templates
from refattn.verify.diagnose.known import Values
from refattn.verify.diagnose.residuals import Residuals
from refattn.verify.tolerance.budget import evaluate

EMPTY_ROWS = "empty rows"
"""The question of conventions that an error of rows without a key is an answer to."""

UNWRITTEN = "parts of the outputs are 0 where they should not be, and all that is not 0 is right"


def symptoms_of(failing: Sequence[Residuals]) -> Iterator[WrongKernel]:
    """Yield what the failing cases show by themselves, with what was got where they show it."""
    got = {id(one.templates.inputs): one.result.tensors for one in failing}

    def empty_rows(call: Call) -> Values:
        values, found = dict(call.outputs), got.get(id(call.inputs), {})
        empty = np.isneginf(values["lse"])[..., None]
        return values | {"out": np.where(empty, found["out"], values["out"])} if "out" in found else values

    def unwritten(call: Call) -> Values:
        found = got.get(id(call.inputs), {})
        same = {name: x for name, x in call.outputs.items() if name in found and found[name].shape == x.shape}
        return {**call.outputs} | {name: np.where(found[name] == 0.0, 0.0, x) for name, x in same.items()}

    if all("lse" in one.truth.values for one in failing):
        words = "rows that may attend nothing hold something else than 0, and all other rows are right"
        yield WrongKernel(EMPTY_ROWS, "storing", empty_rows, words, (EMPTY_ROWS,))
    if any("out" in one.wrong for one in failing):
        id_ = _written(min(failing, key=lambda one: one.templates.size).templates)
        nothing = not any(np.any(one.result.tensors["out"]) for one in failing if "out" in one.wrong)
        words = "every output is 0" if nothing else UNWRITTEN
        yield WrongKernel(words, "storing", unwritten, words, (id_,))


def _written(templates: Templates) -> str:
    """Return the equation whose value the output is; the last one, where it is put together of several."""
    with equations.trace() as traced:
        out = evaluate(templates.mechanism, templates.inputs, templates.case.options, None)["out"]
    same = [key for key, x in traced.items() if np.array_equal(x, out, equal_nan=True)]
    return (same or list(traced))[-1].partition("[")[0]
