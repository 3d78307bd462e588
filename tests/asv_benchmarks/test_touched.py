"""What a change can have touched: planted into one file, it is found by whoever imports that file and nobody else."""

from __future__ import annotations

import ast
import functools

import pytest

from asv_benchmarks import touched
from asv_benchmarks.compare import WORKING_TREE, Homes, check_out
from asv_benchmarks.suite import Benchmark, benchmarks
from refattn.mechanisms.registry import list_mechanisms
from tools.imports import imports


@functools.cache
def every() -> tuple[Benchmark, ...]:
    return tuple(benchmarks())


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Homes:
    folder = tmp_path_factory.mktemp("versions")
    return check_out(WORKING_TREE, folder / "base"), check_out(WORKING_TREE, folder / "head")


@pytest.fixture
def found(homes: Homes, request: pytest.FixtureRequest) -> dict[Benchmark, set[str]]:
    """What a comment at the end of a file touches."""
    file = homes[1] / request.param
    before = file.read_text()
    file.write_text(before + "# a comment\n")
    try:
        return touched.touched(homes, every())
    finally:
        file.write_text(before)


def places(found: dict[Benchmark, set[str]]) -> set[tuple[str, str]]:
    """Module and mechanism of what is touched."""
    return {(one.name.partition(".")[0], touched.mechanism_of(one)) for one in found}


@pytest.mark.parametrize("found", ["refattn/mechanisms/koopman/core.py"], indirect=True)
def test_a_mechanism_touches_itself(found: dict[Benchmark, set[str]]) -> None:
    assert {mechanism for _, mechanism in places(found)} == {"koopman", ""}
    assert {("core", "koopman"), ("block", "koopman"), ("language", "koopman")} <= places(found)
    assert {one.params[0] for one in found if not touched.mechanism_of(one)} <= {
        "refattn.mechanisms.koopman",
        "refattn.cli",
    }
    assert touched.reason(found).startswith(
        "measured: koopman, which may run what differs (refattn.mechanisms.koopman."
    )


@pytest.mark.parametrize("found", ["refattn/mechanisms/softmax/core.py"], indirect=True)
def test_a_mechanism_touches_who_imports_it(found: dict[Benchmark, set[str]]) -> None:
    assert {mechanism for _, mechanism in places(found) if mechanism} == {"softmax", "sympformer", "growing"}


@pytest.mark.parametrize("found", ["refattn/xp.py", "backends/numpy.py"], indirect=True)
def test_what_all_import_touches_all(found: dict[Benchmark, set[str]]) -> None:
    assert {one for one in every() if "'numpy'" in str(one)} <= found.keys()
    assert touched.reason(found).startswith("measured: all mechanisms")


@pytest.mark.parametrize("found", ["refattn/train/loop.py"], indirect=True)
def test_the_trainer_touches_training_alone(found: dict[Benchmark, set[str]]) -> None:
    assert {module for module, _ in places(found)} - {"start"} == {"language"}
    assert {mechanism for _, mechanism in places(found) if mechanism} == set(list_mechanisms())


@pytest.mark.parametrize("found", ["refattn/verify/tolerance/budget.py"], indirect=True)
def test_the_tolerances_touch_shares(found: dict[Benchmark, set[str]]) -> None:
    """Which look them up by a name that depends on the version."""
    assert {module for module, _ in places(found)} - {"start"} == {"accuracy"}


@pytest.mark.parametrize("found", ["backends/torch.py"], indirect=True)
def test_a_backend_touches_what_runs_on_it(found: dict[Benchmark, set[str]]) -> None:
    assert found and all("torch" in one.params for one in found)


@pytest.mark.parametrize("found", ["refattn/mechanisms/delta/tour.js"], indirect=True)
def test_what_is_no_code_touches_nothing(found: dict[Benchmark, set[str]]) -> None:
    assert touched.reason(found) == "nothing is measured: no file that a benchmark imports differs"


def test_a_file_that_is_gone_touches_who_imported_it(homes: Homes) -> None:
    file = homes[1] / "refattn" / "mechanisms" / "delta" / "dense.py"
    before = file.read_text()
    file.unlink()
    try:
        found = touched.touched(homes, every())
    finally:
        file.write_text(before)
    assert {mechanism for _, mechanism in places(found) if mechanism} == {"delta"}


def test_imports_are_read_where_they_are() -> None:
    text = """
import numpy as np
from . import common
if TYPE_CHECKING:
    from a.b import c
else:
    import d
def f():
    with x:
        from a import b
"""
    found = {(one.module, one.inside, one.typing) for one in imports(ast.parse(text), {"a.b", "p.common"}, "p")}
    assert found == {
        ("numpy", False, False),
        ("p.common", False, False),
        ("a.b", False, True),
        ("d", False, False),
        ("a.b", True, False),
    }
