"""The page on array namespaces, over all libraries; and the fixture that the other tests use to run over them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from refattn import backends, philox, xp

# --- namespaces, dtypes, devices


def test_the_namespace_is_the_backend_s(backend: Any) -> None:
    x = backend.array([1.0, 2.0])
    assert xp.namespace(x) is backend.xp
    assert xp.namespace(x, None, x) is backend.xp
    assert xp.backend(x) is backend.owner
    assert xp.is_array(x)
    assert xp.device(x) == xp.device(backend.array(1.0))


@pytest.mark.parametrize("things", [(), (None,), (1.0,), ([1.0],), ("x",)])
def test_no_array_has_no_namespace(things: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        xp.namespace(*things)


def test_what_is_an_array() -> None:
    assert xp.is_array(np.ones(2)) and xp.is_array(np.ones(2).sum())
    assert not any(xp.is_array(thing) for thing in (1.0, 1, True, None, "x", np.ndarray, [1.0], (np.ones(1),)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32", "int64", "complex64", "bool"])
def test_names_of_dtypes(backend: Any, dtype: str) -> None:
    if not backend.has(dtype):
        pytest.skip(f"no {dtype} here")
    x = backend.array([0.0, 1.0], dtype)
    assert xp.dtype_name(x) == dtype
    assert xp.is_bool(x) == (dtype == "bool")
    assert xp.is_floating(x) == ("float" in dtype)
    raised = xp.raised(x)
    assert xp.dtype_name(raised) == ("float32" if dtype in ("float16", "bfloat16") else dtype)
    assert raised is x or dtype in ("float16", "bfloat16")
    assert backend.host(raised).tolist() == [0.0, 1.0]


# --- shims


def test_creation_is_like_the_given_array(backend: Any) -> None:
    like = backend.array([1.0], "float32")
    made = xp.zeros((2, 0, 3), like)
    assert tuple(made.shape) == (2, 0, 3) and made.dtype == like.dtype and xp.device(made) == xp.device(like)
    counted = xp.arange(2, 5, like)
    assert backend.host(counted).tolist() == [2, 3, 4] and xp.dtype_name(counted) == "int64"
    assert xp.device(counted) == xp.device(like)


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (0,), (4,)])
def test_the_maximum_of_the_last_axis(backend: Any, shape: tuple[int, ...]) -> None:
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) - 2.0
    found = backend.host(xp.max_last(backend.array(x)))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.max(x, axis=-1, keepdims=True, initial=-np.inf))


def test_the_maximum_of_infinities_and_nan(backend: Any) -> None:
    x = np.asarray([[-np.inf, -np.inf], [1.0, np.inf], [np.nan, 1.0], [-np.inf, 3.0]])
    found = backend.host(xp.max_last(backend.array(x)))[:, 0]
    np.testing.assert_array_equal(found, [-np.inf, np.inf, np.nan, 3.0])


@pytest.mark.parametrize("shape", [(3, 5), (2, 0, 4), (4, 0), (7,), (2, 3, 70)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_rows(backend: Any, shape: tuple[int, ...], dtype: str) -> None:
    x = philox.normal(shape, seed=0, purpose="sum_last").astype(dtype)
    found = backend.host(xp.sum_last(backend.array(x)))
    expected = np.sum(x, axis=-1, keepdims=True, dtype=np.float64)
    assert found.dtype == dtype and found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= np.finfo(dtype).eps * shape[-1] * (1.0 + np.abs(expected)))


def test_wide_sums_do_not_lose_small_terms(backend: Any) -> None:
    terms = np.full((3, 1000), 1.0, dtype=np.float32)
    terms[0, 0] = 2.0**26  # in float32 each 1 that is added to it alone is lost
    total = xp.sum_wide(backend.array(terms))
    assert tuple(total.shape) == () and xp.dtype_name(total) == "float32"
    assert float(backend.host(total)) == float(np.float32(2.0**26 + 2999.0))
    assert float(backend.host(xp.sum_wide(backend.array(np.zeros((0, 2)))))) == 0.0


@pytest.mark.parametrize("value", [1.0, math.inf, -math.inf, math.nan])
def test_finite(backend: Any, value: float) -> None:
    assert xp.all_finite(backend.array([[0.0], [value]])) is math.isfinite(value)
    assert xp.all_finite(backend.array(np.zeros((0, 2)))) is True


def test_conditions(backend: Any) -> None:
    x = backend.array([1.0, 2.0])
    assert xp.concrete(True) is True and xp.concrete(False) is False
    assert xp.concrete(backend.xp.all(x > 0.0)) is True
    assert xp.concrete(backend.xp.all(x > 1.0)) is False


def test_conditions_under_jit_are_not_known() -> None:
    jax = pytest.importorskip("jax")
    seen = []

    def function(x: Any) -> Any:
        seen.append((xp.concrete(xp.namespace(x).all(x > 0.0)), xp.all_finite(x), xp.concrete(True)))
        return x

    jax.jit(function)(jax.numpy.ones(2))
    assert seen == [(None, None, True)]


def test_several_libraries_have_no_namespace(backend: Any) -> None:
    other = backends.get("strict" if backend.owner.name != "strict" else "numpy").from_numpy(np.ones(2))
    with pytest.raises(TypeError):
        xp.namespace(backend.array([1.0]), other)
