"""One call over many devices of JAX: what a sequence needs that does not fit one of them.

The same source runs on sharded arrays as it is: `jax.jit` and a `NamedSharding` are enough, and XLA says what has to
be sent where. What it would gather is written out here, by the mechanism's own forward and backward on each shard:

- `mesh`: devices by the axes `batch`, `heads` and `tokens`, and how arrays lie on them;
- `keys`: attention to shards of the keys, merged by lse; a ring;
- `states`: recurrences whose state goes from shard to shard;
- `measure`: what a compiled function holds on each device.

Nothing here knows a mechanism by name: those whose core has an lse are of the first kind, and those whose backward
takes the gradient of a state are of the second.
"""

from __future__ import annotations

import inspect
from typing import Any

from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism, Unsupported
from refattn.shards.keys import Keys
from refattn.shards.states import States

__all__ = ["Keys", "States", "kind_of", "parallel"]


def kind_of(record: Mechanism) -> type[Keys] | type[States] | None:
    """Return how shards of a mechanism's tokens work together; None where nothing is written for it."""
    if record.core is None:
        return None
    pulls = inspect.signature(record.core.backward).parameters
    return Keys if "d_lse" in pulls else States if "d_state" in pulls else None


def parallel(mechanism: str | Mechanism, mesh: Any, **options: Any) -> Keys | States:
    """Return the core of a mechanism over a mesh of devices: an object with ``forward`` and ``backward``.

    Parameters
    ----------
    mechanism
        A name of `refattn.list_mechanisms`, or a record.
    mesh
        A `jax.sharding.Mesh` with axes among "batch", "heads" and "tokens".
    **options
        Of `refattn.shards.keys.Keys` or `refattn.shards.states.States`, such as the implementation that runs on a
        shard.

    Raises
    ------
    Unsupported
        Where the mechanism has neither an lse nor a state, by which shards of its tokens could work together.
    """
    record = registry.record_of(mechanism, "parallel(mechanism, mesh)")
    kind = kind_of(record)
    if kind is None:
        raise Unsupported(
            f"mechanism: got {record.name}, needs one with an lse or a state; others run under jax.jit as they are"
        )
    return kind(record, mesh, **options)
