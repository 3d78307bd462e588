"""What goes through a verification, as data: a truth and a result, the verdict on each tensor, outcomes and reports.

A report is of a foreign kernel (`Report`, with its `Suspects` where it failed), or of laws and checks, a `Row`
each (`CheckReport`).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.files import write_output
from refattn.mechanisms import registry
from refattn.mechanisms.record import Case, Mechanism
from refattn.messages import shown

Floats = NDArray[np.float64]

LONGEST = 100_000
"""Characters of a text in a report as JSON; what a kernel or a program says is shorter."""

SCHEMA_VERSION = 1  # of reports as JSON: it grows where a field goes or changes its meaning


class Decline(Exception):  # noqa: N818 (it is no error: most kernels return it)
    """Returned or raised by a kernel that does not do what it was asked; the case counts as declined, not as failed.

    >>> import refattn as ra
    >>> from refattn.verify import verify_case
    >>> def attend(q, k, v, **options):
    ...     return ra.Decline("no options") if options else ra.softmax.forward(q, k, v)[0]
    >>> record = ra.mechanism("softmax")
    >>> verify_case(record, attend, record.case("softcap"), "float32").status
    'declined'
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Result:
    """What one call returned, on the host: tensors by name, the dtypes that they came in, why gradients are missing
    where they were asked, and the ids of the equations that were returned as outputs."""

    tensors: dict[str, NDArray[Any]]
    dtypes: dict[str, str]
    declined: str = ""
    judged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Truth:
    """One case in one storage type.

    Attributes
    ----------
    inputs
        The arrays that a kernel is given.
    upstream
        Gradient with respect to `out`; None where no gradients are asked.
    values
        Outputs ("out", "lse", ...) and gradients ("d_q", ...) in float64.
    variance
        By the same names, the square of the error that is granted, per element and against the rounded truth.
    bias
        By the same names, the root mean square of the bias statistic (see `bias_of`) of honest results: constants that
        are rounded once, a scale for instance, push all elements the same way.
    stored
        By the same names, the type that a result is stored in.
    exact
        The names of those that have to be equal to the rounded truth.
    further
        Gradients with respect to outputs beside `out`, by the names of the backward's arguments: "d_lse".
    factors
        In formats with factors these of q, k and v, by the argument of a kernel that they are: "descale"; {} in others.
    times
        The same as what each element is multiplied by, broadcast.
    along
        The direction of the derivatives "t_out" and "h_q", ..., by the names of the inputs; {} where none are asked.
    """

    inputs: dict[str, NDArray[Any]]
    upstream: NDArray[Any] | None
    values: dict[str, Floats]
    variance: dict[str, Floats]
    bias: dict[str, float]
    stored: dict[str, str]
    exact: frozenset[str] = frozenset()
    further: dict[str, NDArray[Any]] = field(default_factory=dict)
    factors: dict[str, tuple[NDArray[Any], ...]] = field(default_factory=dict)
    times: dict[str, NDArray[Any]] = field(default_factory=dict)
    along: dict[str, NDArray[Any]] = field(default_factory=dict)

    def beside(self, **more: Mapping[str, Any]) -> Truth:
        """Return the truth with more entries in some of its dicts, such as `values`."""
        joined: dict[str, Any] = {name: {**getattr(self, name), **entries} for name, entries in more.items()}
        return replace(self, **joined)


def share_text(share: float) -> str:
    """Return a share with two digits behind the point, rounded away from the limit where it is above."""
    if not math.isfinite(share):
        return "inf"
    if share > 1.0:
        share = math.ceil(share * 100.0 - 1e-9) / 100.0
    return f"{share:.2f}" if share < 1000.0 else ">1000"  # how much more tells nothing


