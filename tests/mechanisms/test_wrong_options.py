"""What no option can be, given to every option of every core, kind, block and run: an error that names it.

And what a message says is needed is what is taken. The sweep is seeded: each option gets a few of the values.
`python -m tests.mechanisms.test_wrong_options` gives it all.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, philox
from refattn.train import settings
from tests.mechanisms.drawn_cases import kinds

WRONG: tuple[Any, ...] = (
    *(None, "x", "", "soft(", "x(y=1)", b"x", 1j, object, True, -1, 0, 2.5, float("nan"), float("inf"), 10**400),
    *([], {}, (), np.int64(-3), np.float64(np.nan), np.float64(0.5), np.array([1, 2]), np.array("x"), np.array([None])),
    np.ones((2, 2, 2, 2, 2, 2)),
)
SAMPLE = 8
LONG = {"steps"}
"""Numbers of which a large one only takes long."""

Call = Callable[[Any], object]


def calls(name: str) -> Iterator[tuple[str, Call]]:
    """Every option of a mechanism, and what takes a value of it."""
    record = ra.mechanism(name)
    draw = philox.normal((3, 1, 2, 4, 3), seed=5, purpose="wrong options")

    def core_with(option: str, value: Any) -> None:
        assert record.core is not None
        record.core.forward(*draw, **{option: value})

    if record.core is not None:
        for option, parameter in inspect.signature(record.core.forward).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                yield option, partial(core_with, option)
    tokens = draw[0, 0, 0].repeat(2, axis=1)[None]

    def block(option: str, value: Any) -> None:
        config = record.block.Config(**{"width": 6, "heads": 2, option: value})
        if option in ("vocabulary", "context", "layers") or isinstance(value, int) and value > 1000:
            return
        params = record.block.init(config, seed=0, like=tokens, layer=0)
        record.block.forward(params, record.block.start(params, tokens, Context()), Context())

    for field in dataclasses.fields(record.block.Config):
        yield field.name, partial(block, field.name)


def with_number(kind: Any, number: str, value: Any) -> object:
    return replace(kind, **{number: value})


def numbers_of_kinds(name: str) -> Iterator[tuple[str, Call]]:
    """Every number of every kind that an option may be, and what makes the kind with a value of it."""
    families = ra.mechanism(name).families
    for option, kind in [(each, kind) for each in families for kind in kinds(name, each)]:
        usual = families[option](kind)
        for field in dataclasses.fields(usual) if dataclasses.is_dataclass(usual) else ():
            if field.init:
                yield field.name, partial(with_number, usual, field.name)


def run_with(option: str, value: Any) -> None:
    settings.build("graph_energy", {option: value})


def runs() -> Iterator[tuple[str, Call]]:
    """Every setting of a run."""
    for field in dataclasses.fields(settings.Settings):
        if field.name != "mechanism":
            yield field.name, partial(run_with, field.name)


def problem(option: str, call: Call, value: Any) -> str | None:
    """What is wrong with how a call refuses a value; None where it takes it, or names what it was given."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            call(value)
    except (TypeError, ValueError, NotImplementedError) as error:
        text = str(error)
        if "\n" in text or len(text) > 500:
            return f"a message of {text.count(chr(10)) + 1} lines and {len(text)} letters"
        if f"{option}:" in text and ("needs" in text or "has" in text):
            return None
        # One that fits by itself, and not together with another option, which is named.
        return None if ": got" in text and ", needs" in text else f"{type(error).__name__}: {text[:150]}"
    except ArithmeticError as error:
        return None if str(error) and type(error) not in (ZeroDivisionError, OverflowError) else repr(error)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return None


def swept(found: Iterator[tuple[str, Call]], seed: int, sample: int | None) -> list[str]:
    problems = []
    for n, (option, call) in enumerate(found):
        chosen = philox.permutation(len(WRONG), seed=seed, purpose="wrong options", step=n)[:sample]
        for value in (WRONG[int(at)] for at in chosen):
            if option in LONG and type(value) is int and value > 1000:
                continue
            if (wrong := problem(option, call, value)) is not None:
                problems.append(f"{option}={value!r:.40}: {wrong}")
    return problems


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_options_that_do_not_fit_are_named(name: str) -> None:
    assert swept(calls(name), 0, SAMPLE) == []
    assert swept(numbers_of_kinds(name), 0, SAMPLE) == []


def bounds(text: str) -> tuple[list[Any], list[Any]]:
    """What a message says it needs, as numbers that fit and numbers that do not."""
    if whole := re.search(r"needs a whole number of at least (\d+)", text):
        least = int(whole[1])
        return [least, np.int64(least + 1)], [least - 1, float(least), True, str(least)]
    real = re.search(r"needs a finite number( above| below| of at least| from)? ?(-?[\d.]+)?", text)
    if not real or " to " in text:
        return [], []
    kind, edge = real[1], float((real[2] or "0").rstrip("."))
    inner, outer = (edge - 0.25, edge + 0.25) if kind == " below" else (edge + 0.25, edge - 0.25)
    closed = kind in (" of at least", " from")
    return [inner, *([edge] if closed else [])], [
        *(np.nan, np.inf, True, "1"),
        *([] if kind is None else [outer] if closed else [edge, outer]),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_what_a_message_says_is_needed_is_what_is_taken(name: str) -> None:
    """A wrong bound is in message and check alike, and not seen here: folders have a table of bounds."""
    count = 0
    for option, call in (*calls(name), *numbers_of_kinds(name)):
        try:
            call("nothing")
        except (TypeError, ValueError) as error:
            good, bad = bounds(str(error)) if str(error).startswith(f"{option}: got 'nothing'") else ([], [])
            count += bool(bad)
            for value in bad:
                with pytest.raises((TypeError, ValueError), match=rf"{option}.*: got"):
                    call(value)
            for value in good:
                try:
                    call(value)
                except (TypeError, ValueError, ArithmeticError) as other:  # one that does not fit another option
                    assert not re.match(rf"{option}: got [^ ]+, needs a (whole|finite) number", f"{other}"), (
                        value,
                        other,
                    )
    assert count


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_an_array_is_told_in_one_line(name: str) -> None:
    """Of one that no option takes a message has the type, the shape and the dtype, not its numbers."""
    for option, call in calls(name):
        for value in (np.ones((2, 2, 2, 2)), np.ones((3, 50), np.int64), np.ones((40, 2), np.bool_)):
            assert problem(option, call, value) is None, (option, value.shape)


def test_settings_that_do_not_fit_are_named() -> None:
    assert swept(runs(), 0, SAMPLE) == []


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("graph_energy", "mu", None),
        ("graph_energy", "kappa", None),
        ("graph_energy", "coupling", []),
        ("graph_energy", "coupling", {}),
        ("graph_energy", "threshold", None),
        ("higher_order", "implementation", np.array([1, 2])),
        ("higher_order", "norm_eps", np.array([1, 2])),
        ("higher_order", "order", 10**400),
        ("koopman", "updates", 10**400),
        ("softmax", "scale", np.int64(-3)),
        ("sympformer", "layers", None),
    ],
)
def test_options_that_were_not_named(name: str, option: str, value: Any) -> None:
    found = [problem(option, call, value) for own, call in calls(name) if own == option]
    assert found and set(found) == {None}


if __name__ == "__main__":
    signal.alarm(600)
    for each in (*ra.list_mechanisms(), None):
        for line in swept(runs() if each is None else calls(each), 0, None):
            print(each or "settings", line)
