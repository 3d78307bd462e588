"""Fixtures and settings that all tests share: the array libraries, what a run may not skip, and Hypothesis.

A test with three parameters or more runs on as many of their combinations as hold every pair of values, and on JAX a
third of them; the others are slow. Where CuPy is not installed, its place is taken by a test double (backends/double).

Environment variables::

    REFATTN_TEST_BACKENDS=numpy,torch    run the tests over libraries on these alone
    REFATTN_REQUIRE=torch,onnxruntime    stop where one of these cannot be imported, in place of skipping its tests
    REFATTN_SLOW_SAMPLE=1                of the slow tests (`-m slow`) a sample
    CI=true                              the same Hypothesis examples in every run

Options::

    --slow-part 0/3         of the slow tests that would run every third, from the first on
    --passed FILE           write the tests that passed to a file
    --leave-out FILE        leave out the tests that such a file names, but for those that name a library of
                            REFATTN_REQUIRE, or use what does so in their file: what they do may depend on it
"""

from __future__ import annotations

import ast
import enum
import functools
import gc
import importlib.util
import itertools
import os
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

# JAX reads these when it is imported, which only happens after this file.
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="refattn-cache-")  # what tests leave there is their own
# Most of the time with JAX is that of its compiler, for functions that run once. Of the CPU it makes four devices.
_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", f"{_XLA} --xla_force_host_platform_device_count=4")

if DOUBLE := importlib.util.find_spec("cupy") is None:
    sys.path.append(str(Path(__file__).parent / "backends" / "double"))  # processes of a pool get it, too

from refattn import backends  # noqa: E402

settings.register_profile("refattn", deadline=None)
settings.register_profile("refattn-ci", deadline=None, derandomize=True, database=None)


class Library(enum.Enum):
    """An array library, in a manner of use."""

    NUMPY = "numpy"
    NUMPY_READONLY = "numpy-readonly"
    STRICT = "strict"
    STRICTEST = "strictest"
    TORCH = "torch"
    JAX = "jax"
    CUPY = "cupy"

    @property
    def backend(self) -> backends.Backend:
        """The backend of refattn that this library is used through."""
        return backends.get({"numpy-readonly": "numpy", "strictest": "strict"}.get(self.value, self.value))

    @property
    def package(self) -> str:
        """The module to import."""
        backend: Any = self.backend  # those of refattn itself have more than the protocol asks for
        return str(backend.package)


@dataclass(frozen=True)
class Arrays:
    """One library as the tests use it: the fixture `backend`."""

    library: Library

    def __str__(self) -> str:
        return self.library.value

    @property
    def owner(self) -> backends.Backend:
        return self.library.backend

    @property
    def xp(self) -> ModuleType:
        return self.owner.namespace()

    def has(self, dtype: str) -> bool:
        """Tell whether the library has a dtype of this name."""
        return hasattr(self.xp, dtype)

    def array(self, x: Any, dtype: str | None = None) -> Any:
        """Return a host array as one of this library, in the dtype of this name (None: its own)."""
        host = np.array(x)
        if dtype is not None and dtype != "bfloat16":
            host = host.astype(dtype)
        made = self.owner.from_numpy(host)
        if dtype == "bfloat16":
            made = backends.of(made).namespace().asarray(made, dtype=self.xp.bfloat16)
        if self.library is Library.NUMPY_READONLY:
            made.flags.writeable = False
        return made

    def host(self, x: Any) -> NDArray[Any]:
        """Return an array of this library as a NumPy array."""
        return self.owner.to_numpy(x)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _chosen() -> list[Library]:
    """The libraries to run on: those that were asked for, or all that are installed."""
    names = [name.strip() for name in os.environ.get("REFATTN_TEST_BACKENDS", "").split(",") if name.strip()]
    known = {library.value: library for library in Library}
    if unknown := [name for name in names if name not in known]:
        raise pytest.UsageError(f"REFATTN_TEST_BACKENDS: got {', '.join(unknown)}, needs some of {', '.join(known)}")
    return [known[name] for name in names] or [library for library in Library if _installed(library.package)]


def _required() -> list[str]:
    return [name.strip() for name in os.environ.get("REFATTN_REQUIRE", "").split(",") if name.strip()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part", default="0/1", metavar="K/N", help="Of the slow tests every N-th, from the K-th on."
    )
    parser.addoption("--passed", type=Path, metavar="FILE", help="Write the tests that passed to a file.")
    parser.addoption("--leave-out", type=Path, metavar="FILE", help="Leave out the tests that passed by such a file.")


class Passed:
    """Notes the tests that passed."""

    def __init__(self, file: Path) -> None:
        self.file, self.names = file, set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.names.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text("\n".join(sorted(self.names)))


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("passed")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed(file))
    settings.load_profile("refattn-ci" if os.environ.get("CI") else "refattn")
    # In the background of a script Ctrl-C is ignored, and refattn leaves it so; tests of Ctrl-C mean the usual case.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "skip_xp_backend(library, reason=...): skip the test on this library")
    _chosen()
    if missing := [name for name in _required() if not _installed(name)]:
        raise pytest.UsageError(f"REFATTN_REQUIRE asks for {', '.join(missing)}, which cannot be imported here")


