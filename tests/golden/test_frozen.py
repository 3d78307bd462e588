"""The golden vectors that come with the package: whole, of every case, small, and what the reference computes today."""

from __future__ import annotations

import math

import pytest

import refattn as ra
from refattn import equations
from refattn.golden import vectors
from refattn.verify import freeze
from refattn.verify.tolerance.compare import ELEMENT

LIMIT = 8 * 2**20
NAMES = [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None]


@pytest.fixture(scope="module")
def shipped() -> vectors.GoldenSet:
    return vectors.read(vectors.SHIPPED)


def test_every_case_of_every_mechanism_is_there(shipped: vectors.GoldenSet) -> None:
    wanted = {(name, case.name) for name in NAMES for case in ra.mechanism(name).cases}
    assert {(entry["mechanism"], entry["case"]) for entry in shipped.cases} == wanted
    assert shipped.manifest["count"] == len(wanted)
    assert sum(path.stat().st_size for path in vectors.SHIPPED.rglob("*") if path.is_file()) <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_every_equation_of_the_dense_form_is_in_some_case(name: str, shipped: vectors.GoldenSet) -> None:
    record = ra.mechanism(name)
    entries = [entry for entry in shipped.cases if entry["mechanism"] == name]
    stored = {id.partition("[")[0] for entry in entries for id in entry["equations"]}
    wanted = {id for id in equations.declared(record.equation_modules[0]) if not id.startswith("d")}
    assert wanted and wanted <= stored <= set(record.equations)
    told = shipped.manifest["mechanisms"][name]["equations"]
    assert {id: facts["formula"] for id, facts in told.items()} == record.equations


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_computes_what_it_did(name: str, shipped: vectors.GoldenSet) -> None:
    record = ra.mechanism(name)
    entries = [entry for entry in shipped.cases if entry["mechanism"] == name]
    found = {entry["case"]: freeze.recompute(record, shipped, entry) for entry in entries}
    assert {case: worst for case, worst in found.items() if not worst[0] <= 1.0} == {}
    # The truth is as exact as the noise says: the second derivation, which has the same noise, agrees with it.
    for entry in entries:
        for id, facts in entry["equations"].items():
            assert facts["differs"] <= ELEMENT * math.hypot(facts["noise"], facts["noise"]), (entry["case"], id)
