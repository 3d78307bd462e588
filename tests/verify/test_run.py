"""A verification from end to end: outcomes, counts, exit codes and facts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage_types import DTYPES, round_to
from refattn.mechanisms.case_features import fewest
from refattn.verify import run
from refattn.verify.adapters.adapter import LoadError
from refattn.verify.outcome import Outcome, Report, Verdict
from refattn.verify.report.junit import junit
from refattn.verify.report.sections import closing
from refattn.verify.report.tables import verified
from refattn.verify.run import verify, verify_case
from refattn.verify.tolerance.budget import granting

CASES = ("tiny", "causal-tail", "grouped", "empty-rows")
RECORD = ra.mechanism("softmax")
RECORD = dataclasses.replace(RECORD, cases=tuple(RECORD.case(name) for name in CASES))


def reference(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ra.softmax.forward(q, k, v, **options)[0]


def test_what_a_declined_case_has_to_give_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def counted(*given: Any) -> Any:
        computed.append(given[1].name)
        return granting(*given)

    monkeypatch.setattr(run, "granting", counted)

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.Decline("no options") if options else reference(q, k, v)

    counts = verify(RECORD, attend, dtypes=["float32"]).counts()["all"]
    assert counts["declined"] == len(CASES) - len(computed) > 0 and counts["agreed"] == len(computed) > 0


class Reference:
    """The tiled implementation, forward and backward."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        out, self.saved = ra.softmax.forward(q, k, v, implementation="tiled", **options)
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
    assert (report.mechanism, report.kernel, report.grad) == ("softmax", "reference", False)
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
        (["not finished"], 3),
        (["agrees", "not finished"], 3),
        (["disagrees", "not finished"], 1),
    ],
)
def test_exit_codes(found: list[str], code: int) -> None:
    assert Report("softmax", "it", False, tuple(map(outcome, found))).exit_code == code


