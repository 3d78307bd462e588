"""What verification catches: every mutant that changes a result by more than rounding does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import refattn as ra
from refattn import equations
from refattn.golden.storage import chop_to, round_to
from refattn.verify.budget import truth
from refattn.verify.compare import compare
from refattn.verify.mutants import FAULTS, KINDS, Mutant, census, kernel, mutants
from refattn.verify.run import judge

RECORD = ra.mechanism("softmax")

SHIFT = "softmax does not depend on the number that is subtracted from all scores of a row"
SURVIVORS = {
    "float32": {
        **{f"SM.4 {kind}": SHIFT for kind in KINDS},
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        **{f"SM.4 {kind}": SHIFT for kind in KINDS},
        **{
            f"{id} rounded one type lower": "the result is stored in bfloat16 right after"
            for id in ("SM.8", "dSM.q", "dSM.k", "dSM.v", "dSM.scale", "dSM.softcap")
        },
        **{
            f"{id} rounded one type lower": "its product with the weights is rounded to bfloat16 in any case"
            for id in ("dSM.7", "dSM.5")
        },
        **{
            f"{id} scaled by 1.02": "one number: 2 % of it is less than the roundings of all weights add up to"
            for id in ("dSM.scale", "dSM.softcap")
        },
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mutants_are_caught(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    fates = census(RECORD, dtype)
    counts = Counter(fate.status for fate in fates)
    survivors = {str(fate.mutant): fate.status for fate in fates if fate.status != "caught"}
    with capsys.disabled():
        print(f"\n{dtype}: {counts['caught']} of {len(fates)} mutants caught; {dict(counts)}")
        for name, status in survivors.items():
            print(f"  {status}: {name}: {SURVIVORS[dtype].get(name, 'NO REASON KNOWN')}")
    assert counts["missed"] == 0
    assert set(survivors) <= set(SURVIVORS[dtype])
    # In float32 nothing but equivalent mutants gets away; the two lists have to stay true.
    assert counts["caught"] >= {"float32": 126, "bfloat16": 115}[dtype]


def test_every_equation_and_kind_has_mutants() -> None:
    found = mutants(RECORD)
    assert len(set(found)) == len(found)
    dense = equations.declared(RECORD.tagged[0])
    assert {mutant.id for mutant in found if mutant.id} == set(dense)
    assert {mutant.kind for mutant in found if not mutant.id} == {*FAULTS, *RECORD.conventions}
    assert {mutant.kind for mutant in found if mutant.id == "SM.1"} == set(KINDS)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_honest_kernel_passes_every_case(dtype: str) -> None:
    for case in RECORD.cases:
        known = truth(RECORD, case, dtype, grad=True)
        verdicts = judge(kernel(RECORD, case, known, dtype), known)
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
