"""Kernels with a state: the emulators are right, each fault of them is wrong, and one is told by its words."""

from __future__ import annotations

import functools

import pytest

import refattn as ra
from refattn.mechanisms.wrong import WrongKernel
from refattn.verify.blame.mutants import kernel
from refattn.verify.blame.suspects import suspects
from refattn.verify.judge.budget import truth
from refattn.verify.judge.compare import judge
from refattn.verify.museum.fault import SIZES, faults, served
from refattn.verify.museum.features import Sums
from refattn.verify.museum.recurrence import Recurrence
from refattn.verify.outcome import Truth
from refattn.verify.show.suspects import told

CHUNKS_OF_8 = [*SIZES["chunk"]][-1]

NAMES = {
    "delta": """
state-gated-channel mask-most grouped-values lengths state-linear norm-zero mask-all burst one-token no-token
state-momentum
    """.split(),
    "higher_order": "mask-causal exact grouped-one narrow add clamp one-signed half causal-head no-key".split(),
}
"""Small cases that show every fault."""

ALL = [(mechanism, one) for mechanism in NAMES for one in faults(mechanism)]


@functools.cache
def known(mechanism: str, name: str) -> Truth:
    record = ra.mechanism(mechanism)
    return truth(record, record.case(name), "float32", grad=True)


def failing(mechanism: str, name: str, fault: WrongKernel, size: str) -> set[str]:
    given, record = known(mechanism, name), ra.mechanism(mechanism)
    result = kernel(record, record.case(name), given, "float32", fault, size=size)
    return {verdict.tensor for verdict in judge(result, given) if not verdict.agrees}


@pytest.mark.parametrize(("mechanism", "kind"), [("delta", Recurrence), ("higher_order", Sums)])
def test_a_kernel_without_a_fault_is_right(mechanism: str, kind: type[Recurrence] | type[Sums]) -> None:
    right = served(kind, "nothing", tiles="chunk")
    for name in NAMES[mechanism]:
        assert not failing(mechanism, name, right, CHUNKS_OF_8), name


def test_in_a_short_type_too() -> None:
    for mechanism, kind, name in (("delta", Recurrence, "lengths"), ("higher_order", Sums, "mask-causal")):
        record = ra.mechanism(mechanism)
        given = truth(record, record.case(name), "bfloat16", grad=True)
        right = served(kind, "nothing", tiles="chunk")
        result = kernel(record, record.case(name), given, "bfloat16", right, size=CHUNKS_OF_8)
        assert all(verdict.agrees for verdict in judge(result, given)), name


@pytest.mark.parametrize(("mechanism", "fault"), ALL, ids=lambda one: getattr(one, "name", ""))
def test_each_fault_is_caught_and_leaves_right_what_it_says(mechanism: str, fault: WrongKernel) -> None:
    for name in NAMES[mechanism]:
        for size in [*fault.sizes][-1::-4]:
            wrong = failing(mechanism, name, fault, size)
            if wrong:
                assert not fault.backward or not {"out", "state"} & wrong
                return
    pytest.fail("no small case catches it")


@pytest.mark.parametrize(
    ("mechanism", "fault", "words"),
    [
        (
            "delta",
            "FirstStateCountedAgain",
            "is added to the state once more at the end of each chunk (chunks of 8 tokens)",
        ),
        ("higher_order", "KeysWithoutNormaliser", "not through the row sum that divides"),
    ],
)
def test_a_fault_is_told_in_words(mechanism: str, fault: str, words: str) -> None:
    record, one = ra.mechanism(mechanism), next(one for one in faults(mechanism) if one.name == fault)
    cases = [record.case(name) for name in NAMES[mechanism][:3]]
    given = [(case, known(mechanism, case.name)) for case in cases]
    size = [*one.sizes][-1]
    results = [kernel(record, *pair, "float32", one, size=size) for pair in given]
    seen = [(*pair, x, any(not v.agrees for v in judge(x, pair[1]))) for pair, x in zip(given, results, strict=True)]
    found = suspects(record, "float32", seen)
    assert found is not None and words in told(found.ranked[0]) and found.ranked[0].link == one.link
