"""Designed calls where features meet: the table of what calls may have, and the call of a row.

A kernel has one rule, so that each rule meets every pair of the rest. Decays are weak where tokens are many, so that
what one chunk leaves shows in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import philox
from refattn.mechanisms.delta.testing.cases import RULES, case, uniform
from refattn.mechanisms.meetings import Row, Rows, Table, given, how_many, rows
from refattn.mechanisms.record import Case, Input

_TOKENS = {"one": (1,), "few": (3, 5, 7), "chunks": (63, 64, 65, 129)}
_WIDTHS = {"narrow": ((8, 8),), "wide-keys": ((66, 2),), "wide-values": ((2, 66), (4, 12))}  # (d, e)
_HEADS = {"own": ((2, 2, 2),), "grouped": ((4, 2, 2), (4, 1, 2)), "shared": ((1, 1, 2), (2, 1, 2))}
"""Those of queries, keys and values."""

_OPTIONS = {
    "state": ("state",),
    "qk_norm": ("norm",),
    "key_mask": ("padded",),
    "scale": ("scale",),
    "lengths": ("packed",),
}


def _excludes(rows: Rows) -> NDArray[np.bool_]:
    """Return which rows are no calls, or hide one of their features."""
    one, single = rows["tokens"] == "one", rows["batch"] == "single"
    packed, decays = rows["lengths"] != "", [rule for rule, gates in RULES.items() if "log_decay" in gates]
    return (
        (packed & ~single)
        | ((rows["key_mask"] != "") & one & single)  # it hides all or nothing
        # Without a state there is nothing that decays, or that belongs to another sequence.
        | (one & (rows["state"] == "") & (packed | np.isin(rows["rule"], decays)))
    )


def _cost(rows: Rows) -> NDArray[np.float64]:
    """Return about what calls cost in units of the smallest: the more options, the fewer kernels have them all."""
    tokens = np.select([rows["tokens"] == each for each in _TOKENS], [numbers[0] for numbers in _TOKENS.values()])
    tokens = tokens * (1 + (rows["batch"] == "many")) * (1 + 2 * (rows["width"] != "narrow"))
    return (1.0 + tokens / 20) * (1.0 + 0.2 * how_many(TABLE, rows))


TABLE = Table(
    sizes={
        "rule": (*RULES,),
        "tokens": (*_TOKENS,),
        "width": (*_WIDTHS,),
        "heads": (*_HEADS,),
        "batch": ("single", "many"),
    },
    options=_OPTIONS,
    excludes=_excludes,
    cost=_cost,
    kernels=(
        (3, {"state", "qk_norm", "key_mask", "scale"}),
        (3, _OPTIONS),  # packed sequences
    ),
    most=3,
)


def _one(sizes: Sequence[Any], chance: float) -> Any:
    return sizes[int(chance * len(sizes))]


def call(row: Row) -> Case:
    """Return the call of a row; its name says which features meet, and its numbers follow from the name."""
    plain = ("narrow", "own", "single")
    words = [row[name] for name in TABLE.sizes if row[name] not in plain] + [row[name] for name in given(TABLE, row)]
    name = "-".join(words)
    chances = philox.uniform((3,), seed=0, purpose=f"meetings.{name}").tolist()
    n = _one(_TOKENS[row["tokens"]], chances[0])
    d, e = _one(_WIDTHS[row["width"]], chances[1])
    h, f, g = _one(_HEADS[row["heads"]], chances[2])
    b = 1 if row["batch"] == "single" else 4 if n == 1 else 2
    options: dict[str, Any] = {}
    if n > 8 and "log_decay" in RULES[row["rule"]] and row["rule"] != "momentum":  # which would grow
        options["log_decay"] = uniform(-0.05, 0.0)
    if "lengths" in row:
        options["lengths"] = [0, 1] if n == 1 else [n - 1, 0, 1] if n < 8 else [n - 3, 0, 3]
    if "qk_norm" in row:
        options["qk_norm"] = True
    if "scale" in row:
        options["scale"] = 0.3
    purpose = f"{' and '.join(given(TABLE, row)) or 'sizes'}, where they meet"
    sizes: dict[str, Any] = {"b": b, "h": h, "f": f, "g": g, "n": n, "d": d, "e": e}
    found = case(name, "size", purpose, row["rule"], **sizes, state="state" in row, **options)
    if "key_mask" in row:  # sequence i has its first tokens hidden, i + n // 3; of one token some have it, some not
        before = 1 if n == 1 else -(n // 3)
        key_mask = Input((b, n), "band", {"before": before, "after": n}, "bn")
        found = replace(found, inputs={**found.inputs, "key_mask": key_mask})
    return found


MEETINGS = tuple(map(call, rows(TABLE)))
