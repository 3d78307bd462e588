"""Exact cases: their results are numbers that every storage type holds, and nothing but these numbers passes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import round_to, spacing
from refattn.mechanisms.case_builders import EVERY, SHORT
from refattn.mechanisms.record import Case
from refattn.verify.outcome import Truth
from refattn.verify.report import sections
from refattn.verify.run import verify
from refattn.verify.selfcheck.samples import shrunk
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import compare


@functools.cache
def known_of(name: str, case: str, dtype: str, small: bool) -> Truth:
    """The true results of a case as it is, or shrunk."""
    record = ra.mechanism(name)
    return truth(record, shrunk(record.case(case)) if small else record.case(case), dtype, grad=True)


CASES = [(name, case) for name in ra.list_mechanisms() for case in ra.mechanism(name).cases if case.exact]
IDS = [f"{name}-{case.name}" for name, case in CASES]
SOFTMAX = ra.mechanism("softmax")


def by_fractions(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """out and d_v of softmax attention in exact arithmetic, where the largest score takes all the weight."""
    inputs = make("softmax", case, "float64")
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    (n_b, h, n_q, d), (_, g, n_k, e) = q.shape, v.shape
    plane = (n_b, h, n_q, n_k)
    allowed, bias, keep = (
        np.broadcast_to(inputs.get(name, usual), plane)
        for name, usual in (("mask", True), ("bias", 0.0), ("keep", 1.0))
    )
    sink = inputs.get("sink", np.zeros((h, 0)))
    scale = Fraction(case.options.get("scale", 1.0 / math.sqrt(d)))
    left, right = case.options.get("window", (None, None))
    right = 0 if case.options.get("causal") else right
    d_out = make_upstream("softmax", case, "out", (n_b, h, n_q, e), "float64")
    out = np.full((n_b, h, n_q, e), Fraction(0))
    d_v = np.full(v.shape, Fraction(0))
    for b, head, i in np.ndindex(n_b, h, n_q):
        of, exist = head * g // h, int(inputs["k_lengths"][b]) if "k_lengths" in inputs else n_k
        place = i + case.options.get("offset", exist - n_q)
        scores: dict[int, Fraction] = {}
        for j in range(exist):
            if not allowed[b, head, i, j] or (left is not None and j < place - left):
                continue
            if right is None or j <= place + right:
                product = sum(Fraction(x) * Fraction(y) for x, y in zip(q[b, head, i], k[b, of, j], strict=True))
                scores[j] = scale * product + Fraction(bias[b, head, i, j])
        every = [*scores.values(), *map(Fraction, sink[head])]
        largest = max(every, default=Fraction(0))
        # All others are e^-128 or less beside the largest.
        assert all(score == largest or largest - score >= 128 for score in every)
        for j in (j for j, score in scores.items() if score == largest):
            weight = Fraction(keep[b, head, i, j]) / every.count(largest)
            out[b, head, i] += [weight * Fraction(x) for x in v[b, of, j]]
            d_v[b, of, j] += [weight * Fraction(x) for x in d_out[b, head, i]]
    return out, d_v


@pytest.mark.parametrize("case", [case for case in SOFTMAX.cases if case.exact], ids=lambda case: case.name)
def test_results_are_those_of_exact_arithmetic(case: Case) -> None:
    for small in (False, True):
        exact = dict(zip(("out", "d_v"), by_fractions(shrunk(case) if small else case), strict=True))
        for dtype in EVERY:
            known = known_of("softmax", case.name, dtype, small)
            for name in known.exact:
                # No rounding at all, or in the gradient of v of weights e^-128 that are none in a short type.
                assert np.array_equal(round_to(known.values[name], dtype), exact[name].astype(np.float64))
                assert [Fraction(x) for x in exact[name].astype(np.float64).flat] == list(exact[name].flat)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_every_type_holds_inputs_and_results(name: str, case: Case) -> None:
    assert case.exact["out"] in (EVERY, SHORT)
    for small in (False, True):
        known = {dtype: known_of(name, case.name, dtype, small) for dtype in ("float64", "bfloat16")}
        for dtype, each in known.items():
            assert each.exact == {tensor for tensor in case.exact if dtype in case.exact[tensor]}
        for tensor in case.exact:
            wide, short = (round_to(each.values[tensor], dtype) for dtype, each in known.items())
            # In float64 there are weights of e^-128, and roundings where short types hide them.
            assert np.allclose(wide, short, rtol=1e-15, atol=1e-50)
            assert np.array_equal(round_to(short, "float16"), short) and np.any(short != 0.0)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_an_error_of_one_place_fails(name: str, case: Case) -> None:
    for dtype in ("float64", "bfloat16"):
        known = known_of(name, case.name, dtype, small=False)
        for tensor in known.exact:
            right = round_to(known.values[tensor], dtype)
            held = right.astype("float32" if dtype == "bfloat16" else dtype)
            assert compare(tensor, held, held.dtype.name, known).share == 0.0
            at = tuple(int(n) for n in np.argwhere(right != 0.0)[-1])
            wrong = right.copy()
            wrong[at] += spacing(right, dtype)[at]
            found = compare(tensor, wrong.astype(held.dtype), held.dtype.name, known)
            assert (found.statistic, found.index, found.agrees) == ("exact", at, False)
            assert found.got != found.expected


def test_the_report_says_that_exact_numbers_differ() -> None:
    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
        out: np.ndarray = ra.softmax.forward(q, k, v, **options)[0]
        return out * np.asarray(1.0 + 2.0**-23, out.dtype)  # within every budget

    few = replace(SOFTMAX, cases=tuple(SOFTMAX.case(name) for name in ("plain", "ties", "exact", "exact-mean")))
    found = verify(few, attend, dtypes=["float32"])
    assert [outcome.case for outcome in found.outcomes if outcome.status == "disagrees"] == ["exact"]
    assert "worst: exact numbers differ (float32 out, case exact)" in sections.closing(found)
