"""A million tokens of causal higher-order attention, made piece by piece, in a state of constant size.

    python examples/million_tokens.py
    python examples/million_tokens.py --check       the recurrent implementation too, token by token: some minutes more
    python examples/million_tokens.py --tokens 8388608 --heads 1 --dtype float32 --devices 8

The third line has the whole sequence at once, on 1 and on 8 devices of JAX, each with its part; those of a CPU are
virtual and share its cores. The last outputs are compared.

Queries, keys and values come in pieces, here from a generator of random numbers, elsewhere from a file; nothing is kept
of a piece but the state, which the next one starts from. The last output is that of attention over the whole sequence.
With --check the same is computed by the definition of the recurrence, and both last outputs are compared.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Iterator
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track

import refattn as ra
from refattn import philox, tree

Piece = tuple[Any, Any, Any]


def pieces(tokens: int, piece: int, heads: int, width: int, dtype: str) -> Iterator[Piece]:
    """Yield q, k and v of one piece after the other, each (1, heads, n, width)."""
    for n, start in enumerate(range(0, tokens, piece)):
        yield made(n, (1, heads, min(piece, tokens - start), width), dtype)


def made(n: int, shape: tuple[int, ...], dtype: str) -> Piece:
    """Return q, k and v of piece number n."""
    q, k, v = (philox.normal(shape, seed=0, purpose=f"million.{name}", step=n).astype(dtype) for name in "qkv")
    return q, k, v


def last_output(sequence: Iterator[Piece], implementation: str) -> tuple[Any, Any]:
    """Return the output of the last token, (1, heads, 1, width), and the state after it."""
    state, out = None, None
    for q, k, v in sequence:
        if state is None:
            state = ra.higher_order.empty_state(k, v)
        out, saved = ra.higher_order.forward(q, k, v, causal=True, state=state, implementation=implementation)
        state = saved.state
    assert out is not None
    return out[:, :, -1:], state


def over_devices(
    tokens: int, piece: int, heads: int, width: int, dtype: str, devices: int
) -> tuple[Any, Any, float, int]:
    """Return the last output, the last state, the seconds of a run, and the bytes that a device holds meanwhile."""
    import jax

    from refattn.shards import measure, mesh, parallel

    if tokens % (devices * piece):
        raise click.ClickException(f"--tokens: got {tokens}, needs a multiple of {devices} devices x {piece} tokens")
    on = mesh.make({"tokens": devices})
    lie, shape = mesh.sharding(on, (None, None, "tokens", None)), (1, heads, tokens, width)

    @functools.cache
    def shard(start: int, stop: int) -> Piece:
        whole = range(start // piece, stop // piece)
        parts = [made(n, (1, heads, piece, width), dtype) for n in whole]
        q, k, v = (np.concatenate(x, axis=2) for x in zip(*parts, strict=True))
        return q, k, v

    def part(n: int, at: Any) -> Any:
        start, stop, _ = at[2].indices(tokens)
        return shard(start, stop)[n]

    arrays = [jax.make_array_from_callback(shape, lie, functools.partial(part, n)) for n in range(3)]
    shard.cache_clear()
    core = parallel("higher_order", on, piece=min(piece, 1024))

    def run(q: Any, k: Any, v: Any) -> Any:
        out, saved = core.forward(q, k, v, causal=True)
        return out[:, :, -1:], saved.state, out

    compiled = jax.jit(run).lower(*arrays).compile()
    start = time.perf_counter()
    last, state, _ = jax.block_until_ready(compiled(*arrays))
    return last, state, time.perf_counter() - start, measure.held(compiled, tokens).bytes


@click.command(help=__doc__.partition("\n")[0])
@click.option("--tokens", type=click.IntRange(1), default=1_000_000, show_default=True, help="Length of the sequence.")
@click.option("--piece", type=click.IntRange(1), default=16384, show_default=True, help="Tokens that exist at once.")
@click.option("--heads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--width", type=click.IntRange(1), default=16, show_default=True, help="Width of queries and values.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float64", show_default=True)
@click.option("--devices", type=click.IntRange(1), metavar="N", help="The whole sequence on 1 and on N devices of JAX.")
@click.option("--check", is_flag=True, help="Compare with the recurrent implementation.")
def main(tokens: int, piece: int, heads: int, width: int, dtype: str, devices: int | None, check: bool) -> None:
    """Run the sequence, in chunks and, if asked, as a recurrence."""
    console = Console(highlight=False)
    last = {}
    if devices:
        from refattn.shards import mesh

        mesh.use_devices(devices)
        outputs = []
        for count in sorted({1, devices}):
            out, _, seconds, held = over_devices(tokens, piece, heads, width, dtype, count)
            outputs.append(np.asarray(out))
            rate, size = tokens / seconds, held / 2**20
            console.print(f"devices {count}: {tokens} tokens in {seconds:.1f} s ({rate:.0f}/s), {size:.1f} MiB on each")
        error = np.max(np.abs(outputs[0] - outputs[-1])) / np.max(np.abs(outputs[0]))
        console.print(f"last outputs differ by {error:.1e} of the largest")
        return
    for implementation in ("chunked", "recurrent") if check else ("chunked",):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sequence = pieces(tokens, piece, heads, width, dtype)
        shown = track(sequence, implementation, total=-(-tokens // piece), console=console, transient=True)
        last[implementation], state = last_output(iter(shown), implementation)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = sum(x.nbytes for x in tree.flatten(state).values())
        console.print(
            f"{implementation}: {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s), a state of "
            f"{size} bytes, peak memory {(after - before) / 1024:.1f} MiB above the start"
        )
    if check:
        whole, steps = last["chunked"], last["recurrent"]
        console.print(
            f"last outputs differ by {np.max(np.abs(whole - steps)) / np.max(np.abs(steps)):.1e} of the largest"
        )


if __name__ == "__main__":
    main()
