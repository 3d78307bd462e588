"""The truth is float64; here longdouble bounds its own error, and the budget is seen to grant what it should."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.inputs import make, make_upstream
from refattn.mechanisms.record import Case
from refattn.mechanisms.softmax import dense
from refattn.verify.tolerance.budget import SMALLEST, bias_of, rounded, truth
from tests.thinned import thinned

RECORD = ra.mechanism("softmax")
CASES = [case for case in RECORD.cases if "long" not in case.name]

pytestmark = pytest.mark.skipif(float(np.finfo(np.longdouble).eps) > 1e-18, reason="longdouble is float64 here")


def longdouble(value: Any) -> Any:
    """Return floating arrays in longdouble, all else as it is."""
    return value.astype(np.longdouble) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


@pytest.mark.parametrize("case", thinned(CASES, 2), ids=lambda case: case.name)
def test_longdouble_agrees_with_the_truth_within_the_float64_budget(case: Case) -> None:
    known = truth(RECORD, case, "float64", grad=True)
    assert known.upstream is not None
    # Checked in float64: what does not exist is 0 there, and the options are as the implementation takes them.
    arguments: dict[str, Any] = {**known.inputs, **case.options}
    _, checked = ra.softmax.forward(**arguments, implementation="dense")
    assert isinstance(checked.inner, dense.Saved)
    given, rows = checked.given, checked.given.rows
    upstream = known.upstream if rows is None else np.where(rows, known.upstream, 0.0)
    out, lse, saved = dense.forward(
        *(longdouble(getattr(checked.inner, name)) for name in "qkv"),
        **{name: longdouble(value) for name, value in given.implementations.items()},
        scale=checked.inner.scale,
        softcap=checked.inner.softcap,
    )
    assert out.dtype == np.longdouble
    gradients = dense.backward(saved, longdouble(upstream), None)
    learned = {f"d_{name}": gradients[name] for name in "qkv"}
    learned |= {f"d_{name}": gradients[name].reshape(shape) for name, shape in given.shapes.items()}
    exact = {"out": out, "lse": lse, "max": saved.largest, **learned}
    assert set(exact) == set(known.values) - {"d_scale", "d_softcap"}
    for name, value in exact.items():
        finite = np.isfinite(known.values[name])
        assert (np.isfinite(value) == finite).all()
        error = np.where(finite, known.values[name], 0.0) - np.where(finite, value, 0.0)
        # Half of the variance is the truth's own, the other half that of the result it will be compared with.
        granted = np.sqrt(np.maximum(known.variance[name] / 2.0, SMALLEST**2))
        assert (np.abs(error) <= 6.0 * granted).all(), name


def test_the_budget_follows_the_conditioning() -> None:
    moderate = truth(RECORD, RECORD.case("plain"), "float32", grad=False)
    peaked = truth(RECORD, RECORD.case("peaked"), "float32", grad=False)
    # Scores four times as large are four times as uncertain, and so is lse, which is about the largest of them.
    ratio = np.sqrt(peaked.variance["lse"].mean() / moderate.variance["lse"].mean())
    assert 2.0 < ratio < 8.0


def test_the_budget_follows_the_storage_type() -> None:
    size = {
        dtype: truth(RECORD, RECORD.case("plain"), dtype, grad=True) for dtype in ("float32", "float16", "bfloat16")
    }
    for name in ("out", "d_q", "d_k", "d_v"):
        spread = {dtype: math.sqrt(known.variance[name].mean()) for dtype, known in size.items()}
        assert 100.0 < spread["float16"] / spread["float32"] < 20_000.0
        assert 4.0 < spread["bfloat16"] / spread["float16"] < 16.0


def test_a_declared_rounding_is_granted() -> None:
    case = RECORD.case("peaked")
    plain = truth(RECORD, case, "float16", grad=False)
    declared = truth(RECORD, case, "float16", grad=False, roundings={"SM.1": ""})
    assert declared.variance["out"].mean() > 2.0 * plain.variance["out"].mean()
    with pytest.raises(ValueError, match=r"roundings: got SM\.77"):
        truth(RECORD, case, "float16", grad=False, roundings={"SM.77": ""})


def test_what_cannot_err_is_granted_nothing() -> None:
    # A query that may attend nothing gives 0, whatever is rounded on the way.
    known = truth(RECORD, RECORD.case("empty-rows"), "bfloat16", grad=True)
    empty = known.values["lse"] == -np.inf
    assert empty.any()
    assert (known.variance["out"][empty] == 0.0).all()
    assert (known.variance["d_q"][empty] == 0.0).all()


def test_truth_and_inputs_are_reproducible() -> None:
    case = RECORD.case("causal")
    first, second = (truth(RECORD, case, "bfloat16", grad=True) for _ in range(2))
    for name in first.values:
        assert np.array_equal(first.values[name], second.values[name], equal_nan=True)
        assert np.array_equal(first.variance[name], second.variance[name], equal_nan=True)
        assert np.array_equal(rounded(first, name), rounded(second, name), equal_nan=True)
    assert np.array_equal(make("softmax", case, "bfloat16")["q"], first.inputs["q"])
    shape = first.values["out"].shape
    assert first.upstream is not None
    assert np.array_equal(make_upstream("softmax", case, "out", shape, "bfloat16"), first.upstream)


def test_bias_of_a_factor_is_its_sign() -> None:
    target, variance = np.asarray([[1.0, -2.0], [3.0, -4.0]]), np.full((2, 2), 1e-4)
    assert bias_of("out", 0.01 * target, variance, target) > 0.0
    assert bias_of("out", -0.01 * target, variance, target) < 0.0
    assert bias_of("out", 0.0 * target, variance, target) == 0.0
