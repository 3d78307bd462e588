"""What a device holds of a long sequence on 1, 2, 4 and 8 of them, how far results are from one device's, and the time.

    nice python -m tools.devices                                 # a table to docs/benchmarks/devices.md: minutes
    nice python -m tools.devices --tokens 65536 --out FILE       # with a shorter sequence of higher-order attention

The devices are virtual ones of a CPU, which share its cores, or those that JAX has.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np

from refattn import philox
from refattn.shards import measure, mesh, parallel

ROOT = Path(__file__).parents[1]
COUNTS = (1, 2, 4, 8)
CALLS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("softmax", 4096, {}),
    ("higher_order", 16384, {"piece": 64}),
    ("delta", 16384, {"piece": 64}),
)
"""Forward and backward, causal, 2 heads of width 8, float64: mechanism, tokens, and how shards are run."""

TEXT = """# Over devices

What each device holds of one long sequence whose tokens are shared out, how far results are from one device's, and how
long a run takes. Made by `python -m tools.devices` with JAX {jax}, on {cores} cores of a CPU. The
devices are virtual: they share these cores, so that times say that nothing is lost, and not what is won.

## Forward and backward

Causal, 2 heads of width 8, float64, by the implementations for [many devices](../backends.md#many-devices): a ring of
keys for `softmax`, a scan of states for the others. Memory is that of arguments, results and all on the way, as XLA
counts it.

{both}

## {tokens} tokens

`python examples/million_tokens.py --tokens {tokens} --heads 1 --dtype float32 --devices 8`: the forward of higher-order
attention of one head of width 16, with all queries, keys, values and outputs held at once.

{long}
"""


def measured(name: str, tokens: int, how: dict[str, Any], count: int) -> tuple[dict[str, Any], int, float]:
    """Return results, the bytes on each device, and the seconds of a second run."""
    import jax

    on = mesh.make({"tokens": count})
    lie = mesh.sharding(on, (None, None, "tokens", None))
    core: Any = parallel(name, on, **how)
    scale = 0.25 if name == "delta" else 1.0  # so that what is not decayed stays small
    given = [scale * philox.normal((1, 2, tokens, 8), seed=0, purpose=f"devices.{x}") for x in ("q", "k", "v", "d_out")]
    options = {} if name == "delta" else {"causal": True}

    def both(q: Any, k: Any, v: Any, d_out: Any) -> dict[str, Any]:
        out, saved = core.forward(q, k, v, **options)
        found = core.backward(saved, d_out)
        return {"out": out, **{x: found[x] for x in "qkv"}}

    arrays = [jax.device_put(x, lie) for x in given]
    compiled = jax.jit(both).lower(*arrays).compile()
    found = jax.block_until_ready(compiled(*arrays))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arrays))
    seconds = time.perf_counter() - start
    return {n: np.asarray(x) for n, x in found.items()}, measure.held(compiled, tokens).bytes, seconds


def differ(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest number of each array."""
    return max(float(np.max(np.abs(got[n] - x)) / np.max(np.abs(x))) for n, x in expected.items())


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the text of a table."""
    head = ("mechanism", "tokens", "devices", "MiB on each", "of one", "differs by", "seconds")
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def example() -> ModuleType:
    """Return examples/million_tokens.py."""
    spec = importlib.util.spec_from_file_location("million_tokens", ROOT / "examples/million_tokens.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@click.command(help=__doc__.partition("\n")[0])
@click.option("--tokens", type=click.IntRange(1), default=2**23, show_default=True, help="Of the long sequence.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "docs/benchmarks/devices.md", help="The page.")
def main(tokens: int, out: Path) -> None:
    """Measure, and write the page."""
    import jax

    mesh.use_devices(max(COUNTS))
    jax.config.update("jax_enable_x64", True)
    rows, expected, whole = [], {}, 0

    def row(name: str, tokens: int, count: int, held: int, error: float, seconds: float) -> tuple[str, ...]:
        part = f"{held / whole:.3f}"
        numbers = (str(count), f"{held / 2**20:.1f}", part, "" if count == 1 else f"{error:.0e}", f"{seconds:.2f}")
        print(name, tokens, *numbers, flush=True)
        return (f"`{name}`", str(tokens), *numbers)

    for name, length, how in CALLS:
        for count in COUNTS:
            found, held, seconds = measured(name, length, how, count)
            if count == 1:
                expected, whole = found, held
            rows.append(row(name, length, count, held, differ(found, expected), seconds))
    long = []
    for count in (1, max(COUNTS)):
        last, _, seconds, held = example().over_devices(tokens, 16384, 1, 16, "float32", count)
        found = {"last": np.asarray(last)}
        if count == 1:
            expected, whole = found, held
        long.append(row("higher_order", tokens, count, held, differ(found, expected), seconds))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = TEXT.format(jax=jax.__version__, cores=cores, both=table(rows), tokens=tokens, long=table(long))
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
