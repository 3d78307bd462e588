"""What verification catches: every mutant that changes a result by more than rounding does."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.golden.storage import chop_to, round_to
from refattn.verify import gradients
from refattn.verify.budget import truth
from refattn.verify.compare import compare
from refattn.verify.mutants import FAULTS, KINDS, Mutant, applies, census, changed_by, kernel, mutants
from refattn.verify.run import judge

RECORD = ra.mechanism("softmax")


def survivors_of(name: str, dtype: str) -> dict[str, str]:
    """The mutants of a mechanism that get away, with the reason."""
    known: dict[str, dict[str, str]] = importlib.import_module(f"tests.mechanisms.{name}.survivors").SURVIVORS
    return known[dtype]


@pytest.mark.parametrize("name", ra.list_mechanisms())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mutants_are_caught(dtype: str, name: str, record_property: Callable[[str, object], None]) -> None:
    fates = census(ra.mechanism(name), dtype)
    expected = survivors_of(name, dtype)
    counts = Counter(fate.status for fate in fates)
    survivors = {str(fate.mutant): fate.status for fate in fates if fate.status != "caught"}
    record_property("rate", f"{name}, {dtype}: {counts['caught']} of {len(fates)} mutants caught; {dict(counts)}")
    for mutant, status in survivors.items():
        record_property("rate", f"  {status}: {mutant}: {expected.get(mutant, 'NO REASON KNOWN')}")
    assert counts["missed"] == 0
    assert set(survivors) == set(expected)
    assert dtype != "float32" or set(survivors.values()) == {"equivalent"}


def test_every_equation_and_kind_has_mutants() -> None:
    found = mutants(RECORD)
    assert len(set(found)) == len(found)
    dense = equations.declared(RECORD.tagged[0])
    assert {mutant.id for mutant in found if mutant.id} == set(dense)
    assert {mutant.kind for mutant in found if not mutant.id} == {*FAULTS, *RECORD.conventions}
    assert {mutant.kind for mutant in found if mutant.id == "SM.1"} == set(KINDS)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_the_honest_kernel_passes_every_case(dtype: str, name: str) -> None:
    record = ra.mechanism(name)
    for case in record.cases:
        known = truth(record, case, dtype, grad=True)
        verdicts = judge(kernel(record, case, known, dtype), known)
        assert all(verdict.agrees for verdict in verdicts), (case.name, verdicts)


def test_a_mutant_is_named_by_equation_and_kind() -> None:
    assert str(Mutant("SM.1", "sign flipped")) == "SM.1 sign flipped"
    assert str(Mutant("", "one NaN")) == "one NaN"


def test_truncation_is_told_from_rounding_by_its_bias() -> None:
    case = RECORD.case("plain")
    known = truth(RECORD, case, "bfloat16", grad=False)
    exact = known.values["out"]
    rounded = compare("out", round_to(exact, "bfloat16").astype(np.float32), "float32", known)
    chopped = compare("out", chop_to(exact, "bfloat16").astype(np.float32), "float32", known)
    assert rounded.share == 0.0
    assert not chopped.agrees
    assert chopped.statistic == "bias"


def _block_mutants() -> list[tuple[equations.Tag, str]]:
    tags = [tag for tag in equations.tags(RECORD.block.module) if tag.claims]
    return [(tag, kind) for tag in tags for kind in KINDS if applies(kind, tag.axes or ())]


@pytest.mark.parametrize(("tag", "kind"), _block_mutants(), ids=lambda x: x if isinstance(x, str) else x.id)
def test_mutants_of_the_block_break_its_gradients(tag: equations.Tag, kind: str) -> None:
    """The block's equations are not in the core that implementations are compared with; its gradients guard them."""
    subject = next(gradients.block_subjects(RECORD))
    with equations.mutate(tag.id, changed_by(kind, tag.axes or (), "float32")):
        expected = gradients.by_differences(subject)  # of the mutant, where the forward is mutated
        got = gradients.by_hand(subject, backends.get("numpy"), "auto")
    assert gradients.largest_error(got, expected)[0] > gradients.TOLERANCES["differences"]
