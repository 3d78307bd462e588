"""Which conventions a kernel follows, told from a few tiny calls.

Any attention is asked the questions of `EXPECTED`, by nine calls. Values are the rows of an identity, so that an output
is the weights themselves, and scores are few and far apart: a convention shows in the weights whatever else is wrong.
What else a mechanism is asked its record has, each with a call and with the wrong conventions that may answer.
docs/conventions.md says which conventions are meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np

from refattn.golden import inputs as designed
from refattn.golden.storage_types import TYPES, has_gradient, stored
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism, Question
from refattn.mechanisms.wrong import Call
from refattn.verify.adapters.adapter import CallError, call
from refattn.verify.outcome import Decline, Floats
from refattn.verify.tolerance.budget import wide

EXPECTED = {
    "causal mask": "bottom-right",
    "mask": "True may attend",
    "empty rows": "zero",
    "soft-cap": "before the mask",
    "lse": "natural",
    "scale": "1/sqrt(d)",
    "grouped heads": "neighbours share",
    "window": "bottom-right, bounds included",
    "sink": "in lse",
    "beyond the lengths": "zero",
}
"""The questions to any attention, and the answers of refattn."""

WIDTH = 8
"""Of queries, keys and values: what kernels for an accelerator are made for at least."""

Run = Callable[..., Mapping[str, Floats]]
Answers = dict[str, str]


class _Unanswered(Exception):  # noqa: N818
    """An answer that is none, and says why."""


def probe_conventions(kernel: Any, mechanism: Mechanism | str, *, dtypes: Iterable[str] = ("float32",)) -> Answers:
    """Return for each question to a mechanism which convention a kernel follows.

    Parameters
    ----------
    kernel
        See `refattn.verify.adapters.adapter`.
    mechanism
        The mechanism that it implements, or its name. Questions of `EXPECTED` that make no sense for it are left out;
        those of its record follow.
    dtypes
        Storage types to ask in: of those that it does not decline, the first.

    Returns
    -------
    dict[str, str]
        Question -> the convention, as `expected` has it, or what it is in words; "declined: ..." where it declined,
        and "unknown: ..." where no convention that is known here gives what it returned.

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.verify import probe_conventions
    >>> def attend(q, k, v, *, causal=False):
    ...     return ra.softmax.forward(q, k, v, causal="top_left" if causal else False)[0]
    >>> probe_conventions(attend, "softmax")["causal mask"]
    'top-left'
    """
    record = registry.record_of(mechanism, "probe_conventions(kernel, mechanism)")

    def reference(q: Any, k: Any, v: Any, **options: Any) -> Any:
        assert record.core is not None
        out, saved = record.core.forward(q, k, v, **options)
        return (out, *(getattr(saved, name) for name in record.outputs))

    own = _ask(reference, record, ("float64",), EXPECTED)
    makes_sense = {question for question, answer in own.items() if answer == EXPECTED[question]}
    found = _ask(kernel, record, tuple(dtypes), makes_sense)
    found = {question: answer for question, answer in found.items() if question in makes_sense}
    return found | {one.name: _of_record(kernel, record, one, tuple(dtypes)) for one in record.questions}


def expected(mechanism: Mechanism) -> Answers:
    """Return the answers of refattn to all that kernels of a mechanism may be asked."""
    return {**EXPECTED, **{question.name: question.answer for question in mechanism.questions}}


def differing(kernel: Any, mechanism: Mechanism | str, *, dtypes: Iterable[str] = ("float32",)) -> Answers:
    """Return of `probe_conventions` what is known, and is not the convention of refattn."""
    record = registry.record_of(mechanism, "differing(kernel, mechanism)")
    answers, right = probe_conventions(kernel, record, dtypes=dtypes), expected(record)
    return {
        question: answer
        for question, answer in answers.items()
        if answer != right[question] and not answer.startswith(("unknown: ", "declined: "))
    }


def _ask(kernel: Any, record: Mechanism, dtypes: tuple[str, ...], asked: Container[str]) -> Answers:
    """Ask the probes of these questions, in the first type that is not declined."""
    answers: Answers = {}
    probes = [(questions, probe) for questions, probe in PROBES if any(question in asked for question in questions)]
    for dtype in dtypes:
        run = _runner(kernel, record, dtype)
        for questions, probe in probes:
            if any(answers.get(question, "declined").startswith("declined") for question in questions):
                answers |= _answered(probe, run, questions)
    return answers


def _of_record(kernel: Any, record: Mechanism, question: Question, dtypes: tuple[str, ...]) -> str:
    """Return the answer to a question of the record, in the first type that is not declined."""
    answer = "declined"
    for dtype in dtypes:
        if answer.startswith("declined"):
            given = designed.make(record.name, question.case, dtype)
            try:
                found = _runner(kernel, record, dtype)(**given, **question.case.options)
            except _Unanswered as error:
                answer = str(error)
                continue
            if missing := [name for name in question.outputs if name not in found]:
                return f"declined: it returns no {missing[0]}"
            tried = _readings(record, question, wide(given))
            readings = {one: _joined(values, question.outputs) for one, values in tried}
            answer = _which(_joined(found, question.outputs), found["unit"], readings)
    return answer


def _readings(
    record: Mechanism, question: Question, given: Mapping[str, Any]
) -> Iterable[tuple[str, Mapping[str, Floats]]]:
    """Yield the answers to a question, each with what it gives."""
    assert record.core is not None
    out, saved = record.core.forward(**given, **question.case.options)
    yield question.answer, {"out": out} | {name: getattr(saved, name) for name in record.outputs}
    for answer, convention in question.readings.items():
        yield answer, record.wrong[convention].results(Call(given, question.case.options))


def _joined(values: Mapping[str, Floats], names: Iterable[str]) -> Floats:
    return np.concatenate([np.ravel(values[name]) for name in names])


def _answered(probe: Callable[[Run], Answers], run: Run, questions: tuple[str, ...]) -> Answers:
    try:
        return probe(run)
    except _Unanswered as error:
        return dict.fromkeys(questions, str(error))


def _runner(kernel: Any, record: Mechanism, dtype: str) -> Run:
    """Return the kernel as a function of float64 arrays that returns tensors by name."""

    def run(**arguments: Any) -> Mapping[str, Floats]:
        options = {name: x for name, x in arguments.items() if not isinstance(x, np.ndarray)}
        if unknown := [name for name in arguments if name not in ("q", "k", "v") and name not in record.defaults]:
            raise _Unanswered(f"declined: there is no {unknown[0]}")
        inputs = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
        given = {name: stored(x, dtype) if has_gradient(x) else x for name, x in inputs.items()}
        try:
            result = call(kernel, given, options, dtype, None, ("out", *record.outputs))
        except CallError as error:
            raise _Unanswered(f"unknown: {error}") from error
        if isinstance(result, Decline):
            raise _Unanswered(f"declined: {result.reason}")
        shape = (*given["q"].shape[:3], given["v"].shape[3])
        if result.tensors["out"].shape != shape:
            raise _Unanswered(f"unknown: out has the shape {result.tensors['out'].shape}, needs {shape}")
        return {"unit": np.asarray(TYPES[dtype].unit), **{n: x.astype(np.float64) for n, x in result.tensors.items()}}

    return run


def _arrays(scores: Floats, heads: int = 1, width: int = WIDTH) -> dict[str, Floats]:
    """Return q, k and v with the same inner products of q and k in every row, and weights for an output."""
    keys = len(scores)
    k = np.zeros((1, heads, keys, width))
    k[..., 0] = scores
    return {"k": k, "v": np.broadcast_to(np.eye(keys, width), k.shape).copy()}


def _queries(rows: int, heads: int = 1, width: int = WIDTH) -> Floats:
    q = np.zeros((1, heads, rows, width))
    q[..., 0] = 1.0
    return q


def _which(found: Floats, unit: Floats, readings: Mapping[str, Floats]) -> str:
    """Return the name of the reading that comes nearest to these numbers, which may err by some roundings.

    These are of numbers of size 1, and some of the size of the largest one, since all go through the same sums.
    """

    def granted(expected: Floats) -> float:
        largest = float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected)))
        return (16.0 + 4.0 * largest) * float(unit) + 1e-6

    near = {
        name: float(np.max(np.abs(np.nan_to_num(found - expected)), initial=0.0))
        for name, expected in readings.items()
        if np.allclose(found, expected, rtol=0.0, atol=granted(expected), equal_nan=True)
    }
    if near:
        return min(near, key=lambda name: near[name])
    shown = ", ".join(f"{x:.3g}" for x in np.ravel(found)[:8])
    return f"unknown: got {shown}"


def _uniform(*rows: str) -> Floats:
    """Return equal weights for the keys that a row marks with x: "xx." gives 1/2, 1/2, 0."""
    marks = np.asarray([[mark == "x" for mark in row] for row in rows], np.float64)
    return marks / np.maximum(marks.sum(axis=-1, keepdims=True), 1.0)


def _causal(run: Run) -> Answers:
    """Three queries, six keys, scores of 0: who sees whom."""
    found = run(q=_queries(3), **_arrays(np.zeros(6)), causal=True)
    readings = {
        "bottom-right": _uniform("xxxx..", "xxxxx.", "xxxxxx"),
        "top-left": _uniform("x.....", "xx....", "xxx..."),
        "ignored": _uniform("xxxxxx", "xxxxxx", "xxxxxx"),
        "bottom-right, and a token does not see itself": _uniform("xxx...", "xxxx..", "xxxxx."),
        "top-left, and a token does not see itself": _uniform("......", "x.....", "xx...."),
        "bottom-right, and a token sees the next one": _uniform("xxxxx.", "xxxxxx", "xxxxxx"),
        "top-left, and a token sees the next one": _uniform("xx....", "xxx...", "xxxx.."),
        "the past is hidden": _uniform("...xxx", "....xx", ".....x"),
        "the past is hidden, and a token does not see itself": _uniform("....xx", ".....x", "......"),
        "top-left, but for the last row, which sees every key": _uniform("x.....", "xx....", "xxxxxx"),
    }
    weights = found["out"][0, 0, :, :6]
    answer = _which(weights, found["unit"], readings)
    return {"causal mask": (answer.startswith("unknown") and visible(weights)) or answer}


def visible(weights: Floats) -> str:
    """Return which keys each query sees, of weights of equal scores (query, key); "" where they are not equal.

    >>> import numpy as np
    >>> from refattn.verify.adapters.conventions import visible
    >>> visible(np.asarray([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]))
    'query 0 sees key 0; query 1 sees keys 0-1; query 2 sees keys 0, 2'
    """
    rows = []
    for n, row in enumerate(weights):
        seen = np.flatnonzero(row > 0.5 / row.shape[0])
        even = 1.0 / max(seen.shape[0], 1)
        if not np.allclose(row[seen], even, rtol=0.02) or not np.allclose(np.delete(row, seen), 0.0, atol=0.02):
            return ""
        runs = np.split(seen, np.flatnonzero(np.diff(seen) > 1) + 1)
        keys = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs if len(run))
        rows.append(f"query {n} sees " + (f"key{'s' * (len(seen) > 1)} {keys}" if keys else "no key"))
    return "; ".join(rows)


def _mask(run: Run) -> Answers:
    """Five keys with scores of 0: one query may attend none, one the first and the fourth, one all."""
    mask = np.asarray([[False] * 5, [True, False, False, True, False], [True] * 5])
    found = run(q=_queries(3), **_arrays(np.zeros(5)), mask=mask)
    weights = found["out"][0, 0, :, :5]
    sense = _which(
        weights[1],
        found["unit"],
        {
            "True may attend": _uniform("x..x.")[0],
            "inverted": _uniform(".xx.x")[0],
            "ignored": _uniform("xxxxx")[0],
            "the key after one that may be attended is attended, too": _uniform("xx.xx")[0],
        },
    )
    rows = {"zero": np.zeros(5), "the mean of all values": np.full(5, 1.0 / 5.0), "NaN": np.full(5, math.nan)}
    empty = "unknown: the mask is ignored" if sense == "ignored" else None
    return {
        "mask": sense,
        "empty rows": empty or _which(weights[2 if sense == "inverted" else 0], found["unit"], rows),
    }


def _softcap(run: Run) -> Answers:
    """Scores of 4 and 0, a key that is hidden, a soft-cap of 2: by its weights."""
    options = {"scale": 0.5, "softcap": 2.0, "mask": np.asarray([[True, True, False]])}
    found = run(q=_queries(1), **_arrays(np.asarray([8.0, 0.0, 2.0])), **options)

    def weights(*scores: float) -> Floats:
        powers = np.exp(scores)
        return np.asarray(powers / powers.sum())

    capped = 2.0 * math.tanh(2.0)
    readings = {
        "before the mask": weights(capped, 0.0, -math.inf),
        "after the mask": weights(capped, 0.0, -2.0),
        "before the scale": weights(math.tanh(4.0), 0.0, -math.inf),
        "ignored": weights(4.0, 0.0, -math.inf),
    }
    return {"soft-cap": _which(found["out"][0, 0, 0, :3], found["unit"], readings)}


def _lse(run: Run) -> Answers:
    """Three scores of 2: the logarithm of the sum of their exponentials."""
    found = run(q=_queries(1), **_arrays(np.full(3, 2.0)), scale=1.0)
    if "lse" not in found:
        return {"lse": "declined: it returns none"}
    readings = {
        "natural": 2.0 + math.log(3.0),
        "base 2": (2.0 + math.log(3.0)) / math.log(2.0),
        "without the maximum": math.log(3.0),
        "base 2, without the maximum": math.log2(3.0),
        "the sum, not its logarithm": 3.0 * math.exp(2.0),
    }
    unit = np.asarray(max(float(found["unit"]), 1e-6))
    return {"lse": _which(found["lse"].ravel(), unit, {name: np.asarray([x]) for name, x in readings.items()})}


def _scale(run: Run) -> Answers:
    """Inner products that make scores of 0, 2 and 0, no scale given: the ratio of their weights tells it.

    The largest score is neither the first nor the last, so that a key that is lost looks like no scale. Three heads of
    width 24, a multiple of 8 that is no power of two; of width 8 where a kernel has no such width.
    """
    try:
        return _scale_of(run, 24)
    except _Unanswered:
        return _scale_of(run, WIDTH)


def _scale_of(run: Run, width: int) -> Answers:
    product = 2.0 * width**0.5
    found = run(q=_queries(1, 3, width), **_arrays(np.asarray([0.0, product, 0.0]), 3, width))
    scales = {
        "1/sqrt(d)": width**-0.5,
        "1: left out": 1.0,
        "1/d: applied twice": 1.0 / width,
        "1/sqrt(heads d)": (3.0 * width) ** -0.5,
        "sqrt(d)": width**0.5,
        "0": 0.0,
        "1/sqrt(d), and powers of 2 in place of exponentials": math.log(2.0) * width**-0.5,
        **{f"1/sqrt({wide}): that of the padded width": wide**-0.5 for wide in (16, 32, 64, 128, 256) if wide > width},
    }
    powers = {name: np.exp([-product * s, 0.0, -product * s]) for name, s in scales.items()}
    weights = found["out"][0, 0, 0, :3]
    answer = _which(weights, found["unit"], {name: each / each.sum() for name, each in powers.items()})
    first, second, last = (float(x) for x in weights)
    error = 32.0 * float(found["unit"]) + 1e-6
    if first + second + last < 1.0 - error:
        answer = f"unknown: the weights of all keys sum to {first + second + last:.3g}: keys that are none are counted"
    elif answer.startswith("unknown") and abs(first - last) > error:
        answer = "unknown: equal scores have unequal weights"
    elif answer.startswith("unknown") and first > 0.0 and second > 0.0:
        answer = f"unknown: a factor of {math.log(second / first) / product:.4g}"
    return {"scale": answer}


def _groups(run: Run) -> Answers:
    """Four query heads, two key/value heads with a key each: whose value each query head takes."""
    k = np.zeros((1, 2, 1, WIDTH))
    v = np.eye(2, WIDTH).reshape(1, 2, 1, WIDTH)
    found = run(q=_queries(1, heads=4), k=k, v=v)
    readings = {
        "neighbours share": np.eye(2)[[0, 0, 1, 1]],
        "interleaved": np.eye(2)[[0, 1, 0, 1]],
        "all take the first": np.eye(2)[[0, 0, 0, 0]],
    }
    return {"grouped heads": _which(found["out"][0, :, 0, :2], found["unit"], readings)}


def _window(run: Run) -> Answers:
    """Two queries, four keys, scores of 0, a window of one key to the left and none to the right."""
    found = run(q=_queries(2), **_arrays(np.zeros(4)), window=(1, 0))
    readings = {
        "bottom-right, bounds included": _uniform(".xx.", "..xx"),
        "bottom-right, the left bound excluded": _uniform("..x.", "...x"),
        "bottom-right, one wider": _uniform("xxx.", ".xxx"),
        "bottom-right, one wider on both sides": _uniform("xxxx", ".xxx"),
        "top-left, bounds included": _uniform("x...", "xx.."),
        "top-left, the left bound excluded": _uniform("x...", ".x.."),
        "ignored": _uniform("xxxx", "xxxx"),
    }
    return {"window": _which(found["out"][0, 0, :, :4], found["unit"], readings)}


def _sink(run: Run) -> Answers:
    """Two scores of 0 and a sink of log 2: half of the sum of exponentials is its."""
    found = run(q=_queries(1), **_arrays(np.zeros(2)), sink=np.asarray([math.log(2.0)]))
    weights = {"in the sum": _uniform("xx")[0] / 2.0, "ignored": _uniform("xx")[0]}
    sense = _which(found["out"][0, 0, 0, :2], found["unit"], weights)
    if sense != "in the sum" or "lse" not in found:
        return {"sink": sense if sense != "in the sum" else "declined: it returns no lse"}
    readings = {"in lse": np.asarray([math.log(4.0)]), "left out of lse": np.asarray([math.log(2.0)])}
    return {"sink": _which(found["lse"].ravel(), np.asarray(max(float(found["unit"]), 1e-6)), readings)}


def _slack(run: Run) -> Answers:
    """Two queries and two keys, of which one each exists; the others hold NaN."""
    one = np.asarray([1])
    given = {"q": _queries(2), **_arrays(np.zeros(2))}
    given = {name: np.where(np.arange(2)[:, None] == 1, math.nan, x) for name, x in given.items()}
    found = run(**given, q_lengths=one, k_lengths=one)["out"][0, 0]
    if not np.all(np.isfinite(found[0])):
        return {"beyond the lengths": "NaN there spreads"}
    return {"beyond the lengths": "zero" if not np.any(found[1]) else "not zero"}


PROBES: tuple[tuple[tuple[str, ...], Callable[[Run], Answers]], ...] = (
    (("causal mask",), _causal),
    (("mask", "empty rows"), _mask),
    (("soft-cap",), _softcap),
    (("lse",), _lse),
    (("scale",), _scale),
    (("grouped heads",), _groups),
    (("window",), _window),
    (("sink",), _sink),
    (("beyond the lengths",), _slack),
)
