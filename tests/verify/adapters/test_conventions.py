"""The probe tells which conventions a kernel follows, from nine tiny calls, and the report says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.softmax.testing.placed import PLACED
from refattn.mechanisms.wrong import Call
from refattn.verify.adapters import conventions
from refattn.verify.adapters.conventions import EXPECTED, PROBES, differing, probe_conventions
from refattn.verify.bugs.fault import faults
from refattn.verify.report import tables
from refattn.verify.run import verify

SOFTMAX = ra.mechanism("softmax")
READINGS = [name for name, one in SOFTMAX.wrong.items() if not one.backward]
SHOWN = {
    "mask ignored": {"mask": "ignored"},
    "mask inverted": {"mask": "inverted"},
    "masked keys have a score of 0": {"mask": "ignored"},  # where the scores are 0 it is no mask at all
    "top-left causality": {"causal mask": "top-left"},
    "a token does not see itself": {"causal mask": "bottom-right, and a token does not see itself"},
    "interleaved groups": {"grouped heads": "interleaved"},
    "window one wider": {"window": "bottom-right, one wider on both sides"},
    "window one narrower": {"window": "bottom-right, the left bound excluded"},
    "window aligned top left": {"window": "top-left, bounds included"},
    "window left out": {"window": "ignored"},
    "left bound of the window excluded": {"window": "bottom-right, the left bound excluded"},
    "sink ignored": {"sink": "ignored"},
    "sink left out of lse": {"sink": "left out of lse"},
    "key lengths ignored": {"beyond the lengths": "NaN there spreads"},
    "query lengths ignored": {"beyond the lengths": "not zero"},
    "a length is the last index": {"beyond the lengths": "NaN there spreads"},
    "scale left out": {"scale": "1: left out"},
    "scale applied twice": {"scale": "1/d: applied twice"},
    "scale of the model's width": {"scale": "1/sqrt(heads d)"},
    "soft-cap after the mask": {"soft-cap": "after the mask"},
    "soft-cap left out": {"soft-cap": "ignored"},
    "soft-cap before the scale": {"soft-cap": "before the scale"},
    "empty rows get the mean": {"empty rows": "the mean of all values", "beyond the lengths": "not zero"},
    "empty rows are NaN": {"empty rows": "NaN", "beyond the lengths": "not zero"},
    "lse to base 2": {"lse": "base 2"},
    "lse without the maximum": {"lse": "without the maximum"},
}
"""What the probe says of the conventions of softmax attention."""

UNSEEN = {
    "bottom-right causality",  # which is the default
    "scale of the values' width",  # values are as wide as keys, since many kernels need that
    "softmax over the queries",  # no convention that anyone follows: unknown
    "keys missing in the denominator",
    *PLACED,  # but for those above: nobody asks about them
} - {*SHOWN}


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, saved = ra.softmax.forward(q, k, v, **options)
    return out, saved.lse


def test_the_reference_follows_its_own() -> None:
    for dtype in ("float64", "float32", "float16"):
        assert probe_conventions(attend, SOFTMAX, dtypes=[dtype]) == EXPECTED
    assert len(PROBES) == 9


@pytest.mark.parametrize("name", READINGS)
def test_every_wrong_convention_is_named(name: str) -> None:
    assert set(READINGS) == {*SHOWN, *UNSEEN}
    wrong = SOFTMAX.wrong[name]
    found = differing(lambda q, k, v, **options: wrong(q, k, v, **options), "softmax")
    assert found == SHOWN.get(name, {})


def test_empty_rows_are_asked_for_in_the_sense_that_a_mask_is_read() -> None:
    inverted = SOFTMAX.wrong["mask inverted"]
    found = probe_conventions(lambda q, k, v, **options: inverted(q, k, v, **options), SOFTMAX)
    assert (found["mask"], found["empty rows"]) == ("inverted", "zero")


def test_other_mechanisms_are_asked_what_makes_sense() -> None:
    def attended(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.higher_order.forward(q, k, v, **options)[0]

    # No scale, no soft-cap, no lse, no window, sink or lengths.
    left_out = {"scale", "soft-cap", "lse", "window", "sink", "beyond the lengths"}
    assert set(probe_conventions(attended, "higher_order")) == set(EXPECTED) - left_out
    wrong = ra.mechanism("higher_order").wrong["top-left causality"]
    found = differing(lambda q, k, v, **options: wrong(q, k, v, **options)[0], "higher_order")
    assert found == {"causal mask": "top-left"}


def test_nobody_is_called_with_what_the_mechanism_refuses() -> None:
    calls: list[tuple[int, int]] = []

    def counted(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append((q.shape[2], k.shape[2]))
        out, saved = ra.delta.forward(q, k, v, **options)
        return out, saved.state

    probe_conventions(counted, "delta")  # whose tokens are one sequence
    assert all(queries == keys for queries, keys in calls), calls


def test_what_is_declined_or_unknown_is_said() -> None:
    def some(q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, **options: Any) -> Any:
        if causal:
            return ra.Decline("no causal masks")
        if mask is not None:
            raise RuntimeError("masks are not there yet")
        return ra.softmax.forward(q, k, v, **{**options, "scale": 0.3})[0]

    found = probe_conventions(some, SOFTMAX)
    assert found["causal mask"] == "declined: no causal masks"
    assert found["mask"] == found["empty rows"] == "unknown: raised RuntimeError: masks are not there yet"
    assert found["lse"] == "declined: it returns none"
    assert found["scale"] == "unknown: a factor of 0.3"
    assert differing(some, SOFTMAX) == {}
    flat = probe_conventions(lambda q, k, v, **options: np.zeros(3, np.float32), SOFTMAX)
    assert flat["causal mask"] == "unknown: out has the shape (3,), needs (1, 1, 3, 8)"


def test_another_type_is_tried_where_one_is_declined() -> None:
    def narrow(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.Decline("float32 alone") if q.dtype != np.float32 else attend(q, k, v, **options)

    assert probe_conventions(narrow, SOFTMAX, dtypes=("float64", "float32")) == EXPECTED


def test_the_report_says_conventions_before_numbers() -> None:
    wrong = SOFTMAX.wrong["top-left causality"]
    few = replace(SOFTMAX, cases=tuple(SOFTMAX.case(name) for name in ("plain", "causal-tail", "causal-head")))
    found = verify(few, lambda q, k, v, **options: wrong(q, k, v, **options), dtypes=["float32"])
    assert found.conventions == found.to_json()["conventions"] == {"causal mask": "top-left"}
    lines = tables.verified(found, few).splitlines()
    at = lines.index("  causal mask: top-left; needs bottom-right")
    assert lines[at - 1].startswith("Conventions that differ") and at < lines.index("Failed (2 of 3 cases run)")
    right = verify(few, attend, dtypes=["float32"])
    assert right.conventions == {} and "Conventions" not in tables.verified(right, few)


def reading(question: str, name: str) -> str:
    """What the probe says of a known bug."""
    fault = next(one for one in faults() if one.name == name)

    def wrong(q: Any, k: Any, v: Any, *, dtype: str, **given: Any) -> Any:
        inputs = {"q": q, "k": k, "v": v, **({"mask": given.pop("mask")} if "mask" in given else {})}
        found = fault.run(Call(inputs, given, None, dtype, exact=False, size=(64, 64)))
        return found["out"].astype(np.float32), found["lse"].astype(np.float32)

    return probe_conventions(wrong, SOFTMAX, dtypes=["bfloat16"])[question]


@pytest.mark.parametrize(
    ("question", "fault", "answer"),
    [
        ("causal mask", "CausalOneTooMany", "bottom-right, and a token sees the next one"),
        ("causal mask", "CausalIgnored", "ignored"),
        ("mask", "MaskIgnored", "ignored"),
        ("scale", "ScaleOfPaddedWidth", "1/sqrt(32): that of the padded width"),
        ("scale", "ScaleOfWideWidth", "1/sqrt(128): that of the padded width"),
        ("scale", "NoLog2e", "1/sqrt(d), and powers of 2 in place of exponentials"),
        ("scale", "PaddingOfLastTile", "unknown: the weights of all keys sum to 0.134: keys that are none are counted"),
        ("scale", "ScaleOfModelWidth", "1/sqrt(heads d)"),
    ],
)
def test_what_looks_alike_is_told_apart(question: str, fault: str, answer: str) -> None:
    assert reading(question, fault) == answer


def test_the_documented_differences_are_wrong_readings_of_the_census() -> None:
    """The page's table of what libraries do otherwise names readings; nearly all of the record's stand there."""
    page = (Path(__file__).parents[3] / "docs" / "conventions.md").read_text()
    table = page[page.index("| difference | where it is so | wrong reading |") :].split("\n\n")[0]
    named = [x.strip() for row in table.splitlines()[2:] for x in row.split("|")[3].split(";")]
    known = ra.mechanism("softmax").wrong
    assert len(named) > 35 and len(named) == len(set(named)) and set(named) <= set(known)


def test_a_key_that_is_lost_is_no_scale() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return ra.softmax.forward(q, k[:, :, :-1], v[:, :, :-1])[0]

    assert probe_conventions(attend, "softmax")["scale"] == "unknown: equal scores have unequal weights"


@pytest.mark.parametrize(("off", "known"), [(0.0, True), (3.0, True), (-3.0, True), (40.0, False), (-40.0, False)])
def test_an_answer_may_err_by_some_roundings_of_its_largest_number(off: float, known: bool) -> None:
    unit = np.asarray(2.0**-24)
    answer = np.asarray([11.3, -0.5])
    found = conventions._which(answer + off * float(unit) * 11.3, unit, {"one": answer, "other": answer + 0.1})
    assert (found == "one") is known and found.startswith(("one", "unknown: got 11.3"))


def test_the_mask_is_read_off() -> None:
    """A causal mask that no convention has is shown as the keys that each query sees."""

    def attend(q: Any, k: Any, v: Any, *, causal: Any = False) -> Any:
        mask = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        mask[0, 1::2] = False
        return ra.softmax.forward(q, k, v, mask=mask if causal else None)[0]

    expected = "query 0 sees keys 0, 2; query 1 sees keys 0-4; query 2 sees keys 0-5"
    assert probe_conventions(attend, "softmax")["causal mask"] == expected
    assert expected in " ".join(repr(ra.verify("softmax", attend, cases=["causal-tail"])).split())
