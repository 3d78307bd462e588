"""Where results are wrong, in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.case_features import features
from refattn.verify import locate, verify, verify_case
from refattn.verify.diagnose.localise import in_words, place_in_words, which_cases, words
from refattn.verify.outcome import Place

RECORD = ra.mechanism("softmax")
CASES = {case.name: case for case in RECORD.cases}


@pytest.mark.parametrize(
    ("axis", "at", "expected"),
    [
        (0, [1], ["only batch 1"]),
        (0, [0, 1], []),
        (1, [0], ["only head 0"]),
        (1, [1, 2, 3, 4, 5], ["all heads but the first"]),
        (1, [0, 2, 4], ["every second of the heads, from 0 on"]),
        (1, [1, 4], ["only heads 1, 4"]),
        (2, [36], ["only row 36", "only the last row"]),
        (2, range(32, 37), ["only the rows of the last tile of 16, which is not full"]),
        (2, range(24), ["only rows before 24"]),
        (2, range(36), ["all rows but the last"]),
        (3, range(8, 16), ["only the second half of the columns", "only columns from 8 on"]),
    ],
)
def test_a_pattern_along_an_axis(axis: int, at: Any, expected: list[str]) -> None:
    mark = np.zeros((2, 6, 37, 16), bool)
    mark[(slice(None),) * axis + (list(at),)] = True
    assert words(mark)[: len(expected)] == expected and bool(words(mark)) == bool(expected)


def test_of_two_rows_it_says_what_a_larger_case_says_of_its_other_rows() -> None:
    mark = np.zeros((2, 1, 2, 4), bool)
    mark[0, :, 0] = True
    assert words(mark) == ["only batch 0", "only row 0", "all rows but the last"]
    assert words(mark[:, :, ::-1], "keys")[-1] == "all keys but the first"


def test_rows_of_gradients_of_keys_are_keys() -> None:
    mark = np.zeros((1, 1, 37, 4), bool)
    mark[:, :, 32:] = True
    assert words(mark, "keys")[0] == "only the keys of the last tile of 16, which is not full"


@pytest.mark.parametrize(
    ("failing", "agreeing", "expected"),
    [
        (("causal", "mask-causal"), ("plain", "mask-full"), "the cases that fail are those with causal"),
        (("grouped",), ("plain", "causal"), "the cases that fail are those with grouped heads"),
        (("grouped",), ("plain",), ""),
        (
            ("causal-tail", "causal-head"),
            ("causal", "unequal"),
            "the cases that fail are those with causal and other lengths of queries and keys",
        ),
        (("plain",), (), ""),
        (("plain", "causal"), ("tiny",), "the cases that fail are those with more than one batch"),
    ],
)
def test_what_the_cases_that_fail_have_in_common(
    failing: tuple[str, ...], agreeing: tuple[str, ...], expected: str
) -> None:
    found = which_cases([CASES[name] for name in failing], [CASES[name] for name in agreeing])
    assert found == expected


@pytest.mark.parametrize(
    "pair",
    [
        ("window", "a head wider than 64"),
        ("sink", "one query"),
        ("offset", "values narrower than keys"),
        ("bias", "more than 64 keys"),
        ("mask", "softcap"),
    ],
)
def test_a_fault_of_two_features_that_meet_is_told_by_them(pair: tuple[str, str]) -> None:
    cases = (*RECORD.cases, *RECORD.kernel_sizes)
    failing = [case for case in cases if {*pair} <= features(case)]
    assert " and ".join(pair) in which_cases(failing, [case for case in cases if case not in failing])


def test_of_what_says_the_same_the_suspected_option_is_told_first() -> None:
    cases = [case for case in ra.mechanism("delta").kernel_sizes if case.name.startswith(("long-", "few-"))]
    failing = [case for case in cases if {"qk_norm", "more than 64 queries"} <= features(case)]
    agreeing = [case for case in cases if case not in failing]
    assert "those with key_mask and" in which_cases(failing, agreeing)
    assert "those with qk_norm and" in which_cases(failing, agreeing, "qk_norm ignored")


def test_results_with_the_same_words_share_a_line() -> None:
    one = Place("out", ("only batch 1",), "plain", (1,), (0,), (0,), (0,), 0.5)
    other = Place("lse", ("only batch 1",), "plain", (1,), (0,), (0,), (), 0.5)
    third = Place("d_q", (), "plain", (0, 1), (0,), (0,), (0,), 0.25)
    assert in_words((one, other, third)) == "out, lse: only batch 1; d_q: in 25 % of its elements (case plain)"
    assert place_in_words(Place("d_v", (), "plain", (0,), (0,), (0,), (0,), 1.0)) == "d_v: everywhere"


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ra.softmax.forward(q, k, v, **options)[0]


def test_a_place_in_an_exact_case_is_counted_by_bits() -> None:
    record = RECORD.changed(cases=(RECORD.case("exact"),), kernel_sizes=())
    assert "out" in record.cases[0].exact

    def moved(q: Any, k: Any, v: Any, **options: Any) -> Any:
        out = attention(q, k, v, **options)
        out[:, 1:, -1] += np.spacing(out[:, 1:, -1])  # by a bit, in the last row
        out[0, 1, -1, 0] += 1.0  # and by far in one number
        return out

    found = locate(record, verify(record, moved, dtypes=["float32"]))
    assert found.suspects is not None
    (place,) = found.suspects.places
    shape = found.outcomes[0].seen[1].tensors["out"].shape  # type: ignore[index]
    assert place.batches == (*range(shape[0]),) and place.columns == (*range(shape[3]),)


def test_the_smallest_case_is_in_what_is_said_of_the_cases_that_fail() -> None:
    names = ("plain", "causal", "tiny")
    record = RECORD.changed(cases=tuple(RECORD.case(name) for name in names), kernel_sizes=())

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, **options) * (1.1 if k.shape[2] > 4 else 1.0)

    report = verify(record, wrong, dtypes=["float32"])
    found = locate(record, report).suspects
    assert found is not None and "more than one batch" in found.which
    small = record.case("tiny")
    inputs = {name: dataclasses.replace(x, shape=(1, 1, 5, 4)) for name, x in small.inputs.items()}
    case = dataclasses.replace(small, inputs=inputs)
    least = verify_case(record, wrong, case, "float32")
    assert least.status == "disagrees"
    found = locate(record, dataclasses.replace(report, least=(case, least))).suspects
    assert found is not None and "more than one batch" not in found.which
