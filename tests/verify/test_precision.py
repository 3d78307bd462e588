"""What a kernel rounds and declares is granted, and what it does not declare is named where it explains a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage_types import round_to
from refattn.instruments.products import products
from refattn.verify import verify
from refattn.verify.adapters.adapter import LoadError
from refattn.verify.bugs.emulator import low
from refattn.verify.layouts import quantise
from refattn.verify.outcome import Result
from refattn.verify.report import diagnosis
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge
from refattn.verify.tolerance.precision import explained
from tools import honest_kernels as kernels

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


class Low(kernels.FusedScale, kernels.Unrounded):
    """What products multiply has eleven bits."""

    def matmul(self, a: Any, b: Any) -> Any:
        return round_to(a.astype(np.float64), "tf32").astype(F) @ round_to(b.astype(np.float64), "tf32").astype(F)


def test_gradients_with_products_of_eleven_bits() -> None:
    """The backward takes an inner product from an output that has the errors of the forward."""
    kernel = kernels.Kernel("low", Low, tile=16)
    for name in ("one-key", "plain", "peaked"):
        case = RECORD.case(name)
        known = truth(RECORD, case, "float32", grad=True, roundings={"products": "tf32"})
        assert known.upstream is not None
        tensors = kernels.run(kernel, "float32", known.inputs, known.upstream, **case.options)
        shares = {v.tensor: v.share for v in judge(Result(tensors, dict.fromkeys(tensors, "float32")), known)}
        assert max(shares.values()) < 0.8 and shares["d_v"] > 0.05, shares


class ShortExponents(kernels.Unrounded):
    """The argument of the exponential is stored in bfloat16, in the backward, too."""

    def exp(self, x: Any) -> Any:
        return super().exp(low(x, "bfloat16"))


def test_the_argument_of_the_exponential_has_a_name() -> None:
    kernel = kernels.Kernel("short exponents", ShortExponents)
    worst: dict[bool, float] = {}
    for name in ("plain", "causal", "peaked", "sink", "sink-large", "tile-65"):
        case = RECORD.case(name)
        for declared in (False, True):
            known = truth(RECORD, case, "bfloat16", grad=True, roundings={"exponent": "bfloat16"} if declared else {})
            assert known.upstream is not None
            tensors = kernels.run(kernel, "bfloat16", known.inputs, known.upstream, **case.options)
            types = {key: known.stored.get(key, "bfloat16") for key in tensors}
            shares = [v.share for v in judge(Result(tensors, types), known)]
            worst[declared] = max(worst.get(declared, 0.0), *shares)
    assert worst[False] > 1.5 and 0.1 < worst[True] < 0.9, worst


def test_it_is_granted_where_it_is_declared() -> None:
    record = some("plain", "causal")

    def attend(q: Any, k: Any, v: Any, *, dtype: str, causal: bool = False) -> Any:
        found = ShortExponents(64, 64).run({"q": q, "k": k, "v": v}, {"causal": causal}, None, F)
        return round_to(found["out"].astype(np.float64), dtype).astype(F), found["lse"]

    assert verify(record, attend, dtypes=["bfloat16"]).exit_code == 1
    assert verify(record, attend, dtypes=["bfloat16"], rounding=["exponent"]).exit_code == 0
    with pytest.raises(ValueError, match="needs some of products, q, k, v, exponent and ids such as SM.1"):
        verify(record, attend, rounding=["exponents"])


def test_types_that_a_device_does_not_have_explain_nothing() -> None:
    record = some("tiny", "causal")
    report = verify(record, with_products("tf32"), dtypes=["float32"])
    assert explained(record, report, {}, ("tf32", "bf16x3")).precision == ()
    report = verify(record, with_products("bfloat16"), dtypes=["float32"])
    (found,) = explained(record, report, {}, ("tf32", "bf16x3")).precision
    assert found.roundings == {"products": "bfloat16"}


def test_a_q_that_is_scaled_and_rounded_again() -> None:
    def scaled(q: Any, k: Any, v: Any, *, dtype: str, scale: float) -> Any:
        q = round_to(q * np.float64(scale), dtype)
        return ra.softmax.forward(q.astype(F), k, v, scale=1.0)[0]

    record = replace(RECORD, cases=(replace(RECORD.case("huge-scores"), options={"scale": 0.3}),))
    report = explained(record, verify(record, scaled, dtypes=["bfloat16"]), {})
    assert [found.roundings for found in report.precision] == [{"q": "bfloat16"}]
    assert verify(record, scaled, dtypes=["bfloat16"], rounding=["q"]).exit_code == 0


def with_int8(rows: int = 128, columns: int = 64, *, smooth: bool = False, wrong: bool = False) -> Any:
    """A kernel whose queries and keys are in int8, with a factor of each block of rows.

    A smooth one takes the mean of the keys from each first. A wrong one multiplies each block by the factor of the
    first.
    """

    def quantised(x: Any, size: int) -> Any:
        blocks = [quantise(x[:, :, n : n + size], "int8", (2, 3)) for n in range(0, x.shape[2], size)]
        factors = [(blocks[0] if wrong else block)[1][..., None, None] for block in blocks]
        return np.concatenate([block[0] * factor for block, factor in zip(blocks, factors, strict=True)], axis=2)

    def attend(q: Any, k: Any, v: Any, *, dtype: str, causal: bool = False, scale: float | None = None) -> Any:
        q, k = q.astype(np.float64), k.astype(np.float64)
        k = k - k.mean(axis=2, keepdims=True) if smooth else k
        out, _ = ra.softmax.forward(quantised(q, rows), quantised(k, columns), v.astype(F), causal=causal, scale=scale)
        return round_to(out.astype(np.float64), dtype).astype(np.float16 if dtype == "float16" else F)

    return attend


IN_INT8 = {"q": "int8", "k": "int8"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_queries_and_keys_in_int8_are_named_and_declared_ones_agree(dtype: str) -> None:
    record = some("plain", "peaked", "causal-long", "grouped", "wide", "tile-192")
    for kernel in (with_int8(), with_int8(smooth=True), with_int8(32)):
        report = explained(record, verify(record, kernel, dtypes=[dtype]), {})
        assert {outcome.status for outcome in report.outcomes} == {"disagrees"}
        words = "scale times q) were rounded to int8 and k were rounded to int8; meant so? declare roundings = "
        assert any(f"{words}{IN_INT8}" in text for _, text in diagnosis.lines(report, record))
        assert 0.1 < _share(record, kernel, dtype) < 0.9
    assert 0.1 < _share(record, with_int8(1, 1), dtype) < 0.9  # a factor of each token


def _share(record: Any, kernel: Any, dtype: str) -> float:
    """Return the largest share that a kernel uses which declares int8."""
    outcomes = verify(record, kernel, dtypes=[dtype], rounding=["q=int8", "k=int8"]).outcomes
    return max(verdict.share for outcome in outcomes for verdict in outcome.verdicts)


def test_a_factor_of_another_block_is_no_rounding_to_int8() -> None:
    assert all(_share(some(name), with_int8(16, 16, wrong=True), "float16") > 1.5 for name in ("plain", "tile-192"))


def test_a_wrong_kernel_is_explained_by_no_precision() -> None:
    record = some("tiny", "causal")

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.softmax.forward(q, k, v, **options, scale=1.02 * q.shape[-1] ** -0.5)[0]

    report = verify(record, wrong, dtypes=["float32"])
    assert report.exit_code == 1 and not explained(record, report, {}).precision


def test_no_type_is_offered_that_is_coarser_than_the_kernels_own() -> None:
    """Of float16 numbers, products in bfloat16 would explain a sum in a narrow accumulator, too."""
    record = some("tiny", "causal")
    report = verify(record, with_products("bfloat16"), dtypes=["float16"])
    assert {outcome.status for outcome in report.outcomes} == {"disagrees"}
    assert explained(record, report, {}).precision == ()


def test_what_cannot_be_declared_is_refused() -> None:
    kernel = with_products("tf32")
    for declared, words in (
        ({"products": "tf33"}, "'tf33'"),
        (("product",), "needs some of products, q, k, v"),
        ({"SM.3": "int8"}, "have int8 for SM.3, needs it for q, k or v alone"),
    ):
        kernel.roundings = declared
        with pytest.raises(LoadError, match=words):
            verify(some("tiny"), kernel, dtypes=["float32"])


class Scaled:
    """A kernel that multiplies what it is given by its factors first, by loops of its own."""

    def __init__(self, format: str, descale: Any = None, forgets: str = "") -> None:
        self.format, self.descale, self.forgets, self.shapes = format, descale, forgets, [()]
        self.result = "float32"

    def forward(self, q: Any, k: Any, v: Any, *, dtype: str, descale: Any, descale_whole: Any = (1, 1, 1)) -> Any:
        assert dtype == self.format
        self.shapes = [x.shape for x in descale]
        size = {"mxfp8": 32, "nvfp4": 16}.get(dtype, self.descale)
        wide = []
        for name, x, factors, whole in zip("qkv", (q, k, v), descale, descale_whole, strict=True):
            x = x.astype(np.float64)
            for at in np.ndindex(x.shape) if name != self.forgets else ():
                b, h, n, d = at
                n, d = (n // size, d) if name == "v" or self.descale else (n, d // size)
                x[at] *= factors[(b, h, n) if self.descale else (b, h, n, d)] * np.float64(whole)
            wide.append(x)
        return ra.softmax.forward(*wide)[0].astype(F)


@pytest.mark.parametrize(
    ("format", "descale", "shapes"),
    [
        ("mxfp8", None, [(2, 4, 37, 1), (2, 4, 37, 1), (2, 4, 2, 16)]),
        ("nvfp4", None, [(2, 4, 37, 1), (2, 4, 37, 1), (2, 4, 3, 16)]),
        ("float8_e5m2", 16, [(2, 4, 3)] * 3),
    ],
)
def test_factors_of_blocks(format: str, descale: Any, shapes: Any) -> None:
    kernel = Scaled(format, descale)
    (outcome,) = verify(some("plain"), kernel, dtypes=[format]).outcomes
    assert outcome.status == "agrees" and kernel.shapes == shapes
    (outcome,) = verify(some("plain"), Scaled(format, descale, forgets="v"), dtypes=[format]).outcomes
    assert outcome.status == "disagrees"


def test_numbers_times_factors_are_the_designed_numbers_rounded() -> None:
    case = RECORD.case("plain")
    designed = truth(RECORD, case, "float32", grad=False).inputs
    for format, unit in (("mxfp8", 2.0**-3), ("nvfp4", 2.0**-2)):  # a block's largest may saturate, by 448 / 512
        known = truth(RECORD, case, format, grad=False)
        for name in "qkv":
            most = np.max(np.abs(designed[name]), axis=3 if name != "v" else 2, keepdims=True)
            assert np.all(np.abs(known.inputs[name] * known.times[name] - designed[name]) <= unit * most)
            held = {"mxfp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn"}[format]
            assert np.array_equal(round_to(known.inputs[name].astype(np.float64), held), known.inputs[name])
