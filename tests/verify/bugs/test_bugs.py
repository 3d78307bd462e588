"""Known bugs: the emulated kernel is right, each fault of it is wrong, and is named by its words."""

from __future__ import annotations

import dataclasses
import functools
import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.bugs.emulator import Flash, Unknown
from refattn.verify.bugs.fault import faults, served
from refattn.verify.bugs.features import Sums
from refattn.verify.bugs.recurrence import Recurrence
from refattn.verify.diagnose.error_templates import Templates
from refattn.verify.diagnose.mutants import kernel
from refattn.verify.diagnose.suspects import locate, suspects
from refattn.verify.diagnose.symptoms import UNWRITTEN
from refattn.verify.outcome import Report, Result, Truth
from refattn.verify.report import tables
from refattn.verify.report.suspects import told
from refattn.verify.run import verify
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge
from tools.measure_names import measured
from tools.rates import PATHS, of_paths

RECORD = ra.mechanism("softmax")
NAMES = """
tiny plain scale causal causal-tail causal-top-left causal-head mask-full mask-keys mask-heads mask-causal grouped
grouped-one unequal narrow empty-rows one-query softcap softcap-mask huge-scores window-causal window-decode offset
bias-heads bias-keys bias-scale alibi sink sink-grouped lengths-both dropout-half window-both lengths-keys tile-65
sink-above
"""
CASES = {
    "softmax": NAMES.split(),
    "delta": """
state-gated-channel mask-most grouped-values lengths state-linear norm-zero mask-all burst one-token no-token
state-momentum few-gated-head
    """.split(),
    "higher_order": "mask-causal exact grouped-one narrow add clamp one-signed half causal-head no-key".split(),
}
"""Small cases that show every fault."""

RIGHT = {
    "softmax": served(Flash, "nothing", tiles="both"),
    "delta": served(Recurrence, "nothing", tiles="chunk"),
    "higher_order": served(Sums, "nothing", tiles="chunk"),
}
"""The kernels without a fault."""

BY_NAME = {one.name: one for one in faults()}


@functools.cache
def known(name: str, mechanism: str = "softmax", dtype: str = "float32") -> Truth:
    record = ra.mechanism(mechanism)
    further = record.pulled if RIGHT[mechanism].name == "Flash" else ()  # the others' emulators take d_out alone
    return truth(record, record.case(name), dtype, grad=True, further=further)


def failing(mechanism: str, wrong: WrongKernel, size: str, name: str, dtype: str = "float32") -> set[str]:
    """The results of a case that a kernel makes wrong."""
    record, given = ra.mechanism(mechanism), known(name, mechanism, dtype)
    result = kernel(record, record.case(name), given, dtype, wrong, size=size)
    return {verdict.tensor for verdict in judge(result, given) if not verdict.agrees}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mechanism", CASES)
def test_the_kernel_without_a_fault_is_right(mechanism: str, dtype: str) -> None:
    right = RIGHT[mechanism]
    for name in CASES[mechanism][:: 1 if dtype == "float32" else 4]:
        for size in [*right.sizes][-2:]:
            assert not failing(mechanism, right, size, name, dtype), (name, size)


def test_there_are_enough_and_each_says_what_is_wrong_and_where_it_was_reported() -> None:
    assert len(faults()) >= 140 and len(BY_NAME) == len(faults()) and faults("koopman") == ()
    assert faults("growing") == faults()
    for mechanism in ("softmax", "delta", "higher_order"):
        record, found = ra.mechanism(mechanism), faults(mechanism)
        assert len({one.wrong for one in found}) == len(found) > 15
        names = {*record.equations, *record.wrong}
        for one in found:
            reported = one.link.startswith("https://github.com/") and ("/issues/" in one.link or "/pull/" in one.link)
            assert reported or one.link == ""
            assert one.of[0] in names and (mechanism == "softmax" or {*one.of} <= names)
            assert len(one.wrong) > 10 and one.wrong[0] == one.wrong[0].lower()