@dataclass(frozen=True)
class Verdict:
    """What became of one tensor.

    Attributes
    ----------
    tensor
        "out", "lse", "d_q", ...
    share
        Used share of the allowed error, by the statistic that used most; infinite where an earlier rung failed.
    statistic
        "element", "row", "whole" or "bias", or the rung that failed: "shape", "dtype", "non-finite", "exact".
    index
        Of the worst element; () where there is none.
    got, expected
        The values there, or what the failed rung saw, in words.
    error, largest
        How far the worst element is off, and the largest element that was expected; None where no number was judged.
    """

    tensor: str
    share: float
    statistic: str
    index: tuple[int, ...]
    got: str
    expected: str
    error: float | None = None
    largest: float | None = None

    @property
    def off(self) -> str:
        """The error beside the largest element that was expected, "5e-08 of 0.016"; "" where no number was judged."""
        return "" if self.error is None else f"{self.error:.2g} of {self.largest:.2g}"

    @property
    def agrees(self) -> bool:
        """Whether the tensor is within its budget."""
        return self.share <= 1.0

    @property
    def at(self) -> str:
        """The index as text, "[0,1]"; "" if there is none."""
        return f"[{','.join(map(str, self.index))}]" if self.index else ""

    @property
    def place(self) -> str:
        """The tensor and the index as text, "out[0,1]"."""
        return f"{self.tensor}{self.at}"


@dataclass(frozen=True)
class Outcome:
    """What became of one case in one dtype.

    Attributes
    ----------
    status
        "agrees", "disagrees", or with `detail` "raises", "declined" or "not finished" within its time limit.
    verdicts
        One per tensor that was returned.
    seen
        What was judged: the truth, and what was returned; None where nothing was, or by samples alone.
    note
        What the verdicts stand on, where it is not the definition on the whole case.

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.verify import verify_case
    >>> def attend(q, k, v):
    ...     raise NotImplementedError("soon")
    >>> record = ra.mechanism("softmax")
    >>> outcome = verify_case(record, attend, record.case("tiny"), "float32")
    >>> outcome.status, outcome.detail.splitlines()[-1]
    ('raises', 'raised NotImplementedError: soon')
    """

    case: str
    kind: str
    dtype: str
    status: str
    detail: str = ""
    verdicts: tuple[Verdict, ...] = ()
    seen: tuple[Truth, Result] | None = field(default=None, repr=False, compare=False)
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", shown(self.detail))

    @property
    def failed(self) -> bool:
        """Whether it disagrees or raises."""
        return self.status in ("disagrees", "raises")

    @property
    def wrong(self) -> tuple[Verdict, ...]:
        """The verdicts that disagree."""
        return tuple(verdict for verdict in self.verdicts if not verdict.agrees)

    def told(self) -> list[str]:
        """Return in lines what is wrong: what was raised, and each result that disagrees."""
        lines = [
            f"{v.place} is {v.got}, needs {v.expected}: {share_text(v.share)} of the allowed error ({v.statistic})"
            f"{f', off by {v.off}' if v.off else ''}"
            for v in self.wrong
        ]
        return [*filter(None, [self.detail]), *lines]


@dataclass(frozen=True)
class Line:
    """An equation with its formula, the file and line that compute it, and what stands there."""

    id: str
    formula: str
    place: str
    code: str


@dataclass(frozen=True)
class Suspect:
    """An equation, or several that cannot be told apart, and the error in it that comes nearest to what was got; or an
    error with a name.

    Attributes
    ----------
    equations
        In the order of the code; () for a convention, an input, or a fault of storing.
    kind
        The error, in words.
    share
        Used share of the allowed error where results are judged against those of the reference with this error: up to
        1 they agree with it.
    explained
        How much of the squared error this error explains, times a number.
    together
        How much all errors of the first equation that are known explain, each times a number.
    sort
        "equation"; "convention", "fault" (a known bug), "input" or "storing" where the error has a name.
    link
        The report that a fault is modelled on.
    cases, failing
        The failing cases that it explains, and how many there are.
    whole
        How many of these it explains with their gradients, or has results for no more than agree.
    """

    equations: tuple[Line, ...]
    kind: str
    share: float
    explained: float
    together: float
    sort: str = "equation"
    link: str = ""
    cases: tuple[str, ...] = ()
    failing: int = 0
    whole: int = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the equations."""
        return tuple(line.id for line in self.equations)


@dataclass(frozen=True)
class Departure:
    """The first value that does not follow from those before it.

    Attributes
    ----------
    case
        The case.
    given
        The equations that values were given for, in order.
    verdict
        On the value: its `tensor` is the id of an equation, or a result.
    between
        The equations that compute it from the values before.
    """

    case: str
    given: tuple[str, ...]
    verdict: Verdict
    between: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a result is wrong.

    Attributes
    ----------
    tensor
        The result.
    words
        What is true of it in every case that it is wrong in: "only batch 1", "rows from 16 on"; () where it is wrong
        everywhere, or in another place each time.
    case
        The case with the most errors, for the next four.
    batches, heads, rows, columns
        Where it has some, by their indices; () where the result has no such axis. Rows of d_k and d_v are keys.
    part
        The part of its elements that is wrong.
    """

    tensor: str
    words: tuple[str, ...]
    case: str
    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    part: float