def test_a_limit_begins_no_further_case_and_says_which_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # each look at it takes a second

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return 1.02 * reference(q, k, v, **options)

    monkeypatch.setattr("refattn.verify.run.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(run, "differing", lambda *_, **__: {"causal": "ignored"})
    report = verify(RECORD, wrong, dtypes=["float32"], limit=1.5)
    assert len(report.outcomes) == 2 and report.conventions  # it is diagnosed from what ran
    left = len(RECORD.cases) - 2
    assert report.not_run[0].startswith(f"{left} of {len(RECORD.cases)} cases did not run, the limit of 1.5 s is over")
    right = verify(RECORD, reference, dtypes=["float32"], limit=0.5)
    assert right.exit_code == 3 and report.exit_code == 1
    assert "cases did not run" in junit(right) and "nothing was run" not in junit(right)
    closing = repr(right).splitlines()[-1]
    assert f"{left + 1} of {left + 2} cases did not run" in closing and " agrees:" not in closing
    assert not verify(RECORD, reference, dtypes=["float32"]).not_run
    required = dataclasses.replace(report, outcomes=(outcome("agrees"),), require_all=True)
    assert required.exit_code == 3


def test_what_tells_most_runs_first_and_what_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ra.mechanism("softmax")
    asked: list[tuple[str, str]] = []

    def judged(record: Any, kernel: Any, case: Any, dtype: str, **_: Any) -> Outcome:
        asked.append((case.name, dtype))
        return Outcome(case.name, case.kind, dtype, "agrees")

    monkeypatch.setattr(run, "verify_case", judged)
    report = verify(record, reference, dtypes=["float64", "float32"], first={("wide", "float32")})
    few = {case.name for case in fewest(record.cases)}
    assert asked[0] == ("wide", "float32") and {name for name, _ in asked[1 : 2 * len(few)]} <= few
    rest = asked[2 * len(few) + 1 - ("wide" in few) :]
    narrow = [name for name, dtype in rest if dtype == "float32"]
    assert [dtype for _, dtype in rest] == ["float32"] * len(narrow) + ["float64"] * (len(rest) - len(narrow))
    costs = [math.prod(record.case(name).inputs["q"].shape) for name in narrow]
    assert max(costs[: len(costs) // 4]) < max(costs[-len(costs) // 4 :])
    assert [one.case for one in report.outcomes[: len(record.cases)]] == [case.name for case in record.cases]


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
    with pytest.raises(LoadError, match="needs some of products, q, k, v, exponent and ids such as SM.1"):
        verify_case(RECORD, rough, case, "float16")


def one(name: str) -> Any:
    """The record of softmax attention with one of its cases."""
    whole = ra.mechanism("softmax")
    return dataclasses.replace(whole, cases=(whole.case(name),))


@pytest.mark.parametrize("case", ["all", "mask-heads", "softcap"])
def test_equations_are_judged_by_their_ids(case: str) -> None:
    """Each against the trace, or against what stands in its place; a wrong one fails by its name."""
    ids = ("SM.1", "SM.capped", "SM.2", "SM.biased", "SM.4", "SM.kept", "SM.largest", "SM.top", "SM.total")
    before = RECORD.fallback_equation

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        with ra.trace() as traced:
            out, saved = ra.softmax.forward(q, k, v, **options)
        found = {"out": out, "max": saved.max}
        for id in ids:
            at = id
            while at not in traced:
                at = before[at]
            found[id] = traced[at]
        return {**found, **changed(found)}

    changed: Any = lambda found: {}  # noqa: E731
    (outcome,) = verify(one(case), attend, dtypes=["float32"]).outcomes
    assert outcome.status == "agrees" and {v.tensor for v in outcome.verdicts} == {"out", "max", *ids}
    changed = lambda found: {"SM.4": found["SM.4"] * np.float32(1.001)}  # noqa: E731
    (outcome,) = verify(one(case), attend, dtypes=["float32"]).outcomes
    assert [v.tensor for v in outcome.verdicts if not v.agrees] == ["SM.4"]
    changed = lambda found: {"dSM.q": found["out"]}  # noqa: E731
    (outcome,) = verify(one(case), attend, dtypes=["float32"]).outcomes
    assert outcome.status == "raises" and "dSM.q, which is no equation of the forward" in outcome.detail


@pytest.mark.parametrize("takes", [False, True])
def test_the_gradient_of_lse_is_judged_where_it_is_taken(takes: bool) -> None:
    """A backward with d_lse that leaves it out fails; one without the parameter is not asked."""

    class Deaf:
        def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            out, self.saved = ra.softmax.forward(q, k, v, **options)
            return out, self.saved.lse

    class Asked(Deaf):
        def backward(self, d_out: Any, d_lse: Any) -> Any:
            return ra.softmax.backward(self.saved, d_out, d_lse if heard else None)

    class Unasked(Deaf):
        def backward(self, d_out: Any) -> Any:
            return ra.softmax.backward(self.saved, d_out)

    heard = True
    (outcome,) = verify(one("sink"), Asked() if takes else Unasked(), dtypes=["float32"], grad=True).outcomes
    assert outcome.status == "agrees"
    assert {v.tensor for v in outcome.verdicts} == {"out", "lse", "d_q", "d_k", "d_v", "d_sink"}
    if takes:
        heard = False
        (outcome,) = verify(one("sink"), Asked(), dtypes=["float32"], grad=True).outcomes
        assert [v.tensor for v in outcome.verdicts if not v.agrees] == ["d_q", "d_k", "d_sink"]


def test_rows_that_do_not_exist_are_left_out_where_an_adapter_says_so() -> None:
    """What is beyond the lengths has to be 0, with an lse of -inf, unless it is unwritten; then any number does."""

    class Unwritten(Reference):
        def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            out, lse = super().forward(q, k, v, **options)
            self.rows = (np.arange(q.shape[2]) >= options["q_lengths"][:, None])[:, None]
            self.columns = (np.arange(k.shape[2]) >= options["k_lengths"][:, None])[:, None]
            return np.where(self.rows[..., None], np.float32(7), out), np.where(self.rows, np.float32(np.nan), lse)

        def backward(self, d_out: Any) -> Any:
            found = super().backward(d_out)
            hidden = {"q": self.rows, "k": self.columns, "v": self.columns}
            return {n: np.where(hidden[n][..., None], np.float32(9), found[n]) for n in "qkv"}

    kernel: Any = Unwritten()
    (outcome,) = verify(one("lengths-both"), kernel, dtypes=["float32"], grad=True).outcomes
    assert [v.tensor for v in outcome.verdicts if not v.agrees] == ["out", "lse", "d_q", "d_k", "d_v"]
    kernel.slack = "unwritten"
    (outcome,) = verify(one("lengths-both"), kernel, dtypes=["float32"], grad=True).outcomes
    assert outcome.status == "agrees" and len(outcome.verdicts) == 5

    def scores(q: Any, k: Any, v: Any, **options: Any) -> Any:
        with ra.trace() as traced:
            out, _ = ra.softmax.forward(q, k, v, **options)
        missing = (np.arange(q.shape[2]) >= options["q_lengths"][:, None])[:, None, :, None]
        missing = missing | (np.arange(k.shape[2]) >= options["k_lengths"][:, None])[:, None, None]
        return {"out": out, "SM.1": np.where(missing, np.float32(5), traced["SM.1"])}

    kernel = scores
    for slack, status in (("", "disagrees"), ("unwritten", "agrees")):
        kernel.slack = slack
        assert verify(one("lengths-both"), kernel, dtypes=["float32"]).outcomes[0].status == status


def test_a_kernel_brings_the_dropout_that_it_draws() -> None:
    """It is asked for the factors before the truth is computed; other answers are errors with a line each."""

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return reference(q, k, v, **{**options, "keep": drawn})

    drawn = (np.random.default_rng(0).random((2, 4, 37, 37)) < 0.5) * np.float32(2)
    asked: list[Any] = []

    def own(*given: Any) -> Any:
        asked.append(given)
        return drawn

    kernel: Any = attend
    (outcome,) = verify(one("dropout-half"), kernel, dtypes=["float32"]).outcomes
    assert outcome.status == "disagrees"
    for keep, status, words in (
        (own, "agrees", ""),
        (lambda *given: drawn[0], "raises", "keep returned float32 of shape (4, 37, 37), needs"),
        (lambda *given: 1 / 0, "raises", "keep raised ZeroDivisionError"),
    ):
        kernel.keep = keep
        (outcome,) = verify(one("dropout-half"), kernel, dtypes=["float32"]).outcomes
        assert outcome.status == status and words in outcome.detail
    assert asked == [("dropout-half", (2, 4, 37, 37))]


class Small:
    """A kernel in float8 that rounds its weights to that, too, as tensor cores need."""

    def forward(self, q: Any, k: Any, v: Any, *, dtype: str, descale: Any, **options: Any) -> Any:
        assert (q.dtype, dtype) == (np.float32, "float8_e4m3fn")
        shapes.append([np.shape(x) for x in descale])
        wide = []
        for x, factor in zip((q, k, v), descale, strict=True):
            by_head = np.broadcast_to(factor, k.shape[:2]).repeat(x.shape[1] // k.shape[1], axis=1)
            wide.append(x.astype(np.float64) * by_head[:, :, None, None])
        with ra.trace() as traced:
            _, saved = ra.softmax.forward(*wide, **options)
        largest = traced["SM.4"].max(axis=-1, keepdims=True)
        weights = round_to(traced["SM.4"] / largest, "float8_e4m3fn") * largest
        out = weights @ wide[2].repeat(q.shape[1] // k.shape[1], axis=1)
        return round_to(out, "bfloat16").astype(np.float32), saved.lse.astype(np.float32)


shapes: list[Any] = []


@pytest.mark.parametrize("case", ["grouped", "peaked"])
def test_float8_comes_with_factors_and_declared_roundings(case: str) -> None:
    """Weights in float8 are granted where they are declared, and are too coarse where they are not."""
    for roundings, status in (({"SM.3": "float8_e4m3fn"}, "agrees"), ((), "disagrees")):
        kernel: Any = Small()
        kernel.roundings = roundings
        (outcome,) = verify(one(case), kernel, dtypes=["float8_e4m3fn"]).outcomes
        assert outcome.status == status
        assert [v.agrees for v in outcome.verdicts] == [status == "agrees", True]
    assert shapes[-1] == [(2, 3 if case == "grouped" else 4)] * 3
    kernel.roundings, kernel.descale = {"SM.3": "float8_e4m3fn"}, "tensor"
    (outcome,) = verify(one(case), kernel, dtypes=["float8_e4m3fn"], grad=True).outcomes
    assert (outcome.status, outcome.detail) == ("declined", "no gradients in float8") and len(outcome.verdicts) == 2
    assert shapes[-1] == [()] * 3
    kernel.roundings = {"SM.3": "float9"}
    with pytest.raises(LoadError, match="its roundings name 'float9'"):
        verify(one(case), kernel, dtypes=["float8_e4m3fn"])


def test_a_forgotten_factor_is_far_off_and_who_cannot_be_told_declines() -> None:
    class Forgets(Small):
        roundings = {"SM.3": "float8_e4m3fn"}

        def forward(self, q: Any, k: Any, v: Any, *, dtype: str, descale: Any, **options: Any) -> Any:
            return super().forward(q, k, v, dtype=dtype, descale=(*descale[:2], descale[2] * 0 + 1), **options)

    (outcome,) = verify(one("plain"), Forgets(), dtypes=["float8_e4m3fn"]).outcomes
    assert outcome.status == "disagrees" and outcome.verdicts[0].share > 100.0
    (outcome,) = verify(one("plain"), reference, dtypes=["float8_e5m2"]).outcomes
    assert outcome.status == "declined" and "cannot be told" in outcome.detail


def test_nothing_agrees_whose_main_path_did_not_run() -> None:
    delta = ra.mechanism("delta")
    few = delta.changed(cases=(delta.case("linear"), delta.case("chunks-linear")), kernel_sizes=())

    def attend(most: int, q: Any, k: Any, v: Any) -> Any:
        return ra.delta.forward(q, k, v)[0] if q.shape[2] <= most else ra.Decline("short ones alone")

    report = verify(few, functools.partial(attend, 64), dtypes=["float32"])
    assert report.not_run == ("nothing that ran crosses a tile or chunk of 64 keys",)
    assert closing(report).startswith("delta: nothing that ran crosses") and report.not_run[0] in verified(report, few)
    assert report.exit_code == 0 and dataclasses.replace(report, require_all=True).exit_code == 3
    whole = verify(few, functools.partial(attend, 200), dtypes=["float32", "bfloat16"])  # the second has no way in
    assert whole.counts()["all"]["declined"] == 2
    assert not whole.not_run and dataclasses.replace(whole, require_all=True).exit_code == 0
    short = delta.changed(cases=(delta.case("linear"),), kernel_sizes=())
    assert not verify(short, functools.partial(attend, 64), dtypes=["float32"]).not_run


def test_the_absolute_error_stands_beside_the_largest_element() -> None:
    case = RECORD.case("tiny")
    outcome = verify_case(RECORD, lambda q, k, v: ra.softmax.forward(q, k, v)[0] + q.dtype.type(0.5), case, "float32")
    verdict = outcome.verdicts[0]
    assert verdict.error == pytest.approx(0.5, rel=1e-5) and verdict.largest is not None and verdict.largest > 0.1
    assert f"off by 0.5 of {verdict.largest:.2g}" in outcome.told()[0]


class Multiplied:
    """A kernel that multiplies numbers of float8 by their factors in float32, and rounds weights times a number."""

    roundings: Any = {"SM.3": "float8_e4m3fn"}

    def __init__(self, times: float = 0.0) -> None:
        self.times = times

    def __call__(self, q: Any, k: Any, v: Any, *, dtype: str, descale: Any) -> Any:
        q, k, v = (x * factor[:, :, None, None] for x, factor in zip((q, k, v), descale, strict=True))  # float32
        heads = q.shape[1] // k.shape[1]
        scores = (q @ k.repeat(heads, axis=1).swapaxes(2, 3)) / np.float32(np.sqrt(q.shape[3]))
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        if self.times:
            weights = round_to(weights * self.times, "float8_e4m3fn").astype(np.float32) / np.float32(self.times)
        out = weights @ v.repeat(heads, axis=1) / total
        return round_to(out, "bfloat16").astype(np.float32), (largest + np.log(total))[..., 0]


def test_factors_multiplied_in_float32_are_honest_and_weights_that_lose_mass_are_not() -> None:
    low, mass = (dataclasses.replace(RECORD, cases=(ra.mechanism("softmax").case(name),)) for name in ("low", "mass"))
    assert statuses(verify(low, Multiplied(), dtypes=["float8_e4m3fn"])) == ["agrees"]
    assert statuses(verify(mass, Multiplied(256.0), dtypes=["float8_e4m3fn"])) == ["agrees"]
    # Weights below 2^-10 of the largest become 0, and the sum that was taken before knows nothing of it.
    (outcome,) = verify(mass, Multiplied(1.0), dtypes=["float8_e4m3fn"]).outcomes
    assert [(v.tensor, v.agrees) for v in outcome.verdicts] == [("out", False), ("lse", True)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("summed", ["before", "after"])
def test_declared_numerators_in_bfloat16_are_accepted_wherever_they_are_summed(summed: str, dtype: str) -> None:
    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        q, k, v = (x.astype(np.float32) for x in (q, *(x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))))
        scores = q @ k.swapaxes(2, 3) * np.float32(q.shape[3] ** -0.5)
        top = scores.max(axis=-1, keepdims=True)
        numerators = np.exp(scores - top)
        rounded = round_to(numerators.astype(np.float64), "bfloat16").astype(np.float32)
        total = (numerators if summed == "before" else rounded).sum(axis=-1, keepdims=True)
        return (rounded @ v / total).astype(dtype), (top + np.log(total))[..., 0]

    for name in ("mass", "long"):
        assert not verify(one(name), kernel, dtypes=[dtype]).passed
        assert verify(one(name), kernel, dtypes=[dtype], rounding=["SM.3=bfloat16"]).passed
