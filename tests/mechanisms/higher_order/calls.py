"""Calls of the higher-order core for the tests, in any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

import refattn as ra
from refattn import philox
from refattn.mechanisms.higher_order.implementations import schedule, tiled
from refattn.ops.tiles import Plan, Tile

NAMES = ("q", "k", "v", "d_out")
IMPLEMENTATIONS = {False: ("dense", "tiled", "linear"), True: ("dense", "tiled", "chunked", "recurrent")}
"""The implementations that there are without and with a causal mask."""


@dataclass(frozen=True)
class Call:
    """The arguments of one forward and backward, on the host in float64."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in "qkv")
        return f"<Call {shapes}, { {n: x.shape if n == 'key_mask' else x for n, x in self.options.items()} }>"

    def but(self, **options: Any) -> Call:
        """The same call with other options."""
        return replace(self, options={**self.options, **options})


def make(
    b: int, h: int, g: int, i: int, j: int, d: int, e: int, *, seed: int = 0, keep: float | None = None, **options: Any
) -> Call:
    """A call of these sizes with elements of about unit size; `keep` masks keys."""

    def draw(name: str, *shape: int) -> Any:
        return philox.normal(shape, seed=seed, purpose=f"higher_order.{name}")

    if keep is not None:
        options["key_mask"] = philox.uniform((b, j), seed=seed, purpose="higher_order.keep") < keep
    return Call(draw("q", b, h, i, d), draw("k", b, g, j, d), draw("v", b, g, j, e), draw("d_out", b, h, i, e), options)


WELL = {
    "causal": make(2, 4, 2, 33, 33, 8, 6, causal=True),
    "half": make(2, 4, 2, 33, 33, 8, 6, causal=True, normaliser="exact(delta=0.5)"),
    "order 3": make(1, 2, 1, 33, 33, 6, 4, order=3, causal=True),
    "given": make(1, 2, 1, 33, 33, 6, 4, layer_norm=False, causal=True),
    "plain denominator": make(1, 2, 1, 33, 33, 6, 4, normaliser="exact(delta=1.0, plain=True)", causal=True),
}
"""Causal calls with sums that are clear of 0, over what changes the way of evaluation."""


def run(call: Call, implementation: str = "dense", dtype: str = "float64") -> dict[str, Any]:
    """Forward and backward; results by name."""
    q, k, v, d_out = (getattr(call, name).astype(dtype) for name in NAMES)
    out, saved = ra.higher_order.forward(q, k, v, **call.options, implementation=implementation)
    return {"out": out, "normaliser": saved.normaliser, **ra.higher_order.backward(saved, d_out)}


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Compare results by name, relative to the largest element of each, or of the smallest gradient that counts."""
    assert found.keys() == expected.keys()
    largest = {name: float(np.max(np.abs(x), initial=0.0)) for name, x in expected.items()}
    floor = 1e-2 * max((largest[name] for name in ("q", "k", "v") if name in largest), default=0.0)
    for name, x in expected.items():
        assert found[name].shape == x.shape, name
        error = float(np.max(np.abs(found[name].astype("float64") - x), initial=0.0))
        size = max(largest[name], floor if name in ("q", "k") else 0.0)
        assert error <= tolerance * size, f"{name}: off by {error}, {error / max(size, 1e-300)} of the largest"


@contextmanager
def cut(chunk: int, heads: int = 1) -> Iterator[None]:
    """Make the implementations take chunks, or tiles, of this many tokens, and tasks of this many key/value heads."""

    def tiles(q: Any, k: Any, rows: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        n = q.shape[2]
        own = tuple(
            Tile(slice(b, b + 1), slice(g, min(g + heads, k.shape[1])), (0, n))
            for b in range(q.shape[0])
            for g in range(0, k.shape[1], heads)
        )
        return own, tuple(
            replace(tile, rows=(start, min(start + rows, n))) for tile in own for start in range(0, n, rows)
        )

    def plan(q: Any, k: Any, most: int) -> Plan:
        whole, blocks = tiles(q, k, chunk)
        return Plan(whole, blocks, max(chunk - 1, 1))

    sizes: dict[str, Any] = {"SHORTEST": chunk, "LONGEST": chunk, "FEWER": chunk, "HEADS": heads}
    with mock.patch.multiple(schedule, **sizes), mock.patch.object(tiled, "plan", plan):
        yield


def rows(n: int, d: int, name: str = "x") -> Any:
    """Normal numbers (1, 1, n, d)."""
    return philox.normal((1, 1, n, d), seed=11, purpose=name)
