"""What holds for softmax attention whatever the numbers are; in float64 on NumPy, for both implementations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import refattn as ra
from tests.mechanisms.softmax.calls import (
    Call,
    assert_close,
    bounds,
    calls,
    cut,
    make,
    run,
)

IMPLEMENTATIONS = ("dense", "tiled")
some = calls()
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
laws = settings(max_examples=50)


def tiles() -> Any:
    return cut(3, 2)


def close(found: Any, expected: Any, scale: float = 1.0) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10 * scale)


# --- symmetries


@each_implementation
@laws
@given(call=some)
def test_scores_are_homogeneous(implementation: str, call: Call) -> None:
    """Only scale q . k matters: <d_q, q> = <d_k, k> = scale d_scale, and powers of two move freely between them."""
    call = call.but(scale=call.options.get("scale", 0.5))
    with tiles():
        found = run(call, implementation)
        moved = run(
            replace(call, q=call.q * 4.0, k=call.k * 0.5).but(scale=call.options["scale"] * 0.5), implementation
        )
    products = [float(np.sum(found["q"] * call.q)), float(np.sum(found["k"] * call.k))]
    products.append(float(call.options["scale"] * found["scale"]))
    limit = 1e-10 * (1.0 + sum(float(np.sum(np.abs(found[n] * getattr(call, n)))) for n in ("q", "k")))
    assert max(products) - min(products) <= limit
    expected = {**found, "q": found["q"] / 4.0, "k": found["k"] * 2.0, "scale": found["scale"] * 2.0}
    assert_close(moved, expected, {name: 8.0 * x for name, x in bounds(call).items()})


@each_implementation
@laws
@given(call=some)
def test_outputs_are_means_of_values(implementation: str, call: Call) -> None:
    """Each lies between the smallest and the largest value that the query may attend; equal values come out."""
    with tiles():
        out = run(call, implementation)["out"]
        ones = run(replace(call, v=np.ones(call.v.shape)), implementation)["out"]
    v = np.repeat(call.v, call.q.shape[1] // call.k.shape[1], axis=1)[:, :, None]
    allowed = call.allowed[..., None]
    alive = call.allowed.any(axis=-1)[..., None]
    low = np.where(alive, np.min(np.where(allowed, v, np.inf), axis=3), 0.0)
    high = np.where(alive, np.max(np.where(allowed, v, -np.inf), axis=3), 0.0)
    assert np.all(out >= low - 1e-13) and np.all(out <= high + 1e-13)
    close(ones, np.broadcast_to(np.where(alive, 1.0, 0.0), ones.shape))


# --- what lse is


@each_implementation
@laws
@given(call=calls(softcaps=False))
def test_the_gradient_of_lse_is_attention_over_the_keys(implementation: str, call: Call) -> None:
    """d lse_i / d q_i = scale sum_j w_ij k_j: attention with the keys as values."""
    ones = replace(call, d_out=np.zeros(call.d_out.shape), d_lse=np.ones(call.q.shape[:3]))
    keys = replace(call, v=call.k, d_out=np.zeros(call.q.shape))
    with tiles():
        found, attended = run(ones, implementation)["q"], run(keys, implementation)["out"]
    close(found, call.options.get("scale", 1.0 / math.sqrt(call.q.shape[3])) * attended, 100.0)


@each_implementation
def test_a_large_cap_is_no_cap(implementation: str) -> None:
    call = make(1, 2, 1, 5, 6, 3, 2)
    found, plain = run(call.but(softcap=1e8), implementation), run(call, implementation)
    for name in plain:
        close(found[name], plain[name], 10.0)
    assert abs(found["softcap"]) < 1e-15


# --- masks


def test_the_future_does_change_the_choice_of_the_maximum() -> None:
    """Else the test before this one would say little."""
    call = make(1, 1, 1, 9, 9, 3, 2, causal=True)
    loud = replace(call, k=np.concatenate([call.k[:, :, :5], call.k[:, :, 5:] + 1e6], axis=2))

    def safe(c: Call) -> Any:
        with ra.trace() as t, cut(9, 9):
            run(c, "tiled")
        return np.ravel(t["SM.top"]) == 0.0

    assert safe(call).all() and safe(loud).tolist() == [True] * 5 + [False] * 4


# --- batch, heads, workers
