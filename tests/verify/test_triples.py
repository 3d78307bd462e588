"""Kernels that are wrong where three features meet, and right elsewhere: the cases of the default run catch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.mechanisms.record import Case
from refattn.verify import verify
from refattn.verify.outcome import Result, Truth
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge

Call = dict[str, Any]
"""The arguments of a call, by name."""
Change = Callable[[Call], Call]

RECORD = ra.mechanism("softmax")
CASES = (*RECORD.cases, *RECORD.kernel_sizes)

HAS: dict[str, Callable[[Call], bool]] = {
    "one query": lambda a: a["q"].shape[2] == 1,
    "2 to 8 queries": lambda a: 2 <= a["q"].shape[2] <= 8,
    "more than 64 queries": lambda a: a["q"].shape[2] > 64,
    "more than 64 keys": lambda a: a["k"].shape[2] > 64,
    "more than 512 keys": lambda a: a["k"].shape[2] > 512,
    "wide head": lambda a: a["q"].shape[3] > 64,
    "groups": lambda a: a["q"].shape[1] > a["k"].shape[1] > 1,
    "heads share keys": lambda a: a["q"].shape[1] > a["k"].shape[1],
    "batch": lambda a: a["q"].shape[0] > 1,
    "causal": lambda a: a.get("causal", False) is not False,
    "narrower values": lambda a: a["v"].shape[3] < a["q"].shape[3],
    "wider values": lambda a: a["v"].shape[3] > a["q"].shape[3],
    "window": lambda a: a.get("window") is not None,
    "softcap": lambda a: a.get("softcap") is not None,
    "sink": lambda a: a.get("sink") is not None,
    "bias": lambda a: a.get("bias") is not None,
    "mask": lambda a: a.get("mask") is not None,
    "k_lengths": lambda a: a.get("k_lengths") is not None,
    "q_lengths": lambda a: a.get("q_lengths") is not None,
    "offset": lambda a: a.get("offset") is not None,
    "scale": lambda a: a.get("scale") is not None,
}
"""The features that kernels are written for."""


def _of_group(x: Any, heads: int) -> Any:
    """Return the key/value heads of query heads that take them one after the other."""
    return np.tile(x, (1, heads // x.shape[1], 1, 1))


def _ignored(name: str) -> Change:
    return lambda a: {name: False if name == "causal" else None}


def _first_batch(name: str) -> Change:
    return lambda a: {name: np.broadcast_to(a[name][:1], a[name].shape)}


def _wider_window(a: Call) -> Call:
    left, right = a["window"]
    return {"window": (None if left is None else left + 1, right if left is not None else right + 1)}


def _later(a: Call) -> Call:
    return {"offset": a["offset"] + 1}


def _longer(name: str, of: str) -> Change:
    return lambda a: {name: np.minimum(a[name] + 1, a[of].shape[2])}


def _full(name: str, of: str) -> Change:
    return lambda a: {name: np.full_like(a[name], a[of].shape[2])}


def _without(*names: str, at: int) -> Change:
    """Return a change that makes a row or column of arrays 0: q, k, v (b, h, n, d)."""

    def change(a: Call) -> Call:
        found = {name: a[name].copy() for name in names}
        for x in found.values():
            x[:, :, at] = 0.0
        return found

    return change


def _narrow(a: Call) -> Call:
    return {name: np.where(np.arange(a[name].shape[3]) < 64, a[name], 0.0) for name in "qk"}


def _interleaved(a: Call) -> Call:
    return {name: _of_group(a[name], a["q"].shape[1]) for name in "kv"}


CHANGES: dict[str, tuple[Change, ...]] = {
    "causal": (_ignored("causal"),),
    "window": (_ignored("window"), _wider_window),
    "softcap": (_ignored("softcap"),),
    "sink": (_ignored("sink"),),
    "bias": (_ignored("bias"),),
    "mask": (_ignored("mask"),),
    "k_lengths": (_full("k_lengths", "k"), _longer("k_lengths", "k")),
    "q_lengths": (_full("q_lengths", "q"),),
    "offset": (_ignored("offset"), _later),
    "scale": (_ignored("scale"),),
    "groups": (_interleaved,),
    "batch": (_first_batch("k"), _first_batch("v")),
    "wide head": (_narrow,),
    "more than 64 keys": (_without("v", at=64),),
    "more than 512 keys": (_without("v", at=512),),
    "more than 64 queries": (_without("q", at=64),),
}
"""What a kernel does wrong about a feature."""


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Softmax attention, in the arithmetic of its arrays."""
    return ra.softmax.forward(q, k, v, **options)[0]


@cache
def _truth(case: str) -> Truth:
    return truth(RECORD, RECORD.case(case), "float32", grad=False)


