"""Wrong kernels on purpose: verification is worth what it catches of these.

A mutant is the dense implementation with one equation disturbed, forward or backward, run as a kernel in a storage type
would run it (float32 inside, the record's roundings on the way, a last rounding at the end). They come from the
equation engine: no mechanism has to write one. Conventions, which are wrong in more than one line, come from the
record, as wrong backward passes do, and a few faults of storing a result (truncation, a NaN) belong to every kernel.

A mutant that changes nothing (a scaled maximum of a softmax, say) is equivalent: no test can catch it, and none should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import equations
from refattn.golden.storage_types import LOWER, chop_to, has_gradient, round_to
from refattn.mechanisms.record import Case, Mechanism
from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.bugs.emulator import Unknown
from refattn.verify.diagnose.changes import KINDS, applies, changed_by
from refattn.verify.outcome import Result, Truth
from refattn.verify.tolerance.budget import evaluate, rounded
from refattn.verify.tolerance.budget import truth as make_truth
from refattn.verify.tolerance.compare import judge

Tensors = dict[str, NDArray[Any]]

SHORT = ("float16", "bfloat16")


def mutants(mechanism: Mechanism) -> tuple[WrongKernel, ...]:
    """Return all mutants of a mechanism's core: equations times kinds, faults of storing, and the record's own."""
    engine = (
        mutant(mechanism, tag, kind) for tag in core_tags(mechanism) for kind in KINDS if applies(kind, tag.axes or ())
    )
    return (*engine, *storing(mechanism), *mechanism.wrong.values())


def mutant(mechanism: Mechanism, tag: equations.Tag, kind: str) -> WrongKernel:
    """Return the kernel in which an equation is disturbed."""

    def run(call: Call) -> Tensors:
        with equations.mutate(tag.id, changed_by(kind, tag.axes or (), lower_type(mechanism, tag.id, call.dtype))):
            return right(mechanism, call)

    return WrongKernel(f"{tag.id} {kind}", "equation", run, kind, (tag.id,))


def lower_type(mechanism: Mechanism, id: str, dtype: str) -> str:
    """Return the type that the value of an equation may be rounded to: the one below that which a kernel declares.

    Declared is the storage type where a kernel rounds to it, otherwise the type that it computes in.
    """
    return dtype if dtype in SHORT and id not in mechanism.stored else LOWER[dtype]


def storing(mechanism: Mechanism) -> tuple[WrongKernel, ...]:
    """Return the faults of storing a result."""

    def run(change: Callable[[Call, NDArray[np.float64]], NDArray[Any]], call: Call) -> Tensors:
        found = right(mechanism, call)
        return found | {"out": change(call, found["out"].astype(np.float64))}

    def truncated(call: Call, out: NDArray[np.float64]) -> NDArray[Any]:
        return chop_to(out, call.dtype)

    def one_nan(call: Call, out: NDArray[np.float64]) -> NDArray[Any]:
        return np.where(np.arange(out.size).reshape(out.shape) == out.size // 2, np.nan, out)

    kinds = {"output truncated": truncated, "one NaN": one_nan}
    return tuple(WrongKernel(n, "storing", partial(run, change), n, (n,)) for n, change in kinds.items())


def core_tags(mechanism: Mechanism) -> Iterator[equations.Tag]:
    """Yield the tags of the core, one for each equation, though exclusive branches may have several."""
    around = (mechanism.block.module, *mechanism.block_modules)
    core = (module for module in mechanism.equation_modules if module not in around)
    found: dict[str, equations.Tag] = {}
    for module in core:
        for tag in equations.tags(module):
            if tag.claims:
                found.setdefault(tag.id, tag)
    return iter(found.values())


def kernel(
    mechanism: Mechanism,
    case: Case,
    truth: Truth,
    dtype: str,
    wrong: WrongKernel | None = None,
    *,
    size: str = "",
    exact: bool = False,
) -> Result:
    """Return what an honest kernel, or a wrong one, gives for a case in a storage type.

    With `exact` it computes in float64 and rounds nothing but its results: what remains is what is wrong.
    """
    return stored(_computed(mechanism, case, truth, dtype, wrong, exact, size), truth)


def right(mechanism: Mechanism, call: Call) -> Tensors:
    """Return what an honest kernel computes."""
    with ExitStack() as stack:
        if call.dtype in SHORT and not call.exact:
            stack.enter_context(equations.rounding(dict.fromkeys(mechanism.stored, call.dtype), _round_here))
        return evaluate(mechanism, call.inputs, call.options, call.d_out, further=call.further)


@np.errstate(all="ignore")  # a wrong kernel may overflow or divide by zero
def _computed(
    mechanism: Mechanism,
    case: Case,
    truth: Truth,
    dtype: str,
    wrong: WrongKernel | None,
    exact: bool,
    size: str = "",
) -> Tensors:
    """Return the results of a kernel before they are stored."""
    working = np.float64 if exact or dtype == "float64" else np.float32
    inputs = {name: x.astype(working) if has_gradient(x) else x for name, x in truth.inputs.items()}
    upstream = None if truth.upstream is None else truth.upstream.astype(working)
    outputs = evaluate(mechanism, inputs, case.options, None) if wrong and wrong.backward else {}
    further = {name: x.astype(working) for name, x in truth.further.items()}
    call = Call(inputs, case.options, upstream, dtype, exact, outputs, further=further)
    return {**outputs, **wrong.results(call, size)} if wrong else right(mechanism, call)


def _round_here(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    return round_to(x.astype(np.float64), dtype).astype(x.dtype)


def stored(tensors: Tensors, truth: Truth) -> Result:
    """Round results to their storage types."""
    types = {name: truth.stored[name] for name in tensors}
    held = {name: round_to(x.astype(np.float64), types[name]) for name, x in tensors.items()}
    kept = {name: x.astype(np.float32 if types[name] == "bfloat16" else types[name]) for name, x in held.items()}
    return Result(kept, types)


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
        computed = _computed(mechanism, case, truth, dtype, None if of_storing else mutant, exact=True)
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
