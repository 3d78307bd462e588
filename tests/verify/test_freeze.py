"""Golden vectors hold what a case computes and what others may differ by; a reference that has changed is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations
from refattn.golden import vectors
from refattn.golden.inputs import make
from refattn.verify import freeze
from refattn.verify.selfcheck.samples import shrunk
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import compare

RECORD = ra.mechanism("softmax")
SOFTMAX_CASES = ("tiny", "mask-full", "softcap")
FEW = replace(RECORD, cases=tuple(RECORD.case(name) for name in SOFTMAX_CASES))


def written(folder: Path) -> vectors.GoldenSet:
    cases = freeze.frozen_cases([FEW], "small")
    vectors.write(
        folder, freeze.about([FEW], "small", "1.2.3"), (freeze.freeze(record, case) for record, case in cases)
    )
    return vectors.read(folder)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> vectors.GoldenSet:
    return written(tmp_path_factory.mktemp("golden") / "set")


def test_writing_twice_gives_the_same_bytes(golden: vectors.GoldenSet, tmp_path: Path) -> None:
    again = written(tmp_path / "again")
    names = [path.relative_to(golden.folder) for path in golden.folder.rglob("*") if path.is_file()]
    assert len(names) == 4
    for name in names:
        assert (golden.folder / name).read_bytes() == (again.folder / name).read_bytes(), name


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_stored_case_judges_as_the_computed_one(golden: vectors.GoldenSet, dtype: str) -> None:
    for entry in golden.cases:
        case = shrunk(RECORD.case(entry["case"]))
        stored = freeze.thaw(entry, golden.arrays(entry), dtype)
        computed = truth(RECORD, case, dtype, grad=True, given="bfloat16")
        assert set(stored.values) == set(computed.values) and set(stored.inputs) == set(computed.inputs)
        for name, x in computed.inputs.items():
            assert stored.inputs[name].dtype == x.dtype and np.array_equal(stored.inputs[name], x)
        for name, x in computed.values.items():
            error = np.sqrt(computed.variance[name]) * np.linspace(-3.0, 3.0, x.size).reshape(x.shape)
            held = computed.stored[name]
            a, b = (compare(name, x + error, held, each) for each in (stored, computed))
            assert a.statistic == b.statistic and a.share == pytest.approx(b.share, rel=1e-6)


def test_every_type_is_given_the_same_numbers(golden: vectors.GoldenSet) -> None:
    for entry in golden.cases:
        arrays = golden.arrays(entry)
        assert entry["dtypes"] == ["float64", "float32", "float16", "bfloat16"]
        for name in ("q", "k", "v", "d_out"):
            for dtype in entry["dtypes"]:
                assert np.array_equal(arrays[f"{dtype}/{name}"][1], arrays[f"float64/{name}"][1])


def test_a_type_that_does_not_hold_the_inputs_is_left_out() -> None:
    case = RECORD.case("tiny")
    huge = replace(case, inputs={**case.inputs, "q": replace(case.inputs["q"], numbers={"scale": 2.0**20})})
    assert freeze.held(RECORD, huge) == ["float64", "float32", "bfloat16"]


def test_every_equation_that_runs_is_in_the_set(golden: vectors.GoldenSet) -> None:
    entry = next(entry for entry in golden.cases if entry["case"] == "softcap")
    arrays = golden.arrays(entry)
    inputs: dict[str, Any] = {
        name: x.astype(np.float64) for name, x in make("softmax", shrunk(RECORD.case("softcap")), "bfloat16").items()
    }
    with equations.trace() as traced:
        out, saved = ra.softmax.forward(**inputs, softcap=5.0, implementation="dense")
        ra.softmax.backward(saved, arrays["float64/d_out"][1])
    assert {f"equations/{id}" for id in traced} == {name for name in arrays if name.startswith("equations/")}
    assert np.array_equal(arrays["results/out"][1], out)
    for id, x in traced.items():
        assert np.array_equal(arrays[f"equations/{id}"][1], x), id
    # The second derivation is another computation: it differs, by rounding alone.
    differs = [facts["differs"] for facts in entry["equations"].values()]
    assert 0.0 < max(differs) < 1e-13


def changed(record: Any, **fields: Any) -> Any:
    return replace(record, cases=tuple(replace(case, **fields) for case in record.cases))


def test_the_reference_agrees_with_its_own_set(golden: vectors.GoldenSet) -> None:
    for entry in golden.cases:
        share, _ = freeze.recompute(FEW, golden, entry)
        assert share <= 1e-3


@pytest.mark.parametrize(("id", "factor"), [("SM.1", 1.0 + 1e-13), ("SM.3", 1.0 + 1e-13), ("dSM.2", 1.0 - 1e-13)])
def test_an_equation_that_has_changed_is_named(golden: vectors.GoldenSet, id: str, factor: float) -> None:
    entry = golden.cases[0]
    with equations.apply(lambda each, name, value: value * factor if each == id else value):
        share, where = freeze.recompute(FEW, golden, entry)
    assert share > 1.0 and where


def test_a_generator_or_options_that_have_changed_are_named(golden: vectors.GoldenSet) -> None:
    entry = golden.cases[0]
    tiny = FEW.case("tiny")
    other = replace(
        FEW, cases=(replace(tiny, inputs={**tiny.inputs, "q": replace(tiny.inputs["q"], numbers={"scale": 2.0})}),)
    )
    assert freeze.recompute(other, golden, entry) == (np.inf, "q: the generator gives other numbers")
    share, where = freeze.recompute(changed(FEW, options={"causal": True}), golden, entry)
    assert share == np.inf and "options: {'causal': True} now, {} in the set" in where


def test_an_equation_is_compared_where_no_result_depends_on_it(golden: vectors.GoldenSet) -> None:
    entry = golden.cases[0]
    with equations.apply(lambda each, name, value: value * 1.02 if each == "SM.top" else value):  # the maximum of a row
        share, where = freeze.recompute(FEW, golden, entry)
    assert share > 1.0 and where.startswith("SM.3, the first of ")


def test_an_equation_that_the_set_does_not_know_is_named(golden: vectors.GoldenSet) -> None:
    entry = golden.cases[0]
    fewer = {id: facts for id, facts in entry["equations"].items() if id != "SM.4"}
    assert freeze.recompute(FEW, golden, {**entry, "equations": fewer}) == (np.inf, "not in both: SM.4")
