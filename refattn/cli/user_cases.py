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


def own_cases(
    record: Mechanism, shapes: Sequence[str], file: str | None, arrays: str | None
) -> tuple[Mechanism, tuple[str, ...]]:
    """Return the record with the cases that were asked for in place of its own, and the type of captured arrays."""
    from refattn.verify import user_cases

    dtypes: tuple[str, ...] = ()
    cases, option = [], "--shape"
    try:
        cases += [user_cases.from_text(record, text) for text in shapes]
        option = "--cases"
        cases += [] if file is None else user_cases.from_file(record, Path(file))
        option = "--inputs"
        if arrays is not None:
            case, dtype = user_cases.captured(record, Path(arrays))
            cases, dtypes = [*cases, case], (dtype,)
    except user_cases.UserCaseError as error:
        raise Problem(f"{option}: {error}") from error
    named = {case.name: case for case in cases}
    return record.changed(cases=tuple(named.values())), dtypes


def some_of(record: Mechanism, names: Sequence[str], quick: bool) -> tuple[Case, ...]:
    """Return the cases of these names, which may stand in one text, or the fewest that have every feature once."""
    from refattn.mechanisms.case_features import fewest

    asked = [name.strip() for text in names for name in text.split(",")]
    known = {case.name: case for case in record.cases}
    if unknown := [name for name in asked if name not in known]:
        near = get_close_matches(unknown[0], known, 5, 0.5) or [*known]
        raise Problem(f"--case: got {unknown[0]!r}, needs a case of {record.name}, such as {', '.join(near[:5])}")
    cases = tuple(known[name] for name in dict.fromkeys(asked)) or record.cases
    return fewest(cases) if quick else cases


def supported(
    record: Mechanism, kernel: Any, dtypes: tuple[str, ...], *, given: bool
) -> tuple[Mechanism, tuple[str, ...]]:
    """Return the record with its cases in sizes that an adapter states it can run, and the types that it states."""
    from refattn.golden.storage_types import DTYPES
    from refattn.verify import user_cases
    from refattn.verify.adapters.adapter import attribute

    stated = attribute(kernel, "supports")
    if stated is None:
        return record, dtypes
    if not isinstance(stated, dict):
        raise Problem(f"supports: got {stated!r}, needs a dict of sizes by their letters")
    types = stated.get("dtypes", ())
    types = (types,) if isinstance(types, str) else tuple(types)
    if unknown := [name for name in types if name not in DTYPES]:
        raise Problem(f"supports: got the dtype {unknown[0]!r}, needs some of {', '.join(DTYPES)}")
    try:
        cases = user_cases.fitted(record.cases, stated)
    except (user_cases.UserCaseError, TypeError, ValueError) as error:
        raise Problem(f"supports: {str(error).removeprefix('supports: ')}") from error
    if not cases:
        raise Problem(f"supports: got {stated!r}, which no case can be made to fit")
    return record.changed(cases=tuple(cases)), dtypes if given else types or dtypes


def without_float64(record: Mechanism, kernel: Any) -> str:
    """Return why a kernel that has float32 has no float64, from the first case that it runs; "" where it has.

    It raises there, or returns another type.
    """
    from refattn.verify.run import verify_case

    for case in record.cases[:TRIED]:
        usual = verify_case(record, kernel, case, "float32")
        if usual.status == "declined":
            continue
        if usual.status == "raises" or any(one.statistic == "dtype" for one in usual.verdicts):
            return ""
        wide = verify_case(record, kernel, case, "float64")
        of_dtype = [f"{one.tensor} is {one.got}" for one in wide.verdicts if one.statistic == "dtype"]
        return wide.detail if wide.status == "raises" else "; ".join(of_dtype)
    return ""
