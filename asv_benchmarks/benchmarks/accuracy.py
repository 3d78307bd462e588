"""Accuracy: the share of the allowed error that each form uses, against the truth in float64 (docs/tolerances.md).

The same inputs give the same share on the same machine, so any change has a cause. A share above 1 is wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

from refattn.mechanisms.record import Case, Mechanism
from refattn.xp import dtype_name

from .common import BACKENDS, FORMS, OTHERS, array, split, usable

if TYPE_CHECKING:
    from refattn.verify.outcome import Truth
    from refattn.verify.selfcheck.sections import Scope

DTYPES = ["float64", "float32", "float16", *(["bfloat16"] if OTHERS else [])]  # NumPy has none

LARGEST = 1e6
"""Stands for an infinite share: a wrong shape or dtype, or NaN where a number should be."""


def _module(name: str, *rooms: str) -> Any:
    """Return a module of verification; earlier versions have it in another room, or beside the others."""
    for room in rooms:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"refattn.verify.{room}.{name}")
    return importlib.import_module(f"refattn.verify.{name}")


truth = _module("budget", "tolerance", "judge").truth
evaluate = _module("budget", "tolerance", "judge").evaluate
compare = _module("compare", "tolerance", "judge").compare
sections = _module("sections", "selfcheck", "itself")


def cases(scope: Scope) -> list[Case]:
    """Return the first designed case of each kind and, for forms in tiles, the largest of all."""
    known = scope.cases
    first = {case.kind: case for case in reversed(known)}
    largest = max(known, key=lambda case: sum(math.prod(given.shape) for given in case.inputs.values()))
    return [case for case in known if case is largest or case is first[case.kind]]


_truths: dict[str, Truth] = {}


def truth_of(record: Mechanism, case: Case, dtype: str, grad: bool) -> Truth:
    """Return the truth about a case, computed once in a process."""
    key = f"{record.name} {case!r} {dtype} {grad}"
    if key not in _truths:
        _truths[key] = truth(record, case, dtype, grad=grad)
    return _truths[key]


def shares(form: str, what: str, dtype: str, backend: str) -> Iterator[float]:
    """Yield the share of every result, "outputs" or "gradients", on every designed case."""
    record, chosen = split(form)
    owner = usable(backend)
    with sections.small_tiles(owner):
        for case in cases(sections.Scope(record, owner)):
            wanted = truth_of(record, case, dtype, what == "gradients")
            inputs = {name: array(owner, x, dtype) for name, x in wanted.inputs.items()}
            upstream = None if wanted.upstream is None else array(owner, wanted.upstream, dtype)
            try:
                found = evaluate(record, inputs, case.options, upstream, chosen)
            except NotImplementedError:  # a form that is never causal, or always
                continue
            for name, x in found.items():
                if name.startswith("d_") == (what == "gradients"):
                    yield min(compare(name, owner.to_numpy(x), dtype_name(x), wanted).share, LARGEST)


class Share:
    """The largest share, and the mean of all."""

    version = "1"
    timeout = 300.0
    unit = "share of the allowed error"
    kind = "share"
    param_names = ["form", "of", "dtype", "backend"]
    params = [FORMS, ["outputs", "gradients"], DTYPES, BACKENDS]

    def setup(self, form: str, of: str, dtype: str, backend: str) -> None:
        owner = usable(backend)
        if not hasattr(owner.namespace(), dtype):
            raise NotImplementedError(f"{backend} has no {dtype}")

    def track_largest(self, form: str, of: str, dtype: str, backend: str) -> float:
        return max(shares(form, of, dtype, backend))

    def track_mean(self, form: str, of: str, dtype: str, backend: str) -> float:
        return fmean(shares(form, of, dtype, backend))