def pytest_report_header() -> str:
    chosen = _chosen()
    left_out = [library.value for library in Library if library not in chosen]
    names = [library.value + " (a double)" * (DOUBLE and library is Library.CUPY) for library in chosen]
    return f"array libraries: {', '.join(names)}; not: {', '.join(left_out) or 'none'}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        chosen = _chosen()
        ids = [library.value for library in chosen]
        metafunc.parametrize("backend", chosen, ids=ids, indirect=True, scope="module")


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def _beyond_pairs(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of one test's combinations of parameters, those that can go: every pair of values is there without them."""
    pairs = []
    for item in items:
        values = [(name, id(value)) for name, value in sorted(_parameters(item).items())]
        pairs.append(frozenset(itertools.combinations(values, 2)))
    missing, others = set().union(*pairs), list(range(len(items)))
    while missing:
        best = max(others, key=lambda n: len(pairs[n] & missing))
        others.remove(best)
        missing -= pairs[best]
    return [items[n] for n in others]


def _mark_beyond_pairs(items: Sequence[pytest.Item]) -> None:
    tests = defaultdict(list)
    for item in items:
        if len(_parameters(item)) > 2 and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for same in tests.values():
        _put_off(_beyond_pairs(same))


def _mark_most_of_some(items: Sequence[pytest.Item]) -> None:
    """JAX compiles every operation for every shape: it runs one of three variants of a test over libraries, and so does
    the double of CuPy, whose numbers are NumPy's."""
    tests = defaultdict(list)
    for item in items:
        library = _parameters(item).get("backend")
        thinned = library is Library.JAX or (DOUBLE and library is Library.CUPY)
        if thinned and item.get_closest_marker("slow") is None:
            tests[library, item.nodeid.partition("[")[0]].append(item)
    for same in tests.values():
        _put_off([item for number, item in enumerate(same) if number % 3])


def _put_off(items: Sequence[pytest.Item]) -> None:
    """Make tests slow, of which the sample takes few."""
    for number, item in enumerate(items):
        item.add_marker("slow")
        if number % 32 and os.environ.get("REFATTN_SLOW_SAMPLE"):
            item.add_marker(pytest.mark.skip(reason="not of the sample"))


@functools.cache
def _dependent(path: Path, libraries: tuple[str, ...]) -> set[str]:
    """The names of a file whose definition names a library, or uses such a name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    words: defaultdict[str, set[str]] = defaultdict(set)
    for node in ast.parse("\n".join(lines)).body:
        first = min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))
        said = set(re.findall(r"\w+", "\n".join(lines[first - 1 : node.end_lineno])))
        stored = (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        for name in [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else stored:
            words[name] |= said
    found: set[str] = set()
    while more := {name for name, said in words.items() if said & {*libraries, *found}} - found:
        found |= more
    return found


def _passed(item: pytest.Item, names: set[str]) -> bool:
    """Tell whether a test is among those that passed and asks for nothing that was not there yet."""
    own = item.nodeid.split("::")[1].partition("[")[0]
    return item.nodeid in names and own not in _dependent(item.path, tuple(_required()))


def _mark_not_sampled(items: Sequence[pytest.Item]) -> None:
    for item in items if os.environ.get("REFATTN_SLOW_SAMPLE") else ():
        if not all(mark.kwargs.get("sampled", True) for mark in item.iter_markers("slow")):
            item.add_marker(pytest.mark.skip(reason="not of the sample"))


def _mark_other_parts(items: Sequence[pytest.Item], part: str) -> None:
    turn, parts = (int(number) for number in part.split("/"))
    slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("skip")]
    for number, item in enumerate(slow):
        if number % parts != turn:
            item.add_marker(pytest.mark.skip(reason="of another part"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no cycles in what is made here, now or later: it lives to the end, and every look takes its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)  # nor again and again in a syntax tree while it grows
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_beyond_pairs(items)
    _mark_most_of_some(items)
    _mark_not_sampled(items)
    _mark_other_parts(items, config.getoption("slow_part"))
    if (file := config.getoption("leave_out")) is not None:
        names = set(file.read_text().splitlines())
        items[:] = [item for item in items if not _passed(item, names)]
    for item in items:
        library = _parameters(item).get("backend")
        for marker in item.iter_markers("skip_xp_backend"):
            if isinstance(library, Library) and library.value in marker.args:
                item.add_marker(pytest.mark.skip(reason=marker.kwargs["reason"]))


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Arrays]:
    """Each array library in turn; one that cannot be used is skipped, or fails where REFATTN_REQUIRE names it."""
    arrays = Arrays(request.param)
    reason = arrays.owner.why_unavailable()
    if reason is not None:
        (pytest.fail if arrays.owner.name in _required() else pytest.skip)(reason)
    arrays.owner.enable_float64()
    if arrays.library is not Library.STRICTEST:
        yield arrays
        return
    strict: Any = arrays.xp
    with strict.ArrayAPIStrictFlags(boolean_indexing=False, data_dependent_shapes=False):
        yield arrays


@pytest.fixture(scope="module")
def xp(backend: Arrays) -> ModuleType:
    """The array API namespace of `backend`."""
    return backend.xp


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the rates that tests recorded: what verification catches, and what it rejects wrongly."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    rates = [value for report in reports for name, value in report.user_properties if name == "rate"]
    if rates:
        terminalreporter.section("rates of verification")
        for rate in rates:
            terminalreporter.write_line(rate)
