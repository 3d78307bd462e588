"""The backward is the derivative of the forward: by differences, by autograd over the same forward, and by its laws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import philox
from tests.mechanisms.softmax.calls import (
    FIXED,
    NAMES,
    Call,
    assert_close,
    assert_same_bits,
    bounds,
    calls,
    cut,
    make,
    run,
)

# Weights of a sixth-order central difference at steps 1, 2 and 3.
STENCIL = {1: 3.0 / 4.0, 2: -3.0 / 20.0, 3: 1.0 / 60.0}


def loss(call: Call, implementation: str) -> float:
    """<out, d_out> + <lse, d_lse>, with -inf of empty rows left out: the function whose gradient backward returns."""
    out, saved = ra.softmax.forward(call.q, call.k, call.v, **call.options, implementation=implementation)
    total = float(np.sum(out * call.d_out))
    if call.d_lse is not None:
        total += float(np.sum(np.where(np.isfinite(saved.lse), saved.lse, 0.0) * call.d_lse))
    return total


def slope(call: Call, implementation: str, direction: dict[str, Any], step: float) -> float:
    def at(t: float) -> float:
        moved = {name: getattr(call, name) + t * direction[name] for name in "qkv"}
        options = {name: call.options[name] + t * direction[name] for name in ("scale", "softcap") if name in direction}
        return loss(replace(call, **moved).but(**options), implementation)

    return sum(weight * (at(n * step) - at(-n * step)) for n, weight in STENCIL.items()) / step


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@settings(max_examples=120)
@given(call=calls(longest=6), seed=st.integers(0, 99))
def test_directional_derivatives(implementation: str, call: Call, seed: int) -> None:
    assume(call.options.get("softcap", 1.0) > 0.5)  # sharper bends need smaller steps than rounding allows
    call = replace(call, q=call.q / max(1.0, np.abs(call.q).max(initial=0.0) / 3.0))
    direction: Any = {name: philox.normal(getattr(call, name).shape, seed=seed, purpose=name) for name in "qkv"}
    direction |= {name: 0.5 for name in ("scale", "softcap") if name in call.options}
    with cut(3, 2):
        gradients = run(call, implementation)
        expected = slope(call, implementation, direction, 2.0**-9)
    found = sum(float(np.sum(gradients[name] * direction[name])) for name in direction)
    size = sum(float(np.sum(np.abs(gradients[name] * direction[name]))) for name in direction)
    assert math.isclose(found, expected, rel_tol=1e-7, abs_tol=1e-7 * (1.0 + size))


# --- autograd


def with_autograd(call: Call, implementation: str) -> dict[str, Any]:
    import torch

    leaves: Any = {name: torch.tensor(getattr(call, name), requires_grad=True) for name in "qkv"}
    options: dict[str, Any] = dict(call.options)
    if "mask" in options:
        options["mask"] = torch.tensor(np.array(options["mask"]))
    for name in ("scale", "softcap"):
        if name in options:
            leaves[name] = options[name] = torch.tensor(float(options[name]), dtype=torch.float64, requires_grad=True)
    out, saved = ra.softmax.forward(leaves["q"], leaves["k"], leaves["v"], **options, implementation=implementation)
    total = (out * torch.tensor(call.d_out)).sum()
    if call.d_lse is not None:
        total = total + (torch.where(torch.isfinite(saved.lse), saved.lse, 0.0) * torch.tensor(call.d_lse)).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {name: x.numpy() for name, x in zip(leaves, found, strict=True)}


def test_autograd_of_the_tiled_implementation() -> None:
    pytest.importorskip("torch")
    call = FIXED["everything"]
    with cut(3, 4):
        expected = with_autograd(call, "tiled")
        found = run(call, "tiled")
    limits = bounds(call)
    assert_close({n: found[n] for n in expected}, expected, {n: limits[n] for n in expected})


def test_jax_differentiates_the_dense_implementation() -> None:
    jax = pytest.importorskip("jax")
    call = FIXED["everything"]
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


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_backward_reads_only_what_was_saved(implementation: str, backend: Any) -> None:
    """Twice the same bits, in any order, and nothing that came in is written to."""
    if str(backend) == "jax" and implementation == "tiled":
        pytest.skip("JAX compiles every operation of every tile")
    call = make(1, 2, 1, 5, 4, 3, 2, mask=(5, 4), softcap=2.0)
    q, k, v, d_out, d_lse = (backend.array(getattr(call, name)) for name in NAMES)
    mask = backend.array(call.options["mask"])
    _, saved = ra.softmax.forward(q, k, v, mask=mask, softcap=2.0, implementation=implementation)
    results = [ra.softmax.backward(saved, d_out, lse) for lse in (d_lse, None, d_lse)]
    for name, value in results[0].items():
        np.testing.assert_array_equal(backend.host(value), backend.host(results[2][name]))
    for name, x in zip(NAMES, (q, k, v, d_out, d_lse), strict=True):
        np.testing.assert_array_equal(backend.host(x), getattr(call, name))
