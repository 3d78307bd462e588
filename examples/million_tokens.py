"""A million tokens of causal higher-order attention, made piece by piece, in a state of constant size.

    python examples/million_tokens.py
    python examples/million_tokens.py --check       the recurrent form too, token by token: some minutes more

Queries, keys and values come in pieces, here from a generator of random numbers, elsewhere from a file; nothing is kept
of a piece but the state, which the next one starts from. The last output is that of attention over the whole sequence.
With --check the same is computed by the definition of the recurrence, and both last outputs are compared.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track

import refattn as ra
from refattn import counter, tree

Piece = tuple[Any, Any, Any]


def pieces(tokens: int, piece: int, heads: int, width: int, dtype: str) -> Iterator[Piece]:
    """Yield q, k and v of one piece after the other, each (1, heads, n, width)."""
    for n, start in enumerate(range(0, tokens, piece)):
        shape = (1, heads, min(piece, tokens - start), width)
        q, k, v = (counter.normal(shape, seed=0, purpose=f"million.{name}", step=n).astype(dtype) for name in "qkv")
        yield q, k, v


def last_output(sequence: Iterator[Piece], form: str) -> tuple[Any, Any]:
    """Return the output of the last token, (1, heads, 1, width), and the state after it."""
    state, out = None, None
    for q, k, v in sequence:
        if state is None:
            state = ra.higher_order.empty_state(k, v)
        out, saved = ra.higher_order.forward(q, k, v, causal=True, state=state, form=form)
        state = saved.state
    assert out is not None
    return out[:, :, -1:], state


@click.command(help=__doc__.partition("\n")[0])
@click.option("--tokens", type=click.IntRange(1), default=1_000_000, show_default=True, help="Length of the sequence.")
@click.option("--piece", type=click.IntRange(1), default=16384, show_default=True, help="Tokens that exist at once.")
@click.option("--heads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--width", type=click.IntRange(1), default=16, show_default=True, help="Width of queries and values.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float64", show_default=True)
@click.option("--check", is_flag=True, help="Compare with the recurrent form.")
def main(tokens: int, piece: int, heads: int, width: int, dtype: str, check: bool) -> None:
    """Run the sequence, in chunks and, if asked, as a recurrence."""
    console = Console(highlight=False)
    last = {}
    for form in ("chunked", "recurrent") if check else ("chunked",):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sequence = pieces(tokens, piece, heads, width, dtype)
        shown = track(sequence, form, total=-(-tokens // piece), console=console, transient=True)
        last[form], state = last_output(iter(shown), form)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = sum(x.nbytes for x in tree.flatten(state).values())
        console.print(
            f"{form}: {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s), a state of {size} bytes, "
            f"peak memory {(after - before) / 1024:.1f} MiB above the start"
        )
    if check:
        whole, steps = last["chunked"], last["recurrent"]
        console.print(
            f"last outputs differ by {np.max(np.abs(whole - steps)) / np.max(np.abs(steps)):.1e} of the largest"
        )


if __name__ == "__main__":
    main()
