"""A verification from end to end: outcomes, counts, exit codes and facts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage import DTYPES
from refattn.verify.foreign.adapter import LoadError
from refattn.verify.outcome import Outcome, Report, Verdict
from refattn.verify.run import verify, verify_case

CASES = ("tiny", "causal-tail", "grouped", "empty-rows")
RECORD = ra.mechanism("softmax")
RECORD = dataclasses.replace(RECORD, cases=tuple(RECORD.case(name) for name in CASES))


def reference(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ra.softmax.forward(q, k, v, **options)[0]


class Reference:
    """The tiled form, forward and backward."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        out, self.saved = ra.softmax.forward(q, k, v, form="tiled", **options)
        return out, self.saved.lse

    def backward(self, d_out: Any) -> Any:
        return ra.softmax.backward(self.saved, d_out.astype(self.saved.like.dtype))


def statuses(report: Report) -> list[str]:
    return [outcome.status for outcome in report.outcomes]


def test_the_reference_agrees_with_itself_in_every_dtype() -> None:
    def attend(q: Any, k: Any, v: Any, *, dtype: str, **options: Any) -> Any:
        seen.add((dtype, q.dtype.name))
        return reference(q, k, v, **options)

    seen: set[tuple[str, str]] = set()
    report = verify(RECORD, attend, label="reference")
    assert (report.mechanism, report.implementation, report.grad) == ("softmax", "reference", False)
    assert seen == {(dtype, "float32" if dtype == "bfloat16" else dtype) for dtype in DTYPES}
    assert statuses(report) == ["agrees"] * len(DTYPES) * len(CASES)
    assert report.counts()["all"] == {"run": 16, "agreed": 16, "failed": 0, "declined": 0}
    assert report.exit_code == 0


def test_gradients_and_lse_are_judged_where_they_are_given() -> None:
    report = verify(RECORD, Reference(), dtypes=["float32"], grad=True)
    assert report.exit_code == 0 and report.grad
    for outcome in report.outcomes:
        assert [verdict.tensor for verdict in outcome.verdicts] == ["out", "lse", "d_q", "d_k", "d_v"]
        assert all(verdict.share <= 1.0 for verdict in outcome.verdicts)


def test_outputs_are_judged_where_gradients_are_declined() -> None:
    right = verify(RECORD, reference, dtypes=["float32"], grad=True)
    assert set(statuses(right)) == {"declined"} and right.exit_code == 3
    assert all(verdict.tensor == "out" and verdict.agrees for o in right.outcomes for verdict in o.verdicts)

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return 1.02 * reference(q, k, v, **options)

    found = verify(RECORD, wrong, dtypes=["float32"], grad=True)
    assert set(statuses(found)) == {"disagrees"} and found.exit_code == 1


def test_a_gradient_that_is_wrong_or_missing_fails() -> None:
    class Wrong(Reference):
        def backward(self, d_out: Any) -> Any:
            return super().backward(d_out) | {"k": np.zeros(self.saved.inner.k.shape, d_out.dtype)}

    class Missing(Reference):
        def backward(self, d_out: Any) -> Any:
            return {"q": super().backward(d_out)["q"]}

    report = verify(RECORD, Wrong(), dtypes=["float32"], grad=True)
    assert report.exit_code == 1
    for outcome in report.outcomes:
        if outcome.case != "empty-rows":
            assert {v.tensor for v in outcome.verdicts if not v.agrees} == {"d_k"}
    report = verify(RECORD, Missing(), dtypes=["float32"], grad=True)
    assert (report.exit_code, set(statuses(report))) == (1, {"raises"})
    assert all("d_k, d_v" in outcome.detail for outcome in report.outcomes)


@pytest.mark.parametrize("returned", [None, (None, None), ()])
def test_returning_nothing_never_agrees(returned: Any) -> None:
    report = verify(RECORD, lambda q, k, v, **options: returned, dtypes=["float32"])
    assert (report.exit_code, set(statuses(report))) == (1, {"raises"})


@pytest.mark.parametrize(
    ("change", "statistic"),
    [
        (lambda out: out[..., :-1], "shape"),
        (lambda out: out.astype(np.float64), "dtype"),
        (lambda out: np.where(np.arange(out.shape[-1]) == 1, np.nan, out).astype(out.dtype), "non-finite"),
    ],
)
def test_the_rung_that_fails_is_named(change: Any, statistic: str) -> None:
    report = verify(RECORD, lambda *a, **o: change(reference(*a, **o)), dtypes=["float32"])
    assert report.exit_code == 1
    for outcome in report.outcomes:
        (verdict,) = outcome.verdicts
        assert verdict.statistic == statistic and math.isinf(verdict.share) and not verdict.agrees


