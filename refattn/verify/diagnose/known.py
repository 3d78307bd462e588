"""Errors that have a name: conventions, known bugs, inputs that are read wrongly, and faults of storing.

Each is run on the cases that fail. Where what it computes agrees with what was got, it explains the case: outputs
first, and gradients where it has some. A case in which an error cannot show says nothing against it, so that cases
that agree only decide between errors that explain as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.bugs.emulator import Flash, Unknown
from refattn.verify.bugs.fault import BACKWARD, faults, flash, in_the_backward, read_again
from refattn.verify.diagnose.changes import LAST, SECOND_HALF, first_alone, flipped, part_scaled, rolled, scaled
from refattn.verify.diagnose.error_templates import Templates
from refattn.verify.diagnose.mutants import storing
from refattn.verify.diagnose.residuals import Residuals
from refattn.verify.outcome import Floats, Result, Truth
from refattn.verify.tolerance.budget import evaluate
from refattn.verify.tolerance.compare import judge

Values = Mapping[str, Any]

PROBES = 6
"""Failing cases that every error is tried on: the cheapest of each kind."""

AGREEING = 8
"""Cases that agree which decide between errors that explain as much."""

LARGE_ERROR = 100.0
"""Mean square of an error, in units of what is granted, from which on what explains it leaves little of it."""

FAR = 0.1
"""The part of a large error that it leaves at most."""

ACTS = 0.25
"""An error that moves no element of a wrong result by so many times what is granted does not act in a case."""

PLAIN = ("ignored", "left out")
"""Of errors of a sort that explain as much, what comes first: nothing is done where something should be."""

ORDER = ("convention", "gradient", "fault", "input", "storing")
"""Of errors that explain as much, what comes first."""


Named = tuple[WrongKernel, str]
"""A wrong kernel, and the words of one of its sizes."""


@dataclass(frozen=True)
class Explained:
    """What an error explains.

    Attributes
    ----------
    wrong, size
        The error.
    cases
        The failing cases that it explains: everything that it has results for agrees, or else outputs alone.
    whole
        Those of them where everything agrees.
    share
        The largest used share of the allowed error in those.
    against
        How many cases that agree it would make fail.
    """

    wrong: WrongKernel
    size: str
    cases: tuple[str, ...]
    whole: tuple[str, ...]
    share: float
    against: int = 0


def errors_with_names(mechanism: Mechanism, without: Iterable[str] = ()) -> tuple[Named, ...]:
    """Return all errors with a name; `without` names those that are left out.

    A convention that a known bug follows has its report.
    """
    out, name = {*without}, mechanism.name
    reports = {one.wrong: one.link for one in faults(name)}
    found = (
        *(replace(one, link=reports.get(one.name, one.link)) for one in mechanism.wrong.values()),
        *faults(name),
        *faults(name, again=True),
        *_mistaken(mechanism),
        *_inputs(mechanism),
        *_factors(mechanism),
        *_options(mechanism),
        *storing(mechanism),
    )
    return tuple((one, size) for one in found if one.name not in out for size in one.sizes)


def results_of(named: Named, templates: Templates, grad: bool) -> Values:
    """Return what a wrong kernel gives for a case, with gradients where asked and where it has some."""
    wrong, size = named
    outputs, truth = right_outputs(templates), templates.truth
    call = templates.call(grad, dtype=truth.stored["out"], outputs=outputs, times=truth.times)
    return (outputs if wrong.backward else {}) | {**wrong.results(call, size)}


def right_outputs(templates: Templates) -> dict[str, Any]:
    return {
        name: templates.truth.values[name] for name in outputs_of(templates.mechanism) if name in templates.truth.values
    }


READ: dict[str, tuple[str, Callable[..., NDArray[Any]]]] = {
    "ignored": ("", scaled(0.0)),
    **{
        words.format(one): (letter, change)
        for letter, one in (("b", "batch"), ("h", "head"), ("i", "token"))
        for words, change in (
            ("of the next {}", rolled(-1)),
            ("of the {} before", rolled(1)),
            ("of the first {} in all", first_alone),
        )
    },
    "without the last token": ("i", part_scaled(LAST)),
    "with tokens in the opposite order": ("i", flipped),
    "with the width in the opposite order": ("d", flipped),
    "without the second half of the width": ("d", part_scaled(SECOND_HALF)),
}
"""What an input may be in place of itself: the axis that it needs, and the change; none where it is left out."""

UPSTREAM = "d_out"
"""The upstream gradient, which the backward alone reads."""


def _axis(x: NDArray[Any], letter: str) -> int | None:
    """Return the axis of an input for its batches, heads, tokens or width; None where it has none of more than one."""
    if x.ndim == 1 and x.dtype.kind in "iu":  # lengths, and where queries stand: one for each batch
        axis = -1 if letter == "b" else None
    elif x.ndim < 3 and x.dtype.kind == "f":  # numbers of heads
        axis = -x.ndim if letter == "h" else None
    else:
        axis = {"b": -4, "h": -3, "i": -2, "d": -1}[letter]
    return axis if axis is not None and x.ndim >= -axis > 0 and x.shape[axis] > 1 else None


def _changed(inputs: Mapping[str, NDArray[Any]], names: tuple[str, ...], how: str) -> dict[str, NDArray[Any]] | None:
    """Return inputs of which some are read as `READ` says; None where that changes none."""
    letter, change = READ[how]
    changed = {name: x for name, x in inputs.items() if letter or name not in names}
    for name in {*names} & {*changed}:
        axis = _axis(inputs[name], letter)
        changed[name] = inputs[name] if axis is None else change(inputs[name], axis)
    same = all(name in changed and np.array_equal(changed[name], x, equal_nan=True) for name, x in inputs.items())
    return None if same else changed


@np.errstate(all="ignore")
def _read(mechanism: Mechanism, names: tuple[str, ...], how: str, call: Call) -> Values:
    inputs = _changed(call.inputs, names, how)
    return {} if inputs is None else evaluate(mechanism, inputs, call.options, call.d_out, further=call.further)


def _read_backward(names: tuple[str, ...], how: str, call: Call) -> Values:
    if call.d_out is None:
        raise Unknown("no gradient was asked")
    inputs = _changed({**call.inputs, UPSTREAM: call.d_out}, names, how)
    if inputs is None:
        return {}
    return in_the_backward(Flash, replace(call, d_out=inputs.pop(UPSTREAM), inputs=inputs, size=(128, 128)))


@np.errstate(all="ignore")
def _without_option(mechanism: Mechanism, name: str, call: Call) -> Values:
    options = {given: x for given, x in call.options.items() if given != name}
    if len(options) == len(call.options):
        return {}
    try:
        return evaluate(mechanism, call.inputs, options, call.d_out, further=call.further)
    except TypeError as error:  # it cannot be left out
        raise Unknown(str(error)) from error


def _options(mechanism: Mechanism) -> Iterator[WrongKernel]:
    for name in dict.fromkeys(name for case in mechanism.cases for name in case.options):
        run, kind = functools.partial(_without_option, mechanism, name), f"{name} ignored"
        yield WrongKernel(kind, "input", run, kind, (name,))


def _inputs(mechanism: Mechanism) -> Iterator[WrongKernel]:
    single = dict.fromkeys(name for case in mechanism.cases for name in case.inputs)
    for names in (*((name,) for name in single), ("k", "v"), (UPSTREAM,)):
        for how, (letter, _) in READ.items():
            if not letter and {*names} & {*"qkv", UPSTREAM}:
                continue
            kind = f"{' and '.join(names)} {how}"
            if names != (UPSTREAM,):
                yield WrongKernel(kind, "input", functools.partial(_read, mechanism, names, how), kind, names)
            if flash(mechanism.name):
                run, of = functools.partial(_read_backward, names, how), (*names, *read_again(names))
                yield WrongKernel(BACKWARD + kind, "input", run, BACKWARD + kind, of, backward=True)


def _returned(name: str, call: Call) -> Values:
    """Return an input in place of the output."""
    x = call.inputs[name]
    return {"out": x} if "out" in call.outputs and x.shape == call.outputs["out"].shape else {}


@np.errstate(all="ignore")
def _exchanged(mechanism: Mechanism, one: str, other: str, call: Call) -> Values:
    x, y = call.inputs[one], call.inputs[other]
    if x.shape != y.shape:
        return {}
    values = evaluate(mechanism, {**call.inputs, one: y, other: x}, call.options, call.d_out, further=call.further)
    names = {f"d_{one}": f"d_{other}", f"d_{other}": f"d_{one}"}
    return {names.get(name, name): value for name, value in values.items()}


def _mistaken(mechanism: Mechanism) -> Iterator[WrongKernel]:
    """Yield what is returned by a kernel that computes no attention, or takes one input for another."""
    for name in "qkv":
        words = f"no attention is computed: the output is {name}"
        yield WrongKernel(f"{name} returned", "input", functools.partial(_returned, name), words, (name,))
    for names in (("q", "k"), ("k", "v")):
        kind = f"{' and '.join(names)} exchanged"
        yield WrongKernel(kind, "input", functools.partial(_exchanged, mechanism, *names), kind, names)


FACTORS = ("ignored", "of the next head", "of the first head in all", "of the next batch", "of the first batch in all")
"""How factors may be read, of `READ`."""


@np.errstate(all="ignore")
def _read_factors(mechanism: Mechanism, names: tuple[str, ...], how: str, call: Call) -> Values:
    if not call.times:
        return {}
    ones = {name: np.ones_like(call.times[name]) for name in names}  # of factors that are ignored
    read = _changed(call.times, names, how) if READ[how][0] else ones
    if read is None:
        return {}
    inputs = {name: call.inputs[name] / call.times[name] * read[name] for name in names}
    return evaluate(mechanism, {**call.inputs, **inputs}, call.options, call.d_out, further=call.further)


def _factors(mechanism: Mechanism) -> Iterator[WrongKernel]:
    """Yield errors of kernels that multiply numbers by factors."""
    for names in (("q",), ("k",), ("v",), ("q", "k"), ("k", "v"), ("q", "k", "v")):
        for how in FACTORS:
            link = "ROCm/rocm-libraries/pull/10474" if how == "of the first batch in all" else ""
            kind = f"factors of {' and '.join((', '.join(names[:-1]), names[-1]) if names[1:] else names)} {how}"
            run = functools.partial(_read_factors, mechanism, names, how)
            yield WrongKernel(kind, "input", run, kind, names, link=link and f"https://github.com/{link}")


def outputs_of(mechanism: Mechanism) -> tuple[str, ...]:
    return ("out", *mechanism.outputs)


@np.errstate(over="ignore", invalid="ignore")
def granted(truth: Truth, name: str, value: Floats) -> Floats:
    """Return the variance of honest errors of a wrong result: where it is larger than the true one, more.

    Where the true one is granted nothing, a wrong one may be what is left of terms that cancel: it is granted what a
    tenth of the typical element is.
    """
    true = np.where(np.isfinite(truth.values[name]), truth.values[name], 0.0)
    relative = float(np.sum(truth.variance[name]) / max(np.sum(true**2), np.finfo(np.float64).tiny))
    squares = np.where(np.isfinite(value), value**2, 0.0)
    return np.maximum(
        truth.variance[name], relative * np.maximum(squares, 0.01 * np.mean(squares) if squares.size else 0.0)
    )


def shares(one: Residuals, values: Values) -> dict[str, float]:
    """Return by name the used share of the allowed error of results that are judged against other ones."""
    names = [name for name in one.errors if name in values]
    if any(np.shape(values[name]) != one.templates.targets[name].shape for name in names):
        return dict.fromkeys(names, np.inf)
    asked = Result({name: one.result.tensors[name] for name in names}, one.result.dtypes)
    wide = {name: np.asarray(values[name], np.float64) for name in names}
    allowed = {name: granted(one.truth, name, wide[name]) for name in names}
    instead = replace(one.truth, values={**one.truth.values, **wide}, variance=allowed, exact=frozenset())
    return {verdict.tensor: verdict.share for verdict in judge(asked, instead)}


@np.errstate(all="ignore")  # a wrong kernel may overflow or divide by zero
def level(one: Residuals, named: Named) -> tuple[int, float]:
    """Return 2 where an error explains all that is wrong in a case, 1 where outputs, 0 where nothing; and the share."""
    outputs = {*outputs_of(one.templates.mechanism)}
    known = named[0]
    if known.kind == "fault" and not one.templates.targets["out"].size:
        return 0, np.inf
    wrong, gradients = {*one.wrong}, {*one.errors} - outputs
    if known.backward == bool(wrong & outputs):
        return 0, np.inf
    try:
        values = results_of(named, one.templates, bool(gradients) and known.backward)
    except (ArithmeticError, ValueError):
        return 0, np.inf
    looked_at = wrong & outputs or wrong
    if _far(one, values, looked_at) or not _acts(one, values, looked_at):
        return 0, np.inf
    found = shares(one, {name: x for name, x in values.items() if name in outputs})
    worst_output = max(found.values(), default=np.inf)
    if not found or worst_output > 1.0 or not wrong & outputs <= {*found} or np.isnan(worst_output):
        return 0, np.inf
    if not gradients:
        return 2, worst_output
    if not known.backward:
        values = results_of(named, one.templates, True)
    rest = shares(one, {name: x for name, x in values.items() if name in gradients})
    if known.backward and not wrong <= {*rest}:
        return 0, np.inf
    worst = max(rest.values(), default=0.0)
    if worst <= 1.0 or (not known.backward and follows(one)):
        return 2, max(worst_output, worst) if worst <= 1.0 else worst_output
    return (0, np.inf) if known.backward else (1, worst_output)


def _far(one: Residuals, values: Values, names: set[str]) -> bool:
    """Tell at little cost whether results are surely not those that were got: they leave most of a large error."""
    for name in names & {*values}:
        if np.shape(values[name]) != one.templates.targets[name].shape:
            return True
        error = one.errors[name]
        left = error - one.templates.marks(name, values[name])
        size = float(error @ error)
        if size > LARGE_ERROR * error.size and float(left @ left) > FAR * size:
            return True
    return False


def _acts(one: Residuals, values: Values, names: set[str]) -> bool:
    """Tell whether an error changes every wrong result that it has: otherwise it agrees only with what is granted."""
    marks = (one.templates.marks(name, values[name]) for name in names & {*values})
    return all(float(np.max(np.abs(mark), initial=0.0)) > ACTS for mark in marks)


def recomputed(one: Residuals) -> list[Values]:
    """Return what gradients may be where the backward is right and outputs are those that were got.

    The true ones, for a backward that reads no output; and those of a flash kernel, which computes delta from the
    output, and weights from lse. A mechanism whose kernels have no such backward has the true ones alone.
    """
    names = [name for name in one.errors if name not in outputs_of(one.templates.mechanism)]
    found: list[Values] = [{name: one.truth.values[name] for name in names}]
    if flash(one.templates.mechanism.name) and one.templates.upstream is not None and {"out", *names} <= {*one.errors}:
        out = one.result.tensors["out"].astype(np.float64)
        lses = [one.truth.values["lse"]]
        call = one.templates.call(size=(128, 128))
        lses += [one.result.tensors["lse"].astype(np.float64)] if "lse" in one.wrong else []
        for lse in lses:
            try:
                values = in_the_backward(Flash, replace(call, outputs={"out": out, "lse": lse}))
            except Unknown:
                break
            found.append({name: values[name] for name in names if name in values})
    return found


def nearest_gradients(one: Residuals) -> tuple[Values, dict[str, float]]:
    """Return of these the ones that most of what was got agrees with, and the used shares of the allowed error."""
    tried = [(values, shares(one, values)) for values in recomputed(one)]
    return min(tried, key=lambda pair: sum(share > 1.0 for share in pair[1].values()))


def follows(one: Residuals) -> bool:
    """Tell whether the gradients of a case follow from its outputs: wrong as they are, the backward is right."""
    found = nearest_gradients(one)[1]
    return bool(found) and max(found.values()) <= 1.0


def explained(
    known: Sequence[Named], failing: Sequence[Residuals], agreeing: Sequence[Residuals] = ()
) -> list[Explained]:
    """Return what errors with names explain of failing cases, the most first, without those that explain nothing."""
    kinds: dict[tuple[str, str], Residuals] = {}
    for one in sorted(failing, key=_cost):
        kinds.setdefault((one.case.kind, " ".join(sorted(one.wrong))), one)
    probes = list(kinds.values())[:PROBES]
    rest = [one for one in failing if not any(one is probe for probe in probes)]
    found: list[Explained] = []
    for error in known:
        tried = [(one, *level(one, error)) for one in probes]
        if any(at for _, at, _ in tried):
            tried += [(one, *level(one, error)) for one in rest]
            cases = tuple(one.case.name for one, at, _ in tried if at)
            whole = tuple(one.case.name for one, at, _ in tried if at == 2)
            found.append(Explained(*error, cases, whole, max(share for _, at, share in tried if at)))
    found.sort(key=_rank)
    best: dict[str, Explained] = {}
    for doubted in _doubted(found, failing, agreeing):
        best.setdefault(doubted.wrong.name, doubted)
    return _without_twins(list(best.values()))


def also_explained(one: Explained, others: Sequence[Residuals]) -> Explained:
    """Return what an error explains with what it explains of other failing cases."""
    tried = [(other.case.name, *level(other, (one.wrong, one.size))) for other in others]
    cases = (*one.cases, *(name for name, at, _ in tried if at))
    whole = (*one.whole, *(name for name, at, _ in tried if at == 2))
    return replace(one, cases=cases, whole=whole, share=max(one.share, *(share for _, at, share in tried if at), 0.0))


def _cost(one: Residuals) -> float:
    b, h, n, _ = one.templates.inputs["q"].shape
    return float(b * h * max(n, 64) * max(one.templates.inputs["k"].shape[2], 64))


def _given(one: Residuals) -> set[str]:
    """Return what a case has beside q, k and v."""
    return {*one.case.inputs, *one.case.options} - {*"qkv"}


def _rank(one: Explained) -> tuple[Any, ...]:
    plain = any(word in one.wrong.in_words(one.size) for word in PLAIN)
    return (
        -len(one.whole),
        -len(one.cases),
        one.against,
        ORDER.index(one.wrong.kind),
        not plain,
        round(one.share, 1),
    )


def _doubted(found: list[Explained], failing: Sequence[Residuals], agreeing: Sequence[Residuals]) -> list[Explained]:
    """Return the errors that explain most with how many cases that agree speak against each, in their new order.

    Of the cases that agree those are asked that have most of what the failing ones have.
    """
    if not found or not agreeing:
        return found
    given = {name for one in failing for name in _given(one)}
    few = sorted(agreeing, key=lambda one: (len(given & _given(one)), _cost(one)))[-AGREEING:]
    most = len(found[0].whole), len(found[0].cases)
    return sorted(
        (
            replace(one, against=sum(_spoils(case, (one.wrong, one.size)) for case in few))
            if (len(one.whole), len(one.cases)) == most
            else one
            for one in found
        ),
        key=_rank,
    )


@np.errstate(all="ignore")
def _spoils(one: Residuals, named: Named) -> bool:
    """Tell whether an error would show in a case that agrees."""
    try:
        values = results_of(named, one.templates, named[0].backward)
    except Unknown:
        return False
    except (ArithmeticError, ValueError):
        return True
    return max(shares(one, values).values(), default=0.0) > 1.0


def _without_twins(found: list[Explained]) -> list[Explained]:
    """Leave out what is a convention which explains as much, and that no more cases speak against.

    Such are faults that follow it, and the option that it ignores.
    """
    conventions = {
        one.wrong.name: (len(one.cases), -one.against) for one in found if one.wrong.kind in ("convention", "gradient")
    }
    none = (-1, 0)

    def is_twin(one: Explained) -> bool:
        as_much = (len(one.cases), -one.against)
        if one.wrong.kind == "fault":
            return any(conventions.get(name, none) >= as_much for name in one.wrong.of)
        option, _, ignored = one.wrong.name.partition(" ")
        return (one.wrong.kind, ignored) == ("input", "ignored") and any(
            (len(other.cases), -other.against) >= as_much
            for other in found
            if other.wrong.kind != "input" and {option, ignored} <= {*other.wrong.in_words(other.size).split()}
        )

    return [one for one in found if not is_twin(one)]
