"""Errors that are read off what was got: rows and parts that were not written, and options that nobody asked for.

The former have no numbers of their own, and explain what only looks like them. The latter, a window, a soft-cap,
causality, another scale, a kernel applies though the call does not have them. The value is not known, so it is
measured: on the smallest failing case the value is found whose results come nearest to what was got. Whether that
explains the failures is judged like every error with a name.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from refattn import equations
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.diagnose.error_templates import Templates
from refattn.verify.diagnose.known import Values
from refattn.verify.diagnose.residuals import Residuals
from refattn.verify.outcome import Floats
from refattn.verify.tolerance.budget import evaluate

EMPTY_ROWS = "empty rows"
"""The question of conventions that an error of rows without a key is an answer to."""

UNWRITTEN = "parts of the outputs are 0 where they should not be, and all that is not 0 is right"


def symptoms_of(failing: Sequence[Residuals]) -> Iterator[WrongKernel]:
    """Yield what the failing cases show by themselves, with what was got where they show it."""
    got = {id(one.templates.inputs): one.result.tensors for one in failing}

    def empty_rows(call: Call) -> Values:
        values, found = dict(call.outputs), got.get(id(call.inputs), {})
        empty = np.isneginf(values["lse"])[..., None]
        return values | {"out": np.where(empty, found["out"], values["out"])} if "out" in found else values

    def unwritten(call: Call) -> Values:
        found = got.get(id(call.inputs), {})
        same = {name: x for name, x in call.outputs.items() if name in found and found[name].shape == x.shape}
        return {**call.outputs} | {name: np.where(found[name] == 0.0, 0.0, x) for name, x in same.items()}

    if all("lse" in one.truth.values for one in failing):
        words = "rows that may attend nothing hold something else than 0, and all other rows are right"
        yield WrongKernel(EMPTY_ROWS, "storing", empty_rows, words, (EMPTY_ROWS,))
    if any("out" in one.wrong for one in failing):
        id_ = _written(min(failing, key=lambda one: one.templates.size).templates)
        nothing = not any(np.any(one.result.tensors["out"]) for one in failing if "out" in one.wrong)
        words = "every output is 0" if nothing else UNWRITTEN
        yield WrongKernel(words, "storing", unwritten, words, (id_,))


def _written(templates: Templates) -> str:
    """Return the equation whose value the output is; the last one, where it is put together of several."""
    with equations.trace() as traced:
        out = evaluate(templates.mechanism, templates.inputs, templates.case.options, None)["out"]
    same = [key for key, x in traced.items() if np.array_equal(x, out, equal_nan=True)]
    return (same or list(traced))[-1].partition("[")[0]


# --- options that nobody asked for

KEYS = 2048
"""Keys up to which every left bound of a window is tried at once, on the last query."""

PAIRS = 1 << 20
"""Scores of a case up to which a value is measured on it."""

STEPS = 2.0 ** (0.25 * np.arange(-24, 33))
"""Where the search for a number begins: so many times what is usual."""

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

HALVINGS = 40
"""Steps of the golden section, after which a number is known to 1e-9."""

APART = 16.0
"""An element is wrong that is off by so many times what is granted."""


def unasked_of(mechanism: Mechanism, failing: Sequence[Residuals]) -> Iterator[WrongKernel]:
    """Yield the options that a kernel may apply without having been asked, each with the value that comes nearest."""
    small = min((one for one in failing if _is_small(one)), key=lambda one: one.templates.size, default=None)
    if small is None:
        return
    for name, search in (("causal", _causal), ("window", _window), ("softcap", _softcap), ("scale", _scale)):
        if name not in mechanism.defaults or (name in small.case.options and name != "scale"):
            continue
        tried = [(_distance(small, {name: value}), value) for value in search(small)]
        if tried:
            _, value = min(tried, key=lambda pair: pair[0])
            words = f"{name} that nobody asked for, as if {name} were {_shown(value)}"
            if name == "scale":
                words = f"as if scale were {_shown(value)}"
            run = functools.partial(_with_option, mechanism, name, value)
            yield WrongKernel(f"{name} unasked", "input", run, words, (*_equations_of(mechanism, name), name))


def _equations_of(mechanism: Mechanism, name: str) -> list[str]:
    """Return the forward equation whose formula has the option, if one has."""
    named = [id for id, text in mechanism.equations.items() if id[0] != "d" and re.search(rf"\b{name}\b", text)]
    return named[:1]


def _is_small(one: Residuals) -> bool:
    q, k = (one.templates.inputs[name].shape for name in "qk")
    return "out" in one.wrong and math.prod(q[:3]) * k[2] <= PAIRS


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@np.errstate(all="ignore")
def _with_option(mechanism: Mechanism, name: str, value: Any, call: Call) -> Values:
    if name in call.options and name != "scale":
        return {}
    return evaluate(mechanism, call.inputs, {**call.options, name: value}, call.d_out, further=call.further)


def _distance(one: Residuals, options: dict[str, Any]) -> float:
    """Return how far the output with other options is from what was got: a mean square, in units of what is granted."""
    out = _output(one, options)
    return math.inf if out is None else one_norm(one.errors["out"] - one.templates.marks("out", out))


def one_norm(x: Any) -> float:
    """Return the sum of squares, infinite where it is not finite."""
    size = float(x @ x)
    return size if math.isfinite(size) else math.inf


@np.errstate(all="ignore")
def _output(one: Residuals, options: dict[str, Any]) -> Any:
    case = one.case
    try:
        return evaluate(one.templates.mechanism, one.templates.inputs, {**case.options, **options}, None)["out"]
    except (TypeError, ValueError, ArithmeticError):  # a combination of options that the core does not take
        return None


def _causal(one: Residuals) -> Iterator[Any]:
    yield from (True, "top_left")


def _softcap(one: Residuals) -> Iterator[Any]:
    yield from _nearest(one, "softcap", 1.0)


def _scale(one: Residuals) -> Iterator[Any]:
    yield from _nearest(one, "scale", 1.0 / math.sqrt(one.templates.inputs["q"].shape[3]))


def _nearest(one: Residuals, name: str, usual: float) -> Iterator[float]:
    """Yield the number that comes nearest, and what it is with few digits: people choose round numbers."""
    starts = [float(usual * step) for step in STEPS]

    def at(log: float) -> float:
        return _distance(one, {name: math.exp(log)})

    found = [at(math.log(x)) for x in starts]
    best = int(np.argmin(found))
    if not math.isfinite(found[best]):
        return
    step = 0.25 * math.log(2.0)
    value = math.exp(_least(at, math.log(starts[best]) - step, math.log(starts[best]) + step))
    yield value
    allowed = 1.5 * _distance(one, {name: value}) + 2.0 * one.errors["out"].size
    for digits in (1, 2, 3, 4):
        few = float(f"{value:.{digits}g}")
        if _distance(one, {name: few}) <= allowed:
            yield few
            return


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function of one number is least, by golden section."""
    inner = [high - GOLDEN * (high - low), low + GOLDEN * (high - low)]
    values = [function(x) for x in inner]
    for _ in range(HALVINGS):
        if values[0] <= values[1]:
            high, inner = inner[1], [high - GOLDEN * (inner[1] - low), inner[0]]
            inner[0] = high - GOLDEN * (high - low)
            values = [function(inner[0]), values[0]]
        else:
            low, inner = inner[0], [inner[1], inner[1]]
            inner[1] = low + GOLDEN * (high - low)
            values = [values[1], function(inner[1])]
    return (low + high) / 2.0


