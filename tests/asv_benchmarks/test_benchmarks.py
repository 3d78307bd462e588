"""The benchmarks: each runs once for every mechanism, n/a is told as n/a, and asv sees what the suite sees."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import refattn as ra
from asv_benchmarks.benchmarks import common
from asv_benchmarks.sides import ROOT
from asv_benchmarks.suite import PROFILES, Benchmark, benchmarks, prepare
from refattn import backends
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from tests.processes import python

SUITE = ROOT / "asv_benchmarks" / "benchmarks"
ALL = benchmarks()
NUMPY = [
    benchmark
    for benchmark in ALL
    if not {"cupy", "torch", "jax"} & set(benchmark.params) and not benchmark.name.startswith("instructions.")
]


def key(benchmark: Benchmark) -> tuple[Any, ...]:
    """What stays of a benchmark when its sizes are left out."""
    return (benchmark.name, *(x for x in benchmark.params if isinstance(x, str)))


def smallest(chosen: list[Benchmark]) -> list[Benchmark]:
    """The benchmarks with one choice of sizes, none of them large."""
    found: dict[tuple[Any, ...], Benchmark] = {}
    for benchmark in chosen:
        params = tuple(x if isinstance(x, str) else min(x, 64) for x in benchmark.params)
        found.setdefault(key(benchmark), dataclasses.replace(benchmark, params=params))
    return list(found.values())


def assert_is_missing(benchmark: Benchmark, reason: str) -> None:
    """On NumPy nothing is n/a but bfloat16, and what is not offered."""
    assert reason
    name = benchmark.params[0]
    stream = benchmark.name.startswith("stream.") and ra.mechanism(str(name)).stream is None
    causal = benchmark.name.startswith("core.Causal.") and "causal" not in common.split(str(name))[0].defaults
    causal |= benchmark.name.startswith("core.Causal.") and reason.startswith("implementation: got")
    large = "matrices of at most" in reason  # an implementation that is for small arrays
    assert stream or causal or large or "bfloat16" in benchmark.params


def chosen() -> list[Any]:
    """The benchmarks with the smallest sizes; of float32 every second is slow, of the other types every one."""
    found = []
    for number, benchmark in enumerate(smallest(NUMPY)):
        others = bool({"float64", "float16", "bfloat16"} & set(benchmark.params)) or number % 2 == 1
        left_out = bool(os.environ.get("REFATTN_SLOW_SAMPLE")) and number % 8
        marks = [pytest.mark.slow] * others + [pytest.mark.skip(reason="not of the sample")] * bool(others and left_out)
        found.append(pytest.param(benchmark, id=str(benchmark), marks=marks))
    return found


def few(scope: Any) -> list[Any]:
    """The smallest case, and for implementations that are always causal the first of those."""
    cases = scope.mechanism.cases
    return [scope.mechanism.case("tiny"), *[case for case in cases if case.options.get("causal") is True][:1]]


TIMED = ("core", "block", "stream", "memory", "language.Decode")
"""Of those whose body is timed, or its memory, as a whole."""


@pytest.mark.parametrize("benchmark", chosen())
def test_every_benchmark_runs(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asv_benchmarks.benchmarks.peak.SECONDS", 0.0)
    monkeypatch.setattr("asv_benchmarks.benchmarks.language.STEPS", 1)
    monkeypatch.setattr("asv_benchmarks.benchmarks.start.TIMES", 1)
    monkeypatch.setattr("asv_benchmarks.benchmarks.accuracy.cases", few)
    try:
        run = prepare(benchmark.name, list(benchmark.params))
    except NotImplementedError as reason:
        assert_is_missing(benchmark, str(reason))
        return
    waited: list[None] = []
    monkeypatch.setattr(backends.get("numpy"), "synchronize", lambda: waited.append(None))
    result = run()
    if benchmark.name.startswith(TIMED):
        assert waited  # for its work
    if benchmark.kind == "share":
        # The dense implementation in float64 is the truth itself, and another one may give its bits where it has one
        # tile.
        truth = "float64" in benchmark.params
        assert 0.0 <= result <= 1.0 and (result > 0.0 or truth)
    elif benchmark.kind in ("rate", "work"):
        assert result > 0.0
    elif benchmark.kind == "memory" and "track_" in benchmark.name:
        assert math.isfinite(result)


def test_every_mechanism_and_every_form_is_there() -> None:
    cores = {name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None}
    implementations = {
        f"{name}.{implementation}" for name in cores for implementation in ra.mechanism(name).implementations
    }
    for method in (
        "core.Core.time_forward",
        "core.Core.time_backward",
        "core.Core.time_both",
        "memory.Core.peakmem_both",
    ):
        assert {b.params[0] for b in ALL if b.name == method} == implementations
    for method in ("accuracy.Share.track_largest", "accuracy.Share.track_mean"):
        assert {b.params[0] for b in ALL if b.name == method} == implementations
    assert {b.params[0] for b in ALL if b.name == "peak.Peak.track_forward"} == implementations
    for method in ("block.Block.time_both", "stream.Stream.time_step", "language.Train.track_tokens"):
        assert {b.params[0] for b in ALL if b.name == method} == set(ra.list_mechanisms())
    imported = {b.params[0] for b in ALL if b.name == "start.Import.track_import"}
    assert {f"refattn.mechanisms.{name}" for name in ra.list_mechanisms()} <= imported


@pytest.fixture(
    params=[{"implementations": ("dense",)}, {"core": None, "stream": None}], ids=["one implementation", "no core"]
)
def later(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mechanism]:
    """A mechanism that joins the registry: softmax by another name, without some of what it has."""
    record = dataclasses.replace(ra.mechanism("softmax"), name="later", **request.param)
    room = ModuleType("refattn.mechanisms.later")
    room.record = record  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, room.__name__, room)
    monkeypatch.setattr(registry, "_NAMES", ("softmax", "later"))
    modules = [name for name in sys.modules if name.startswith("asv_benchmarks.benchmarks")]
    kept = {name: sys.modules.pop(name) for name in modules}
    yield record
    for name in [name for name in sys.modules if name.startswith("asv_benchmarks.benchmarks")]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_a_later_mechanism_appears_by_itself(later: Mechanism) -> None:
    found = [b for b in benchmarks() if any(str(x).split(".")[0] == "later" for x in b.params)]
    assert {b.params[0] for b in found if "." in str(b.params[0])} == ({"later.dense"} if later.core else set())
    others = {"start.Import.track_import", "start.Machine.time_numpy"}
    if later.core is None:
        cores = ("core.", "accuracy.", "memory.Core.", "memory.Device.", "peak.", "work.")
        others |= {b.name for b in ALL if b.name.startswith(cores)}
    assert {b.name for b in found} == {b.name for b in ALL} - others
    if later.core is not None:
        prepare("core.Core.time_both", ["later.dense", 64, 16, "float32", "numpy"])()
    prepare("block.Block.time_both", ["later", 64, 64, "float32", "numpy"])()
    if later.stream is None:
        with pytest.raises(NotImplementedError, match="later is not given its tokens one by one"):
            prepare("stream.Stream.time_step", ["later", 64, 256, "float32", "numpy"])


# --- what is not there is n/a


def test_a_library_that_cannot_be_used_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.get("cupy"), "why_unavailable", lambda: "there is no GPU")
    common.core_call.cache_clear()  # its last call may be one on the double of CuPy
    for benchmark in smallest([b for b in ALL if "cupy" in b.params]):
        with pytest.raises(NotImplementedError, match="there is no GPU"):
            prepare(benchmark.name, list(benchmark.params))


def test_bfloat16_is_measured_where_there_is_one() -> None:
    pytest.importorskip("torch")
    implementation = common.FORMS[0]
    shares = [
        prepare(f"accuracy.Share.{m}", [implementation, "outputs", "bfloat16", "torch"])()
        for m in ("track_largest", "track_mean")
    ]
    assert 0.0 < shares[1] < shares[0] <= 1.0


def test_an_infinite_share_becomes_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = importlib.import_module("asv_benchmarks.benchmarks.accuracy")
    evaluate = accuracy.evaluate
    monkeypatch.setattr(accuracy, "evaluate", lambda *a, **k: {n: x[..., :-1] for n, x in evaluate(*a, **k).items()})
    assert prepare("accuracy.Share.track_largest", [common.FORMS[0], "outputs", "float32", "numpy"])() == 1e6


# --- how it is measured


def test_the_short_profile_is_numpy_alone() -> None:
    short = benchmarks(PROFILES["short"])
    assert 0 < len(short) < len(ALL) == len(benchmarks(PROFILES["full"]))
    assert not {"cupy", "torch", "jax"} & {x for b in short for x in b.params}
    assert {x for b in short if b.name.startswith("core") for x in b.params} & set(("float64", "float32")) == {
        "float32"
    }
    assert {b.name for b in short} == {
        b.name for b in ALL if not b.name.startswith(("instructions.", "memory.Device."))
    }
    quick = benchmarks(PROFILES["quick"])
    assert {b.kind for b in quick} == {"time", "rate", "work"} and len(quick) < 50
    named = {str(b.params[0]).split(".")[0] for b in quick if b.name.startswith("block")}
    assert named == set(ra.list_mechanisms())


@pytest.mark.slow
def test_instructions_are_counted_to_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed: apt-get install valgrind")
    monkeypatch.setenv("REFATTN_WORKERS", "3")  # which would share them out as it happens
    run = prepare("instructions.Instructions.track_both", ["softmax"])
    run()  # a first run may compile modules, and then holds other things in memory
    found = run()
    assert 1e6 < found < 1e8
    assert [run(), run()] == [found, found]


# --- asv


def seen_by_asv(libraries: str) -> dict[str, tuple[list[list[str]], str]]:
    """Return by name the parameters and the version of each benchmark, as asv finds them."""
    pytest.importorskip("asv_runner")
    code = f"""
