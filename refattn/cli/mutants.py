"""``refattn mutants``: what a test suite is worth, by the wrong kernels that it rejects."""

from __future__ import annotations

from typing import Any

import click

from refattn.cli.arguments import NOTHING_RUN, Name, Problem, Seconds, check_writable, json_option, record_of
from refattn.cli.output import deliver, progress


@click.command("mutants", short_help="Serve wrong kernels to a test suite, and count those that it rejects.")
@click.argument("mechanism", type=Name())
@click.option("--suite", required=True, metavar="CMD", help="The command that runs the suite: 0 where it passes.")
@click.option("--only", default="", metavar="TEXT", help="Faults with this in their name.")
@click.option("--every", default=1, metavar="N", type=click.IntRange(1), help="Every N-th of them.")
@click.option(
    "--timeout", type=Seconds(), default=600.0, metavar="SECONDS", help="A run that takes longer is a rejection."
)
@json_option
@click.pass_context
def mutants(
    ctx: click.Context, mechanism: str, suite: str, only: str, every: int, timeout: float, file: str | None
) -> None:
    """Run a suite that calls torch's scaled_dot_product_attention with known faults in its place, one after the other.

    A fault that gives the right results in all that the suite calls is not counted; it tells which shapes are missing.

    Exit codes: 0 all that were wrong are rejected; 1 some are not; 2 the suite fails as it is; 3 nothing was served.
    """
    check_writable(file)
    record = record_of(mechanism)
    from refattn.verify import mutated
    from refattn.verify.report import mutation

    kernels = mutated.chosen(record.name, only, every)
    if not kernels:
        click.echo(
            f"refattn: {record.name}: no fault of its kernels is known, or none has {only!r} in its name", err=True
        )
        ctx.exit(NOTHING_RUN)
    try:
        with progress("mutants", "kernels") as wrap:
            fates = list(mutated.score(suite, wrap(kernels), timeout=timeout))
    except mutated.SuiteError as error:
        raise Problem(f"--suite: {error}") from error
    killed, count = mutated.worth(fates)
    rows: list[dict[str, Any]] = [
        {"name": one.fault.name, "wrong": one.fault.in_words(one.size), "link": one.fault.link, "status": one.status}
        for one in fates
    ]
    data = {"mechanism": record.name, "suite": suite, "killed": killed, "wrong": count, "kernels": rows}
    deliver(lambda **implementation: mutation.lines(rows, killed, count, **implementation), data, file)
    ctx.exit(0 if killed == count and count else 1 if count else NOTHING_RUN)
