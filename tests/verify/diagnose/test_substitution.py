"""Where a kernel leaves the reference, from values of its own for some of the equations."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations
from refattn.golden.storage_types import round_to
from refattn.golden.tensors import encode
from refattn.mechanisms.record import Input
from refattn.verify.diagnose.error_templates import Templates
from refattn.verify.diagnose.mutants import kernel
from refattn.verify.diagnose.substitution import departure, earliest
from refattn.verify.diagnose.suspects import locate
from refattn.verify.outcome import Departure, Outcome, Report, Result
from refattn.verify.report import tables
from refattn.verify.run import verify
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge

RECORD = ra.mechanism("softmax")
CASE = RECORD.case("softcap")
CASE = dataclasses.replace(
    CASE, inputs={name: Input((1, 2, 7, 4), x.design, x.numbers) for name, x in CASE.inputs.items()}
)
FEW = dataclasses.replace(RECORD, cases=(CASE,))
FORWARD = ("SM.1", "SM.capped", "SM.top", "SM.3", "SM.total", "SM.4", "SM.5", "SM.lse")
RAN = (*FORWARD, "dSM.v", "dSM.4", "dSM.total", "dSM.3", "dSM.2", "dSM.1", "dSM.q", "dSM.k")
GIVEN = ("SM.1", "SM.3", "SM.4", "dSM.4", "dSM.2")


@functools.cache
def templates_of(dtype: str) -> Templates:
    return Templates(FEW, CASE, truth(RECORD, CASE, dtype, grad=True), {})


def returned(
    id: str = "SM.1", factor: float = 1.0, *, dtype: str = "float32", given: Any = GIVEN
) -> tuple[Templates, Result]:
    """What a kernel returns that has one equation wrong, with its values for some."""
    templates = templates_of(dtype)
    with ra.trace() as traced, equations.mutate(id, lambda x: x * factor):
        result = kernel(RECORD, CASE, templates.truth, dtype)
    own = {key: np.asarray(traced[key]) for key in given}
    dtypes = {key: x.dtype.name for key, x in own.items()}
    return templates, Result({**result.tensors, **own}, {**result.dtypes, **dtypes})


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_an_honest_kernel_departs_nowhere(dtype: str) -> None:
    templates, result = returned(dtype=dtype, given=RAN)
    assert departure(templates, result, dtype) is None


@pytest.mark.parametrize(
    ("wrong", "where", "between"),
    [
        ("SM.capped", "SM.3", ("SM.capped", "SM.largest", "SM.top", "SM.3")),
        ("SM.total", "SM.4", ("SM.total", "SM.4")),
        ("SM.5", "out", ("SM.5",)),
        ("dSM.4", "dSM.4", ("dSM.4",)),
        ("dSM.3", "dSM.2", ("dSM.total", "dSM.3", "dSM.2")),
        ("dSM.1", "d_q", ("dSM.1", "dSM.q")),
        ("dSM.v", "d_v", ("dSM.v",)),
    ],
)
def test_the_first_value_that_does_not_follow(wrong: str, where: str, between: tuple[str, ...]) -> None:
    found = departure(*returned(wrong, 1.01), "float32")
    assert found is not None
    assert (found.verdict.tensor, found.between, found.given) == (where, between, GIVEN)
    assert found.verdict.share > 10.0 and found.case == "softcap"


def test_what_follows_from_a_wrong_value_is_right() -> None:
    """The scores are wrong, and all that is computed from them agrees with them: they alone depart."""
    found = departure(*returned("SM.1", 1.01, given=("SM.1", "SM.capped", "SM.4")), "float32")
    assert found is not None and found.verdict.tensor == "SM.1" and found.between == ("SM.1",)


def test_values_of_the_storage_type_may_be_rounded_to_it() -> None:
    templates, result = returned(dtype="bfloat16")
    rounded = {key: round_to(result.tensors[key].astype(np.float64), "bfloat16") for key in GIVEN}
    stored = dataclasses.replace(result, tensors={**result.tensors, **rounded})
    assert departure(templates, stored, "bfloat16") is None
    wrong = {**stored.tensors, "SM.4": round_to(rounded["SM.4"] * 1.05, "bfloat16")}
    found = departure(templates, dataclasses.replace(result, tensors=wrong), "bfloat16")
    assert found is not None and found.verdict.tensor == "SM.4"


def test_a_value_of_another_shape_departs_and_is_not_used() -> None:
    templates, result = returned()
    wrong = {**result.tensors, "SM.3": result.tensors["SM.3"][..., :-1]}
    found = departure(templates, dataclasses.replace(result, tensors=wrong), "float32")
    assert found is not None and (found.verdict.tensor, found.verdict.statistic) == ("SM.3", "shape")


def test_without_values_nothing_departs() -> None:
    assert departure(*returned("SM.5", 1.5, given=()), "float32") is None


def test_the_earliest_of_several_cases() -> None:
    first, second = (departure(*returned(id, 1.01), "float32") for id in ("dSM.3", "SM.total"))
    assert earliest(RECORD, (first, None, second)) is second
    assert earliest(RECORD, (None,)) is None


def given_by(result: Result) -> Report:
    templates = returned()[0]
    outcome = Outcome(
        "softcap", "softcap", "float32", "disagrees", "", judge(result, templates.truth), (templates.truth, result)
    )
    return locate(FEW, Report("softmax", "mine", True, (outcome,)))


def test_the_report_says_it() -> None:
    found = given_by(returned("SM.total", 1.01)[1])
    text = tables.verified(found, FEW)
    assert "given SM.1, SM.3, SM.4, dSM.4, dSM.2: the first that does not follow from those before it is" in text
    assert "what computes it from them:\n      SM.total  z_i = sum_j u_ij" in text
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))["suspects"]
    assert data["departure"]["verdict"]["tensor"] == "SM.4"
    assert [line["id"] for line in data["between"]] == ["SM.total", "SM.4"]
    wrong = returned("SM.total", 1.01)[1]
    shape = {**wrong.tensors, "SM.1": wrong.tensors["SM.1"][..., :1]}
    found = given_by(dataclasses.replace(wrong, tensors=shape))
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["suspects"]["departure"]["verdict"]["share"] is None


class Giving:
    """A kernel with a wrong equation that says what it has for two others."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        with ra.trace() as traced, equations.mutate("SM.total", lambda x: x * 1.01):
            out, self.saved = ra.softmax.forward(q, k, v, implementation="dense", **options)
        self.intermediates = {"SM.3": traced["SM.3"], "SM.4": traced["SM.4"]}
        return out, self.saved.lse


def test_an_implementation_gives_them_in_an_attribute() -> None:
    found = locate(FEW, verify(FEW, Giving(), dtypes=["float32"]))
    assert found.suspects is not None and isinstance(found.suspects.departure, Departure)
    assert found.suspects.departure.verdict.tensor == "SM.4"


def test_a_program_writes_them_beside_its_results(tmp_path: Path) -> None:
    from refattn.verify.adapters.program import Program

    code = tmp_path / "program.py"
    code.write_text(f"import shutil, sys\nshutil.copy({str(tmp_path / 'stored.safetensors')!r}, sys.argv[2])\n")
    _, result = returned("SM.total", 1.01)
    arrays = {name: (result.dtypes[name], result.tensors[name]) for name in ("out", "lse", "SM.3", "SM.4")}
    (tmp_path / "stored.safetensors").write_bytes(encode(arrays))
    program = Program(f"{sys.executable} {code}", ("out", "lse"), 60.0)
    found = locate(FEW, verify(FEW, program, dtypes=["float32"]))
    assert found.suspects is not None and found.suspects.departure is not None
    assert found.suspects.departure.given == ("SM.3", "SM.4")
    assert found.suspects.departure.verdict.tensor == "SM.4"
