"""Calls of the higher-order core for the tests: drawn by Hypothesis or fixed, run in any library and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

import refattn as ra
from refattn import philox
from refattn.mechanisms.higher_order.implementations import schedule, tiled
from refattn.mechanisms.higher_order.options import Add, Clamp, Exact, Signed
from refattn.ops.tiles import Plan, Tile

NAMES = ("q", "k", "v", "d_out")
CAUSAL = (False, True, "top_left", "bottom_right")
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

    @property
    def implementations(self) -> tuple[str, ...]:
        """The implementations that compute it; the dense one first."""
        return IMPLEMENTATIONS[self.options.get("causal", False) is not False]

    @property
    def allowed(self) -> Any:
        """(b, h, i, j): which query may attend which key, said again."""
        shape = (*self.q.shape[:3], self.k.shape[2])
        mask = self.options.get("key_mask", np.ones((1, 1), bool))
        full: Any = np.broadcast_to(mask[:, None, None, :], shape)
        causal = self.options.get("causal", False)
        return full if causal is False else np.tril(full, 0 if causal == "top_left" else shape[3] - shape[2])


def make(
    b: int, h: int, g: int, i: int, j: int, d: int, e: int, *, seed: int = 0, keep: float | None = None, **options: Any
) -> Call:
    """A call of these sizes with elements of about unit size; `keep` masks keys."""

    def draw(name: str, *shape: int) -> Any:
        return philox.normal(shape, seed=seed, purpose=f"higher_order.{name}")

    if keep is not None:
        options["key_mask"] = philox.uniform((b, j), seed=seed, purpose="higher_order.keep") < keep
    return Call(draw("q", b, h, i, d), draw("k", b, g, j, d), draw("v", b, g, j, e), draw("d_out", b, h, i, e), options)


@st.composite
def calls(draw: Any, *, longest: int = 9, deltas: tuple[float, ...] = (0.0, 0.5)) -> Call:
    """Calls of all sizes, with all options; orders whose sums stay clear of 0."""
    size = st.integers(1, longest)
    b, g, r = (draw(st.integers(1, 2)) for _ in range(3))
    delta = draw(st.sampled_from(deltas))
    options: dict[str, Any] = {"causal": draw(st.sampled_from(CAUSAL))}
    options["order"] = draw(st.sampled_from((0, 2, 4) if delta == 0.0 else (0, 2)))
    options["layer_norm"] = draw(st.booleans()) or delta == 0.5
    # With delta = 1/2 a weight is 0 at s = -1: scores that stay above it keep the sums away from 0.
    options["alpha"] = 4.0 if delta == 0.5 else draw(st.sampled_from((1.0, 3.0)))
    kind = draw(st.sampled_from((Exact, Add, Clamp, Signed)))
    eps = {} if kind is Exact else {"eps": 0.3}
    options["normaliser"] = kind(delta=delta, plain=draw(st.booleans()), **eps)
    keep = draw(st.sampled_from((None, 0.6)))
    sizes = b, g * r, g, draw(size), draw(size), draw(st.integers(4, 6)), draw(st.integers(1, 5))
    return make(*sizes, seed=draw(st.integers(0, 99)), keep=keep, **options)


WELL = {
    "plain": make(2, 4, 2, 33, 33, 8, 6),
    "causal": make(2, 4, 2, 33, 33, 8, 6, causal=True),
    "masked": make(2, 4, 2, 33, 33, 8, 6, causal=True, keep=0.7),
    "unequal": make(1, 2, 1, 21, 45, 16, 8, causal=True),
    "top left": make(1, 2, 1, 45, 21, 16, 8, causal="top_left"),
    "half": make(2, 4, 2, 33, 33, 8, 6, causal=True, normaliser="exact(delta=0.5)"),
    "order 4": make(1, 2, 1, 19, 33, 5, 6, order=4, alpha=1.0),
    "order 3": make(1, 2, 1, 33, 33, 6, 4, order=3, causal=True),
    "given": make(1, 2, 1, 33, 33, 6, 4, layer_norm=False, causal=True),
    "plain denominator": make(1, 2, 1, 33, 33, 6, 4, normaliser="exact(delta=1.0, plain=True)", causal=True),
}
"""Calls with sums that are clear of 0, over what changes the way of evaluation."""

FIXED = {
    "plain": make(2, 2, 2, 5, 5, 4, 4),
    "causal": make(1, 4, 2, 7, 9, 5, 3, keep=0.7, causal=True, normaliser="exact(delta=0.5)"),
    "general": make(1, 3, 1, 9, 6, 4, 2, causal="top_left", layer_norm=False, order=4, normaliser="add(eps=0.2)"),
}
"""A few calls for the libraries on which a call takes long."""


def run(call: Call, implementation: str = "dense", backend: Any = None, dtype: str = "float64") -> dict[str, Any]:
    """Forward and backward; results by name on the host. JAX is given both as one compiled function."""

    def send(x: Any, dtype: str | None = None) -> Any:
        if backend is not None:
            return backend.array(x, dtype)
        return x.astype(dtype) if dtype else x

    def evaluate(arrays: dict[str, Any], mask: Any) -> dict[str, Any]:
        options = {**call.options, "key_mask": mask}
        out, saved = ra.higher_order.forward(
            arrays["q"], arrays["k"], arrays["v"], **options, implementation=implementation
        )
        return {"out": out, "normaliser": saved.normaliser, **ra.higher_order.backward(saved, arrays["d_out"])}

    arrays = {name: send(getattr(call, name), dtype) for name in NAMES}
    mask = send(call.options["key_mask"]) if "key_mask" in call.options else None
    if str(backend) == "jax":
        import jax

        results = jax.jit(evaluate)(arrays, mask)
    else:
        results = evaluate(arrays, mask)
    return {name: np.asarray(x) if backend is None else backend.host(x) for name, x in results.items()}


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


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare results by name, bit by bit."""
    assert found.keys() == expected.keys()
    for name in found:
        a, b = np.ascontiguousarray(found[name]), np.ascontiguousarray(expected[name])
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), name


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
