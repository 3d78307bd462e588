"""What ``refattn verify`` runs in place of the designed cases, or beside them: shapes and arrays of the user's own."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refattn.cli.arguments import Problem

if TYPE_CHECKING:
    from refattn.mechanisms.record import Case, Mechanism
    from refattn.verify.outcome import Report

TRIED = 8
"""Cases that are tried to see whether there is float64."""


def seed_of(text: str) -> int:
    """Return the seed that was asked for; of "random" one that nobody knows before."""
    if text == "random":
        return secrets.randbelow(1 << 32)
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise Problem(f"--seed: got {text!r}, needs a whole number, or random")
    return int(text)


def sizes_of_large(shapes: Sequence[str]) -> dict[str, Any]:
    """Return the heads and the width that a shape beside --large has."""
    found: dict[str, Any] = {}
    if len(shapes) > 1:
        raise Problem(f"--large: got --shape {len(shapes)} times, needs it once at most")
    for part in ",".join(shapes).split(",") if shapes else ():
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in ("h", "d") or not value.isdecimal() or int(value) < 1:
            raise Problem(f"--large: got --shape {shapes[0]!r}, needs the number of heads and the width, h=2,d=16")
        found[{"h": "heads", "d": "width"}[name]] = int(value)
    return found


def own_cases(record: Mechanism, asked: Any) -> tuple[Mechanism, tuple[str, ...], tuple[str, ...]]:
    """Return the record with the cases that were asked for in place of its own, the type of captured arrays, and what
    was guessed or set aside of them, in words.
    """
    from refattn.verify import captured, user_cases

    dtypes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    cases, option = [], "--shape"
    try:
        cases += [user_cases.from_text(record, text) for text in asked.shapes]
        option = "--cases"
        cases += [] if asked.listed is None else user_cases.from_file(record, Path(asked.listed))
        option = "--inputs"
        if asked.inputs is not None:
            found = captured.readings(record, Path(asked.inputs), **_how_read(asked))[0]
            cases, dtypes, remarks = [*cases, found.case], (found.dtype,), found.remarks
            if found.results:
                remarks += (
                    f"not judged: {', '.join(found.results)} of {asked.inputs}, which is judged without a kernel",
                )
    except user_cases.UserCaseError as error:
        raise Problem(f"{option}: {error}") from error
    named = {case.name: case for case in cases}
    return record.changed(cases=tuple(named.values())), dtypes, remarks


def _how_read(asked: Any) -> dict[str, Any]:
    """Return how a file of arrays is read, as `refattn.verify.captured.readings` takes it."""
    from refattn.verify import captured

    options = {name: x for text in asked.options for name, x in captured.options_of(text).items()}
    dtype = asked.dtypes[0] if asked.dtypes else ""
    return {"rename": renamed_by(asked), "options": options, "axes": asked.axes or "", "dtype": dtype}


def renamed_by(asked: Any) -> dict[str, str]:
    """Return what --rename says."""
    from refattn.verify.names import renamed

    try:
        return {theirs: ours for text in asked.rename for theirs, ours in renamed(text).items()}
    except ValueError as error:
        raise Problem(f"--rename: {error}") from error


def of_dump(record: Mechanism, asked: Any) -> tuple[Mechanism, Report, tuple[Mechanism, Report] | None]:
    """Return the record with the call of a dump as its case, the report on what the file says was returned, and that
    on a part where the call is long.
    """
    from refattn.verify import captured, user_cases

    if len(asked.dtypes) > 1:
        raise Problem(f"--inputs: got --dtype {', '.join(asked.dtypes)}, needs one: what was returned is of one type")
    try:
        found = captured.readings(record, Path(asked.inputs), **_how_read(asked))
        if "out" not in found[0].results:
            got = ", ".join(found[0].case.given)
            needs = "out to be judged, or --impl or --exec to run a kernel on it; --rename THEIRS=out says what is out"
            raise Problem(f"--inputs: {asked.inputs}: got {got}, needs {needs}")
        return captured.judged(record, found, Path(asked.inputs).name, asked.rounding)
    except user_cases.UserCaseError as error:
        raise Problem(f"--inputs: {error}") from error


def some_of(record: Mechanism, names: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases of these names, which may stand in one text; all if none is named."""
    asked = [name.strip() for text in names for name in text.split(",")]
    known = {case.name: case for case in record.cases}
    if unknown := [name for name in asked if name not in known]:
        near = get_close_matches(unknown[0], known, 5, 0.5) or [*known]
        raise Problem(f"--case: got {unknown[0]!r}, needs a case of {record.name}, such as {', '.join(near[:5])}")
    return tuple(known[name] for name in dict.fromkeys(asked)) or record.cases


def supported(
    record: Mechanism, kernel: Any, dtypes: tuple[str, ...], *, given: bool
) -> tuple[Mechanism, tuple[str, ...]]:
    """Return the record with its cases in sizes that an adapter states it can run, and the types that it states."""
    from refattn.verify import user_cases
    from refattn.verify.adapters.adapter import Adapter

    try:
        return user_cases.supported(record, Adapter.of(kernel).supports, dtypes, given=given)
    except user_cases.UserCaseError as error:
        raise Problem(str(error)) from error


def without_float64(record: Mechanism, kernel: Any) -> str:
    """Return why a kernel that has float32 has no float64, from the first case that it runs; "" where it has.

    It raises there, or returns another type.
    """
    from refattn.verify.run import verify_case

    for case in record.cases[:TRIED]:
        usual = verify_case(record, kernel, case, "float32")
        if usual.status == "declined":
            continue
        if usual.status in ("raises", "not finished") or any(one.statistic == "dtype" for one in usual.verdicts):
            return ""
        wide = verify_case(record, kernel, case, "float64")
        of_dtype = [f"{one.tensor} is {one.got}" for one in wide.verdicts if one.statistic == "dtype"]
        return wide.detail if wide.status == "raises" else "; ".join(of_dtype)
    return ""