def test_an_error_that_is_small_but_everywhere_is_seen() -> None:
    report = verify(RECORD, lambda *a, **o: reference(*a, **o) * np.float32(1.0001), dtypes=["float32"])
    assert report.exit_code == 1 and set(statuses(report)) == {"disagrees"}


def test_outcomes_are_counted_by_case_class() -> None:
    def attend(q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False) -> Any:
        if mask is not None:
            return ra.Decline("no masks")
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("no groups")
        return reference(q, k, v, causal="top_left" if causal else False)

    report = verify(RECORD, attend, dtypes=["float32"])
    assert statuses(report) == ["agrees", "disagrees", "raises", "declined"]
    assert [outcome.detail for outcome in report.outcomes[2:]] == ["raised NotImplementedError: no groups", "no masks"]
    none = {"run": 0, "agreed": 0, "failed": 0, "declined": 0}
    assert report.counts() == {
        "plain": none | {"run": 1, "agreed": 1},
        "causal": none | {"run": 1, "failed": 1},
        "grouped": none | {"run": 1, "failed": 1},
        "empty-row": none | {"declined": 1},
        "all": {"run": 3, "agreed": 1, "failed": 2, "declined": 1},
    }
    assert list(report.counts())[-1] == "all"
    assert report.exit_code == 1


def outcome(status: str) -> Outcome:
    return Outcome("tiny", "plain", "float32", status)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([], 3),
        (["declined"], 3),
        (["agrees"], 0),
        (["agrees", "declined"], 0),
        (["agrees", "disagrees"], 1),
        (["declined", "raises"], 1),
    ],
)
def test_exit_codes(found: list[str], code: int) -> None:
    assert Report("softmax", "it", False, tuple(map(outcome, found))).exit_code == code


def test_json_is_plain_and_complete() -> None:
    bad = Verdict("out", math.inf, "non-finite", (0, 1), "nan", "0.5")
    good = Verdict("lse", 0.25, "row", (), "1", "1")
    found = Outcome("tiny", "plain", "float32", "disagrees", "", (bad, good))
    report = Report("softmax", "it", False, (found, outcome("declined")))
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["counts"] == report.counts() and data["exit_code"] == 1
    first, second = data["outcomes"][0]["verdicts"]
    assert (first["share"], first["agrees"], first["index"], first["got"]) == (None, False, [0, 1], "nan")
    assert (second["share"], second["agrees"]) == (0.25, True)
    assert data["outcomes"][1] | {"verdicts": []} == data["outcomes"][1]


def test_huge_numbers_are_wrong_without_a_warning() -> None:
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return np.full_like(reference(q, k, v, **options), np.finfo(q.dtype).max)

    for dtype in ("float64", "float32"):
        report = verify(RECORD, attend, dtypes=[dtype])
        assert set(statuses(report)) == {"disagrees"}
        json.dumps(report.to_json(), allow_nan=False)


def test_progress_wraps_the_cases() -> None:
    def progress(plan: Iterable[Any]) -> Iterable[Any]:
        seen.extend(plan)
        return seen

    seen: list[Any] = []
    verify(RECORD, reference, dtypes=["float32", "float64"], progress=progress)
    assert [(case.name, dtype) for case, dtype in seen] == [(c, d) for d in ("float32", "float64") for c in CASES]


def test_declared_roundings_are_granted() -> None:
    def rough(q: Any, k: Any, v: Any, **options: Any) -> Any:
        scores = (
            q.astype(np.float32) @ np.swapaxes(k.astype(np.float32), 2, 3) * np.float32(q.shape[3] ** -0.5)
        ).astype(np.float16)
        weights = np.exp(scores.astype(np.float32))
        return (weights / weights.sum(axis=-1, keepdims=True) @ v.astype(np.float32)).astype(np.float16)

    case = ra.mechanism("softmax").case("peaked")
    assert verify_case(RECORD, rough, case, "float16").status == "disagrees"
    rough.roundings = ("SM.1",)  # type: ignore[attr-defined]
    assert verify_case(RECORD, rough, case, "float16").status == "agrees"
    rough.roundings = ("SM.77",)  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match=r"roundings are \('SM.77',\), needs a tuple of ids such as SM.1"):
        verify_case(RECORD, rough, case, "float16")
