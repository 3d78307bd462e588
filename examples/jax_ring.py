"""Ring attention in JAX, written plainly, as a kernel for `refattn verify --mesh`.

    refattn verify softmax --impl examples/jax_ring.py:ring --mesh tokens=4 --grad
    refattn verify softmax --impl examples/jax_ring.py:ring --mesh heads=2,tokens=4 --dtype float32

Queries, keys and values come sharded over the mesh. Each device attends the block of keys that it has, hands it to the
next one, and merges what it finds by the logarithms of the denominators; JAX differentiates the whole. It shares no
code with refattn: put yours in its place.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


@partial(jax.jit, static_argnames=("mesh", "causal", "scale", "softcap"))
def ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: Mesh,
    causal: bool | str = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e), on the mesh -> out (b, h, n_q, e), lse (b, h, n_q)."""
    offset = None if not causal else 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    batch, heads, tokens = (axis if axis in mesh.shape else None for axis in ("batch", "heads", "tokens"))
    rows, size = P(batch, heads, tokens), mesh.shape.get("tokens", 1)
    local = partial(on_one_device, size=size, offset=offset, scale=scale, softcap=softcap)
    return jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=(rows, rows), check_vma=False)(q, k, v)


def on_one_device(
    q: jax.Array, k: jax.Array, v: jax.Array, *, size: int, offset: int | None, scale: float, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of this device's queries; `offset` places query 0 among the keys, None without a mask."""
    dtype, here = q.dtype, jax.lax.axis_index("tokens") if size > 1 else 0
    wide = jnp.promote_types(dtype, jnp.float32)
    shared = q.shape[1] // k.shape[1]
    q, k, v = q.astype(wide), *(jnp.repeat(x.astype(wide), shared, axis=1) for x in (k, v))
    out, lse = jnp.zeros((*q.shape[:3], v.shape[3]), wide), jnp.full(q.shape[:3], -jnp.inf, wide)
    places = here * q.shape[2] + jnp.arange(q.shape[2])[:, None]
    for step in range(size):
        source = (here - step) % size
        scores = q @ jnp.swapaxes(k, 2, 3) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        if offset is not None:
            keys = source * k.shape[2] + jnp.arange(k.shape[2])
            scores = jnp.where(keys <= places + offset, scores, -jnp.inf)
        highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=3, initial=-jnp.inf), lse))
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights, before = jnp.exp(scores - shift[..., None]), jnp.exp(lse - shift)
        total = before + jnp.sum(weights, axis=3)
        some = total > 0.0
        total = jnp.where(some, total, 1.0)
        out = (before[..., None] * out + weights @ v) / total[..., None]
        lse = jnp.where(some, shift + jnp.log(total), -jnp.inf)
        if step + 1 < size:
            k, v = jax.lax.ppermute((k, v), "tokens", [(n, (n + 1) % size) for n in range(size)])
    return out.astype(dtype), lse


ring.framework = "jax"  # type: ignore[attr-defined]
