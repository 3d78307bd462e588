"""Calls of the softmax core for the tests, in any implementation and dtype.

`bounds` derives how far two honest evaluations of a call may be apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

import refattn as ra
from refattn import philox
from refattn.golden.storage_types import round_to
from refattn.mechanisms.softmax.implementations import tiled
from refattn.ops.tiles import Plan, Tile

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
NAMES = ("q", "k", "v", "d_out", "d_lse")
CAUSAL = (False, True, "top_left", "bottom_right")


@dataclass(frozen=True)
class Call:
    """The arguments of one forward and backward, on the host in float64."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    d_lse: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in "qkv")
        options = {n: f"mask {x.shape}" if n == "mask" else x for n, x in self.options.items()}
        return f"<Call {shapes}, d_lse {self.d_lse is not None}, {options}>"

    def but(self, **options: Any) -> Call:
        """The same call with other options."""
        return replace(self, options={**self.options, **options})

    @property
    def allowed(self) -> Any:
        """(b, h, i, j): which query may attend which key, said again."""
        shape = (*self.q.shape[:3], self.k.shape[2])
        full: Any = np.broadcast_to(self.options.get("mask", True), shape)
        causal = self.options.get("causal", False)
        return full if causal is False else np.tril(full, 0 if causal == "top_left" else shape[3] - shape[2])


def make(
    b: int, h: int, g: int, i: int, j: int, d: int, e: int, *, seed: int = 0, logits: float = 1.0, **options: Any
) -> Call:
    """A call of these sizes with elements of about unit size; `mask=` may be a shape."""
    if isinstance(options.get("mask"), tuple):
        options["mask"] = philox.uniform(options["mask"], seed=seed, purpose="mask") < 0.6
    lse = options.pop("d_lse", True)

    def draw(name: str, *shape: int) -> Any:
        return philox.normal(shape, seed=seed, purpose=name)

    q, k, v = draw("q", b, h, i, d) * logits, draw("k", b, g, j, d), draw("v", b, g, j, e)
    return Call(q, k, v, draw("d_out", b, h, i, e), draw("d_lse", b, h, i) if lse else None, options)


@st.composite
def calls(draw: Any, *, softcaps: bool = True) -> Call:
    """Calls of all small sizes, with all options."""
    size = st.integers(1, 7)
    b, g, r = (draw(st.integers(1, 2)) for _ in range(3))
    i, j, d, e = draw(size), draw(size), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    options: dict[str, Any] = {"causal": draw(st.sampled_from(CAUSAL))}
    if draw(st.booleans()):
        shape = [draw(st.sampled_from((1, n))) for n in (b, g * r, i, j)]
        options["mask"] = tuple(shape[draw(st.integers(0, 4)) :])
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from((0.0, -0.7, 0.3, 2.0)) | st.floats(-3.0, 3.0))
    if softcaps and draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from((0.2, 1.0, 5.0, 100.0)))
    logits = draw(st.sampled_from((1.0, 8.0)))
    return make(
        b, g * r, g, i, j, d, e, seed=draw(st.integers(0, 99)), logits=logits, d_lse=draw(st.booleans()), **options
    )


def run(call: Call, implementation: str = "dense", dtype: str = "float64") -> dict[str, Any]:
    """Forward and backward; results by name."""
    q, k, v, d_out, d_lse = (None if x is None else x.astype(dtype) for x in (getattr(call, name) for name in NAMES))
    out, saved = ra.softmax.forward(q, k, v, **call.options, implementation=implementation)
    return {"out": out, "lse": saved.lse, **ra.softmax.backward(saved, d_out, d_lse)}


def as_stored(call: Call, dtype: str) -> Call:
    """The call with its arrays rounded to a dtype: what an evaluation in that dtype is given."""
    arrays = {name: getattr(call, name) for name in NAMES}
    rounded: dict[str, Any] = {name: None if x is None else round_to(x, dtype) for name, x in arrays.items()}
    return replace(call, **rounded)