import json
from asv_runner._aux import update_sys_path
from asv_runner.discovery import disc_benchmarks
update_sys_path({str(SUITE)!r})
print(json.dumps([[b.name, b.params, b.version] for b in disc_benchmarks({str(SUITE)!r})]))
"""
    chosen: Any = {common.LIBRARIES: libraries} if libraries else {}
    found = python("-c", code, **chosen)
    return {name: (params, version) for name, params, version in json.loads(found.splitlines()[-1])}


def test_asv_sees_the_same_benchmarks() -> None:
    seen = seen_by_asv(",".join(common.EVERY))
    assert set(seen) == {b.name for b in ALL}
    for name, (params, _) in seen.items():
        ours = [b.params for b in ALL if b.name == name]
        assert math.prod(map(len, params)) == len(ours)
        assert [repr(x) for x in ours[-1]] == [values[-1] for values in params]


def test_asv_sees_numpy_alone_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed: asv compares what has the same parameters."""
    monkeypatch.delenv(common.LIBRARIES, raising=False)
    seen = seen_by_asv("")
    named = {x for params, _ in seen.values() for axis in params for x in axis}
    assert {f"'{name}'" for name in common.EVERY} & named == {"'numpy'"} and "'bfloat16'" not in named
    assert "memory.Device.track_peak_both" not in seen, "it has no device"
    assert "'bfloat16'" in {x for params, _ in seen_by_asv("numpy,torch").values() for axis in params for x in axis}
    with pytest.raises(AssertionError, match="REFATTN_BENCHMARKS: got 'tensorflow', needs some of numpy,"):
        seen_by_asv("tensorflow")


