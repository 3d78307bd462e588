"""The smallest case that fails: lengths, heads and widths are halved, and options left out, while the failure stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.verify.outcome import Outcome, Report
from refattn.verify.run import verify_case
from refattn.verify.selfcheck.samples import resized, resized_by, sizes_of
from refattn.verify.tolerance.sampled import is_long

SECONDS = 10.0
"""No further case is tried after so long."""

AFFORDED = 1 << 19
"""Scores of the first smaller case of a long one."""


def least(
    mechanism: Mechanism, kernel: Any, report: Report, *, rounding: tuple[str, ...] = (), seconds: float = SECONDS
) -> tuple[Case, Outcome] | None:
    """Return the smallest case found that fails as the first one of a report does, and what was found.

    Parameters
    ----------
    mechanism, kernel, report, rounding
        What was verified, and what was found.
    seconds
        How long to search.

    Returns
    -------
    tuple[Case, Outcome] or None
        None if nothing fails. A case that hangs takes the whole time limit each time, and stays as it is.
    """
    if not report.failed:
        return None
    wanted, end = report.failed[0], time.monotonic() + seconds
    asked: dict[str, Any] = {"grad": report.grad, "rounding": rounding}

    def run(case: Case) -> Outcome | None:
        """Run a case; None where there is no such case, or it does not fail in the same way."""
        if time.monotonic() > end:
            return None
        try:
            found = verify_case(mechanism, kernel, case, wanted.dtype, seed=report.seed, **asked)
        except Exception:  # the mechanism has no such case, widths that must be equal for instance
            return None
        return found if _fault(found) == _fault(wanted) else None

    case, outcome = mechanism.case(wanted.case), wanted
    if case.given or is_long(mechanism, case):
        case = affordable(case)
        found = run(case)
        if found is None:
            return None
        outcome = found
    if "did not end" not in wanted.detail:
        case, outcome = _descend(mechanism, case, outcome, run)
    return case, outcome


def in_place_of_long(
    mechanism: Mechanism, kernel: Any, report: Report, *, rounding: tuple[str, ...] = ()
) -> tuple[Mechanism, Report] | None:
    """Return the first long case that disagrees in a size that suspects can be looked for in; None where it agrees."""
    failed = (one for one in report.outcomes if one.status == "disagrees" and not one.seen)
    wanted = next(failed, None)
    if wanted is None or any(one.status == "disagrees" and one.seen for one in report.outcomes):
        return None
    case = affordable(mechanism.case(wanted.case))
    asked: dict[str, Any] = {"grad": report.grad, "rounding": rounding, "seed": report.seed}
    found = verify_case(mechanism, kernel, case, wanted.dtype, **asked)
    return replace(mechanism, cases=(case,)), replace(report, outcomes=(found,))


def affordable(case: Case) -> Case:
    """Return a long case with fewer sequences and heads, then tokens; random numbers in place of captured ones."""
    case = replace(case, given={})
    while not case.inputs["q"].axes:
        (b, h, rows, d), (_, g, columns, _) = case.inputs["q"].shape, case.inputs["k"].shape
        if b * h * rows * columns <= AFFORDED:
            break
        shared = h // max(g, 1)
        smaller = (
            (b // 2, g, shared)
            if b > 1
            else (b, g // 2, shared)
            if g > 1
            else (b, g, shared // 2 if shared > 2 else shared)
        )
        lengths = (rows, columns) if smaller != (b, g, shared) else ((rows + 1) // 2, (columns + 1) // 2)
        case = resized(case, *smaller, *lengths, d, case.inputs["v"].shape[3])
    return case


def _descend(
    mechanism: Mechanism, case: Case, outcome: Outcome, run: Callable[[Case], Outcome | None]
) -> tuple[Case, Outcome]:
    """Take each step down as often as the failure stays, until none does."""
    moved = True
    while moved:
        moved = False
        for smaller in _steps(mechanism, case):
            found = run(smaller)
            if found is not None:
                case, outcome, moved = smaller, found, True
                break
    return case, outcome


def _steps(mechanism: Mechanism, case: Case) -> Iterator[Case]:
    """Yield the cases that are a step smaller: sizes first, then what may be left out."""
    yield from _sizes_by_axes(case) if case.inputs["q"].axes else _sizes(mechanism, case)
    for name in case.options:
        yield replace(case, options={n: x for n, x in case.options.items() if n != name})
    for name in set(case.inputs) - set("qkv"):
        yield replace(case, inputs={n: x for n, x in case.inputs.items() if n != name})


def _sizes(mechanism: Mechanism, case: Case) -> Iterator[Case]:
    """Yield the cases whose sizes are a step smaller: lengths first, which the time depends on."""
    (b, h, rows, d), (_, g, columns, _) = case.inputs["q"].shape, case.inputs["k"].shape
    sizes = (b, g, h // max(g, 1), rows, columns, d, case.inputs["v"].shape[3])
    both = ((3, 4), (5, 6))  # lengths, widths
    single = (0, 1, 2, 5, 6) if mechanism.one_sequence else range(7)
    for axes in (*both, *((n,) for n in single)):
        halved = tuple(max(1, n // 2) if at in axes and n else n for at, n in enumerate(sizes))
        if halved != sizes:
            yield resized(case, *halved)


def _sizes_by_axes(case: Case) -> Iterator[Case]:
    """Yield the same for a case whose inputs have axes: tokens, widths, batch and heads."""
    sizes = sizes_of(case)
    for letters in ("n", "de", "b", "hfg", "h", "d", "e"):
        smaller = {a: max(1, n // 2) if a in letters and n else n for a, n in sizes.items()}
        if smaller != sizes:
            yield resized_by(case, smaller)


def _fault(outcome: Outcome) -> tuple[str, str]:
    """Return what is wrong: the first tensor that disagrees, or what was raised, without its particulars."""
    wrong = [verdict.tensor for verdict in outcome.wrong[:1]]
    return outcome.status, outcome.detail.partition(":")[0] if outcome.detail else "".join(wrong)


def lines(
    mechanism: str, case: Case, outcome: Outcome, text: str, grad: bool, rounding: tuple[str, ...], seed: int = 0
) -> tuple[str, ...]:
    """Return six lines of Python that run a case, with what was found in the last one."""
    inputs = ", ".join(f'"{name}": {_input(given)}' for name, given in case.inputs.items())
    extra = f", grad={grad}, seed={seed}" + (f", rounding={rounding}" if rounding else "")
    told = outcome.detail or "; ".join(f"{v.place}: {v.got}, not {v.expected}" for v in outcome.wrong[:1])
    program = text.startswith("Program(")
    return (
        "import refattn as ra",
        "from refattn.mechanisms.record import Case, Input",
        f"from refattn.verify import {'Program' if program else 'load'}, verify_case",
        f'case = Case("{case.name}", "{case.kind}", {{{inputs}}}, {dict(case.options)!r})',
        f'found = verify_case(ra.mechanism("{mechanism}"), {text}, case, "{outcome.dtype}"{extra})',
        f"print(found.status, found.detail, *found.verdicts, sep='\\n')  # {told}",
    )


def _input(given: Input) -> str:
    extra = f', "{given.design}", {dict(given.numbers)!r}' if given.design != "normal" or given.numbers else ""
    axes = f', axes="{given.axes}"' if given.axes else ""
    return f"Input({given.shape}{extra}{axes})"
