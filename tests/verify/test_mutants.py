"""What verification catches: every mutant that changes a result by more than rounding does."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.golden.storage_types import chop_to, round_to
from refattn.verify.diagnose.changes import KINDS, applies, changed_by
from refattn.verify.diagnose.mutants import kernel, mutants, storing
from refattn.verify.outcome import Truth
from refattn.verify.selfcheck import gradients
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import compare, judge
from tools.census import census, kill_rate

RECORD = ra.mechanism("softmax")

SAMPLED = bool(os.environ.get("REFATTN_SLOW_SAMPLE"))
LEAST = {"float32": 0.98, "bfloat16": 0.95}
"""The part of the mutants that are not equivalent which has to be caught, by storage type."""


def survivors_of(name: str, dtype: str) -> dict[str, str]:
    """The mutants of a mechanism that get away, with the reason."""
    known: dict[str, dict[str, str]] = importlib.import_module(f"tests.mechanisms.{name}.survivors").SURVIVORS
    return known[dtype]


def check_census(name: str, dtype: str, record: Callable[[str, object], None], start: int = 0, step: int = 1) -> None:
    """Every `step`-th mutant is caught, or survives for a reason that is known."""
    tried = mutants(ra.mechanism(name))[start::step]
    fates = census(ra.mechanism(name), dtype, tried)
    known = survivors_of(name, dtype)
    expected = {str(mutant): known[str(mutant)] for mutant in tried if str(mutant) in known}
    counts = Counter(fate.status for fate in fates)
    survivors = {str(fate.mutant): fate.status for fate in fates if fate.status != "caught"}
    record("rate", f"{name}, {dtype}: {counts['caught']} of {len(fates)} mutants caught; {dict(counts)}")
    for mutant, status in survivors.items():
        record("rate", f"  {status}: {mutant}: {expected.get(mutant, 'NO REASON KNOWN')}")
    assert counts["missed"] == 0
    assert set(survivors) == set(expected)
    assert dtype != "float32" or set(survivors.values()) <= {"equivalent"}
    if step == 1:
        assert set(known) == set(survivors)
        assert kill_rate(fates) >= LEAST[dtype]


@pytest.mark.parametrize(
    ("dtype", "start"),
    [
        ("float32", 0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("bfloat16", 0), ("float32", 1), ("bfloat16", 1)]),
    ],
)
def test_mutants_are_caught(dtype: str, start: int, record_property: Callable[[str, object], None]) -> None:
    """A sixteenth in float32; the slow tests have the other ones, and their sample a part of one."""
    own = [*LEAST].index(dtype)
    if not start:
        check_census("softmax", dtype, record_property, own, 16)
    elif SAMPLED:
        check_census("softmax", dtype, record_property, own + 2, 24)
    else:
        for other in {*range(16)} - {own}:
            check_census("softmax", dtype, record_property, other, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["growing"] if SAMPLED else ra.list_mechanisms())
@pytest.mark.parametrize("dtype", LEAST)
def test_mutants_are_caught_of_all(dtype: str, name: str, record_property: Callable[[str, object], None]) -> None:
    check_census(name, dtype, record_property, step=8 if SAMPLED else 1)


def test_every_equation_and_kind_has_mutants() -> None:
    found = mutants(RECORD)
    assert len(set(found)) == len(found)
    dense = equations.declared(RECORD.equation_modules[0])
    equation = [mutant for mutant in found if mutant.kind == "equation"]
    assert {mutant.of[0] for mutant in equation} == set(dense)
    assert {str(mutant) for mutant in found if mutant not in equation} == {*map(str, storing(RECORD)), *RECORD.wrong}
    assert {mutant.wrong for mutant in equation if mutant.of == ("SM.1",)} == set(KINDS)


DTYPES = ("float32", "bfloat16", "float64", "float16")


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 2 if SAMPLED else 32))]
)
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_the_honest_kernel_passes_every_case(name: str, turn: int) -> None:
    """In each turn every eighth case in one of the types; in all turns each case in every type."""
    record = ra.mechanism(name)
    for number, case in enumerate(record.cases):
        if (number + turn) % 8:
            continue
        dtype = DTYPES[(number + turn) // 8 % len(DTYPES)]
        known = truth(record, case, dtype, grad=True)
        verdicts = judge(kernel(record, case, known, dtype), known)
        assert all(verdict.agrees for verdict in verdicts), (case.name, dtype, verdicts)


def test_a_mutant_is_named_by_equation_and_kind() -> None:
    assert {"SM.1 sign flipped", "one NaN", "scale left out"} <= {str(mutant) for mutant in mutants(RECORD)}


def test_truncation_is_told_from_rounding_by_its_bias() -> None:
    case = RECORD.case("plain")
    known = truth(RECORD, case, "bfloat16", grad=False)
    exact = known.values["out"]
    rounded = compare("out", round_to(exact, "bfloat16").astype(np.float32), "float32", known)
    chopped = compare("out", chop_to(exact, "bfloat16").astype(np.float32), "float32", known)
    assert rounded.share == 0.0
    assert not chopped.agrees
    assert chopped.statistic == "bias"


def test_beside_a_tie_little_noise_carries_a_value_to_its_neighbour() -> None:
    """Numbers of bfloat16 from 1 on are 2^-7 apart, noise is 2^-22: the middle of two, and a tenth of a step off."""
    step, noise = 2.0**-7, 2.0**-22
    value = np.full((1, 1, 8, 16), 1.0)
    for place, agrees in ((0.5 + noise, True), (0.6, False)):
        value[0, 0, 2, 3] = 1.0 + place * step
        variance = {"out": np.full(value.shape, noise**2 + 0.8 * noise * step)}
        known = Truth({}, None, {"out": value}, variance, {"out": 0.0}, {"out": "bfloat16"})
        verdict = compare("out", np.ones(value.shape, dtype=np.float32), "float32", known)
        assert verdict.agrees == agrees, verdict


def _block_mutants() -> list[tuple[equations.Tag, str]]:
    tags = [tag for tag in equations.tags(RECORD.block.module) if tag.claims]
    return [(tag, kind) for tag in tags for kind in KINDS if applies(kind, tag.axes or ())]


BLOCK_MUTANTS = [
    pytest.param(tag, kind, marks=[pytest.mark.slow] if number % 4 else [], id=f"{tag.id}-{kind}")
    for number, (tag, kind) in enumerate(_block_mutants())
    if not SAMPLED or number % 4 == 0 or number % 16 == 1
]


@pytest.mark.parametrize(("tag", "kind"), BLOCK_MUTANTS)
def test_mutants_of_the_block_break_its_gradients(tag: equations.Tag, kind: str) -> None:
    """The block's equations are not in the core that kernels are compared with; its gradients guard them."""
    subject = next(gradients.block_subjects(RECORD))
    with equations.mutate(tag.id, changed_by(kind, tag.axes or (), "float32")):
        judge = gradients.beside(subject, "differences", 2)  # of the mutant, where the forward is mutated
        error, _ = judge(gradients.by_hand(subject, backends.get("numpy"), "auto"))
    assert error > gradients.TOLERANCES["differences"]


@pytest.mark.slow
def test_a_scale_that_is_2_percent_too_large_shows_in_bfloat16_in_the_output_alone() -> None:
    hidden = set()
    mutant = next(one for one in mutants(RECORD) if one.name == "SM.1 scaled by 1.02")
    for case in RECORD.cases:
        known = truth(RECORD, case, "bfloat16", grad=False)
        result = kernel(RECORD, case, known, "bfloat16", mutant)
        if all(verdict.agrees for verdict in judge(result, known) if verdict.tensor == "out"):
            hidden.add(case.name)
    # Where one key has all the weight, or all have the same, or there is none, the scale does not matter.
    exact = {case.name for case in RECORD.cases if case.exact}
    assert hidden == exact | {
        "one-key",
        "no-key",
        "no-key-sink",
        "no-query",
        "no-length",
        "huge-scores",
        "empty-rows",
        "window-mask",  # of three keys most rows keep one or none
    }
