"""Verification in parts: some cases each, in processes or on a cluster, which start the kernel for them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from refattn import many_runs
from refattn.files import source_digest
from refattn.many_runs import Unit, Where
from refattn.mechanisms import registry
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.adapters.isolate import Isolated
from refattn.verify.adapters.program import Program
from refattn.verify.outcome import Outcome, Verdict
from refattn.verify.run import verify_case
from refattn.verify.tolerance.sampled import is_long

PART = 32
"""Cases for which a kernel is started once."""


@dataclass(frozen=True)
class Given:
    """A kernel as any process can start it: `impl` or, with its `outputs`, the command `program`."""

    impl: str
    program: str
    outputs: tuple[str, ...]
    seconds: float

    @property
    def digest(self) -> str:
        """Of the file of `impl`, where it is one: what imports or runs it may have changed all the same."""
        file = Path(self.impl.rpartition(":")[0])
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    @contextmanager
    def started(self) -> Iterator[Any]:
        """Start it, and end it."""
        if self.program:
            yield Program(self.program, self.outputs, self.seconds)
            return
        with Isolated(self.impl, self.seconds) as kernel:
            yield kernel


def outcomes(
    mechanism: Mechanism,
    kernel: Any,
    given: Given,
    where: Where,
    plan: Sequence[tuple[Case, str]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    **asked: Any,
) -> list[Outcome]:
    """Return the outcomes of cases, each with its dtype; `asked` is what `verify_case` takes by keyword.

    What an outcome has `seen` stays where it was. In a type in which something disagrees `kernel`, which is
    `given` in this process, runs the cases again: suspects are found from the arrays.
    """
    units = [
        Unit(
            f"verify {named(mechanism)} {given} {given.digest} {asked} "
            f"{[(_text(case), dtype) for case, dtype in part]}",
            run_part,
            (mechanism.address, given, part, asked),
        )
        for part in (plan[n : n + PART] for n in range(0, len(plan), PART))
    ]
    found: dict[Unit, Any] = dict(many_runs.run(units, where, progress=progress, lost=_lost))
    if any(part["reference"] for part in found.values()):
        kernel.reference = True
    kernel.interpreted = max((part["interpreted"] for part in found.values()), key=len, default="")
    listed = [_outcome(**facts) for unit in units for facts in found[unit]["outcomes"]]
    wrong = {one.dtype for one in listed if one.status == "disagrees"}
    for n, (case, dtype) in enumerate(plan):
        if dtype in wrong and listed[n].verdicts and not is_long(mechanism, case):
            again = verify_case(mechanism, kernel, case, dtype, **asked)
            listed[n] = replace(listed[n], seen=again.seen)
    return listed


def named(mechanism: Mechanism) -> str:
    """Return what tells a mechanism from all others: of one from another package its address and its code's digest."""
    if mechanism.name in registry.list_mechanisms():
        return mechanism.name
    return f"{mechanism.address} {source_digest(mechanism.home) if mechanism.home in sys.modules else ''}"


def run_part(name: str, given: Given, plan: Sequence[tuple[Case, str]], asked: dict[str, Any]) -> dict[str, Any]:
    """Run some cases by a kernel that is started for them; return the facts of `outcomes` for JSON."""
    record = registry.mechanism(name)
    with given.started() as kernel:
        found = [verify_case(record, kernel, case, dtype, **asked) for case, dtype in plan]
        listed = [asdict(replace(one, seen=None)) for one in found]
        told = {"reference": getattr(kernel, "reference", False) is True}
        return {"outcomes": listed, **told, "interpreted": getattr(kernel, "interpreted", "")}


def _lost(unit: Unit) -> dict[str, Any]:
    _, _, plan, _ = unit.arguments
    listed = [asdict(Outcome(case.name, case.kind, dtype, "raises", many_runs.ENDED)) for case, dtype in plan]
    return {"outcomes": listed, "reference": False, "interpreted": ""}


def _outcome(verdicts: Sequence[dict[str, Any]], **facts: Any) -> Outcome:
    return Outcome(**facts, verdicts=tuple(Verdict(**{**one, "index": tuple(one["index"])}) for one in verdicts))


def _text(case: Case) -> str:
    """Return all that a case is; of arrays that a user gave their digest."""
    arrays = {name: np.asarray(x) for name, x in case.given.items()}
    digests = [(name, x.dtype, x.shape, hashlib.sha256(x.tobytes()).hexdigest()) for name, x in arrays.items()]
    return f"{case!r} {digests}"
