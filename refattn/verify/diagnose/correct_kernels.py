"""Honest runs of any mechanism: dense.py with the roundings of its kernels, and all others, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from refattn.golden.storage_types import has_gradient
from refattn.mechanisms.record import Case, Mechanism, Unsupported
from refattn.verify.diagnose.mutants import kernel, stored
from refattn.verify.outcome import Result, Truth, Verdict
from refattn.verify.tolerance.budget import evaluate, truth
from refattn.verify.tolerance.compare import judge


def results(record: Mechanism, case: Case, known: Truth, dtype: str) -> Iterator[tuple[str, Result]]:
    """Yield what honest kernels store, by name."""
    yield "kernel", kernel(record, case, known, dtype)
    inputs = {name: x.astype(np.float32) if has_gradient(x) else x for name, x in known.inputs.items()}
    assert known.upstream is not None
    for implementation in record.implementations[1:]:
        try:
            found = evaluate(record, inputs, case.options, known.upstream.astype(np.float32), implementation)
        except Unsupported:
            continue
        yield implementation, stored(found, known)


def runs(record: Mechanism, dtype: str, least: int, step: int = 1) -> Iterator[tuple[str, tuple[Verdict, ...]]]:
    """Yield so many honest runs at least, by name: every `step`-th designed case, with one seed after the other."""
    count = 0
    for seed in itertools.count():
        for one in runs_with(record, dtype, seed, step):
            count += 1
            yield one
        if count >= least:
            return


def runs_with(record: Mechanism, dtype: str, seed: int, step: int = 1) -> Iterator[tuple[str, tuple[Verdict, ...]]]:
    """Yield those with one seed."""
    for case in record.cases[::step]:
        try:
            known = truth(record, case, dtype, grad=True, seed=seed)
        except ArithmeticError:  # with other numbers than its own a case may have no result: a flow diverges
            continue
        for name, result in results(record, case, known, dtype):
            yield f"{case.name}, seed {seed}, {name}", judge(result, known)
