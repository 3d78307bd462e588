"""The memory that a call makes resident beside what it holds at once: what the allocator adds.

    python -m asv_benchmarks.resident

Where it adds much, blocks of many sizes leave holes between results. NumPy's arrays are told to `tracemalloc`, which
counts what is held at once; memory of other libraries it does not see, so that only refattn is asked.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from asv_benchmarks.comparison import Point, describe, load
from asv_benchmarks.comparisons import HELD
from asv_benchmarks.sides import STEADY, Worker, closing, held_to


def measure(name: str, point: Point, threads: int) -> tuple[int, int]:
    """Return by how many bytes a call of refattn lifts what is resident, and how many it holds at once."""
    side = next(side for side in load(name).sides if side.ours)
    worker = Worker({**held_to(threads), **STEADY, **side.env})
    with closing({side.label: worker}):
        worker.ask("make", target=side.target, params=dict(point))
        return worker.ask("memory")["bytes"], worker.ask("live")["bytes"]


def main() -> None:
    """Print the table."""
    table = Table("call", "threads", "resident, MiB", "held at once, MiB", "ratio")
    for name, point, threads in HELD:
        resident, held = measure(name, point, threads)
        sizes = (f"{x / 2**20:.1f}" for x in (resident, held))
        table.add_row(f"{name} {describe(point)}", str(threads), *sizes, f"{resident / held:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
