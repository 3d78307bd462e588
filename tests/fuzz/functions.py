"""A fuzzer of public functions: ``python -m tests.fuzz.functions [--calls N] [--seed S]``.

Each call takes a function with arguments that are right, and puts something else in the place of one of them, now and
then of none: a wrong type, shape or dtype, NaN, a masked array, an array that cannot be written to, a number out of all
range. What comes of it is counted:

- fine: it returns
- refused: an error whose message names the argument, or another one that it does not fit to
- obscure: an error of refattn that does not name it
- foreign: an error from inside another library that does not name it
- obscure or foreign, within: the same where something inside of an argument was changed, such as one array of many
- wrong: what no reader of that argument could mean (a masked array, objects or a text for an array, a set for a number)
  is taken and gives a result
- hang: it has not ended after 10 seconds
- mutated: an array that was given is another afterwards
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

import refattn as ra
from tests.fuzz.command import Bad, Totals, command
from tests.fuzz.public import Target, targets

ROOT = Path(ra.__file__).parent


class TooLong(BaseException):
    """A call does not end."""


def _too_long(*_: Any) -> None:
    raise TooLong


# fmt: off
PLAIN: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 1.5, float("nan"), float("inf"), -1e300, 1e300, 2**70, -(2**70), "", "x", b"x", "\0",
    [], [1, 2], (), (1,), {}, {"x": 1}, {1: 2}, {1, 2}, 1j, len, int, ..., object(), np.float32(2.0), np.int8(3),
    np.zeros(3), np.zeros((2, 2)), np.asarray(2), np.asarray("x"),
]
# fmt: on


def strange(draw: random.Random, right: Any) -> tuple[Any, bool]:
    """Return something in the place of an argument, and whether nobody could mean it."""
    array = isinstance(right, np.ndarray)
    number = isinstance(right, int | float) and not isinstance(right, bool)
    if array and draw.random() < 0.75:
        x = right.copy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options: list[tuple[Any, bool]] = [
                (np.ma.masked_array(x, mask=np.ones(x.shape, bool)), True),
                (x.astype(object), True),
                (x.astype(str), True),
                (x.astype(complex), x.dtype.kind != "c"),
                (np.asarray([[["x"]]]), True),
                (x[None], False),
                (x[..., :0] if x.ndim else x, False),
                (x[..., :-1] if x.ndim else x, False),
                (np.concatenate([x, x], -1) if x.ndim else x, False),
                (np.float64(1.0), False),
                (x.astype(np.float32), False),
                (x.astype(np.float16), False),
                (x.astype(np.int64), False),
                (x.astype(bool), False),
                (np.full_like(x, np.nan) if x.dtype.kind == "f" else x.astype(np.int64) - 100, False),
                (np.full_like(x, np.inf) if x.dtype.kind == "f" else x.astype(np.int64) + 300, False),
                (x.T, False),
                (np.lib.stride_tricks.as_strided(x, writeable=False), False),
                (np.asfortranarray(x), False),
            ]
            if x.ndim == 2:
                options.append((np.matrix(x), True))
        return draw.choice(options)
    value = draw.choice(PLAIN)
    absurd = str | bytes | set | dict if array else set | dict | list
    return value, (array or number) and isinstance(value, absurd)


def within(draw: random.Random, right: Any) -> tuple[Any, str] | None:
    """Return a tree with something else in the place of one of its leaves, and the name of this; None if it is none."""
    if isinstance(right, dict) and right:
        name = draw.choice(list(right))
        inner = within(draw, right[name]) or (strange(draw, right[name])[0], str(name))
        return {**right, name: inner[0]}, inner[1]
    if isinstance(right, tuple | list) and right:
        n = draw.randrange(len(right))
        inner = within(draw, right[n]) or (strange(draw, right[n])[0], str(n))
        return type(right)([*right[:n], inner[0], *right[n + 1 :]]), inner[1]
    # One that checks what it is made of cannot be made of anything else.
    plain = is_dataclass(right) and not isinstance(right, type) and not hasattr(right, "__post_init__")
    if plain and (held := [each.name for each in fields(right)]):
        name = draw.choice(held)
        inner = within(draw, getattr(right, name)) or (strange(draw, getattr(right, name))[0], name)
        changed = copy.copy(right)
        object.__setattr__(changed, name, inner[0])  # as code may that makes such objects without their checks
        return changed, inner[1]
    return None


def outcome(target: Target, arguments: Mapping[str, Any], at: list[str], absurd: bool) -> tuple[str, str]:
    """Call a function; return the kind of what came, and words about it."""
    before = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray) and x.dtype.kind != "O"}
    signal.setitimer(signal.ITIMER_REAL, 10.0)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            target.call(arguments)
    except TooLong:
        return "hang", "did not end"
    except Exception as error:
        told = at and (target.named(str(error)) or any(name.rpartition(".")[2] in str(error) for name in at))
        found = "refused" if told else _by(error)
        words = f"{type(error).__name__}: {error}"
    else:
        found, words = ("wrong" if absurd else "fine"), "taken"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    if any(arguments[name].tobytes() != data for name, data in before.items()):
        found = "mutated"
    return found, words


def _by(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [n for n, frame in enumerate(frames) if Path(frame.filename).is_relative_to(ROOT)]
    return "foreign" if own and own[-1] < len(frames) - 1 else "obscure"


def run_all(calls: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return how often what came, and a line for each call that did not end as it should."""
    draw = random.Random(seed)
    counts: Counter[str] = Totals("functions")
    bad: list[str] = Bad()
    with tempfile.TemporaryDirectory() as home:
        here, before = os.getcwd(), signal.signal(signal.SIGALRM, _too_long)
        os.chdir(home)
        try:
            known = targets(Path(home))
            for target in known:  # all are right before anything is changed
                target.call(target.arguments)
            for n in range(calls):
                target = draw.choice(known)
                arguments, at, absurd = dict(target.arguments), [], False
                number = min(draw.choice((0, *(1,) * 16, *(2,) * 3)), len(arguments))
                for name in draw.sample(list(arguments), number):
                    inner = within(draw, arguments[name]) if draw.random() < 0.5 else None
                    if inner is None:
                        arguments[name], nobody = strange(draw, arguments[name])
                        absurd |= nobody
                    else:
                        arguments[name] = inner[0]
                    at.append(name if inner is None else f"{name}.{inner[1]}")
                got, words = outcome(target, arguments, at, absurd)
                if got in ("obscure", "foreign") and "." in "".join(at):
                    got += ", within"
                counts[got] += 1
                if got not in ("fine", "refused"):
                    values = ((name, repr(arguments[name.partition(".")[0]]).split()) for name in at)
                    given = ", ".join(f"{name}={' '.join(value)[:60]}" for name, value in values)
                    bad.append(f"call {n}, {got}: {target.name}({given}): {words[:160]}")
        finally:
            os.chdir(here)
            signal.signal(signal.SIGALRM, before)
    return counts, bad


if __name__ == "__main__":
    command("functions", "calls", 1000, run_all)
