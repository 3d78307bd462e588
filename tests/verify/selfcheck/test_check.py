"""The reference's check of itself: it agrees on every library, and each section is seen to disagree."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.backends.base import Backend
from refattn.many_runs import Where
from refattn.mechanisms import projections
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.softmax import core, dense, loops
from refattn.mechanisms.softmax.implementations import tiled
from refattn.ops.masks import Band
from refattn.verify.outcome import CheckReport, Row
from refattn.verify.selfcheck import check as check_module
from refattn.verify.selfcheck import gradients
from refattn.verify.selfcheck.check import check, check_all
from refattn.verify.selfcheck.sections import MOST, NotRun, Scope, Task, small_tiles, tasks
from tests.conftest import Library

RECORD = ra.mechanism("softmax")
NUMPY = backends.get("numpy")
FEW = replace(RECORD, cases=tuple(RECORD.case(name) for name in ("tiny", "causal", "softcap")))
WITH_ALL = replace(FEW, cases=(*FEW.cases, RECORD.case("all")))  # which computes every equation

SAMPLED = (Library.STRICTEST, Library.TORCH)


@pytest.fixture(scope="module")
def report() -> CheckReport:
    """A sample of few cases: `refattn check` and, as a step of .ci/run, `refattn check --full` run all."""
    return check(WITH_ALL)


def row(section: str, name: str, record: Mechanism = RECORD, backend: str = "numpy", *, full: bool = True) -> Row:
    """Run one task."""
    scope = Scope(record, backends.get(backend), full=full)
    found = [task for task in tasks(scope) if (task.section, task.name) == (section, name)]
    assert len(found) == 1, (section, name)
    return found[0].row()


def test_numpy_agrees_with_itself(report: CheckReport) -> None:
    assert [r for r in report.rows if r.status != "agrees" and "torch" not in r.detail] == []
    assert report.exit_code == 0
    sections = {r.section for r in report.rows}
    assert sections == {*"implementations definition loops equations properties vectors gradients tangents".split()}
    assert {r.name for r in report.rows if r.section == "properties"} == set(RECORD.properties)
    assert {r.name for r in report.rows if r.section == "implementations"} == {
        f"{implementation}, {dtype}" for implementation in RECORD.implementations for dtype in ("float64", "float32")
    }


def test_rows_say_where_most_of_the_allowed_error_was_used(report: CheckReport) -> None:
    rows = {(r.section, r.name): r for r in report.rows}
    tiled_row = rows["implementations", "tiled, float32"]
    assert tiled_row.share is not None and 0.0 < tiled_row.share < 1.0
    assert tiled_row.detail.partition(":")[0] in {case.name for case in WITH_ALL.cases}
    assert not report.full
    assert rows["equations", "hooked copies"].detail == f"{len(WITH_ALL.cases) * len(WITH_ALL.implementations)} times"
    assert rows["equations", "docstrings, tags and trace"].detail == f"{len(RECORD.equations)} equations"


def test_the_report_as_json(report: CheckReport) -> None:
    broken = replace(report, rows=(*report.rows, Row("properties", "some", "disagrees", math.inf, "")))
    data = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert data["mechanism"] == "softmax" and data["backend"] == "numpy"
    assert data["rows"][-1] == asdict(broken.rows[-1]) | {"share": None}
    assert data["counts"] == broken.counts()
    assert data["counts"]["disagrees"] == 1
    assert data["exit_code"] == 1


@pytest.mark.parametrize(
    "statuses, require_all, code",
    [
        (["agrees"], True, 0),
        (["agrees", "not run"], False, 0),
        (["agrees", "not run"], True, 3),
        (["not run"], False, 3),
        ([], False, 3),
        (["agrees", "disagrees", "not run"], False, 1),
        (["disagrees", "not run"], True, 1),
    ],
)
def test_exit_codes(statuses: list[str], require_all: bool, code: int) -> None:
    rows = tuple(Row("properties", str(n), status, None, "") for n, status in enumerate(statuses))
    assert CheckReport("softmax", "numpy", require_all, rows).exit_code == code


@pytest.mark.slow
@pytest.mark.skip_xp_backend("numpy-readonly", reason="the check makes its own arrays")
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_library_agrees(name: str, backend: Any) -> None:
    record, sampled = ra.mechanism(name), bool(os.environ.get("REFATTN_SLOW_SAMPLE"))
    if sampled:
        # `refattn check` has run on NumPy by then, what holds on the strictest holds on strict, and JAX is slow.
        number = ra.list_mechanisms().index(name)
        if backend.library is not (SAMPLED[number % len(SAMPLED)] if number else Library.JAX):
            pytest.skip("not of the sample: each mechanism on one library")
        step = len(record.cases) if backend.library is Library.JAX else 24
        record = replace(record, cases=record.cases[::step], properties=record.properties[number % 4 :: step])
    found = check(record, backend.owner)
    bad = [row for row in found.rows if row.status == "disagrees"]
    if sampled:  # few cases need not reach every equation, nor give every number
        bad = [row for row in bad if row.name != "docstrings, tags and trace" and "no case gives" not in row.detail]
    assert bad == [] and (sampled or found.exit_code == 0)
    assert any(r.name.endswith("under jit") for r in found.rows) == (backend.owner.name == "jax")


@pytest.mark.parametrize("section, name", [("loops", "every equation"), ("implementations", "tiled, float32")])
@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape: see the slow test")
def test_some_sections_agree_on_every_library(section: str, name: str, backend: Any) -> None:
    found = row(section, name, FEW, backend.owner.name)
    assert found.status == "agrees", found


def seeing_more(right: Any) -> Any:
    """Each row sees what the next one may."""
    return lambda self, mask, rows, columns, batch: right(self, mask, (rows[0] + 1, rows[1] + 1), columns, batch)


def wrong_in_float32(right: Any) -> Any:
    def forward(q: Any, k: Any, v: Any, **given: Any) -> Any:
        out, lse, saved = right(q, k, v, **given)
        return (out * (1.0 + 2e-6) if q.dtype == np.float32 else out), lse, saved

    return forward


def without_d_v(right: Any) -> Any:
    def backward(saved: Any, d_out: Any, d_lse: Any = None) -> Any:
        gradients = right(saved, d_out, d_lse)
        return {name: x for name, x in gradients.items() if name != "v" or saved.implementation == "dense"}

    return backward


def scaled(id: str) -> Callable[[Any], Any]:
    def wrong(right: Any) -> Any:
        return lambda *args, **given: {n: x * (1.0 + 1e-9 * (n == id)) for n, x in right(*args, **given).items()}

    return wrong


def other_bits(right: Any) -> Any:
    """A hooked copy of the tiled implementation that rounds otherwise."""

    def forward(*args: Any, **given: Any) -> Any:
        out, lse, saved = tiled.forward(*args, **given)
        return np.nextafter(out, np.inf), lse, saved

    copy = SimpleNamespace(forward=forward, backward=tiled.backward)
    return lambda module: copy if module is tiled and equations.is_active() else right(module)


def cut_by_workers(right: Any) -> Any:
    return lambda q, k, most: replace(right(q, k, most), columns=64 * backends.workers())


def wrong_d_w(right: Any) -> Any:
    def backward(x: Any, w: Any, d_y: Any) -> Any:
        d_x, d_w, d_b = right(x, w, d_y)
        return d_x, d_w * (1.0 + 1e-7), d_b

    return backward


def raising(right: Any) -> Any:
    def forward(*args: Any, **given: Any) -> Any:
        raise FloatingPointError("two\nlines")

    return forward


IDS = ("equations", "docstrings, tags and trace")
LOOPS = ("loops", "every equation")
DECLARED = rf"SM.99 is declared, but no case computes it; SM.99 is not both declared and tagged in {dense.__name__}"


@pytest.mark.parametrize(
    ("module", "name", "wrong", "task", "detail"),
    [
        (Band, "allowed", seeing_more, ("implementations", "tiled, float64"), "causal: "),
        (tiled, "forward", wrong_in_float32, ("implementations", "tiled, float32"), ".*out"),
        (core, "backward", without_d_v, ("implementations", "tiled, float64"), ".*no d_v"),
        (tiled, "forward", raising, ("implementations", "tiled, float64"), ".*: raised FloatingPointError: two lines$"),
        *(
            (loops, "backward" if id[0] == "d" else "forward", scaled(id), LOOPS, rf".*: {id}(, the first of \d+ .*)?$")
            for id in ("SM.3", "SM.lse", "dSM.total", "dSM.softcap")
        ),
        (
            loops,
            "forward",
            lambda right: lambda *args, **given: {**right(*args, **given), "SM.99": np.zeros(())},
            LOOPS,
            ".*not in both derivations: SM.99",
        ),
        (dense, "__doc__", lambda right: f"{right}\n    [SM.99]  x = y\n", IDS, f".*{DECLARED}"),
        (equations, "active", other_bits, ("equations", "hooked copies"), "tiny: tiled$"),
        (tiled, "plan", cut_by_workers, ("properties", "workers"), "sample long: tiled"),
        (projections, "linear_backward", wrong_d_w, ("gradients", "block, differences"), ".*gradient of params.w_"),
        (projections, "linear_backward", wrong_d_w, ("tangents", "block, duality"), ""),
        *(
            (tiled, "backward", lambda right: lambda saved, d_out, d_lse: right(saved, d_out, None), task, ".*n tiled$")
            for task in (("gradients", "core, differences"), ("tangents", "core, duality"))
        ),
    ],
)
def test_what_is_wrong_is_found(
    module: Any, name: str, wrong: Any, task: tuple[str, str], detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong(vars(module)[name]))
    record = replace(FEW if task != IDS else RECORD, properties=("workers",))
    found = row(*task, record, full=task[1] != "block, differences")
    assert found.status == "disagrees" and re.match(detail, found.detail), found
    other = {"tiled, float32": "tiled, float64", "tiled, float64": "dense, float64"}.get(task[1])
    assert other is None or row(task[0], other, FEW).status == "agrees"


@pytest.mark.parametrize("task", [LOOPS, ("vectors", "every stored case")])
def test_the_first_equation_that_differs_is_named(task: tuple[str, str]) -> None:
    with equations.apply(lambda id, _, value: value * 1.001 if id == "SM.2" else value):
        found = row(*task, FEW)
    # A trace has what SM.2 gave, before the hook changes it for the equations that follow.
    assert found.status == "disagrees" and ": SM.largest, the first of " in found.detail


def test_a_sample_of_cases_need_not_reach_every_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ra.mechanism("graph_energy")
    few = replace(whole, cases=(whole.case("tiny"),))
    found = row("equations", "docstrings, tags and trace", few)
    assert found.status == "disagrees" and "dGE.bias is declared, but no case computes it" in found.detail
    monkeypatch.setattr(Scope, "compiles", True)
    assert row("equations", "docstrings, tags and trace", few).status == "agrees"
    # What is computed has to be declared all the same.
    undeclared = row("equations", "docstrings, tags and trace", replace(RECORD, equation_modules=(dense,)))
    assert "SM.queries is computed in line " in undeclared.detail
    assert (
        undeclared.status == "disagrees"
        and "layer/block.py, a module that is missing in equation_modules" in undeclared.detail
    )


def test_a_property_that_nobody_wrote_is_found() -> None:
    found = row("properties", "gravity", replace(RECORD, properties=("gravity",)))
    assert found.status == "disagrees"
    assert found.detail.startswith("no property is called gravity, needs one of permutation, query_permutation, ")


def test_without_torch_autograd_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    why = 'torch is not installed: pip install "refattn[torch]"'
    monkeypatch.setattr(backends.get("torch"), "why_unavailable", lambda: why)
    for what in ("core", "block"):
        found = row("gradients", f"{what}, autograd")
        assert (found.status, found.share, found.detail) == ("not run", None, why)


class Away(Backend):
    name = "away"
    package = "refattn_no_such_package"
    array_type = "Array"
    install = "pip install away"

    def from_numpy(self, x: Any, device: Any = None) -> Any:
        raise NotImplementedError

    def to_numpy(self, x: Any) -> Any:
        raise NotImplementedError


def test_a_backend_that_cannot_be_used_is_not_run() -> None:
    found = check(RECORD, Away())
    assert [(r.status, r.share) for r in found.rows] == [("not run", None)]
    assert "pip install away" in found.rows[0].detail
    assert found.exit_code == 3


def test_an_unknown_backend_raises() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        check(RECORD, "nowhere")


def absent() -> Any:
    raise NotRun("there is no such thing")


@pytest.mark.parametrize(
    ("run", "wanted"),
    [(absent, ("not run", None, "there is no such thing")), (lambda: (math.nan, ""), ("disagrees", math.nan, ""))],
)
def test_nan_never_agrees_and_what_cannot_run_says_why(run: Any, wanted: tuple[Any, ...]) -> None:
    found = Task("properties", "some", run).row()
    assert repr((found.status, found.share, found.detail)) == repr(wanted)


def test_a_mechanism_without_a_core_has_a_block_and_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(tasks(Scope(replace(RECORD, core=None), NUMPY)))
    assert [(task.section, task.name) for task in found] == [
        ("equations", "docstrings, tags and trace"),
        ("gradients", "block, differences"),
        ("gradients", "block, autograd"),
        ("tangents", "block, duality"),
        ("tangents", "block, symmetry"),
    ]


def test_strict_runs_under_its_strictest_flags() -> None:
    strict: Any = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    before = strict.get_array_api_strict_flags()
    inside = []

    def progress(given: Any) -> Iterator[Task]:
        inside.append(strict.get_array_api_strict_flags())
        yield from ()

    check(RECORD, "strict", progress=progress)
    assert inside[0]["boolean_indexing"] is False
    assert inside[0]["data_dependent_shapes"] is False
    assert strict.get_array_api_strict_flags() == before


def test_tiles_are_small_inside_alone() -> None:
    owner = Away()
    usual = owner.tile_bytes
    with pytest.raises(KeyError), small_tiles(owner):
        assert owner.tile_bytes == 1
        raise KeyError
    assert owner.tile_bytes == usual
    with small_tiles(NUMPY):
        assert NUMPY.tile_bytes == type(NUMPY).tile_bytes


def test_small_arrays_have_several_tiles_where_tiles_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    counts: list[int] = []
    right = vars(tiled)["plan"]

    def plan(q: Any, k: Any, most: int) -> Any:
        cut = right(q, k, most)
        counts.append(len(cut.rows) * -(-k.shape[2] // cut.columns))
        return cut

    monkeypatch.setattr(tiled, "plan", plan)
    with small_tiles(backends.get("strict")):
        assert row("properties", "repeatable", backend="strict").status == "agrees"
    assert max(counts) >= 6


# --- a sample, and processes side by side


@pytest.mark.slow
def test_processes_find_what_one_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two mechanisms, in the order that was asked for; what wraps the tasks sees each as it ends, and a mechanism
    comes once its own have ended."""
    monkeypatch.setattr(check_module, "tasks", lambda scope: list(tasks(scope))[:5])  # the processes still know all
    names, ended = ("sympformer", "growing"), []

    def progress(items: Any) -> Any:
        assert len(items) >= 4
        for n, item in enumerate(items):
            ended.append(n)
            yield item

    reports = check_all(names, where=Where(jobs=2), progress=progress)
    found = [next(reports)]
    seen = len(ended)
    found += reports
    assert seen < len(ended)
    assert [one.mechanism for one in found] == list(names) and not any(one.full for one in found)
    assert found == [check(ra.mechanism(name)) for name in names] and len(found[0].rows) == 5


