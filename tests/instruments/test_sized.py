"""Sizes of rounding errors that are carried along: of sums and slopes, and of what float32 loses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations, philox
from refattn.golden.inputs import make
from refattn.instruments.sized import sizes
from refattn.verify.tolerance.budget import evaluate, rounding_sizes, wide

UNIT = 2.0**-24


def size(x: Any) -> Any:
    return np.sqrt(x.square)


def test_sum_is_relative_to_its_terms() -> None:
    with sizes() as unit:
        x = unit.array(np.asarray([3.0, 4.0, -7.0]))
        found = size(np.sum(x))
        product = size(x @ x)
    assert found == pytest.approx(math.sqrt(3) * (0.0 + math.sqrt(9.0 + 16.0 + 49.0)))
    assert product == pytest.approx(math.sqrt(3) * (74.0 + math.sqrt(81.0 + 256.0 + 2401.0)))


def test_what_arguments_bring_is_multiplied_by_the_slope() -> None:
    with sizes() as unit:
        x = unit.array(np.asarray([0.5, 4.0])) / 3.0
        powers = np.exp(x)
        moved = np.where(np.asarray([True, False]), np.concat([powers[1:], powers[:1]]), 0.0)
    error = np.asarray([0.5, 4.0]) / 3.0
    expected = np.exp(error) * np.hypot(error, 1.0)
    assert size(powers) == pytest.approx(expected)
    assert size(moved) == pytest.approx([expected[1], 0.0])


def test_nothing_is_rounded_where_numbers_are_moved() -> None:
    with sizes() as unit:
        x = unit.array(np.ones((2, 3)))
        for same in (x[:, 1:], np.matrix_transpose(x), 2.0 * x, x + 0.0, -x, np.maximum(x, 0.0), np.max(x)):
            assert np.all(size(same) == 0.0)


def test_solution_errs_as_if_its_matrix_had_been_rounded() -> None:
    matrix = np.asarray([[1.0, 1.0], [1.0, 1.0 + 2.0**-8]])
    with sizes() as unit:
        x: Any = np.linalg.solve(unit.array(matrix), unit.array(np.asarray([[1.0], [2.0]])))
    single = np.linalg.solve(matrix.astype(np.float32), np.asarray([[1.0], [2.0]], np.float32))
    assert np.all(np.abs(single - x.value) <= UNIT * size(x))
    assert np.all(size(x) < 2.0**11 * np.abs(x.value))


@pytest.mark.parametrize("count", [3, 300])
def test_float32_errs_by_less(count: int) -> None:
    a, b = (philox.normal((8, count), seed=1, purpose=f"sized.{name}") for name in "ab")
    a, b = (x.astype(np.float32).astype(np.float64) for x in (a, b))
    with sizes() as unit:
        double: Any = np.tanh(unit.array(a) @ np.matrix_transpose(unit.array(b)) * 0.3)
    got = np.tanh(np.matmul(a.astype(np.float32), b.T.astype(np.float32)) * np.float32(0.3))
    error = np.abs(got - double.value)
    assert np.all(error <= 4.0 * UNIT * size(double))


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_equation_of_a_call_has_a_size(name: str) -> None:
    record = ra.mechanism(name)
    case = record.case("tiny")
    inputs = wide(make(name, case, "float32"))
    out = evaluate(record, inputs, case.options, None)["out"]
    with equations.trace() as traced:
        evaluate(record, inputs, case.options, np.ones(out.shape))
    found = rounding_sizes(record, {**inputs, **case.options, "d_out": np.ones(out.shape)}, traced, 1.0)
    assert found.keys() == traced.keys()
    for key, value in traced.items():
        assert found[key].shape == value.shape
        assert np.all(np.isfinite(found[key])) and np.all(found[key] >= 0.0)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_record_replaces_what_is_measured_or_adds_to_it(name: str) -> None:
    record = ra.mechanism(name)
    assert record.rounding_scales.keys() | record.further_rounding_scales.keys() <= record.equations.keys()
    assert not record.rounding_scales.keys() & record.further_rounding_scales.keys()


def test_nothing_is_measured_at_rest() -> None:
    with sizes() as unit:
        x = unit.array(np.ones(3))
        unit.resting = True
        lost = np.sum(x)
        unit.resting = False
        assert lost.square == 0.0 and np.sum(x).square > 0.0
