"""Designed inputs: reproducible, independent of each other and of their order, and exact in float32."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.golden import inputs
from refattn.golden.storage_types import has_gradient, largest, round_to
from refattn.mechanisms.record import Case, Input
from tests.thinned import thinned


def bits(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: (x.shape, x.dtype.name, x.tobytes()) for name, x in arrays.items()}


@pytest.mark.parametrize("mechanism", ra.list_mechanisms())
@pytest.mark.parametrize("dtype", ["bfloat16", *thinned(["float32", "float64", "float16"], 3)])
def test_every_case_of_every_mechanism(mechanism: str, dtype: str) -> None:
    for case in ra.mechanism(mechanism).cases:
        made = inputs.make(mechanism, dataclasses.replace(case, slack=""), dtype)
        shapes = {name: given.shape for name, given in case.inputs.items()}
        assert {name: x.shape for name, x in made.items()} == shapes, case.name
        for name, x in made.items():
            given = case.inputs[name]
            if not has_gradient(x):
                assert x.dtype == {"mask": bool, "band": bool, "counts": "int64"}[given.design], case.name
                continue
            assert given.design not in ("mask", "band", "counts"), case.name
            assert x.dtype == ("float32" if dtype == "bfloat16" else dtype), case.name
            finite = np.isfinite(x) | ((given.design == "resets" or "hidden" in given.numbers) & (x == -np.inf))
            assert np.all(finite) and np.array_equal(round_to(x.astype("float64"), dtype), x), case.name
        whole = inputs.make(mechanism, case, dtype)
        assert bits(inputs.make(mechanism, case, dtype)) == bits(whole), case.name
        assert bool(case.slack) == (bits(whole) != bits(made)), case.name


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kept"), [("lengths-causal", {"k": "k", "v": "k"}), ("lengths-both", dict(zip("qkv", "qkk", strict=True)))]
)
def test_what_lengths_leave_out(name: str, kept: dict[str, str], dtype: str) -> None:
    """Rows from a length on hold NaN or the largest number, and all else is what it was."""
    case = ra.mechanism("softmax").case(name)
    made, bare = (inputs.make("softmax", c, dtype) for c in (case, dataclasses.replace(case, slack="")))
    for array, x in made.items():
        expected = bare[array].copy()
        for b, length in enumerate(made[f"{kept[array]}_lengths"] if array in kept else ()):
            expected[b, :, length:] = np.nan if case.slack == "nan" else largest(dtype)
        assert np.array_equal(x, expected, equal_nan=has_gradient(x)), array


@pytest.mark.parametrize("mechanism", ra.list_mechanisms())
def test_the_core_runs_on_them(mechanism: str) -> None:
    """And what exists is exact in float32, so that float32 and float64 are given the same numbers."""
    core = ra.mechanism(mechanism).core
    assert core is not None
    for case in ra.mechanism(mechanism).cases:
        bare = dataclasses.replace(case, slack="")
        wide, narrow = inputs.make(mechanism, bare, "float64"), inputs.make(mechanism, bare, "float32")
        assert all(np.array_equal(wide[name], narrow[name]) for name in wide), case.name
        narrow = inputs.make(mechanism, case, "float32")
        out, saved = core.forward(**narrow, **case.options)
        d_out = inputs.make_upstream(mechanism, case, "out", out.shape, "float32")
        gradients = core.backward(saved, d_out)
        assert np.all(np.isfinite(out)) and all(np.all(np.isfinite(g)) for g in gradients.values()), case.name


def test_each_array_has_its_own_numbers() -> None:
    shape = (1, 2, 8, 8)
    case = Case("a", "plain", {name: Input(shape) for name in ("q", "k", "v")})
    other = dataclasses.replace(case, name="b")
    found = [
        *inputs.make("softmax", case, "float64").values(),
        *inputs.make("softmax", other, "float64").values(),
        *inputs.make("other", case, "float64").values(),
        *inputs.make("softmax", case, "float64", seed=1).values(),
        *(inputs.make_upstream("softmax", case, name, shape, "float64") for name in ("out", "lse")),
    ]
    assert len({x.tobytes() for x in found}) == len(found) == 14


def test_designs_are_what_they_say() -> None:
    q = inputs.make("m", Case("c", "", {"q": Input((50, 50), "normal", {"scale": 4.0})}), "float64")["q"]
    assert np.array_equal(q, 4.0 * philox.normal((50, 50), seed=0, purpose="m.c.q"))
    assert 3.8 < q.std() < 4.2 and abs(q.mean()) < 0.3 and np.all(np.abs(q) <= 12.0)
    for keep in (0.0, 0.3, 1.0):
        mask = inputs.make("m", Case("c", "", {"mask": Input((50, 50), "mask", {"keep": keep})}), "float64")["mask"]
        assert abs(mask.mean() - keep) < 0.04
    band = inputs.make("m", Case("c", "", {"mask": Input((2, 3, 4), "band", {"before": 0, "after": 1})}), "float64")
    assert np.array_equal(band["mask"], [[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]] * 2)
    upstream = inputs.make_upstream("m", Case("c", "", {}), "out", (4, 5), "float16")
    assert np.array_equal(upstream, philox.normal((4, 5), seed=0, purpose="m.c.d_out").astype("float16"))


def test_these_numbers_are_fixed_for_good() -> None:
    """Vectors and results of others rest on them."""
    made = inputs.make("softmax", ra.mechanism("softmax").case("tiny"), "float32")
    assert made["q"].ravel()[:3].tolist() == [-0.8516693115234375, 0.8285675048828125, 0.3908233642578125]
    found = {name: zlib.crc32(x.astype("<f4").tobytes()) for name, x in made.items()}
    assert found == {"q": 1423285535, "k": 1497602556, "v": 2855528378}
