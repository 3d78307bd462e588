"""Long calls: what samples say is what the whole call says, and an error in one row of many is among them."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.inputs import make
from refattn.mechanisms.record import Case, Input
from refattn.verify.layouts import quantise
from refattn.verify.run import verify_case
from refattn.verify.selfcheck.samples import shrunk
from refattn.verify.tolerance import sampled
from refattn.verify.user_cases import from_text

RECORD = ra.mechanism("softmax")
CASE = from_text(RECORD, "b=2,h=4,g=2,n=17,d=8,causal")


class Kernel:
    """The reference in the type of its inputs; a fault may be put into its results."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults

    def forward(self, q: Any, k: Any, v: Any, *, dtype: str = "", **options: Any) -> Any:
        out, self.saved = ra.softmax.forward(q, k, v, **options)
        return self._wrong("out", out), self._wrong("lse", self.saved.lse)

    def backward(self, d_out: Any, d_lse: Any = None) -> Any:
        return {n: self._wrong(n, g) for n, g in ra.softmax.backward(self.saved, d_out, d_lse).items()}

    def _wrong(self, name: str, x: Any) -> Any:
        if name not in self.faults:
            return x
        at, factor = self.faults[name]
        x = x.copy()
        x[at] *= x.dtype.type(factor)
        return x


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All calls are long, and few of their rows are drawn."""
    monkeypatch.setattr(sampled, "FULL", 0)
    monkeypatch.setattr(sampled, "PAIRS", 1000)
    yield


NAMES = ("causal-tail", "grouped", "bias-softcap", "window-mask", "sink-large", "lengths-both", "lengths-sink", "all")


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_call_are_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = shrunk(RECORD.case(name))
    whole = verify_case(RECORD, Kernel(), case, "float32", grad=True)
    monkeypatch.setattr(sampled, "FULL", 0)
    found = verify_case(RECORD, Kernel(), case, "float32", grad=True)
    assert (found.status, found.seen) == ("agrees", None)
    shares = {verdict.tensor: verdict.share for verdict in whole.verdicts}
    assert {verdict.tensor for verdict in found.verdicts} == {"out", "lse", "d_q", "d_k", "d_v"}
    for verdict in found.verdicts:  # every row is in the sample, and its noise is known to a fifth
        assert verdict.share == pytest.approx(shares[verdict.tensor], rel=0.6, abs=0.05)
    assert "by tiles is off the definition by" in found.note
    assert float(found.note.rpartition(" by ")[2].split()[0]) < 1e-6


@pytest.mark.parametrize("name", ["lse", "k"])
def test_an_error_in_one_row_is_seen(name: str, short: None) -> None:
    kernel = Kernel(**{name: ((1, 1, 13), 1.001)})
    found = verify_case(RECORD, kernel, CASE, "float32", grad=True)
    wrong = {verdict.tensor: verdict.index for verdict in found.verdicts if not verdict.agrees}
    tensor = name if name in ("out", "lse") else f"d_{name}"
    assert found.status == "disagrees" and {*wrong} == {tensor} and wrong[tensor][:3] == (1, 1, 13)


def test_int8_is_granted_by_the_largest_number_of_a_head_that_may_be_in_no_sample(short: None) -> None:
    case = from_text(RECORD, "b=2,h=4,g=2,n=64,d=8")
    inputs = make("softmax", case, "float32")
    inputs["q"][:, :, 40], inputs["k"][:, :, 40] = 30.0, 0.0
    case = replace(case, given=inputs)

    def in_int8(q: Any, k: Any, v: Any) -> Any:
        (q8, q_factors), (k8, k_factors) = (quantise(x, "int8", (2, 3)) for x in (q, k))
        return ra.softmax.forward(q8 * q_factors[..., None, None], k8 * k_factors[..., None, None], v)[0]

    declared = verify_case(RECORD, in_int8, case, "float32", rounding=["q=int8", "k=int8"])
    assert declared.status == "agrees" and declared.verdicts[0].share > 0.1
    assert verify_case(RECORD, in_int8, case, "float32").status == "disagrees"


def test_what_fails_at_once_is_not_sampled(short: None) -> None:
    case = CASE
    found = verify_case(RECORD, Kernel(out=((0, 1, 5, 7), np.nan)), case, "float32")
    assert [(v.statistic, v.index) for v in found.verdicts if not v.agrees] == [("non-finite", (0, 1, 5, 7))]

    def wide(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return q.astype(np.float64)

    assert verify_case(RECORD, wide, case, "float32").verdicts[0].statistic == "dtype"


def test_the_gradient_of_lse_is_cut_too(short: None) -> None:
    class Wrong(Kernel):
        def backward(self, d_out: Any, d_lse: Any = None) -> Any:
            return super().backward(d_out, -d_lse)

    found = verify_case(RECORD, Wrong(), CASE, "float32", grad=True)
    assert {v.tensor for v in found.verdicts if not v.agrees} == {"d_q", "d_k"}


def test_a_mechanism_that_cannot_be_cut_refuses_what_its_definition_cannot_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Input((1, 8, 4096, 8))
    case = Case("large", "own", {"q": shape, "k": shape, "v": shape})
    with pytest.raises(sampled.TooLargeError, match="needs at most 16777216"):
        sampled.is_long(ra.mechanism("higher_order"), case)
    assert sampled.is_long(RECORD, case) and not sampled.is_long(replace(RECORD, parts=None), RECORD.case("plain"))


def test_few_queries_over_many_keys_need_little_more_memory_than_the_keys() -> None:
    """One query has few scores, while the definition would hold the keys of a group once for each of 16 heads."""
    case = from_text(RECORD, "b=2,h=32,g=2,nq=1,nk=2100,d=64")
    keys = 8 * math.prod(case.inputs["k"].shape)
    assert sampled.is_long(RECORD, case)
    tracemalloc.start()
    try:
        outcome = verify_case(
            RECORD, lambda q, k, v: ra.softmax.forward(q, k, v, implementation="tiled")[0], case, "float32"
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outcome.status == "agrees" and peak < 16 * keys < 8 * sampled.REPEATED
