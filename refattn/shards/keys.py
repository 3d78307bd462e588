"""Keys over devices: softmax attention to each shard of the keys, merged by the logarithms of the denominators.

Each device keeps its queries. A block of keys and values is attended where it is, and then goes to the next device of
the ring, until all have come by. What a device knows after some blocks is the softmax over their keys, `out` and `lse`,
and of two such sets A and B of keys::

    lse = log(exp lse_A + exp lse_B),    out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

Backward the blocks go round again, each with the gradients of its keys and values, which after a whole turn are home.
With w = exp(lse_A - lse), the share of A, the gradients of what A alone gives are::

    d out_A = w d_out,    d lse_A = w (d_out . (out_A - out) + d_lse)

and the mechanism's own backward does the rest. It is run block by block, so nothing is as long as the sequence in two
axes, and a device holds one block beside its own.

Letters: b batch, h query head, i query, j key, e width of values; of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.record import Mechanism
from refattn.shards.mesh import over, spec
from refattn.xp import Array, is_array, raised

PLANE = ("mask", "bias", "keep")
"""Options that broadcast to (b, h, i, j): a device has the rows of its queries, whole."""


@dataclass(frozen=True)
class Saved:
    """What `Keys.backward` reads: the arguments, and the results, with the queries padded."""

    lse: Array  # (b, h, i) of the queries that there are
    given: Mapping[str, Array]
    static: Mapping[str, Any]
    padded: tuple[Array, Array]  # out (b, h, i, e) and lse (b, h, i)
    like: Mapping[str, Array]


class Keys:
    """The core of a mechanism that has an lse, with queries and keys over the devices of an axis `tokens`.

    Parameters
    ----------
    record
        The mechanism.
    mesh
        Of axes among `refattn.shards.mesh.AXES`. Heads of queries and of keys have to be multiples of its `heads`;
        tokens that are no multiple of its `tokens` are padded.
    implementation
        The implementation that attends one block.
    """

    def __init__(self, record: Mechanism, mesh: Any, implementation: str = "auto") -> None:
        assert record.core is not None
        self.core, self.mesh, self.implementation = record.core, mesh, implementation
        self.size = mesh.shape.get("tokens", 1)

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Saved]:
        """Return what the core's forward returns, out and a `Saved` with lse; same options but `implementation`."""
        like = {"q": q, "k": k, "v": v, **{name: x for name, x in options.items() if is_array(x)}}
        given, static = self._enter(q, k, v, options)
        rows = spec(self.mesh, "batch", "heads", "tokens")

        def local(given: dict[str, Array]) -> tuple[Array, Array]:
            return self._forward(given, static)

        padded = over(self.mesh, local, (self._specs(given),), rows)(given)
        out, lse = (x[:, :, : q.shape[2], ...] for x in padded)
        return out.astype(q.dtype), Saved(lse, given, static, padded, like)

    def backward(self, saved: Saved, d_out: Array, d_lse: Array | None = None) -> dict[str, Array]:
        """Return the gradients that the core's backward returns."""
        import jax.numpy as jnp

        queries = saved.given["q"].shape[2]
        d_out = _longer(raised(d_out), queries)
        d_lse = jnp.zeros_like(saved.padded[1]) if d_lse is None else _longer(raised(d_lse), queries)
        rows = spec(self.mesh, "batch", "heads", "tokens")

        def local(given: dict[str, Array], *rest: Array) -> Any:
            return self._backward(given, saved.static, *rest)

        out_specs = (rows, spec(self.mesh, "heads"), spec(self.mesh))
        function = over(self.mesh, local, (self._specs(saved.given), rows, rows, rows, rows), out_specs)
        tokens, heads, numbers = function(saved.given, *saved.padded, d_out, d_lse)
        found = {**tokens, **heads, **numbers}
        return {name: _shaped(x, saved.like.get(name), saved.like["q"].dtype) for name, x in found.items()}

    def _enter(
        self, q: Array, k: Array, v: Array, options: Mapping[str, Any]
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the arrays of a call, padded, and its other options.

        Where queries are aligned, or keys hidden, is an array from here on: `at` (b,) is the place of query 0 among the
        keys, which on a device depends on its number.
        """
        import jax.numpy as jnp

        static = {name: x for name, x in options.items() if x is not None and not is_array(x)}
        arrays = {name: x for name, x in options.items() if is_array(x)}
        (b, h, queries, _), keys = q.shape, k.shape[2]
        for name in PLANE:
            if name in arrays:
                arrays[name] = jnp.broadcast_to(arrays[name], (b, h, queries, keys))
        ends = {"q_lengths": queries, "k_lengths": keys}
        causal, window = static.pop("causal", False), static.get("window")
        offset = arrays.pop("offset", static.pop("offset", None))
        if causal is not False or window is not None:
            if offset is None:
                usual = arrays.get("k_lengths", keys) - arrays.get("q_lengths", queries)
                offset = 0 if causal == "top_left" else usual
            arrays["at"] = jnp.broadcast_to(jnp.asarray(offset), (b,))
            static["causal"] = causal is not False
        if keys % self.size:
            arrays["k_lengths"] = jnp.asarray(arrays.get("k_lengths", jnp.full((b,), keys)))
        rows, columns = (-(-n // self.size) * self.size for n in ends.values())
        for name in PLANE:
            if name in arrays:
                arrays[name] = _longer(_longer(arrays[name], rows), columns, axis=3)
        return {"q": _longer(raised(q), rows), "k": _longer(raised(k), columns), "v": _longer(raised(v), columns)} | {
            name: raised(x) for name, x in arrays.items()
        }, static

    def _specs(self, given: Mapping[str, Array]) -> dict[str, Any]:
        known: dict[str, tuple[str, ...]] = dict.fromkeys(("at", "q_lengths", "k_lengths"), ("batch",))
        known |= {name: ("batch", "heads", "tokens") for name in ("q", "k", "v", *PLANE)}
        known["sink"] = ("heads",)
        return {name: spec(self.mesh, *known.get(name, ())) for name in given}

    # --- on one device

    def _forward(self, given: dict[str, Array], static: Mapping[str, Any]) -> tuple[Array, Array]:
        """Return (out, lse) of this device's queries: (b, h, i, e) and (b, h, i)."""
        import jax
        import jax.numpy as jnp

        q, v = given["q"], given["v"]
        start = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.full(q.shape[:3], -jnp.inf, q.dtype)

        def step(carry: Any, n: Array) -> tuple[Any, None]:
            out, lse, k, v = carry
            part, saved = self._attend(given, static, k, v, n)
            return (*merge(out, lse, part, saved.lse), *self._next(k, v)), None

        (out, lse, _, _), _ = jax.lax.scan(step, (*start, given["k"], v), jnp.arange(self.size))
        return out, lse

    def _backward(
        self, given: dict[str, Array], static: Mapping[str, Any], out: Array, lse: Array, d_out: Array, d_lse: Array
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Return the gradients of arrays of tokens, of heads, and of numbers."""
        import jax
        import jax.numpy as jnp

        q, k, v = (given[name] for name in "qkv")

        def step(carry: Any, n: Array) -> tuple[Any, dict[str, Array]]:
            d_q, k, v, d_k, d_v = carry
            part, saved = self._attend(given, static, k, v, n)
            share = jnp.exp(jnp.where(saved.lse == -jnp.inf, -jnp.inf, saved.lse - lse))  # (b, h, i)
            # forward: out = sum share part, share = exp(lse_part - lse)
            d_part = share[..., None] * d_out
            d_lse_part = share * (jnp.vecdot(d_out, part - out) + d_lse)
            found = self.core.backward(saved, d_part, d_lse_part)
            d_k, d_v = d_k + found.pop("k"), d_v + found.pop("v")
            return (d_q + found.pop("q"), *self._next(k, v, d_k, d_v)), found

        start = (jnp.zeros_like(q), k, v, jnp.zeros_like(k), jnp.zeros_like(v))
        (d_q, _, _, d_k, d_v), rest = jax.lax.scan(step, start, jnp.arange(self.size))
        order = (self._index() - jnp.arange(self.size)) % self.size  # when the block of each device came by
        planes = {name: jnp.concatenate(list(rest.pop(name)[order]), axis=3) for name in PLANE if name in rest}
        heads = {
            name: self._sum(jnp.sum(rest.pop(name), axis=0), "batch", "tokens") for name in ("sink",) if name in rest
        }
        numbers = {name: self._sum(jnp.sum(x, axis=0), "batch", "heads", "tokens") for name, x in rest.items()}
        return {"q": d_q, "k": d_k, "v": d_v, **planes}, heads, numbers

    def _attend(self, given: dict[str, Array], static: Mapping[str, Any], k: Array, v: Array, n: Array) -> Any:
        """Attend the block of keys that has made n steps: that of the device so many places before this one."""
        import jax
        import jax.numpy as jnp

        source, options = (self._index() - n) % self.size, {**static}
        first_query, first_key = self._index() * given["q"].shape[2], source * k.shape[2]
        for name, x in given.items():
            if name in PLANE:
                options[name] = jax.lax.dynamic_slice_in_dim(x, first_key, k.shape[2], axis=3)
            elif name == "sink":  # it takes part once
                options[name] = jnp.where(source == 0, x, -jnp.inf)
            elif name == "at":
                options["offset"] = x + first_query - first_key
            elif name in ("q_lengths", "k_lengths"):
                first, size = (first_query, given["q"].shape[2]) if name[0] == "q" else (first_key, k.shape[2])
                options[name] = jnp.clip(x - first, 0, size)
            elif name not in "qkv":
                options[name] = x
        return self.core.forward(given["q"], k, v, **options, implementation=self.implementation)

    def _index(self) -> Any:
        import jax

        return jax.lax.axis_index("tokens") if self.size > 1 else 0

    def _next(self, *arrays: Array) -> Any:
        """Hand arrays to the next device of the ring."""
        import jax

        ring = [(n, (n + 1) % self.size) for n in range(self.size)]
        return jax.lax.ppermute(arrays, "tokens", ring) if self.size > 1 else arrays

    def _sum(self, x: Array, *axes: str) -> Array:
        import jax

        names = tuple(axis for axis in axes if axis in self.mesh.shape)
        return jax.lax.psum(x, names) if names else x


def merge(out: Array, lse: Array, part: Array, lse_part: Array) -> tuple[Array, Array]:
    """Return (out, lse) over two sets of keys, for those of each; one without keys has an lse of -inf."""
    import jax.numpy as jnp

    highest = jnp.maximum(lse, lse_part)
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    a, b = jnp.exp(lse - shift), jnp.exp(lse_part - shift)
    total = jnp.where(highest == -jnp.inf, 1.0, a + b)
    together = (a[..., None] * out + b[..., None] * part) / total[..., None]
    return together, jnp.where(highest == -jnp.inf, -jnp.inf, shift + jnp.log(total))


def _longer(x: Array, size: int, axis: int = 2) -> Array:
    """Return x with zeros after it, up to a size along an axis."""
    import jax.numpy as jnp

    missing = size - x.shape[axis]
    return x if not missing else jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])


def _shaped(x: Array, like: Array | None, dtype: Any) -> Array:
    """Return a gradient in the shape of its argument: without padding, summed over what was broadcast."""
    if like is None:  # a number of Python
        return x.astype(dtype)
    shape = (1,) * (x.ndim - like.ndim) + like.shape
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1)
    x = x.sum(axis=axes, keepdims=True)[tuple(slice(size) for size in shape)]
    return x.reshape(like.shape).astype(like.dtype)
