"""Attention to a sequence that lies on many devices: on the virtual ones of a CPU, and on those of several processes.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/sharded.py --mesh heads=2,tokens=4
    python examples/sharded.py --processes 2 --mesh tokens=4

The first runs in one process. The second starts two, which find each other over loopback and talk by gloo, each with
half of the devices: so it is on a cluster or a TPU pod, where each machine starts the same program and names the first
one (there `jax.distributed.initialize()` needs no arguments). No process ever has the whole sequence: each makes the
shards of its own devices. What comes out is compared, shard by shard, with one device's.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from typing import Any

import click
import numpy as np

import refattn as ra
from refattn import philox
from refattn.shards import mesh, parallel

SHAPE = (2, 4, 64, 8)
"""Batch, heads, tokens and width; axes are multiples of those of the mesh."""


@click.command(help=__doc__.partition("\n")[0])
@click.option("--mesh", "text", default="heads=2,tokens=4", show_default=True, help="How devices share the work.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Start so many, on loopback.")
@click.option("--rank", type=int, hidden=True)
@click.option("--at", hidden=True)
def main(text: str, processes: int, rank: int | None, at: str | None) -> None:
    """Run here, or in processes that this one starts."""
    if processes > 1 and rank is None:
        sys.exit(started(text, processes))
    import jax

    sizes = mesh.sizes_of(text)
    jax.config.update("jax_enable_x64", True)
    if rank is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()) // processes)
        jax.distributed.initialize(at, num_processes=processes, process_id=rank)
    else:
        mesh.use_devices(math.prod(sizes.values()))
    on = mesh.make(sizes)
    print(f"process {jax.process_index()} of {jax.process_count()}: {len(jax.local_devices())} of {on.size} devices")
    for name, implementation in (("softmax", "dense"), ("softmax", None), ("higher_order", None)):
        print(
            f"{name} {implementation or 'over shards'}: differs by {difference(name, implementation, on):.1e} of it",
            flush=True,
        )


def difference(name: str, implementation: str | None, on: Any) -> float:
    """Return how far shards of outputs and gradients are from one device's, relative to the largest number.

    With an implementation the mechanism runs as it is: XLA says what devices send to each other. Without one it is the
    implementation that is written for shards.
    """
    import jax

    q, k, v, d_out = (philox.normal(SHAPE, seed=0, purpose=f"sharded.{name}") for name in ("q", "k", "v", "d_out"))
    core, options = (
        (ra.mechanism(name).core, {"implementation": implementation}) if implementation else (parallel(name, on), {})
    )
    lie = mesh.sharding(on, ("batch", "heads", "tokens", None))

    @jax.jit
    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, saved = core.forward(q, k, v, causal=True, **options)
        found = core.backward(saved, d_out)
        return {"out": out, **{name: found[name] for name in "qkv"}}

    # Each process is asked for the shards of its own devices alone; here it cuts them from the whole.
    got = both(*(jax.make_array_from_callback(SHAPE, lie, lambda part, x=x: x[part]) for x in (q, k, v, d_out)))
    out, saved = ra.mechanism(name).core.forward(q, k, v, causal=True)
    expected = {"out": out, **ra.mechanism(name).core.backward(saved, d_out)}
    return max(
        float(np.max(np.abs(np.asarray(shard.data) - expected[name][shard.index])) / np.max(np.abs(expected[name])))
        for name, x in got.items()
        for shard in x.addressable_shards
    )


def started(text: str, processes: int) -> int:
    """Start the processes of a group on this machine, and wait for them; return the largest exit code."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--mesh", text, "--processes", str(processes), "--at", at]
    # Each has devices of its own number, whatever this process was told.
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    group = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(processes)]
    try:
        return max(abs(process.wait()) for process in group)
    finally:
        for process in group:
            process.kill()


if __name__ == "__main__":
    main()