@pytest.mark.parametrize(
    ("mechanism", "fault"),
    [(mechanism, one) for mechanism in CASES for one in faults(mechanism)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_each_fault_is_caught_and_leaves_right_what_it_says(mechanism: str, fault: WrongKernel) -> None:
    """A fault of the backward leaves outputs right; where tiles matter, some size of them shows."""
    of_options = fault in set(faults()) - set(faults(without=("options",)))
    for name in CASES[mechanism][:: -1 if of_options else 1]:
        for size in fault.sizes:
            wrong = failing(mechanism, fault, size, name)
            if wrong:
                assert not fault.backward or not {"out", *ra.mechanism(mechanism).outputs} & wrong
                return
    pytest.fail("no small case catches it")


@pytest.mark.parametrize("name", ["no-key", "no-query", "no-key-sink"])
def test_a_fault_takes_calls_without_keys_or_queries(name: str) -> None:
    """The diagnosis runs every fault on every case."""
    for one in faults():
        with suppress(Unknown):
            failing("softmax", one, one.usual, name)


def test_a_gradient_that_is_scaled_before_it_is_rounded_shows_in_float16_where_it_is_small() -> None:
    def shares(wrong: WrongKernel, name: str) -> dict[str, float]:
        case = RECORD.case(name)
        given = truth(RECORD, case, "float16", grad=True)  # the gradient of lse would not be small
        result = kernel(RECORD, case, given, "float16", wrong, size=[*wrong.sizes][-1])
        return {verdict.tensor: verdict.share for verdict in judge(result, given)}

    wrong = BY_NAME["ScaledGradientInHalf"]
    found = shares(wrong, "faint")
    assert found["d_k"] > 5.0 and found["d_q"] > 1.0 and max(found["out"], found["d_v"]) < 0.8
    assert max(shares(RIGHT["softmax"], "faint").values()) < 0.8
    assert max(share for name in ("scale", "tile-97", "tiny-values") for share in shares(wrong, name).values()) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", CASES)
def test_each_fault_is_caught_in_each_path_where_it_changes_a_result(mechanism: str) -> None:
    """A kernel that is wrong in one path alone, such as decoding, is caught by the cases of that path."""
    paths = PATHS[::3] if "REFATTN_SLOW_SAMPLE" in os.environ else PATHS
    for path, fates in of_paths(mechanism, paths):
        lost = [str(fate.mutant) for fate in fates if fate.status not in ("caught", "equivalent")]
        assert not lost, (path, lost)
        assert any(fate.status == "caught" for fate in fates)


def named(name: str, size: str, cases: tuple[str, ...], **options: Any) -> Any:
    given = [
        (one, known(one.name), kernel(RECORD, one, known(one.name), "float32", BY_NAME[name], size=size))
        for one in map(RECORD.case, cases)
    ]
    judged = [(*one, not all(verdict.agrees for verdict in judge(one[2], one[1]))) for one in given]
    found = suspects(RECORD, "float32", judged, **options)
    assert found is not None
    return found


def test_a_fault_is_told_in_words_with_its_tiles_and_its_report() -> None:
    found = named("AccumulatorNotRescaled", " (tiles of 16 keys)", ("tiny", "one-key", "plain", "causal"))
    first = found.ranked[0]
    assert told(first) == (
        "the accumulator is not rescaled when the running maximum moves (tiles of 16 keys): explains everything"
    )
    assert (first.sort, first.link, first.ids) == ("fault", BY_NAME["AccumulatorNotRescaled"].link, ("SM.5",))
    assert (first.cases, first.failing, first.whole) == (("plain", "causal"), 2, 2)
    assert found.which.startswith("the cases that fail are those with more than 16 keys (also: ")
    small = named("SumNotRescaled", " (tiles of 8 keys)", ("tiny", "plain", "causal"))
    assert told(small.ranked[0]).endswith("(tiles of 8 keys): explains everything")


def dense(q: Any, k: Any, v: Any, shown: Any, sink: Any = None, bound: float = np.inf) -> Any:
    """Attention in one formula, with what a wrong kernel has: which keys count how often, a sink, a clamp."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.clip(np.where(shown > 0, q @ np.swapaxes(k, 2, 3) * q.shape[3] ** -0.5, -np.inf), -bound, bound)
    top = np.max(scores, axis=-1, keepdims=True)
    p = np.exp(scores - np.where(np.isneginf(top), 0.0, top)) * np.where(np.isfinite(bound), 1, shown)
    total = p.sum(axis=-1, keepdims=True) + (0.0 if sink is None else np.exp(sink.reshape(-1, 1, 1)))
    return p @ v / np.where(total == 0.0, 1.0, total)


def seen(q: Any, k: Any, causal: bool = False, mask: Any = None) -> Any:
    n, m = q.shape[2], k.shape[2]
    pairs = np.tri(n, m, m - n if causal else m, dtype=int)
    return np.broadcast_to(pairs if mask is None else pairs * mask, (*q.shape[:2], n, m))


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("MaximumOfNothing", "tiny plain"),
        ("LastTileMovedBack", "tiny plain causal tile-97"),
        ("TilesAboveDiagonalSkipped", "tiny plain causal tile-97"),
        ("ClampedAfterMask", "plain exact empty-rows"),
        ("SinkBeforeMaximum", "tiny sink-grouped sink sink-several"),
    ],
)
def test_bugs_met_in_other_libraries_are_named_in_kernels_without_tiles(name: str, cases: str) -> None:
    """The same errors in one formula, which shares nothing with the emulator."""

    def attend(q: Any, k: Any, v: Any, causal: Any = False, mask: Any = None, sink: Any = None) -> Any:
        shown, keys = seen(q, k, causal, mask), np.arange(k.shape[2])
        if name == "LastTileMovedBack" and (beyond := k.shape[2] % 32) and k.shape[2] > 32:
            overlap = (keys >= k.shape[2] - 32) & (keys < k.shape[2] - beyond)
            shown = shown * (1 + overlap)
        if name == "TilesAboveDiagonalSkipped":
            rows = np.arange(q.shape[2])[:, None]
            last = np.minimum(rows // 32 * 32 + 32, q.shape[2]) + k.shape[2] - q.shape[2]
            shown = shown * (keys // 32 * 32 < last)
        bound = 50.0 if name == "ClampedAfterMask" else np.inf
        if sink is not None and name != "SinkBeforeMaximum":
            return ra.Decline("no sink")
        if sink is not None:
            sums = np.exp(sink.reshape(q.shape[1], -1).astype(np.float64)).sum(axis=-1)
            return dense(q, k, v, shown, np.log(sums)).astype(q.dtype)
        out = dense(q, k, v, shown, bound=bound)
        if name == "MaximumOfNothing":
            out[~(shown[..., :32] > 0).any(axis=-1)] = np.nan
        return out.astype(q.dtype)

    every = {case.name: case for case in (*RECORD.cases, *RECORD.kernel_sizes)}
    few = [every[one] for one in cases.split() if one in every]
    if name == "MaximumOfNothing":
        few.append(next(case for case in every.values() if hides_a_tile(case)))
    record = RECORD.changed(cases=tuple(few), kernel_sizes=())
    found = locate(record, verify(record, attend, dtypes=["float32"])).suspects
    assert found is not None and BY_NAME[name].wrong in told(found.ranked[0])
    assert found.ranked[0].link == BY_NAME[name].link and len(found.ranked[0].cases) == found.ranked[0].failing


def hides_a_tile(case: Any) -> bool:
    """Whether some query of a case with a mask alone sees keys, none of them among the first 32."""
    if {*case.options} - {"causal"} or {*case.inputs} != {*"qkv", "mask"} or case.inputs["k"].shape[2] <= 32:
        return False
    mask = known(case.name).inputs["mask"]
    return bool((mask.any(axis=-1) & ~mask[..., :32].any(axis=-1)).any())


@pytest.mark.parametrize(
    ("mechanism", "name", "words"),
    [
        (
            "delta",
            "FirstStateCountedAgain",
            "is added to the state once more at the end of each chunk (chunks of 8 tokens)",
        ),
        ("higher_order", "KeysWithoutNormaliser", "not through the row sum that divides"),
    ],
)
def test_a_fault_of_a_kernel_with_a_state_is_told_in_words(mechanism: str, name: str, words: str) -> None:
    record, one = ra.mechanism(mechanism), next(one for one in faults(mechanism) if one.name == name)
    size, given = [*one.sizes][-1], []
    for case in map(record.case, CASES[mechanism][:3]):
        right = known(case.name, mechanism)
        wrong = bool(failing(mechanism, one, size, case.name))
        given.append((case, right, kernel(record, case, right, "float32", one, size=size), wrong))
    found = suspects(record, "float32", given)
    assert found is not None and words in told(found.ranked[0]) and found.ranked[0].link == one.link


def test_a_wrong_output_reaches_gradients_through_delta() -> None:
    """An error of dense.py in SM.5 leaves d_q and d_k right, a kernel's does not: it is found all the same."""
    found = named("LaterBatchesZero", "", ("plain", "grouped"), without=("LaterBatchesZero",))
    assert found.wrong == ("out", "d_q", "d_k")
    assert found.ranked[0].ids == ("SM.5",) and found.ranked[0].whole == 2
    assert [place.words[0] for place in found.places[:1]] == ["only batch 1"]


@pytest.mark.slow
def test_what_fits_nothing_is_named_by_what_is_right_and_by_what_failing_cases_have() -> None:
    """Columns out of order, and a mask that is read elsewhere: errors of many equations fit them a little."""
    found = named("ColumnsOutOfOrder", "", ("plain",), without=("ColumnsOutOfOrder",))
    assert "SM.5" in found.ranked[0].ids and found.right == ("lse", "d_v")
    cases = ("mask-keys", "plain", "causal", "softcap")
    assert named("MaskWraps", " (tiles of 16 keys)", cases, without=("MaskWraps",)).ranked[0].ids == ("SM.2",)


@pytest.mark.parametrize(
    ("name", "cases", "without", "words"),
    [
        ("ValuesOfNextBatch", ("plain",), (), "v of the next batch"),
        ("ScaleIgnored", ("scale", "plain"), ("scale left out", "ScaleLeftOut"), "scale ignored"),
    ],
)
def test_what_is_read_wrongly_or_ignored_is_named(
    name: str, cases: tuple[str, ...], without: tuple[str, ...], words: str
) -> None:
    found = named(name, "", cases, without=(name, *without))
    assert told(found.ranked[0]) == f"{words}: explains everything"


def test_a_fault_of_the_backward_alone_is_named_by_that_of_the_forward() -> None:
    case, given = RECORD.case("window-causal"), known("window-causal")
    again = next(one for one in faults(again=True) if one.name == "WindowOneMoreLeft")
    wrong = again.results(Call(given.inputs, case.options, given.upstream, outputs=given.values, further=given.further))
    right = {name: given.values[name] for name in ("out", "lse")}
    result = Result({name: x.astype(np.float32) for name, x in {**wrong, **right}.items()}, given.stored)
    found = suspects(RECORD, "float32", [(case, given, result, True)])
    assert found is not None and told(found.ranked[0]) == (
        "in the backward alone: the window has one key too many on its left side: explains everything"
    )


@pytest.mark.parametrize(
    ("mechanism", "case", "name", "id"),
    [
        ("softmax", "causal-tail", "causal", "SM.2"),
        ("delta", "state-kda", "state", "DELTA.1"),
        ("delta", "tiny", "q", None),
    ],
)
def test_an_argument_enters_in_the_first_equation_that_it_changes(
    mechanism: str, case: str, name: str, id: str | None
) -> None:
    record = ra.mechanism(mechanism)
    given = known(case) if mechanism == "softmax" else truth(record, record.case(case), "float32", grad=True)
    assert Templates(record, record.case(case), given, {}).entry(name) == id


def test_what_was_not_written_is_named() -> None:
    found = named("LastRowsNotWritten", " (tiles of 32 queries)", ("plain", "causal"), without=("LastRowsNotWritten",))
    assert found.ranked[0].kind == UNWRITTEN and found.ranked[0].ids == ("SM.5",) and found.ranked[0].cases


def test_rows_without_a_key_are_named_whatever_they_hold() -> None:
    case, given = RECORD.case("empty-rows"), known("empty-rows")
    empty = np.isneginf(given.values["lse"])[..., None]
    out = np.where(empty, given.inputs["v"][:, :, -1:], given.values["out"]).astype(np.float32)
    found = suspects(RECORD, "float32", [(case, given, Result({"out": out}, given.stored), True)])
    assert found is not None and found.ranked[0].kind.startswith("rows that may attend nothing hold something else")


def test_two_faults_explain_their_cases_each() -> None:
    """A kernel that ignores the causal mask, and drops the soft-cap: the cases of one say nothing against the other."""
    one, two = BY_NAME["CausalIgnored"], BY_NAME["SoftcapTimesScore"]
    given = []
    for name, fault in (("causal", one), ("causal-tail", one), ("softcap", two), ("plain", one)):
        case = RECORD.case(name)
        result = kernel(RECORD, case, known(name), "float32", fault)
        given.append((case, known(name), result, name != "plain"))
    found = suspects(RECORD, "float32", given)
    assert found is not None
    assert [told(suspect) for suspect in found.ranked[:2]] == [
        "the causal mask is ignored: explains 2 of 3 failing cases",
        "the tanh of the soft-cap is multiplied by the score, not by the soft-cap: explains 1 of 3 failing cases",
    ]


def test_the_report_begins_with_the_diagnosis() -> None:
    few = dataclasses.replace(
        RECORD, cases=tuple(RECORD.case(name) for name in ("mask-heads", "mask-full", "mask-keys"))
    )

    def attend(q: Any, k: Any, v: Any, **given: Any) -> Any:
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            **{name: given.pop(name) for name in [*given] if hasattr(given[name], "shape")},
        }
        found = BY_NAME["MaskOfFirstBatch"].results(Call(arrays, given, dtype="float32", exact=False))
        return found["out"], found["lse"]

    found = locate(few, verify(few, attend, label="mine.py:attend", dtypes=["float32"]))
    lines = tables.verified(found, few, details=False).splitlines()
    assert lines[2] == "what       2 of 3 cases fail (float32): out, lse wrong"
    assert lines[3] == (
        "where      out, lse: only batch 1; the cases that fail are those with a mask that differs between batches"
    )
    assert lines[4].startswith("how much   >1000 of the allowed error: ")
    assert lines[5] == "which      all batches take the mask of the first one: explains everything"
    assert lines[6] == "report     https://github.com/kohya-ss/musubi-tuner/pull/413"
    assert "  float32, 2 cases: out, lse disagree: mask-full, mask-keys" in lines
    assert not any(line.startswith("Suspects") for line in lines)
    data = found.to_json()["suspects"]
    assert data["places"][0]["words"][0] == "only batch 1" and data["places"][0]["batches"] == [1]
    assert data["ranked"][0]["link"].startswith("https://") and data["which"].startswith("the cases that fail")
    assert isinstance(found, Report)


def test_faults_that_are_left_out_are_named_by_their_equation() -> None:
    """A sample of `python -m tools.measure_names`, which the documentation has the rates of."""
    few = dataclasses.replace(RECORD, cases=tuple(RECORD.case(name) for name in ("plain", "mask-full", "mask-heads")))
    rows = [one for one in measured(few, "float32", grad=False, only="MaskOfFirst") if one.caught]
    assert len(rows) == 2 and all(1 <= one.place <= 2 for one in rows)


@pytest.mark.slow
def test_real_bugs_are_named(record_property: Any) -> None:
    sampled = "REFATTN_SLOW_SAMPLE" in os.environ
    rows = [one for one in measured(RECORD, "float32", grad=False, step=6 if sampled else 3) if one.caught]
    right = sum(1 <= one.place <= 2 for one in rows)
    record_property("rate", f"softmax, float32: {right} of {len(rows)} faults, left out, are named by the first two")
    assert len(rows) > (15 if sampled else 30) and right >= 0.75 * len(rows), [
        one.fault.name for one in rows if not 1 <= one.place <= 2
    ]
    # What explains less than a tenth is not named: the place is told in its stead.
    assert sum(one.count == 0 for one in rows) <= 0.35 * len(rows)