def caught(features: tuple[str, ...], change: Change, cases: tuple[Case, ...] = CASES) -> Iterator[str]:
    """Yield the cases in which a kernel is caught that is wrong where these features meet."""
    for case in cases:
        shapes = {name: np.broadcast_to(0.0, x.shape) for name, x in case.inputs.items()}
        if all(HAS[name]({**shapes, **case.options}) for name in features):
            known = _truth(case.name)
            call = {**known.inputs, **case.options}
            try:
                out = attend(**call | change(call))
            except ValueError:  # the other options need this one
                yield case.name
            else:
                if not all(one.agrees for one in judge(Result({"out": out}, {"out": "float32"}), known)):
                    yield case.name


def _at_the_end_of_all_keys(a: Call) -> Call:
    return {"offset": a["k"].shape[2] - 1}


def _bias_of_one_tile(a: Call) -> Call:
    return {"bias": np.where(np.arange(a["bias"].shape[-1]) < 16, a["bias"], 0.0)}


def _mask_of_a_neighbour(a: Call) -> Call:
    return {"mask": np.roll(a["mask"], 1, -1)}


def _capped_sink(a: Call) -> Call:
    return {"sink": a["softcap"] * np.tanh(a["sink"] / a["softcap"])}


SCORES = "causal window softcap sink bias mask"
SERVING = "causal window softcap sink k_lengths q_lengths offset scale"
SEVEN: dict[str, tuple[tuple[str, str, str], str, Change]] = {
    "window from the last key": (
        ("one query", "window", "k_lengths"),
        "causal window k_lengths",
        _at_the_end_of_all_keys,
    ),
    "window of padding": (("more than 64 queries", "window", "q_lengths"), SERVING, _full("q_lengths", "q")),
    "bias of a tile": (("causal", "softcap", "bias"), SCORES, _bias_of_one_tile),
    "mask of a neighbour": (("groups", "bias", "mask"), "causal bias mask", _mask_of_a_neighbour),
    "sink left out": (("2 to 8 queries", "offset", "sink"), SERVING, _ignored("sink")),
    "soft-cap left out": (("one query", "softcap", "mask"), SCORES, _ignored("softcap")),
    "sink capped": (("more than 64 keys", "softcap", "sink"), "causal window softcap sink", _capped_sink),
}
"""Kernels that agreed with every case while only pairs met: where they are wrong, the options they have, and how."""


@pytest.mark.parametrize("name", SEVEN)
def test_seven_kernels_that_are_wrong_in_a_triple_are_caught(name: str) -> None:
    features, options, change = SEVEN[name]

    def kernel(q: Any, k: Any, v: Any, **given: Any) -> Any:
        call = {"q": q, "k": k, "v": v, **given}
        return attend(**call | (change(call) if all(HAS[each](call) for each in features) else {}))

    has = {*"qkv", *options.split()}
    wrong = next(caught(features, change, tuple(case for case in CASES if {*case.inputs, *case.options} <= has)))
    few = RECORD.changed(cases=(RECORD.case("tiny"), RECORD.case(wrong)))
    assert [one.case for one in verify(few, kernel, dtypes=["float32"]).failed] == [wrong]
    assert verify(few, attend, dtypes=["float32"]).passed


APART = (
    {"one query", "2 to 8 queries", "more than 64 queries"},
    {"more than 64 queries", "more than 512 keys"},
    {"more than 64 keys", "more than 512 keys"},
    {"narrower values", "wider values"},
    {"one query", "causal"},  # the last query attends every key
)
"""Of each set a call has one, or no case has more."""


def kernels() -> list[tuple[tuple[str, ...], str, int]]:
    """Return three features, the one that is wrong where they meet, and which change of it."""
    triples = [some for some in combinations(HAS, 3) if not any(len({*some} & one) > 1 for one in APART)]
    return [(some, one, n) for some in triples for one in some for n in range(len(CHANGES.get(one, ())))]


def test_of_sixty_kernels_that_are_wrong_in_a_triple_95_percent_are_caught() -> None:
    of = kernels()
    chances = philox.uniform((60,), seed=7, purpose="triples")
    drawn = [of[int(u * len(of))] for u in chances]
    missed = [each for each in drawn if not next(caught(each[0], CHANGES[each[1]][each[2]]), "")]
    assert len(missed) <= 3, missed


@pytest.mark.parametrize("keys", [1024, 2048, 16384])
def test_another_path_of_decoding_for_many_keys_is_caught(keys: int) -> None:
    def wrong(a: Call) -> Call:
        return {"v": np.roll(a["v"], 1, 0)} if a["k"].shape[2] > keys else {}

    assert list(caught(("one query", "batch", "heads share keys"), wrong))
