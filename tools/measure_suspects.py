"""How often `refattn verify` names the right equation: every mutant that is caught, its own error templates left out.

    python -m tools.measure_suspects                    # all mechanisms, float32: about five minutes
    python -m tools.measure_suspects softmax --dtype bfloat16
    python -m tools.measure_suspects softmax --family   # all relatives of the mutant are left out too
    python -m tools.measure_suspects softmax --misses   # also what is not among the first two

A row tells how many mutants were caught, and for how many of them, in percent, the right equation is the first of the
suspects, or among the first two; then the same where an equation counts as the right one if some error in it gives
exactly the same results.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

import refattn as ra
from refattn.verify.diagnose.leave_one_out import Found, found


def percent(count: int, of: int) -> str:
    """Return a part in percent."""
    return f"{100.0 * count / of:.1f}" if of else ""


def row(name: str, dtype: str, rows: Sequence[Found]) -> str:
    """Return a line of the table."""
    counts = [
        sum(one.place <= most for one in rows) if strict else sum(one.class_place <= most for one in rows)
        for strict in (True, False)
        for most in (1, 2)
    ]
    cells = "  ".join(f"{percent(count, len(rows)):>9}" for count in counts)
    return f"{name:<14}{dtype:<10}{len(rows):>6}  {cells}"


HEADER = f"{'mechanism':<14}{'dtype':<10}{'caught':>6}  {'first':>9}  {'first two':>9}  {'or same':>9}  {'in two':>9}"


@click.command()
@click.argument("mechanisms", nargs=-1, metavar="[MECHANISM]...")
@click.option("--dtype", default="float32", show_default=True, help="The storage type.")
@click.option("--family", is_flag=True, help="Leave out all relatives of the mutant: all factors, all shifts, ...")
@click.option("--misses", is_flag=True, help="Print the mutants whose equation is not among the first two.")
def main(mechanisms: tuple[str, ...], dtype: str, family: bool, misses: bool) -> None:
    """Measure how often the right equation is among the first suspects."""
    click.echo(HEADER)
    total: list[Found] = []
    for name in mechanisms or ra.list_mechanisms():
        record = ra.mechanism(name)
        if record.core is None:
            continue
        rows = list(found(record, dtype, family=family))
        total += rows
        click.echo(row(name, dtype, rows))
        for one in rows if misses else ():
            if one.place > 2:
                click.echo(f"    {one.mutant}: place {one.place}, or same {one.class_place}")
    click.echo(row("all", dtype, total))


if __name__ == "__main__":
    main()