def test_a_process_that_ends_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "_run", ends)
    monkeypatch.setattr(check_module, "tasks", lambda scope: list(tasks(scope))[-3:])  # a process for each
    (found,) = check_all(["softmax"], where=Where(jobs=2))
    assert found.exit_code == 1 and len(found.rows) == 3 and all("ended" in row.detail for row in found.rows)


def ends(*arguments: object) -> None:
    os._exit(3)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_sample_reaches_every_kind_of_case(name: str) -> None:
    scope = Scope(ra.mechanism(name), NUMPY)
    cases = [case for dtype in scope.dtypes for case in scope.cases_of(dtype)]
    names = {case.name for case in cases}
    assert len(names) == len(cases) and {case.name for case in scope.kinds} <= names
    assert names <= {case.name for case in scope.cases} and len(cases) >= min(len(scope.cases), 27)
    assert len(scope.cases) > MOST or len(cases) == len(scope.cases)
    whole = Scope(ra.mechanism(name), NUMPY, full=True)
    assert all(whole.cases_of(dtype) == whole.cases for dtype in whole.dtypes)
    full = [(task.section, task.name) for task in tasks(Scope(ra.mechanism(name), NUMPY, full=True))]
    assert [(task.section, task.name) for task in tasks(scope)] == full


def test_a_wrong_gradient_shows_along_a_direction() -> None:
    """An error of one element of one leaf, as large as the gradient's elements, in a sample of directions."""
    subject = next(gradients.core_subjects(FEW, FEW.cases, full=False))
    right = gradients.by_hand(subject, NUMPY, "dense")
    judge = gradients.beside(subject, "differences", 2)
    assert judge(right)[0] < gradients.TOLERANCES["differences"]
    for name, x in right.items():
        for at in range(x.size):
            wrong = x.copy()
            wrong.reshape(-1)[at] += 1e-6 * np.max(np.abs(x))
            assert judge({**right, name: wrong})[0] > gradients.TOLERANCES["differences"]
    assert judge({**right, "q": right["q"][..., :1]})[0] == math.inf


def test_jax_computes_as_before_when_a_check_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    seen: list[bool] = []

    def none(scope: Scope) -> list[Task]:
        seen.append(jax.config.jax_enable_x64)
        return []

    monkeypatch.setattr(check_module, "tasks", none)
    jax.config.update("jax_enable_x64", False)
    try:
        check(RECORD, "jax")
        assert seen == [True] and not jax.config.jax_enable_x64
    finally:
        jax.config.update("jax_enable_x64", before)


def test_a_missing_key_is_named_with_its_place() -> None:
    loops = ModuleType("loops")
    empty: dict[str, Any] = {}
    vars(loops).update(forward=lambda **given: empty["SM.9"])
    found = row(*LOOPS, replace(FEW, loops=loops))
    assert re.search(r"raised KeyError: 'SM\.9' in line \d+ of .*test_check\.py$", found.detail)