@dataclass(frozen=True)
class Suspects:
    """What a failed verification says about where the error is.

    Attributes
    ----------
    dtype, cases
        What was looked at.
    wrong, right
        The results that disagree in some of these cases, and those that agree in all.
    count
        How many equations the core has.
    possible
        Those that can disturb all that is wrong; () where none can.
    narrow
        Of these, those that disturb nothing that is right.
    ranked
        The most likely first.
    departure
        The first value of its own that does not follow from those before it; None where none was given, or all follow.
    between
        Where the equations stand that compute it from those.
    places
        Where each result that disagrees is wrong.
    which
        What the cases that fail have in common, in words, or "".
    near
        Where nothing is ranked, the equations that come nearest all the same: they tell of the place, not of the error.

    Examples
    --------
    >>> import dataclasses, refattn as ra
    >>> from refattn.verify import locate, verify
    >>> record = ra.mechanism("softmax")
    >>> few = dataclasses.replace(record, cases=(record.case("tiny"),))
    >>> def doubled(q, k, v):
    ...     return ra.softmax.forward(q, 2.0 * k, v)[0]
    >>> suspects = locate(few, verify(few, doubled, dtypes=["float32"])).suspects
    >>> suspects.wrong, [line.id for line in suspects.ranked[0].equations]
    (('out',), ['SM.1'])
    """

    dtype: str
    cases: tuple[str, ...]
    wrong: tuple[str, ...]
    right: tuple[str, ...]
    count: int
    possible: tuple[str, ...]
    narrow: tuple[str, ...]
    ranked: tuple[Suspect, ...]
    departure: Departure | None
    between: tuple[Line, ...]
    places: tuple[Place, ...] = ()
    which: str = ""
    near: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the lines that a report has on them."""
        return "\n".join(" " * columns + text for columns, text in _shown_by("suspects").lines(self))

    def _repr_html_(self) -> str:
        return _shown_by("page").verbatim([repr(self)])


@dataclass(frozen=True)
class Precision:
    """What would explain the failures in a dtype.

    With `roundings` declared (see `refattn.verify.tolerance.budget.Roundings`) those cases agree that were judged once
    more, `cases` of those `failing`.
    """

    dtype: str
    roundings: dict[str, str]
    cases: int
    failing: int


class Judged:
    """What reports of both sorts have: whether all agrees, as a truth value, an exception or a file."""

    @property
    def exit_code(self) -> int:
        """0 where all that ran agrees."""
        raise NotImplementedError

    @property
    def passed(self) -> bool:
        """Whether something was run and all of it agrees; ``bool(report)`` is the same."""
        return self.exit_code == 0

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the diagnosis if something disagrees or nothing was run."""
        __tracebackhide__ = True  # pytest then shows the caller's line
        if not self.passed:
            raise AssertionError(repr(self))

    def to_junit(self, path: str | Path | None = None) -> str:
        """Return the report as JUnit's XML, which servers that build and test show; write it to a file, too."""
        return _written(_shown_by("junit").junit(self), path)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_output(str(path), text.encode("utf-8", "backslashreplace"))
    return text


def _shown_by(name: str) -> Any:
    """Return a module of `report`, which knows what is shown here and is loaded when somebody looks."""
    return importlib.import_module(f"refattn.verify.report.{name}")


def _as_json(data: dict[str, Any], path: str | Path | None) -> dict[str, Any]:
    data = for_json(data)
    if path is not None:
        _written(json.dumps(data, indent=2) + "\n", path)
    return data


