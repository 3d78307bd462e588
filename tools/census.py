"""What verification is worth: what becomes of wrong kernels, and of correct ones of any mechanism.

A census gives each mutant of `refattn.verify.diagnose.mutants` a fate over the designed cases. Correct kernels are
dense.py with the roundings of its kernels, and all other implementations, in float32. `tools.rates` counts both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import has_gradient
from refattn.mechanisms.record import Case, Mechanism, Unsupported
from refattn.mechanisms.wrong import WrongKernel
from refattn.verify.bugs.emulator import Unknown
from refattn.verify.diagnose.mutants import before_storing, kernel, mutants, stored
from refattn.verify.outcome import Result, Truth, Verdict
from refattn.verify.tolerance.budget import evaluate, rounded
from refattn.verify.tolerance.budget import truth as make_truth
from refattn.verify.tolerance.compare import judge


@dataclass(frozen=True)
class Fate:
    """What became of a mutant over the designed cases in one storage type.

    Attributes
    ----------
    status
        "caught"; "equivalent": in exact arithmetic its results are the true ones; "below rounding": in exact
        arithmetic they differ by less than an honest kernel's; "missed": they differ by more, and nobody noticed.
    share
        The largest used share of the allowed error that it reached.
    case, tensor
        Where.
    """

    mutant: WrongKernel
    dtype: str
    status: str
    share: float
    case: str
    tensor: str


def truths_of(mechanism: Mechanism, dtype: str, seed: int = 0) -> list[tuple[Case, Truth]]:
    """Return the designed cases, each with what its mutants are judged by.

    A case that the kernel without an error does not pass is left out: whatever fails there shows nothing.
    """
    all_cases = [(case, make_truth(mechanism, case, dtype, grad=True, seed=seed)) for case in mechanism.cases]
    return [
        (case, truth)
        for case, truth in all_cases
        if all(verdict.agrees for verdict in judge(kernel(mechanism, case, truth, dtype), truth))
    ]


def census(
    mechanism: Mechanism,
    dtype: str,
    suspects: Iterable[WrongKernel] | None = None,
    *,
    seed: int = 0,
    truths: list[tuple[Case, Truth]] | None = None,
) -> tuple[Fate, ...]:
    """Return the fate of every mutant in one storage type, or of some; `truths` may be given, `truths_of`."""
    truths = truths_of(mechanism, dtype, seed) if truths is None else truths
    fates: list[Fate] = []
    for mutant in suspects or mutants(mechanism):
        # Mutants of one equation follow each other, and the case that caught the last one will catch the next.
        first = fates[-1].case if fates and fates[-1].mutant.of == mutant.of and mutant.kind == "equation" else ""
        fates.append(_fate(mechanism, sorted(truths, key=lambda known: known[0].name != first), dtype, mutant))
    return tuple(fates)


def kill_rate(fates: Iterable[Fate]) -> float:
    """Return how many of the mutants that are not equivalent were caught, as a part of all of these."""
    real = [fate.status == "caught" for fate in fates if fate.status != "equivalent"]
    return sum(real) / len(real)


def _fate(mechanism: Mechanism, truths: list[tuple[Case, Truth]], dtype: str, mutant: WrongKernel) -> Fate:
    worst: tuple[float, str, str] = (-1.0, "", "")
    run: list[tuple[Case, Truth]] = []
    for case, truth in truths:
        try:
            verdicts = judge(kernel(mechanism, case, truth, dtype, mutant), truth)
        except Unknown:
            continue
        except (ArithmeticError, ValueError):  # a kernel that finds no result is caught by whoever calls it
            return Fate(mutant, dtype, "caught", float("inf"), case.name, "")
        worst = max(worst, *((verdict.share, case.name, verdict.tensor) for verdict in verdicts))
        if worst[0] > 1.0:
            return Fate(mutant, dtype, "caught", *worst)
        run.append((case, truth))
    status = "equivalent"
    for case, truth in run:
        of_storing = mutant.kind == "storing"  # where what is computed is right
        computed = before_storing(mechanism, case, truth, dtype, None if of_storing else mutant, exact=True)
        result = kernel(mechanism, case, truth, dtype, mutant, exact=True) if of_storing else stored(computed, truth)
        if not all(verdict.agrees for verdict in judge(result, truth)):
            # Such as a truncation of what was rounded before: nothing of a kernel changes.
            same = all(
                _bits(kernel(mechanism, *one, dtype, mutant)) == _bits(kernel(mechanism, *one, dtype)) for one in run
            )
            return Fate(mutant, dtype, "equivalent" if same else "missed", *worst)
        # Equal as they are computed (but for float64's own rounding, which is relative to the largest result: a smaller
        # one may be what cancels of that), or at least as they are stored.
        rounding = 1e-12 * max(_largest(x) for x in truth.values.values())
        if not all(
            _same(computed[name], truth.values[name], rounding) or _same(x, rounded(truth, name), 0.0)
            for name, x in result.tensors.items()
        ):
            status = "below rounding"
    return Fate(mutant, dtype, status, *worst)


def _bits(result: Result) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in result.tensors.items()}


def _largest(x: NDArray[np.float64]) -> float:
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))


def _same(got: NDArray[Any], expected: NDArray[np.float64], error: float) -> bool:
    """Tell whether two results are equal, up to an error."""
    return np.allclose(got, expected, rtol=0.0, atol=error)


# --- correct kernels


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
            known = make_truth(record, case, dtype, grad=True, seed=seed)
        except ArithmeticError:  # with other numbers than its own a case may have no result: a flow diverges
            continue
        for name, result in results(record, case, known, dtype):
            yield f"{case.name}, seed {seed}, {name}", judge(result, known)
