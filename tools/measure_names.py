"""How often `refattn verify` names what is wrong in kernels with real bugs: each is left out of the known ones.

    python -m tools.measure_names                    # softmax in float32, about two minutes
    python -m tools.measure_names delta              # or higher_order
    python -m tools.measure_names --dtype bfloat16 --misses
    python -m tools.measure_names --known            # the fault itself is not left out
    python -m tools.measure_names --step 7 --first 3 # every seventh, from the fourth on

Each fault of `refattn/verify/bugs` is run as a kernel on all designed cases, once without gradients and once with
them. *Right* is an equation or convention that the fault is an error of, a fault that is an error of the same, or a
convention that the probe found. A fault counts as named, too, if what is named first explains everything and its
numbers are those of the fault in all failing cases: nothing tells them apart. What no designed case catches is not
counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np

import refattn as ra
from refattn.mechanisms.record import Case, Mechanism
from refattn.mechanisms.wrong import WrongKernel
from refattn.verify.bugs.emulator import Unknown
from refattn.verify.bugs.fault import BACKWARD, faults
from refattn.verify.diagnose.error_templates import Templates
from refattn.verify.diagnose.known import ACTS, errors_with_names, results_of
from refattn.verify.diagnose.known import Named as Error
from refattn.verify.diagnose.mutants import kernel
from refattn.verify.diagnose.suspects import suspects
from refattn.verify.outcome import Suspects, Truth
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge

Failing = tuple[Case, Truth]


@dataclass(frozen=True)
class Named:
    """What was named of a fault.

    Attributes
    ----------
    caught
        Whether some designed case failed.
    place
        Of the first right suspect, from 1; 0 where there is none.
    count
        How many suspects there were.
    best
        The first two.
    """

    fault: WrongKernel
    caught: bool
    place: int
    count: int
    best: str


def right(fault: WrongKernel, found: Suspects, by_words: dict[str, WrongKernel]) -> int:
    """Return the place of the first right suspect; 1 where nothing is named and the place is right."""
    for place, one in enumerate(found.ranked, start=1):
        names = {*one.ids, one.kind}
        kind = one.kind.removeprefix(BACKWARD)
        other = next((known for words, known in by_words.items() if kind.startswith(words)), None)
        names |= {*other.of} if one.sort == "fault" and other else set()
        names |= {*kind.split()} if one.sort == "input" else set()
        if names & {*fault.of} or (other is not None and other.name == fault.name):
            return place
    return 1 if {*found.near} & {*fault.of} else 0


def same(record: Mechanism, dtype: str, fault: WrongKernel, found: Suspects, failing: list[Failing]) -> bool:
    """Tell whether what is named first has the numbers of a fault in all failing cases, far within what is granted."""
    first = found.ranked[0] if found.ranked else None
    if first is None or first.whole < first.failing:
        return False
    known = [one for one in errors_with_names(record, (fault.name,)) if one[0].in_words(one[1]) == first.kind]
    return any(all(_alike(record, dtype, case, one, fault, error) for case, one in failing) for error in known)


def _alike(record: Mechanism, dtype: str, case: Case, one: Truth, fault: WrongKernel, error: Error) -> bool:
    templates = Templates(record, case, one, {})
    try:
        of_fault, of_error = (
            results_of(named, templates, one.upstream is not None) for named in ((fault, fault.usual), error)
        )
    except (ArithmeticError, ValueError):
        return False
    names = {name for name in (*of_fault, *of_error) if name in templates.targets}
    compared = {*of_fault} & {*of_error} & names
    if "out" not in compared or any(np.shape(of_fault[name]) != np.shape(of_error[name]) for name in compared):
        return False
    return all(
        float(np.max(np.abs(templates.errors(name, of_fault[name], np.asarray(of_error[name]))), initial=0.0)) <= ACTS
        for name in compared
    )


def measured(
    record: Mechanism, dtype: str, *, grad: bool, step: int = 1, first: int = 0, known: bool = False, only: str = ""
) -> Iterator[Named]:
    """Yield what is named of every `step`-th fault from the `first` on, each with the second of its tile sizes."""
    truths = [(case, truth(record, case, dtype, grad=grad)) for case in record.cases]
    by_words = {one.wrong: one for one in faults(record.name)}
    for fault in faults(record.name)[first::step]:
        if (fault.backward and not grad) or only not in fault.name:
            continue
        given = []
        for case, one in truths:
            try:
                result = kernel(record, case, one, dtype, fault, size=fault.usual)
            except Unknown:  # an option that the emulated kernel does not have
                continue
            given.append((case, one, result, not all(verdict.agrees for verdict in judge(result, one))))
        found = suspects(record, dtype, given, without=() if known else (fault.name,))
        if found is None:
            yield Named(fault, False, 0, 0, "")
            continue
        best = "; ".join(f"{'/'.join(one.ids)} {one.kind}".strip() for one in found.ranked[:2]) or "nothing"
        place = right(fault, found, by_words)
        if not 1 <= place <= 2 and same(
            record, dtype, fault, found, [(case, one) for case, one, _, bad in given if bad]
        ):
            place = 1
        yield Named(fault, True, place, len(found.ranked), best)


@click.command()
@click.argument("mechanism", default="softmax")
@click.option("--dtype", default="float32", show_default=True, help="The storage type.")
@click.option("--step", default=1, help="Every so many-th fault.")
@click.option("--first", default=0, help="From this one on, counted from 0.")
@click.option("--known", is_flag=True, help="Do not leave the fault itself out.")
@click.option("--misses", is_flag=True, help="Print what is not named among the first two.")
@click.option("--only", default="", help="Faults with this in their name.")
@click.option(
    "--grad/--outputs", "part", default=None, help="With gradients, or outputs alone; both if neither is given."
)
def main(
    mechanism: str, dtype: str, step: int, first: int, known: bool, misses: bool, only: str, part: bool | None
) -> None:
    """Measure how often real bugs are named."""
    record = ra.mechanism(mechanism)
    for grad in (False, True) if part is None else (part,):
        rows = list(measured(record, dtype, grad=grad, step=step, first=first, known=known, only=only))
        caught = [one for one in rows if one.caught]
        two, nothing = sum(1 <= one.place <= 2 for one in caught), sum(one.count == 0 for one in caught)
        what = "outputs and gradients" if grad else "outputs"
        click.echo(
            f"{mechanism}, {dtype}, {what}: {len(caught)} of {len(rows)} faults caught; "
            f"named right among the first two: {100.0 * two / max(len(caught), 1):.1f} %, "
            f"first {sum(one.place == 1 for one in caught)}, "
            f"nothing named: {100.0 * nothing / max(len(caught), 1):.1f} %"
        )
        for one in rows if misses else ():
            if not one.caught:
                click.echo(f"    {one.fault.name}: not caught")
            elif not 1 <= one.place <= 2:
                click.echo(f"    {one.fault.name} ({'/'.join(one.fault.of)}): place {one.place}: {one.best}")


if __name__ == "__main__":
    main()