def bounds(call: Call, dtype: str = "float64") -> dict[str, Any]:
    """How far each result of an evaluation in `dtype` may be from the exact one, by name.

    The terms of every sum are added up with their absolute values; each is off by some units of rounding for the
    operations that make it, and by the error of its score, through the exponential.
    """
    unit = UNIT["float64" if dtype == "float64" else "float32"]
    h, d, keys = call.q.shape[1], call.q.shape[3], call.k.shape[2]
    groups = max(call.k.shape[1], 1)
    k, v = (np.repeat(x, h // groups, axis=1) for x in (call.k, call.v))
    scale = call.options.get("scale", 1.0 / math.sqrt(d))
    softcap = call.options.get("softcap")
    product = np.abs(call.q) @ np.swapaxes(np.abs(k), 2, 3)
    score = abs(scale) * product
    size = float(score.max(initial=0.0))
    largest = size if softcap is None else min(size, softcap)
    bend = 0.0 if softcap is None else size / softcap + 2.0  # u = s / softcap is as far off, relatively, as s is
    steps = (keys + call.q.shape[2] * (h // groups) + d + call.v.shape[3] + 30.0) * (1.0 + 2.0 * size + bend)
    truth = run(call)
    with np.errstate(all="ignore"):  # at pairs that are hidden
        weights = np.where(call.allowed, np.exp(_scores(call) - truth["lse"][..., None]), 0.0)
    d_weights = np.abs(call.d_out) @ np.swapaxes(np.abs(v), 2, 3)
    d_lse = 0.0 if call.d_lse is None else np.abs(call.d_lse)[..., None]
    d_scores = weights * (d_weights + np.sum(weights * d_weights, axis=-1, keepdims=True) + d_lse)

    def grouped(x: Any) -> Any:
        b, _, j, width = x.shape
        return x.reshape(b, groups, h // groups, j, width).sum(axis=2)

    found = {
        "out": weights @ np.abs(v),
        "lse": np.full(truth["lse"].shape, 1.0 + largest),
        "q": abs(scale) * (d_scores @ np.abs(k)),
        "k": abs(scale) * grouped(np.swapaxes(d_scores, 2, 3) @ np.abs(call.q)),
        "v": grouped(np.swapaxes(weights, 2, 3) @ np.abs(call.d_out)),
        "scale": np.sum(d_scores * product),
        "softcap": np.sum(d_scores * (1.0 + (0.0 if softcap is None else score / softcap))),
    }
    stored = {name: UNIT[dtype] * np.abs(truth[name]) if name != "lse" else 0.0 for name in truth}
    tiny = 2.0**-1022 if dtype == "float64" else 2.0**-24 if dtype == "float16" else 2.0**-126
    return {name: steps * unit * found[name] + stored[name] + tiny for name in truth}


def _scores(call: Call) -> Any:
    k = np.repeat(call.k, call.q.shape[1] // max(call.k.shape[1], 1), axis=1)
    scores = call.q @ np.swapaxes(k, 2, 3) * call.options.get("scale", 1.0 / math.sqrt(call.q.shape[3]))
    softcap = call.options.get("softcap")
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def assert_close(found: dict[str, Any], expected: dict[str, Any], allowed: dict[str, Any]) -> None:
    """Compare results by name; infinities must be at the same places, and nothing is NaN."""
    assert found.keys() == expected.keys()
    for name in found:
        a, b = np.asarray(found[name], dtype="float64"), np.asarray(expected[name], dtype="float64")
        assert a.shape == b.shape, name
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=name)
        error = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
        limit = np.where(finite, np.broadcast_to(allowed[name], b.shape), 0.0)
        assert np.all(error <= limit), (
            f"{name}: off by {error.max()}, {np.max(error / np.maximum(limit, 1e-300))} times"
        )


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare results by name, bit by bit."""
    assert found.keys() == expected.keys()
    for name in found:
        a, b = np.ascontiguousarray(found[name]), np.ascontiguousarray(expected[name])
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), name


@contextmanager
def cut(rows: int, columns: int, batches: int = 1, heads: int = 1) -> Iterator[None]:
    """Make the tiled implementation cut the plane of queries and keys in tiles of this size."""

    def plan(q: Any, k: Any, most: int) -> Plan:
        whole = tuple(
            Tile(slice(b, min(b + batches, q.shape[0])), slice(g, min(g + heads, k.shape[1])), (0, q.shape[2]))
            for b in range(0, q.shape[0], batches)
            for g in range(0, k.shape[1], heads)
        )
        blocks = tuple(
            Tile(tile.batch, tile.heads, (start, min(start + rows, q.shape[2])))
            for tile in whole
            for start in range(0, q.shape[2], rows)
        )
        return Plan(whole, blocks, columns)

    with mock.patch.object(tiled, "plan", plan):
        yield
