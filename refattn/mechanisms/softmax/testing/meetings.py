"""Designed calls where features meet: the table of what calls may have, and the call of a row.

Numbers are such that each option shows beside all others: sinks weigh as much as the keys that are visible together,
scores reach beyond the soft-cap, windows, lengths and offsets hide about half of the keys.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import philox
from refattn.mechanisms.case_builders import bias, counts, dropout, listed, mask
from refattn.mechanisms.case_builders import qkv as _case
from refattn.mechanisms.meetings import Row, Rows, Table, given, how_many, rows
from refattn.mechanisms.record import Case

_PAIRS = {
    "pairs": "bhij",
    "heads": "hij",
    "plane": "ij",
    "keys": "b11j",
    "head-keys": "bh1j",
    "slopes": "1h1j",
}
"""How masks and biases are broadcast, by the axes that they have."""

_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "queries": {"one": (1,), "few": (3, 5, 8), "tiles": (65, 67)},
    "keys": {"short": (33, 37, 53), "tiles": (129, 131), "parts": (517, 521)},
    "width": {"narrow": (16,), "wide": (66, 72)},
    "heads": {"own": (1,), "grouped": (2, 3)},
    "batch": {"single": (1,), "many": (2,)},
}

_OPTIONS = {
    "causal": ("causal", "top-left"),
    "window": ("window", "band"),
    "softcap": ("softcap",),
    "sink": ("sink", "sinks"),
    "bias": tuple(f"bias-{name}" for name in _PAIRS),
    "mask": tuple(f"mask-{name}" for name in _PAIRS),
    "k_lengths": ("k-lengths",),
    "q_lengths": ("q-lengths",),
    "offset": ("offset", "offsets"),
    "keep": ("dropout", "dropout-heads"),
    "scale": ("scale",),
    "narrower": ("narrower",),
    "wider": ("wider",),
}


def _excludes(rows: Rows) -> NDArray[np.bool_]:
    """Return which rows are no calls, too large calls, or hide an option."""
    has = {name: rows[name] != "" for name in _OPTIONS}
    queries, keys, top_left = rows["queries"], rows["keys"], rows["causal"] == "top-left"
    by_sequence = has["k_lengths"] | has["q_lengths"] | (rows["offset"] == "offsets")
    return (
        ((queries == "tiles") & (keys == "parts"))
        | (by_sequence & (rows["batch"] == "single"))
        | (has["offset"] & (top_left | ~(has["causal"] | has["window"])))
        | (top_left & ((queries != "tiles") | (has["k_lengths"] & (keys != "short"))))
        | (has["narrower"] & has["wider"])
    )


def _cost(rows: Rows) -> NDArray[np.float64]:
    """Return about what calls cost in units of the smallest: the more options, the fewer kernels have them all."""
    queries, keys, width, heads, batch = (
        np.select([rows[name] == each for each in of], [numbers[0] for numbers in of.values()])
        for name, of in _SIZES.items()
    )
    keys = np.where((queries == 1) & (keys > 512), 2 * keys, keys)
    numbers = batch * keys * (queries * (2 + 3 * (heads > 1)) + 2 * width)  # scores, keys and values
    return (1.0 + numbers / 20_000) * (1.0 + 0.2 * how_many(TABLE, rows))


TABLE = Table(
    sizes={name: (*classes,) for name, classes in _SIZES.items()},
    options=_OPTIONS,
    excludes=_excludes,
    cost=_cost,
    kernels=(
        *((2, {"causal", name}) for name in ("window", "softcap", "sink", "bias", "mask", "k_lengths", "scale")),
        (3, {"causal", "bias", "mask"}),  # T5, ALiBi
        (3, {"causal", "window", "softcap"}),  # Gemma
        (3, {"causal", "window", "softcap", "sink"}),  # gpt-oss
        (3, {"causal", "window", "k_lengths"}),  # ragged decoding
        (3, {"causal", "bias", "mask", "scale", "k_lengths"}),  # scaled_dot_product_attention, padded batches
        (3, {"causal", "window", "softcap", "k_lengths", "q_lengths", "scale"}),  # FlashAttention
        (3, {"causal", "window", "sink", "k_lengths", "offset", "scale"}),  # prompts in chunks
        (3, {"causal", "window", "softcap", "sink", "bias", "mask"}),  # changes of scores, in any order
        (3, {"causal", "window", "softcap", "sink", "k_lengths", "q_lengths", "offset", "scale"}),  # servers
        (3, _OPTIONS),
    ),
    most=5,
)


def call(row: Row) -> Case:
    """Return the call of a row; its name says which features meet, and its numbers follow from the name."""
    plain = ("narrow", "own", "single")
    words = [row[name] for name in TABLE.sizes if row[name] not in plain] + [row[name] for name in given(TABLE, row)]
    name = "-".join(words)
    chances = philox.uniform((len(_SIZES),), seed=0, purpose=f"meetings.{name}").tolist()
    sizes = ((of[row[size]], u) for (size, of), u in zip(_SIZES.items(), chances, strict=True))
    n_q, n_k, d, shared, b = (numbers[int(u * len(numbers))] for numbers, u in sizes)
    n_k = 2 * n_k - 5 if n_q == 1 and n_k > 512 else n_k  # switches of decoding are at 1,024 keys
    b, h = b + ("q_lengths" in row), 2 * shared
    visible, options = n_k, dict[str, Any]()  # about how many keys a query attends
    if "causal" in row:
        options["causal"] = True if row["causal"] == "causal" else "top_left"
        visible = n_k if options["causal"] is True else min(n_q, n_k)
    if "k_lengths" in row:
        options["k_lengths"], visible = counts(*(n_k, n_k // 2 - 1, n_k * 5 // 8)[:b]), min(visible, n_k // 2)
    if "q_lengths" in row:
        options["q_lengths"] = counts(*((1, 1, 0) if n_q == 1 else (n_q, n_q // 2 + 1, n_q - 1)))
    if "offset" in row:
        place = n_k // 2 if n_q <= 8 else n_k // 8
        options["offset"] = place if row["offset"] == "offset" else counts(*(place + 2, place, place // 2)[:b])
    if "window" in row:
        visible = min(n_k, n_q) // 3 if n_q > 8 else visible // 4
        options["window"] = (visible, None if row["window"] == "window" else visible // 2)
    if "softcap" in row:
        options |= {"softcap": 2.0, "logits": 4.0}
    if "sink" in row:
        weight = round(math.log(max(visible, 2)))
        several = {"shape": (h, 3)} if row["sink"] == "sinks" else {"shape": (h,)}
        options["sink"] = listed(weight + 2, weight - 1, weight, weight + 1, **several)
    if "scale" in row:
        options["scale"] = round(1.7 * d**-0.5, 2)
    axes = {"b": b, "h": h, "i": n_q, "j": n_k, "1": 1}
    for key, make in (("bias", partial(bias, scale=2.0)), ("mask", mask)):
        if key in row:
            options[key] = make(*(axes[a] for a in _PAIRS[row[key].removeprefix(f"{key}-")]))
    if "keep" in row:
        options["keep"] = dropout(b, h if row["keep"] == "dropout" else 1, n_q, n_k, p=0.5)
    e = d + 4 * ("wider" in row) - 6 * ("narrower" in row)
    purpose = f"{' and '.join(given(TABLE, row)) or 'sizes'}, where they meet"
    return _case(name, "kernel", purpose, b=b, h=h, g=2, n_q=n_q, n_k=n_k, d=d, e=e, **options)


MEETINGS = tuple(map(call, rows(TABLE)))
