"""How many parts of a campaign end in a second, by the number of Dask workers on this machine.

    python -m tools.throughput growing koopman --page docs/campaigns.md    # some minutes

Each row is `refattn check` of the same mechanisms, without `--full`, on a cluster of its own: processes of one thread,
which still have to import what they run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from docs.experiments.page import put, table
from refattn.many_runs import Where
from refattn.verify.selfcheck.check import check_all

WORKERS = (1, 2, 4)


def row(names: tuple[str, ...], workers: int) -> list[str]:
    """Return the cells of a number of workers."""
    from distributed import LocalCluster

    parts = 0

    def count(ended: Sequence[Any]) -> Sequence[Any]:
        nonlocal parts
        parts = len(ended)
        return ended

    with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        cluster.wait_for_workers(workers)
        where = Where(scheduler=cluster.scheduler_address)
        before = time.perf_counter()
        found = [*check_all(names, where=where, progress=count)]
        seconds = time.perf_counter() - before
    assert not any(one.exit_code for one in found)
    return [str(workers), str(parts), f"{seconds:.0f}", f"{parts / seconds:.2f}"]


@click.command()
@click.argument("mechanisms", nargs=-1, required=True, metavar="MECHANISM...")
@click.option("--page", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Write the table there.")
def main(mechanisms: tuple[str, ...], page: Path | None) -> None:
    """Print the table."""
    rows = [row(mechanisms, workers) for workers in WORKERS]
    text = table([["workers", "parts", "seconds", "parts per second"], *rows])
    text += f"\n\n`python -m tools.throughput {' '.join(mechanisms)}` on {os.cpu_count()} CPUs that did nothing else."
    click.echo(text)
    if page is not None:
        put(page, {"throughput": text})


if __name__ == "__main__":
    main()