def test_every_benchmark_has_a_version_that_was_set_by_hand() -> None:
    """Otherwise asv takes a hash of its source, and a comment would end its history."""
    for name, (_, version) in seen_by_asv("").items():
        assert re.fullmatch(r"[1-9]\d?", version), f"{name}: version = {version}"


def test_asv_holds_libraries_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time is what a call costs on one thread; --python=same does not read the environment of asv's settings."""
    pytest.importorskip("asv_runner")
    for name in ("REFATTN_WORKERS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    code = f"""
import os, sys, numpy, threadpoolctl
sys.path.insert(0, {str(ROOT / "asv_benchmarks")!r})
import benchmarks
threads = {{library["num_threads"] for library in threadpoolctl.threadpool_info()}}
print(os.environ["REFATTN_WORKERS"], os.environ["OMP_NUM_THREADS"], *threads)
"""
    assert python("-c", code).split() == ["1", "1", "1"]


def test_results_of_several_commits_come_with_the_repository() -> None:
    """asv reads them, of one machine, and their benchmarks are those of today."""
    stored = pytest.importorskip("asv.results")
    folder, *others = (ROOT / "asv_benchmarks" / "recorded").iterdir()
    assert not others and json.loads((folder / "machine.json").read_text())["machine"] == folder.name
    found = [stored.Results.load(str(file), folder.name) for file in folder.glob("*-*.json")]
    assert len(found) >= 5 and len({one.commit_hash for one in found}) == len(found)
    for one in found:
        assert {*one.get_all_result_keys()} <= {b.name for b in ALL}
    rooms = set.intersection(*({name.partition(".")[0] for name in one.get_all_result_keys()} for one in found))
    assert rooms >= {"accuracy", "core", "language", "memory", "peak", "stream"}
