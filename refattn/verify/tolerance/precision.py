"""What would explain a failure: a precision that a kernel may compute in and has not declared.

Results that disagree are judged once more, with what declared roundings would be granted. The first declaration, from
fine to coarse, with which all of them agree is told; whether it is meant to compute so is for its author to say.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from refattn.golden.storage_types import FLOAT8, SCALED
from refattn.mechanisms.record import Mechanism
from refattn.verify.outcome import Outcome, Precision, Report
from refattn.verify.tolerance.budget import Roundings, granting
from refattn.verify.tolerance.compare import judge

MOST = 16
"""Cases that are judged once more, the smallest that fail."""

AT_ONCE = ("shape", "dtype", "non-finite")
"""What no rounding explains."""


def explained(
    mechanism: Mechanism, report: Report, declared: Mapping[str, str], missing: Container[str] = ()
) -> Report:
    """Return a report with the roundings of each dtype that would explain its failures, where there are such.

    `declared` are those that it was judged with; `missing` the types that its device does not multiply in, so that they
    explain nothing.
    """
    found = []
    for dtype in dict.fromkeys(outcome.dtype for outcome in report.outcomes if outcome.status == "disagrees"):
        failed = [one for one in report.outcomes if one.dtype == dtype and one.status == "disagrees"]
        again = sorted((one for one in failed if one.seen is not None), key=_size)[:MOST]
        wrong = [verdict for one in failed for verdict in one.verdicts if not verdict.agrees]
        others = [v for v in wrong if v.statistic in AT_ONCE or "." in v.tensor or v.tensor.startswith(("t_", "h_"))]
        if not again or others:
            continue
        for roundings in _candidates(mechanism, dtype):
            both = {**declared, **roundings}
            if all(_agrees(mechanism, one, both, report.seed) for one in again):
                if roundings.get("products") in missing:
                    break
                found.append(Precision(dtype, roundings, len(again), len(failed)))
                break
    return replace(report, precision=tuple(found))


def _candidates(mechanism: Mechanism, dtype: str) -> Iterator[dict[str, str]]:
    """Yield what a kernel may have rounded in a dtype, from fine to coarse, to no type that is coarser than its own.

    What is coarser explains errors of another kind, too, such as rows that are summed up in a narrow accumulator.
    """
    forward = [id for id in mechanism.equations if not id.startswith("d")]
    before_products = [id for id in mechanism.stored if not id.startswith("d")]
    if dtype == "float32":
        yield from ({"products": type_} for type_ in ("bf16x3", "tf32", "bfloat16"))
        yield from (dict.fromkeys(before_products, type_) for type_ in ("float16", "bfloat16") if before_products)
        yield from ({name: type_} for name in mechanism.named_roundings for type_ in ("float16", "bfloat16"))
    elif dtype in ("float16", "bfloat16"):
        yield {"q": dtype}
        yield from ({name: dtype} for name in mechanism.named_roundings)
        yield from ({id: dtype} for id in forward if id not in mechanism.stored)
        yield dict.fromkeys(forward[:2], dtype)
        yield from ({**dict.fromkeys(forward[:2], dtype), name: dtype} for name in mechanism.named_roundings)
    elif dtype in SCALED:
        yield from ({id: type_} for type_ in FLOAT8 for id in mechanism.accumulates_before_rounding)
    if dtype in ("float32", "float16", "bfloat16"):
        yield {"q": "int8", "k": "int8"}


def _agrees(mechanism: Mechanism, outcome: Outcome, roundings: Roundings, seed: int) -> bool:
    assert outcome.seen is not None
    known, result = outcome.seen
    case = mechanism.case(outcome.case)
    kind = known.stored["out"] if known.factors else outcome.dtype
    try:
        granted = granting(mechanism, case, kind, known, roundings, seed)
    except (ArithmeticError, ValueError):  # so coarse that the reference finds no result
        return False
    return all(verdict.agrees for verdict in judge(result, granted))


def _size(outcome: Outcome) -> int:
    assert outcome.seen is not None
    return sum(math.prod(x.shape) for x in outcome.seen[0].inputs.values())
