"""What a kernel rounds and declares is granted, and what it does not declare is named where it explains a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage import round_to
from refattn.instruments.products import products
from refattn.verify import verify
from refattn.verify.foreign.adapter import LoadError
from refattn.verify.judge.budget import truth
from refattn.verify.judge.compare import judge
from refattn.verify.judge.precision import explained
from refattn.verify.outcome import Result
from refattn.verify.show import diagnosis
from tests.verify import kernels

RECORD = ra.mechanism("softmax")
F = np.float32


def some(*names: str) -> Any:
    return replace(RECORD, cases=tuple(RECORD.case(name) for name in names))


def with_products(type_: str) -> Any:
    """A kernel whose matrix products are of factors that are rounded to a type."""

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        with products(lambda x: round_to(x.astype(np.float64), type_)) as unit:
            out, _ = ra.softmax.forward(*map(unit.array, (q, k, v)), **options)
        return out.value.astype(q.dtype)

    return attend


@pytest.mark.parametrize("type_", ["bf16x3", "tf32", "bfloat16"])
def test_undeclared_products_are_named_and_declared_ones_agree(type_: str) -> None:
    record = some("tiny", "causal")
    report = verify(record, with_products(type_), dtypes=["float32"])
    assert {outcome.status for outcome in report.outcomes} == {"disagrees"}
    report = explained(record, report, {})
    (found,) = report.precision
    assert (found.dtype, found.roundings, found.failing) == ("float32", {"products": type_}, 2)
    assert ("precision", f"float32 agrees if what it multiplies were in {type_}; meant so? declare roundings = ") in [
        (word, text.partition("{")[0]) for word, text in diagnosis.lines(report, record)
    ]
    declared = verify(record, with_products(type_), dtypes=["float32"], rounding=[f"products={type_}"])
    assert {outcome.status for outcome in declared.outcomes} == {"agrees"}


def test_gradients_with_products_of_eleven_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward takes an inner product from an output that has the errors of the forward."""

    def product(a: Any, b: Any) -> Any:
        return round_to(a.astype(np.float64), "tf32").astype(F) @ round_to(b.astype(np.float64), "tf32").astype(F)

    monkeypatch.setitem(kernels.PRODUCTS, "low", product)
    kernel = kernels.Kernel("low", product="low", rounded_weights=False, fused_scale=True, chunk=16)
    for name in ("one-key", "plain", "peaked"):
        case = RECORD.case(name)
        known = truth(RECORD, case, "float32", grad=True, roundings={"products": "tf32"})
        assert known.upstream is not None
        tensors = kernels.run(kernel, "float32", known.inputs, known.upstream, **case.options)
        shares = {v.tensor: v.share for v in judge(Result(tensors, dict.fromkeys(tensors, "float32")), known)}
        assert max(shares.values()) < 0.8 and shares["d_v"] > 0.05, shares


def test_a_q_that_is_scaled_and_rounded_again() -> None:
    def scaled(q: Any, k: Any, v: Any, *, dtype: str, scale: float) -> Any:
        q = round_to(q * np.float64(scale), dtype)
        return ra.softmax.forward(q.astype(F), k, v, scale=1.0)[0]

    record = replace(RECORD, cases=(replace(RECORD.case("huge-scores"), options={"scale": 0.3}),))
    report = explained(record, verify(record, scaled, dtypes=["bfloat16"]), {})
    assert [found.roundings for found in report.precision] == [{"q": "bfloat16"}]
    assert verify(record, scaled, dtypes=["bfloat16"], rounding=["q"]).exit_code == 0


def test_a_wrong_kernel_is_explained_by_no_precision() -> None:
    record = some("tiny", "causal")

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.softmax.forward(q, k, v, **options, scale=1.02 * q.shape[-1] ** -0.5)[0]

    report = verify(record, wrong, dtypes=["float32"])
    assert report.exit_code == 1 and not explained(record, report, {}).precision


def test_what_cannot_be_declared_is_refused() -> None:
    kernel = with_products("tf32")
    for declared, words in (({"products": "tf33"}, "'tf33'"), (("product",), "needs some of products, q, k, v")):
        kernel.roundings = declared
        with pytest.raises(LoadError, match=words):
            verify(some("tiny"), kernel, dtypes=["float32"])
