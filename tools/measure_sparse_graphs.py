"""Time and memory of graph energy attention on sparse graphs, forward and backward, up to 131,072 tokens.

    python -m tools.measure_sparse_graphs
    python -m tools.measure_sparse_graphs --most 16384 --state token

Each token has links to 16 tokens on either side; one head of width 16 in float32, five Euler steps with the coupling
sin. Memory is the most that was allocated beside what there was before the call, as tracemalloc counts it.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import click
import numpy as np

import refattn as ra
from refattn import counter
from refattn.mechanisms.graph_energy import core


def call(n: int, state: str) -> None:
    """Run forward and backward on n tokens."""
    q, k, v = (counter.normal((1, 1, n, 16), seed=0, purpose=f"sparse.{name}").astype(np.float32) for name in "qkv")
    graph = ra.graph_energy.window_graph(n, 16, q)
    options: dict[str, Any] = {"state": state, "coupling": "sin", "steps": 5}
    out, saved = core.forward(q, k, v, graph=graph, **options)
    core.backward(saved, out)


def measured(n: int, state: str) -> tuple[float, float]:
    """Return the seconds of a call, and its peak in MiB, each of a call of its own."""
    begin = time.perf_counter()
    call(n, state)
    seconds = time.perf_counter() - begin
    tracemalloc.start()
    call(n, state)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 2**20


@click.command()
@click.option("--most", default=131072, help="The largest number of tokens.")
@click.option("--state", type=click.Choice(["feature", "token"]), default="feature")
def main(most: int, state: str) -> None:
    """Print a table of time and memory by the number of tokens."""
    call(64, state)
    click.echo("| tokens | edges | seconds | peak, MiB | all pairs, MiB |\n| --- | --- | --- | --- | --- |")
    n = 2048
    while n <= most:
        seconds, peak = measured(n, state)
        click.echo(f"| {n:,} | {32 * n - 272:,} | {seconds:.3g} | {peak:.3g} | {4 * n * n / 2**20:,.0f} |")
        n *= 4


if __name__ == "__main__":
    main()
