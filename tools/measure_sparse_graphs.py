"""Time and memory of graph energy attention on sparse graphs and levels, forward and backward, up to 131,072 tokens.

    python -m tools.measure_sparse_graphs
    python -m tools.measure_sparse_graphs --most 16384 --state token
    python -m tools.measure_sparse_graphs --state levels
    python -m tools.measure_sparse_graphs --state all --most 2048

Each token has links to 16 tokens on either side; one head of width 16 in float32, five Euler steps with the coupling
sin. "levels" are three, of every token, every 4th and every 16th, of each of which a token reads the last 16; "all" is
one level where a token reads all earlier ones. Memory is the most that was allocated beside what there was before the
call, as tracemalloc counts it.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import click
import numpy as np

import refattn as ra
from refattn import philox
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.layer import hierarchy


def inputs(n: int) -> list[Any]:
    """Return queries, keys and values."""
    return [philox.normal((1, 1, n, 16), seed=0, purpose=f"sparse.{name}").astype(np.float32) for name in "qkv"]


def call(arrays: list[Any], state: str) -> None:
    """Run forward and backward."""
    n, options = arrays[0].shape[2], dict[str, Any](coupling="sin", steps=5)
    if state == "levels":
        out, levels = hierarchy.forward(*arrays, causal=True, **options)
        hierarchy.backward(levels, out)
        return
    options |= (
        {"causal": True}
        if state == "all"
        else {"state": state, "graph": ra.graph_energy.window_graph(n, 16, arrays[0])}
    )
    out, saved = core.forward(*arrays, **options)
    core.backward(saved, out)


def measured(n: int, state: str) -> tuple[float, float]:
    """Return the seconds of a call, and its peak in MiB, each of a call of its own."""
    arrays = inputs(n)
    begin = time.perf_counter()
    call(arrays, state)
    seconds = time.perf_counter() - begin
    tracemalloc.start()
    call(arrays, state)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 2**20


@click.command()
@click.option("--most", default=131072, help="The largest number of tokens.")
@click.option("--state", type=click.Choice(["feature", "token", "levels", "all"]), default="feature")
def main(most: int, state: str) -> None:
    """Print a table of time and memory by the number of tokens."""
    call(inputs(64), state)
    sparse = state in ("feature", "token")
    head = ["tokens", *(["edges"] if sparse else []), "seconds", "peak, MiB", "all pairs, MiB"]
    click.echo(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    n = 2048 if sparse else 1024
    while n <= most:
        seconds, peak = measured(n, state)
        cells = [f"{n:,}", *([f"{32 * n - 272:,}"] if sparse else []), f"{seconds:.3g}", f"{peak:.3g}"]
        click.echo(f"| {' | '.join([*cells, f'{4 * n * n / 2**20:,.0f}'])} |")
        n *= 4 if sparse else 2


if __name__ == "__main__":
    main()
