"""Finds by trial what an adapter can run, for `supports`: sizes, options and types, from what it declined or raised.

Small calls are made, and only whether they run counts. First the sizes in which a call with few options runs, the
least demanding ones first: as they are, with e = d, h = g and nq = nk, in multiples of 16, 64 and 128. Then each
condition is left out again, unless a call that breaks it does not run. Then options are added one after the other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from refattn.golden.inputs import make
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.adapters.adapter import Adapter, CallError, call
from refattn.verify.outcome import Decline, Report
from refattn.verify.run import FEW
from refattn.verify.user_cases import UserCaseError, fitted, letters_of

WHERE = ("e = d", "h = g", "nq = nk")
LADDER: tuple[dict[str, Any], ...] = (
    {},
    {"n": {"multiple_of": 16}, "d": {"multiple_of": 16}},
    *({"n": {"multiple_of": step}, "d": [width]} for step in (16, 64, 128) for width in (64, 32, 128)),
)
"""Sizes that are tried in turn."""

STEPS, WIDTHS = (16, 32, 64, 128), (16, 32, 64, 96, 128, 192, 256)
"""Numbers of tokens whose multiples may be what runs, and widths."""

TRIED = 3
"""Calls that are made before something counts as what it does not run."""

LARGEST = 1 << 24
"""Products of a call that is made for a trial."""

SECONDS = 10.0
"""After these no further call is made: what is not known to run is left out."""

Supports = dict[str, Any]


def few_ran(report: Report) -> bool:
    """Tell whether a kernel declined, or raised in, so many cases that it is worth to find what it can run.

    One that hangs or ends its process would do so again in each trial.
    """
    by_case: dict[str, bool] = {}
    for one in report.outcomes:
        if one.status == "not finished" or any(words in one.detail for words in ("no gradients", "its process")):
            return False
        by_case[one.case] = by_case.get(one.case, False) or one.status in ("agrees", "disagrees")
    return len(by_case) > TRIED and sum(by_case.values()) <= FEW * len(by_case)


@dataclass
class _Trial:
    """A kernel that is called, and what became of it."""

    record: Mechanism
    kernel: Any
    cases: Sequence[Case]
    end: float
    dtype: str = ""
    known: dict[Any, bool] = field(default_factory=dict)

    def runs(self, case: Case, dtype: str = "") -> bool:
        """Tell whether a call runs; False if there is no time for it."""
        dtype = dtype or self.dtype
        about = (tuple((n, x.shape, x.design) for n, x in case.inputs.items()), repr(case.options), dtype)
        if about not in self.known:
            if time.monotonic() > self.end:
                return False
            try:
                inputs = make(self.record.name, case, dtype)
                found = call(self.kernel, inputs, case.options, dtype, None, ("out", *self.record.outputs))
                self.known[about] = not isinstance(found, Decline)
            except CallError:
                self.known[about] = False
        return self.known[about]

    def fitting(self, cases: Iterable[Case], supports: Supports) -> Iterator[Case]:
        """Yield the cases in sizes that are stated, small ones."""
        for case in cases:
            try:
                found = fitted([case], {key: x for key, x in supports.items() if key != "options"})
            except UserCaseError:
                continue
            yield from (one for one in found if _cost(one) < LARGEST)


def _cost(case: Case) -> int:
    return math.prod(case.inputs["q"].shape) * case.inputs["k"].shape[2]


def _more(case: Case) -> frozenset[str]:
    """Return the names of the arguments of a case beside q, k and v."""
    return frozenset({*case.options, *case.inputs} - {*"qkv"})


def found(record: Mechanism, kernel: Any, dtypes: Sequence[str], seconds: float = SECONDS) -> Supports | None:
    """Return what a kernel can run, as the attribute `supports` has it: what nothing speaks against is left out.

    Parameters
    ----------
    record
        The mechanism, with the cases that are to run.
    kernel
        See `refattn.verify.adapters.adapter`.
    dtypes
        The types that are asked.
    seconds
        The time after which no further call is made.

    Returns
    -------
    dict or None
        None if no call runs, or nothing has to be stated.

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.verify import found_supports
    >>> def attend(q, k, v, *, causal=False):
    ...     if v.shape != q.shape or q.shape[3] % 64:
    ...         raise ValueError("no such sizes")
    ...     return ra.softmax.forward(q, k, v, causal=causal)[0]
    >>> few = ra.mechanism("softmax")
    >>> few = few.changed(cases=tuple(map(few.case, ("plain", "causal", "unequal", "grouped", "softcap"))))
    >>> found_supports.found(few, attend, ["float32"])
    {'d': [64, 128, 192, 256], 'where': ['e = d', 'h = g', 'nq = nk'], 'options': ['causal']}
    """
    if not all({*"qkv"} <= {*case.inputs} for case in record.cases):
        return None
    adapter = Adapter.of(kernel)
    usual = sorted(record.cases, key=lambda case: (len(_more(case)), _odd(case), _cost(case)))
    trial = _Trial(record, adapter, usual, time.monotonic() + seconds)
    start = _start(trial, dtypes)
    if start is None:
        return None
    first, supports = start
    taken = _more(first)
    if first.options.get("causal") and not any(
        trial.runs(one) for one in [*trial.fitting((case for case in usual if not _more(case)), supports)][:TRIED]
    ):
        supports["fixed"] = {"causal": first.options["causal"]}
        taken -= {"causal"}
    supports = _without(trial, _equal(trial, supports, taken), taken)
    taken = _options(trial, supports, taken)
    supports = _bounded(trial, _equal(trial, supports, taken), taken)
    if {name for case in usual for name in _more(case)} - taken - {*supports.get("fixed", ())}:
        supports["options"] = sorted(taken)
    running = [dtype for dtype in dtypes if any(trial.runs(one, dtype) for one in trial.fitting([first], supports))]
    if len(running) < len(dtypes):
        supports["dtypes"] = running
    return supports or None


def _odd(case: Case) -> bool:
    """Tell whether a case is special in its sizes: few kernels are made for such."""
    return 0 in (*case.inputs["q"].shape, *case.inputs["k"].shape) or min(case.inputs["q"].shape[2:]) < 2


def _start(trial: _Trial, dtypes: Sequence[str]) -> tuple[Case, Supports] | None:
    """Return a case with few options and the least demanding sizes in which it runs, and set the type."""
    simplest: dict[frozenset[str], Case] = {}
    for case in trial.cases:
        if not _odd(case):
            simplest.setdefault(_more(case), case)
    for sizes in LADDER:
        supports = {**sizes, "where": [*WHERE]}
        for case in [*simplest.values()][: 4 * TRIED]:
            for one in trial.fitting([case], supports):
                for trial.dtype in dtypes:
                    if trial.runs(one):
                        return case, supports
    return None


def _known(trial: _Trial, supports: Supports, taken: frozenset[str]) -> list[Case]:
    """Return the cases that have no argument but those that the kernel takes."""
    return [case for case in trial.cases if _more(case) <= taken | {*supports.get("fixed", ())}]


def _needed(
    trial: _Trial, known: Iterable[Case], now: Supports, then: Sequence[Supports], breaks: Callable[[Case], bool]
) -> bool:
    """Tell whether a case that breaks a condition does not run, and does in the sizes of one that is stated in turn."""
    speaking = 0
    for case in known:
        for one in trial.fitting([case], now):
            if breaks(one):
                if trial.runs(one):
                    return False
                speaking += any(trial.runs(other) for each in then for other in trial.fitting([case], now | each))
        if speaking == TRIED:
            break
    return speaking > 0


def _equal(trial: _Trial, supports: Supports, taken: frozenset[str]) -> Supports:
    """Return what is stated with those pairs of equal sizes without which no call runs."""
    known = _known(trial, supports, taken)
    where = [*WHERE]
    for pair in WHERE:
        others = [one for one in where if one != pair]
        left, right = pair.split(" = ")
        differ = partial(_differ, left, right)
        where = where if _needed(trial, known, {**supports, "where": others}, [{"where": where}], differ) else others
    rest = {key: x for key, x in supports.items() if key != "where"}
    return {**rest, "where": where} if where else rest


def _differ(left: str, right: str, case: Case) -> bool:
    return letters_of(case)[left] != letters_of(case)[right]


def _as_wide(width: int, case: Case) -> bool:
    return letters_of(case)["d"] == width


def _without(trial: _Trial, supports: Supports, taken: frozenset[str]) -> Supports:
    """Return what is stated without sizes that no call needs."""
    known = _known(trial, supports, taken)
    for letter in ("n", "d"):
        if letter in supports:
            others = {key: x for key, x in supports.items() if key != letter}
            within = [one.inputs for one in trial.fitting(known, supports)]

            def breaks(one: Case, within: list[Any] = within) -> bool:
                return one.inputs not in within and not _odd(one)

            needed = _needed(trial, known, others, [{letter: supports[letter]}], breaks)
            supports = supports if needed else others
    return supports


def _options(trial: _Trial, supports: Supports, taken: frozenset[str]) -> frozenset[str]:
    """Return the arguments that the kernel takes, each in some call that runs."""
    fixed = frozenset(supports.get("fixed", ()))
    failures: dict[frozenset[str], int] = {}
    changed = True
    while changed:
        changed = False
        for case in sorted(trial.cases, key=lambda case: (len(_more(case) - taken - fixed), _odd(case))):
            new = _more(case) - taken - fixed
            if not new or failures.get(_more(case), 0) >= TRIED:
                continue
            tried = [*trial.fitting([case], supports)]
            if any(trial.runs(one) for one in tried):
                taken, changed = taken | new, True
                break
            failures[_more(case)] = failures.get(_more(case), 0) + max(len(tried), 1)
    return taken


def _bounded(trial: _Trial, supports: Supports, taken: frozenset[str]) -> Supports:
    """Return what is stated with the numbers of tokens and the widths that run, if some do not."""
    known = _known(trial, supports, taken)

    def breaks(one: Case, *letters: str) -> bool:
        return not _odd(one) and any(letters_of(one)[letter] % 16 for letter in letters)

    def running(letter: str, sizes: Sequence[int]) -> list[int]:
        of_size = {size: [*trial.fitting(known, {**supports, letter: [size]})] for size in sizes}
        return [size for size, cases in of_size.items() if any(map(trial.runs, cases[: 4 * TRIED]))]

    steps = [{"n": {"multiple_of": step}} for step in STEPS]
    if "n" in supports or _needed(trial, known, supports, steps, lambda one: breaks(one, "nq", "nk")):
        runs = running("n", STEPS) or [supports.get("n", {}).get("multiple_of", 16)]
        supports = {**supports, "n": {"multiple_of": min(runs)}}
    elif _needed(trial, known, supports, [{"n": {"at_least": 1}}], lambda one: 0 in _lengths(one)):
        supports = {**supports, "n": {"at_least": 1}}
    each = [{"d": [width]} for width in WIDTHS]
    if "d" in supports or _needed(trial, known, supports, each, lambda one: breaks(one, "d")):
        return {**supports, "d": running("d", WIDTHS) or supports.get("d", [64])}
    less = [{"d": {"at_most": width}} for width in WIDTHS]
    widths = sorted({letters_of(one)["d"] for one in trial.fitting(known, supports)}, reverse=True)
    limit: dict[str, Any] = {}
    for wide, width in itertools.pairwise(widths):
        here = [one for one in trial.fitting(known, supports) if letters_of(one)["d"] == wide]
        if any(map(trial.runs, here[:TRIED])):
            break
        if limit or _needed(trial, known, supports, less, partial(_as_wide, wide)):
            limit = {"d": {"at_most": width}}
    return supports | limit


def _lengths(case: Case) -> tuple[int, int]:
    found = letters_of(case)
    return found["nq"], found["nk"]


def beside(record: Mechanism, cases: Iterable[Case], before: Report) -> Mechanism:
    """Return a record of cases in the sizes that run; one whose own sizes raised is another case, by its name."""
    raised = {one.case for one in before.outcomes if one.status == "raises"}
    own = {case.name: case for case in record.cases}
    named = (
        replace(case, name=f"{case.name}-fitted") if case.name in raised and case != own[case.name] else case
        for case in cases
    )
    return record.changed(cases=tuple(case for case in named if case.name not in raised))


def as_words(supports: Supports) -> str:
    """Return what is stated in words of `refattn.verify.adapt`; what has no word is left out.

    >>> from refattn.verify import found_supports
    >>> found_supports.as_words({"n": {"multiple_of": 16}, "d": [32, 64], "where": ["e = d"], "options": ["causal"]})
    'needs=e=d n=%16 d=32,64'
    """
    words = ["needs=" + ",".join(pair.replace(" ", "") for pair in supports["where"])] if "where" in supports else []
    for name in ("n", "d", "dtypes"):
        stated = supports.get(name)
        if isinstance(stated, dict):
            least, most = (stated.get(bound, "") for bound in ("at_least", "at_most"))
            words.append(f"{name}=%{stated['multiple_of']}" if "multiple_of" in stated else f"{name}={least}..{most}")
        elif stated:
            words.append(f"{name}={','.join(map(str, stated))}")
    return " ".join(words)


def joined(
    before: Report, after: Report, record: Mechanism, supports: Supports, words: bool
) -> tuple[Mechanism, Report]:
    """Return the report of the cases in the sizes that run, with what raised in others: it is an error all the same.

    It offers what is stated as a line for the adapter, or in `words` of the command.
    """
    raised = tuple(one for one in before.outcomes if one.status == "raises")
    names = {one.case for one in raised}
    assert after.record is not None
    whole = record.changed(cases=(*(case for case in record.cases if case.name in names), *after.record.cases))
    now, then = (len({one.case for one in each.outcomes if not one.verdicts == ()}) for each in (after, before))
    place = f"in --call, {then} without (found by trial): {as_words(supports)}"
    own = f"in the adapter, {then} without (found by trial): attend.supports = {supports!r}"
    line = f"{now} cases run with this {place if words else own}"
    report = replace(after, outcomes=(*raised, *after.outcomes), record=whole, remarks=(*after.remarks, line))
    return whole, report
