"""Which conventions an implementation of a recurrence follows is told from a few calls, and so is a wrong stage."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden import inputs
from refattn.mechanisms.delta.judge.stages import STAGES
from refattn.mechanisms.record import Question
from refattn.verify.blame.suspects import locate
from refattn.verify.foreign.conventions import differing, probe_conventions
from refattn.verify.run import verify
from refattn.verify.show import report

DELTA = ra.mechanism("delta")
RIGHT = {question.name: question.answer for question in DELTA.questions}
STEPS = [name for name, one in DELTA.wrong.items() if not one.backward and not name.startswith("stage: ")]


def own(q: Any, k: Any, v: Any, *, dtype: str = "", **options: Any) -> Any:
    out, saved = ra.delta.forward(q, k, v, **options)
    return out, saved.state


def following(name: str) -> Any:
    reading = DELTA.wrong[name]
    return lambda q, k, v, **options: reading(q, k, v, **options)


def test_the_reference_follows_its_own() -> None:
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert probe_conventions(own, DELTA, dtypes=[dtype]) == RIGHT


@pytest.mark.parametrize("name", STEPS)
def test_every_wrong_convention_is_named(name: str) -> None:
    question, answer = next((q, a) for q in DELTA.questions for a, reading in q.readings.items() if reading == name)
    also = {"scale": "1/d: applied twice"} if name == "scale on keys too" else {}  # which one token cannot tell apart
    assert differing(following(name), DELTA) == {question.name: answer, **also}


@pytest.mark.parametrize("question", DELTA.questions, ids=lambda question: question.name)
def test_the_answers_to_a_question_are_far_apart(question: Question) -> None:
    """So far that none of them is taken for another where results are stored in bfloat16."""
    given = {**inputs.make("delta", question.case, "float64"), **question.case.options}
    at = [("out", "state").index(name) for name in question.outputs]
    outputs = [own(**given), *(DELTA.wrong[name](**given) for name in question.readings.values())]
    found = [np.concatenate([np.ravel(values[n]) for n in at]) for values in outputs]
    apart = [np.max(np.abs(a - b)) for n, a in enumerate(found) for b in found[:n]]
    assert min(apart) > 0.08


def test_a_report_names_the_convention_and_the_stage_of_any_chunk() -> None:
    few = replace(DELTA, cases=tuple(DELTA.case(name) for name in ("tiny", "gated-delta")))
    found = verify(few, following("prediction before the decay"), dtypes=["float32"])
    assert "order: predict, decay, write, read; needs decay, predict, write, read" in report.verified(found, few)
    wrong = functools.partial(STAGES["stage: W without decays"], size=16)
    staged = locate(few, verify(few, lambda q, k, v, **options: wrong(q, k, v, **options), dtypes=["float32"]))
    assert staged.conventions == {} and staged.suspects is not None
    assert staged.suspects.ranked[0].kind == "stage: W without decays, in chunks of 16"