def _window(one: Residuals) -> Iterator[tuple[int | None, int | None]]:
    """Yield windows whose bounds are read off the rows that are wrong, or off the last query."""
    inputs = one.templates.inputs
    n_q, n_k = inputs["q"].shape[2], inputs["k"].shape[2]
    if {"q_lengths", "k_lengths", "offset"} & {*inputs, *one.case.options} or min(n_q, n_k) < 1:
        return
    got, true = one.result.tensors["out"].astype(np.float64), one.truth.values["out"]
    noise = np.sqrt(np.maximum(one.truth.variance["out"], np.finfo(np.float64).tiny))
    wrong = np.flatnonzero((np.abs(got - true) > APART * noise).any(axis=(0, 1, 3)))
    places = wrong + n_k - n_q
    lefts: set[int] = {*_lefts_of_last(one, got)}
    rights: set[int] = set()
    if wrong.size:
        lefts.add(int(places[0]) - 1)  # the first query that sees a key less
        rights.add(n_k - 2 - int(places[-1]))  # the last that does
    bounds: list[tuple[int | None, int | None]] = []
    for left in sorted(n for n in lefts if 0 <= n < n_k):
        bounds += [(left, None), (left, 0), (left, left)]
    bounds += [(None, right) for right in sorted(n for n in rights if 0 <= n < n_k)]
    yield from dict.fromkeys(bounds)


@np.errstate(all="ignore")
def _lefts_of_last(one: Residuals, got: Floats) -> Iterable[int]:
    """Return the left bound that explains the last query of the first head best, of all at once.

    With a_j the weights of the keys and a_0 what is not theirs (a sink), a query at place p with the left bound L gives
    sum over j >= p - L of a_j v_j, divided by a_0 + sum over j >= p - L of a_j.
    """
    inputs = one.templates.inputs
    n_q, n_k = inputs["q"].shape[2], inputs["k"].shape[2]
    if not 1 < n_k <= KEYS or {*inputs} - {"q", "k", "v", "sink"}:
        return []
    q, k = inputs["q"][:1, :1, -1:], inputs["k"][:1, :1]
    cut = {"q": q, "k": k, "v": np.eye(n_k)[None, None]}
    if "sink" in inputs:
        cut["sink"] = inputs["sink"][:1]
    weights = evaluate(one.templates.mechanism, cut, one.case.options, None)["out"].reshape(-1)
    values = inputs["v"][0, 0]
    sums = np.cumsum((weights[:, None] * values)[::-1], axis=0)
    total = (1.0 - weights.sum()) + np.cumsum(weights[::-1])
    off = np.sum((sums / total[:, None] - got[0, 0, -1]) ** 2, axis=1)
    return [int(np.nanargmin(off))] if np.isfinite(off).any() and n_q else []