@dataclass(frozen=True)
class Report(Judged):
    """All outcomes of one kernel.

    ``repr(report)`` is the diagnosis in about ten lines. A notebook shows the top of the page that `to_html` writes.

    Attributes
    ----------
    suspects
        Where the error is (`refattn.verify.diagnose.suspects.locate`); None where nobody asked, or no number disagrees.
    smallest, least
        The smallest case that fails, as lines of Python (`refattn.verify.shrink`), and with what was found.
    conventions
        Where something fails, those that are not the conventions of refattn: see `refattn.verify.adapters.conventions`.
    seed
        Of the random numbers of the inputs.
    reference
        Whether the kernel, in a process of its own, has loaded a definition that others are judged by.
    interpreted
        What interprets the kernel on the CPU, which configurations ran, and what that does not see; "" if nothing does.
    precision
        Where something fails, what it may have rounded that would explain it: see `refattn.verify.tolerance.precision`.
    left_out
        Why float64, which nobody asked for by name, was not run; "" where it was.
    not_run
        In words, the cases that did not run in time or did not finish, and what cases are there for and none that ran
        does: to cross a tile or chunk, or, where most cases were declined, the features that none has.
    waiting
        How many cases did not run, as the time was over or the run was interrupted.
    require_all
        Whether that is a failure.
    framework, device
        The library whose arrays the kernel is given, and where they lie; "" for NumPy's.
    no_attention
        What it returns in all cases if it computes no attention at all, in words; "" otherwise.
    remarks
        What was guessed, or set aside, of a file of arrays or of an adapter's options, in words.
    record
        The record that was verified against, with the cases that were run; None for that of the mechanism.
    located
        Whether the error was looked for.

    Examples
    --------
    >>> import dataclasses, refattn as ra
    >>> from refattn.verify import verify
    >>> record = ra.mechanism("softmax")
    >>> few = dataclasses.replace(record, cases=(record.case("tiny"),))
    >>> report = verify(few, lambda q, k, v: ra.softmax.forward(q, k, v)[0], dtypes=["float32"])
    >>> report.counts()["all"], report.exit_code, report.to_json()["exit_code"]
    ({'run': 1, 'agreed': 1, 'failed': 0, 'declined': 0}, 0, 0)
    """

    mechanism: str
    kernel: str
    grad: bool
    outcomes: tuple[Outcome, ...]
    suspects: Suspects | None = None
    smallest: tuple[str, ...] = ()
    least: tuple[Case, Outcome] | None = None
    conventions: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    reference: bool = False
    interpreted: str = ""
    precision: tuple[Precision, ...] = ()
    left_out: str = ""
    not_run: tuple[str, ...] = ()
    waiting: int = 0
    require_all: bool = False
    framework: str = ""
    device: str = ""
    no_attention: str = ""
    remarks: tuple[str, ...] = ()
    record: Mechanism | None = field(default=None, compare=False)
    located: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        """Return what was verified, the diagnosis and the verdict."""
        return _shown_by("tables").short(self, self.against)

    def _repr_html_(self) -> str:
        return _shown_by("page").top(self, self.against)

    @property
    def against(self) -> Mechanism:
        """The record that was verified against."""
        return self.record or registry.listed(self.mechanism)

    @property
    def failed(self) -> list[Outcome]:
        """The outcomes that disagree or raise."""
        return [outcome for outcome in self.outcomes if outcome.failed]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many cases agreed, failed and were declined: by case class, then "all".

        A case that did not finish is none of these; `not_run` names it.
        """
        table: dict[str, dict[str, int]] = {}
        for outcome in self.outcomes:
            if outcome.status == "not finished":
                continue
            column = {"agrees": "agreed", "declined": "declined"}.get(outcome.status, "failed")
            for kind in (outcome.kind, "all"):
                row = table.setdefault(kind, {"run": 0, "agreed": 0, "failed": 0, "declined": 0})
                row[column] += 1
                row["run"] += column != "declined"
        total = table.pop("all", {"run": 0, "agreed": 0, "failed": 0, "declined": 0})
        return {**table, "all": total}

    @property
    def exit_code(self) -> int:
        """0 all that ran agree, 1 something fails, 3 nothing ran, not all cases finished, or not all required."""
        total = self.counts()["all"]
        if total["failed"]:
            return 1
        unfinished = self.waiting or any(outcome.status == "not finished" for outcome in self.outcomes)
        return 3 if unfinished or not total["run"] or (self.require_all and self.not_run) else 0

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the report as a page for a browser that needs no other file; write it to a file, too."""
        version = importlib.import_module("refattn").__version__
        return _written(_shown_by("page").page(self, self.against, version), path)

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the report as plain data for JSON, as `refattn/verify/report/report.schema.json` describes it.

        With a path, write it to a file, too.
        """
        plain = tuple(replace(one, seen=None) for one in self.outcomes)
        data = dataclasses.asdict(replace(self, outcomes=plain, least=None, record=None))
        del data["least"], data["record"], data["located"]
        suspects = data["suspects"] or {"departure": None}
        for outcome in data["outcomes"]:
            del outcome["seen"]
        departure = [suspects["departure"]["verdict"]] if suspects["departure"] else []
        for verdict in (*(each for one in data["outcomes"] for each in one["verdicts"]), *departure):
            verdict["agrees"] = verdict["share"] <= 1.0
            if verdict["statistic"] not in ("shape", "dtype"):
                verdict |= {name: _number(verdict[name]) for name in ("got", "expected")}
        about = {"schema_version": SCHEMA_VERSION, "kind": "cases"}
        answers = (
            [[word, text] for word, text in _shown_by("diagnosis").lines(self, self.against)] if self.failed else []
        )
        more = {"diagnosis": answers, "counts": self.counts(), "exit_code": self.exit_code}
        return _as_json({**about, **data, **more}, path)


def for_json(data: Any) -> Any:
    """Return what JSON can say: null in place of a number that is not finite, and no half of a pair of characters."""
    if isinstance(data, dict):
        return {shown(name): for_json(x) for name, x in data.items()}
    if isinstance(data, list | tuple):
        return [for_json(x) for x in data]
    if isinstance(data, float):
        return float(data) if math.isfinite(data) else None
    return data if data is None or isinstance(data, bool | int) else shown(data, LONGEST)


def _number(text: str) -> float | str:
    """Return the number that a text is; the text where it is none, or not finite, for which JSON has no numbers."""
    try:
        return float(text) if math.isfinite(float(text)) else text
    except ValueError:
        return text


@dataclass(frozen=True)
class Row:
    """What became of one check.

    Attributes
    ----------
    section
        "implementations", "loops", "equations", "properties", "gradients", "devices", ....
    name
        What was checked.
    status
        "agrees", "disagrees" or "not run".
    share
        The largest used share of the allowed error: infinite where no error is allowed or something raised, None where
        nothing was measured.
    detail
        Where that was, what went wrong, or how to get what is missing.

    Examples
    --------
    >>> from refattn.verify.outcome import Row
    >>> row = Row("laws", "causal", "disagrees", 12.5, "row 3 feels key 4")
    >>> row.status, row.share
    ('disagrees', 12.5)
    """

    section: str
    name: str
    status: str
    share: float | None
    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", shown(self.detail))


@dataclass(frozen=True)
class CheckReport(Judged):
    """All rows of one mechanism on one backend.

    >>> from refattn.verify.outcome import CheckReport, Row
    >>> wrong = Row("laws", "causal", "disagrees", 12.5, "row 3 feels key 4")
    >>> report = CheckReport("softmax", "numpy", False, (wrong,))
    >>> report.counts(), report.exit_code, report.to_json()["rows"][0]["share"]
    ({'agrees': 0, 'disagrees': 1, 'not run': 0}, 1, 12.5)
    """

    mechanism: str
    backend: str
    require_all: bool
    rows: tuple[Row, ...]
    full: bool = False  # otherwise a sample was run

    def __repr__(self) -> str:
        """Return the rows that disagree, and the verdict."""
        wrong = (f"{one.section}: {one.name}: {one.detail}" for one in self.rows if one.status == "disagrees")
        return "\n".join((*wrong, _shown_by("tables").check_closing(self)))

    def counts(self) -> dict[str, int]:
        """Return the number of rows by status."""
        return {status: sum(row.status == status for row in self.rows) for status in ("agrees", "disagrees", "not run")}

    @property
    def exit_code(self) -> int:
        """0 all that ran agrees, 1 something disagrees, 3 nothing ran or, where all is required, not all did."""
        counts = self.counts()
        if counts["disagrees"]:
            return 1
        return 3 if not counts["agrees"] or (self.require_all and counts["not run"]) else 0

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the report as plain data for JSON; a share that is not finite is null.

        With a path, write it to a file, too.
        """
        data = dataclasses.asdict(self)
        about = {"schema_version": SCHEMA_VERSION, "kind": "checks"}
        return _as_json({**about, **data, "counts": self.counts(), "exit_code": self.exit_code}, path)
