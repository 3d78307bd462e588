"""A fuzzer of shapes as text and as JSON: ``python -m tests.fuzz.options [--calls N] [--seed S]``.

Each call puts together or changes a shape of the user's own for a mechanism: of ``--shape`` as text, or an entry of a
file of ``--cases``. What comes of it is counted:

- fine: a case
- refused: one line that names the field
- obscure: another error, or one that names none
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from typing import Any

import refattn as ra
from refattn.verify import user_cases
from tests.fuzz.command import Bad, Totals, command
from tests.fuzz.files import STRANGE

SIZES = ("b", "h", "g", "n", "nq", "nk", "d", "e", "logits", "mask", "k_lengths", "q_lengths")
NUMBERS = ("1", "2", "3", "8", "0", "-1", "1.5", "nan", "inf", "1e400", "4294967296", "1e9", "9" * 5000)
ODD = ("2:3", ":::", "[1]", "[", "[" * 3000, "{}", "true", "null", "x", "top_left")
VALUES = (*NUMBERS, *ODD, "\ud800", "\x1b[31m", "", " ", "\0", "=", "é" * 300)
NAMES = [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None]


def text_of(options: list[str], draw: random.Random) -> str:
    """Return a shape as text that may be odd."""
    parts = ["n=4", "d=2"]
    for _ in range(draw.randrange(4)):
        name = draw.choice([*SIZES, *options, *options, "\ud800", "", "nothing"])
        parts.append(f"{name}={draw.choice(VALUES)}" if draw.random() < 0.85 else name)
    draw.shuffle(parts)
    return ",".join(parts)


def entry_of(options: list[str], draw: random.Random) -> Any:
    """Return an entry of a file of shapes that may be odd."""
    one: Any = {"n": 4, "d": 2}
    for _ in range(draw.randrange(1, 4)):
        one[draw.choice([*SIZES, *options, *options, "name"])] = copy.deepcopy(draw.choice(STRANGE))
    return one


def run(calls: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return how often what came, and a line for each call that came to an obscure end."""
    draw = random.Random(seed)
    counts: Counter[str] = Totals("options")
    bad: list[str] = Bad()
    for n in range(calls):
        record = ra.mechanism(draw.choice(NAMES))
        options = [*record.defaults]
        given = text_of(options, draw) if draw.random() < 0.5 else entry_of(options, draw)
        try:
            if isinstance(given, str):
                user_cases.from_text(record, given)
            else:
                user_cases._from_entry(record, json.loads(json.dumps(given)))
            outcome, told = "fine", ""
        except user_cases.UserCaseError as error:
            told = str(error)
            outcome = "refused" if len(told) < 1000 and re.search(r"got|needs|missing|reduce", told) else "obscure"
        except Exception as error:
            outcome, told = "obscure", f"{type(error).__name__}: {error}"
        counts[outcome] += 1
        if outcome == "obscure":
            bad.append(f"call {n}, {record.name}: {repr(given)[:150]}: {told[:200]!r}")
    return counts, bad


if __name__ == "__main__":
    command("options", "calls", 1000, run)
