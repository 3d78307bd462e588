"""Traced runs: every equation with its value, where it stands, and the text and the data made of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.golden.inputs import make, make_upstream
from refattn.mechanisms.record import Mechanism
from refattn.verify import traced
from refattn.verify.report.trace import WHOLE, text

ROOT = Path(__file__).parents[2]
NUMPY = backends.get("numpy")


def core(name: str = "softmax", case: str = "tiny", dtype: str = "float64") -> traced.Traced:
    return traced.trace_core(ra.mechanism(name), case, dtype, NUMPY)


def runs(name: str) -> list[traced.Traced]:
    record = ra.mechanism(name)
    cores = [] if record.core is None else [core(name)]
    return [*cores, traced.trace_block(record, "float64", NUMPY)]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_equation_has_a_place_that_computes_it(name: str) -> None:
    record = ra.mechanism(name)
    places = traced.places(record)
    assert {id: place.formula for id, place in places.items()} == record.equations
    for id, place in places.items():
        lines = (ROOT / place.file).read_text().splitlines()
        code = place.code.splitlines()
        at = [line.strip() for line in lines[place.line - 1 : place.line - 1 + len(code)]]
        names = [name.strip() for name in at[0].partition(" = ")[0].split(",")]
        assert place.variable in names and f"[{id}]" in at[-1]
        assert [line.strip() for line in code[:-1]] == at[:-1] and at[-1].startswith(code[-1].strip())
        assert "#" not in code[-1]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_run_holds_what_ran_in_order(name: str) -> None:
    for found in runs(name):
        ids = [step.id for step in found.steps]
        assert found.forward and found.backward and len(ids) == len(set(ids))
        assert not any(step.id.startswith("d") for step in found.forward)
        assert any(step.id.startswith("d") for step in found.backward)
        for step in found.steps:
            assert step.place.axes is None or len(step.place.axes) == step.value.ndim
        assert {"out", *(f"d_{x}" for x in ("x",) if found.part == "block")} <= set(found.results)


def test_values_are_those_of_a_run_by_hand() -> None:
    record = ra.mechanism("softmax")
    case = record.case("softcap-mask")
    found = core(case="softcap-mask")
    inputs: dict[str, Any] = make("softmax", case, "float64")
    with equations.trace() as t:
        out, saved = ra.softmax.forward(**inputs, **case.options, implementation="dense")
        d_out = make_upstream("softmax", case, "out", out.shape, "float64")
        d_lse = make_upstream("softmax", case, "lse", saved.lse.shape, "float64")
        gradients = ra.softmax.backward(saved, d_out, d_lse)
    assert [step.id for step in found.steps] == list(t)
    for step in found.steps:
        np.testing.assert_array_equal(step.value, t[step.id])
    expected = {"out": out, "lse": saved.lse, "max": saved.max, **{f"d_{name}": x for name, x in gradients.items()}}
    assert list(found.results) == list(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(found.results[name], x)
    assert list(found.arguments) == ["q", "k", "v", "mask", "d_out", "d_lse"] and found.options == {"softcap": 2.0}
    assert set(found.tensors()) == {*found.arguments, *t, *expected}


def test_the_gradient_of_a_block_is_that_of_its_step() -> None:
    """One parameter is moved: the inner product of out and d_out changes as the gradient says."""
    record = ra.mechanism("softmax")
    found = traced.trace_block(record, "float64", NUMPY)
    x, d_out, w = (found.arguments[name] for name in ("x", "d_out", "params.w_v"))
    params = record.block.init(record.block.Config(width=4, heads=2), seed=0, like=x)
    np.testing.assert_array_equal(params.w_v, w)

    def loss(by: float) -> float:
        moved = w.copy()
        moved[1, 2] += by
        at = dataclasses.replace(params, w_v=moved)
        state, _ = record.block.forward(at, record.block.start(at, x, ra.Context()), ra.Context())
        return float(np.sum(record.block.read(at, state) * d_out))

    slope = (loss(1e-3) - loss(-1e-3)) / 2e-3
    assert math.isclose(slope, found.results["d_params.w_v"][1, 2], rel_tol=1e-8)


def test_bfloat16_and_other_libraries() -> None:
    assert core(dtype="bfloat16").arguments["q"].dtype == np.float32
    pytest.importorskip("torch")
    tensors = traced.trace_core(ra.mechanism("softmax"), "tiny", "bfloat16", backends.get("torch"))
    values = tensors.results["out"]  # the library has bfloat16, so the result is rounded to it
    assert values.dtype == np.float32 and np.all(values.view(np.uint32) % 2**16 == 0)
    same = traced.trace_core(ra.mechanism("softmax"), "tiny", "float64", backends.get("torch"))
    for step, other in zip(core().steps, same.steps, strict=True):
        assert step.id == other.id
        np.testing.assert_allclose(step.value, other.value, rtol=1e-13, atol=1e-15)


# Text


def test_the_text_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = core()
    lines = text(found).splitlines()
    assert lines[0] == "Softmax attention: the core, case tiny, float64 on numpy"
    at = lines.index(f"SM.1  {found.forward[0].place.formula}")
    place = found.forward[0].place
    assert lines[at + 1] == f"    {place.file}:{place.line}: scores = q @ xp.matrix_transpose(k_heads) * scale"
    assert lines[at + 2] == "    scores (b, h, i, j) = (1, 2, 4, 4)"
    first = found.forward[0].value[0, 0, 0]
    assert [round(float(x), 5) for x in lines[at + 3].strip("[ ]").split()] == [round(float(x), 5) for x in first]
    order = [lines.index(name) for name in ("Arguments", "Forward", "Backward", "Results")]
    assert order == sorted(order)
    assert "out = SM.5" in lines and "d_q = dSM.q" in lines
    assert "\x1b" not in text(found) and "\x1b[1mSM.1\x1b[0m" in text(found, colour=True)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_step_is_in_the_text(name: str) -> None:
    for found in runs(name):
        shown = text(found)
        for step in found.steps:
            assert f"\n{step.id}  " in shown and f"{step.place.file}:{step.place.line}: " in shown


def test_large_arrays_are_described() -> None:
    found = core(case="mask-full")
    assert found.arguments["mask"].size > WHOLE
    shown = text(found)
    mask, q, masked = found.arguments["mask"], found.arguments["q"], found.forward[1].value
    assert f"{int(mask.sum())} of {mask.size} true" in shown
    norm = math.sqrt(float(np.sum(q * q)))
    assert f"min {q.min():.5g}, mean {q.mean():.5g}, max {q.max():.5g}, norm {norm:.5g}; first" in shown
    hidden = int(np.sum(~np.isfinite(masked)))
    assert hidden > 0 and f"; {hidden} not finite; first" in shown


@pytest.mark.parametrize("case", [case.name for case in ra.mechanism("softmax").cases])
def test_a_result_is_called_by_its_own_equation_or_shown(case: str) -> None:
    """Without keys the output, its equation and the gradient of q are the same zeros."""
    found = core(case=case)
    own = {name: f"dSM.{name[2:]}" for name in found.results} | {"out": "SM.5", "lse": "SM.lse", "max": "SM.largest"}
    lines = text(found).splitlines()
    results = lines[lines.index("Results") + 2 :]
    assert [line.split(" ")[0] for line in results if not line.startswith(" ")] == list(found.results)
    told = dict(line.split(" = ") for line in results if " = " in line)
    assert told == {name: own[name] for name in told}
    # A full bias has the gradient of the scores, the largest of one score is that score, and a sink has one axis less.
    untold = found.results.keys() - told.keys()
    empty = ("no-key", "no-query", "no-key-sink", "no-length")
    assert untold <= {"lse", "max", "d_bias", "d_sink", "d_keep"} or case in empty


# Data


def test_json_has_the_same_values() -> None:
    found = core(case="causal-head")  # its first rows are empty: -inf
    data: Any = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [one["id"] for one in (*data["forward"], *data["backward"])] == [step.id for step in found.steps]
    for one, step in zip((*data["forward"], *data["backward"]), found.steps, strict=True):
        value = np.array(one["value"], dtype=np.float64).reshape(one["shape"])  # float("-Infinity") is -inf
        np.testing.assert_array_equal(value, step.value)
        assert (one["file"], one["line"], one["variable"]) == (step.place.file, step.place.line, step.place.variable)
        assert tuple(one["axes"]) == step.place.axes and one["formula"] == step.place.formula
    assert "-Infinity" in json.dumps(data)
    assert data["options"] == {"causal": True}


def test_a_mechanism_may_run_the_equations_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record with the block alone: the equations of its core belong to somebody else."""
    record = ra.mechanism("softmax")
    alone: Mechanism = dataclasses.replace(record, equation_modules=record.equation_modules[1:], core=None)
    found = traced.trace_block(alone, "float64", NUMPY)
    assert {"SM.1", "SM.output", "dSM.q"} <= {step.id for step in found.steps}
