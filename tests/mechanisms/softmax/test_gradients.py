"""What the gradient of softmax attention is asked for, and JAX's own of the same forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from tests.mechanisms.softmax.calls import (
    NAMES,
    assert_close,
    assert_same_bits,
    bounds,
    make,
    run,
)


def test_jax_differentiates_the_dense_implementation() -> None:
    jax = pytest.importorskip("jax")
    call = make(2, 4, 2, 7, 9, 3, 5, mask=(2, 1, 7, 9), causal=True, scale=-0.7, softcap=2.0)
    mask = call.options["mask"]

    def total(q: Any, k: Any, v: Any, scale: Any, softcap: Any) -> Any:
        options = {"mask": jax.numpy.asarray(mask), "causal": True, "scale": scale, "softcap": softcap}
        out, saved = ra.softmax.forward(q, k, v, **options, implementation="dense")
        lse = jax.numpy.where(jax.numpy.isfinite(saved.lse), saved.lse, 0.0)
        return (out * call.d_out).sum() + (lse * call.d_lse).sum()

    given = [jax.numpy.asarray(x) for x in (call.q, call.k, call.v, call.options["scale"], call.options["softcap"])]
    found = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3, 4)))(*given)
    expected = dict(zip(("q", "k", "v", "scale", "softcap"), map(np.asarray, found), strict=True))
    truth, limits = run(call), bounds(call)
    assert_close({n: truth[n] for n in expected}, expected, {n: limits[n] for n in expected})


# --- what the gradient is asked for


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_numbers_and_arrays_have_the_same_gradients(implementation: str, backend: Any) -> None:
    if str(backend) == "jax" and implementation == "tiled":
        pytest.skip("JAX compiles every operation of every tile")
    call = make(1, 2, 1, 4, 5, 3, 2, scale=-0.6, softcap=1.7)
    q, k, v, d_out, d_lse = (backend.array(getattr(call, name)) for name in NAMES)
    results = []
    for scale, softcap in ((-0.6, 1.7), (backend.array(-0.6), backend.array(1.7)), (np.float64(-0.6), np.float64(1.7))):
        out, saved = ra.softmax.forward(q, k, v, scale=scale, softcap=softcap, implementation=implementation)
        gradients = ra.softmax.backward(saved, d_out, d_lse)
        assert list(gradients) == ["q", "k", "v", "scale", "softcap"]
        assert tuple(gradients["scale"].shape) == tuple(gradients["softcap"].shape) == ()
        results.append({name: backend.host(x) for name, x in {"out": out, **gradients}.items()})
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_an_array_of_another_width_is_cast(backend: Any) -> None:
    call = make(1, 1, 1, 3, 3, 2, 2)
    q, k, v, d_out = (backend.array(getattr(call, name), "float32") for name in NAMES[:4])
    _, saved = ra.softmax.forward(q, k, v, scale=backend.array(0.5, "float64"))
    gradients = ra.softmax.backward(saved, d_out)
    assert gradients["scale"].dtype == q.dtype and saved.lse.dtype == q.dtype


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 1}, {"scale": 0.3}, {"softcap": 2}, {"scale": -1.0, "softcap": 2.0}], ids=str
)
def test_gradients_are_those_of_what_was_given(options: dict[str, Any], implementation: str) -> None:
    assert list(run(make(1, 2, 1, 3, 4, 2, 2, **options), implementation)) == ["out", "lse", "q", "k", "v", *options]


@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape")
@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_upstream_gradients(dtype: str, implementation: str, backend: Any) -> None:
    if not backend.has(dtype):
        pytest.skip(f"no {dtype} here")
    call = make(1, 1, 1, 3, 4, 2, 2)
    q, k, v, d_out = (backend.array(getattr(call, name), dtype) for name in NAMES[:4])
    _, saved = ra.softmax.forward(q, k, v, implementation=implementation)
    narrow = ra.softmax.backward(saved, d_out)
    wide = ra.softmax.backward(saved, backend.xp.astype(d_out, backend.xp.float32))
    for name in "qkv":
        assert narrow[name].dtype == q.dtype
        np.testing.assert_array_equal(backend.host(narrow[name]), backend.host(wide[name]))
