"""The pytest plugin: a test that asks for `golden_case` runs on every designed case of a mechanism, in every type.

::

    @pytest.mark.golden("softmax", dtypes=["float32", "bfloat16"])
    def test_my_kernel(golden_case):
        golden_case.check(my_attention, grad=True, rounding=["products=tf32"])

A kernel that a module has by its name, or that is named, ``"mine.py:attend"``, runs in a process of its own. A
test of which every case is declined has run nothing: it fails the session.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism
    from refattn.verify.adapters.isolate import Isolated
    from refattn.verify.outcome import Outcome


@dataclass(frozen=True)
class GoldenCase:
    """One designed case in one type.

    Attributes
    ----------
    mechanism, case, dtype
        Their names; a mechanism of another package may be MODULE:NAME of its record.
    """

    mechanism: str
    case: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.mechanism}-{self.case}-{self.dtype}"

    @property
    def _record(self) -> Mechanism:
        from refattn.mechanisms import registry

        return registry.mechanism(self.mechanism)

    @classmethod
    def named(cls, text: str) -> GoldenCase:
        """Return the case of a text such as "softmax-causal-float32"; without a type it is float32.

        Raises
        ------
        ValueError
            If there is no such mechanism, case or type.
        """
        from refattn.golden.storage_types import DTYPES
        from refattn.mechanisms import registry

        name, _, case = str(text).partition("-")
        front, _, dtype = case.rpartition("-")
        case, dtype = (front, dtype) if dtype in DTYPES else (case, "float32")
        return cls(name, registry.mechanism(name).case(case).name, dtype)

    @property
    def inputs(self) -> dict[str, Any]:
        """The arrays that a kernel is given, by name: NumPy's, bfloat16 in float32."""
        from refattn.golden.inputs import make

        return make(self._record.name, self._record.case(self.case), self.dtype)

    @property
    def options(self) -> Mapping[str, Any]:
        """The other arguments of the call."""
        return self._record.case(self.case).options

    def check(
        self,
        kernel: Any,
        *,
        grad: bool = False,
        rounding: Iterable[str] = (),
        timeout: float = 60.0,
        in_process: bool = False,
    ) -> Outcome:
        """Fail, in one line, where a kernel disagrees with the reference; skip where it declines.

        Parameters
        ----------
        kernel
            A function ``f(q, k, v, **options)``, or an object with ``forward`` and ``backward``, as for ``refattn
            verify``, or a text that names one: ``"MODULE:NAME"``, ``"FILE.py:NAME"``. A text, and a function or class
            that its module has under its name, runs in another process, which is started once: one that hangs or
            crashes fails its case. Anything else, such as a function inside a function, runs in this one.
        grad
            Whether its gradients are judged too.
        rounding
            What it rounds beside what every kernel does: names, or "NAME=TYPE".
        timeout
            Seconds for each case, in another process.
        in_process
            Run it in this process: for a debugger.
        """
        from refattn.verify.run import verify_case

        found, case = _loaded(kernel, timeout, in_process), self._record.case(self.case)
        outcome = verify_case(self._record, found, case, self.dtype, grad=grad, rounding=rounding)
        if outcome.status == "declined":
            pytest.skip(f"{DECLINED}{outcome.detail}")
        if outcome.status != "agrees":
            told = "; ".join(outcome.told())
            pytest.fail(f"{self}: {told}{_suspect(self._record, outcome, grad)}", pytrace=False)
        return outcome


DECLINED = "declined: "

_PROCESSES: dict[str, Isolated] = {}
"""Kernels in processes of their own, by what names them."""


def _loaded(kernel: Any, seconds: float, in_process: bool) -> Any:
    """Return a kernel in a process of its own, where it can be found there."""
    from refattn.verify.adapters.adapter import LoadError, load
    from refattn.verify.adapters.isolate import Isolated

    if in_process:
        return load(kernel) if isinstance(kernel, str) else kernel
    places = [kernel] if isinstance(kernel, str) else list(_places(kernel))
    for place in places:
        try:
            if place not in _PROCESSES:
                _PROCESSES[place] = Isolated(place, seconds)
        except LoadError as error:
            if isinstance(kernel, str):
                raise pytest.UsageError(str(error)) from error
            continue
        _PROCESSES[place].seconds = seconds
        return _PROCESSES[place]
    return kernel


def _places(kernel: Any) -> Iterator[str]:
    """Yield what names a function or class in another process: by its module, or by the module's file."""
    name, module = getattr(kernel, "__qualname__", ""), sys.modules.get(kernel.__module__)
    if (
        module is not None
        and name.isidentifier()
        and getattr(module, name, None) is kernel
        and module.__name__ != "__main__"
    ):
        yield f"{module.__name__}:{name}"
        if str(getattr(module, "__file__", None)).endswith(".py"):
            yield f"{module.__file__}:{name}"


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes of kernels."""
    while _PROCESSES:
        _PROCESSES.popitem()[1].close()


# --- a test that has run nothing


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a report say that it is of a golden case, in another process too."""
    if "golden_case" in getattr(item, "fixturenames", ()):
        item.user_properties.append(("golden_case", item.nodeid.partition("[")[0]))


class _Watch:
    """Sees the reports of this session, those of other workers too."""

    def __init__(self) -> None:
        self.ran: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of what became of a golden case."""
        test = dict(report.user_properties).get("golden_case")
        if test is None or (report.when != "call" and report.passed):
            return
        why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        declined = why.removeprefix("Skipped: ").startswith(DECLINED)
        self.ran.setdefault(str(test), set()).add(DECLINED if declined else report.outcome)

    def empty(self) -> list[str]:
        """Return the tests of which every case was declined."""
        return [test for test, what in self.ran.items() if what == {DECLINED}]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session where a test has run nothing."""
        if self.empty() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say which."""
        for test in self.empty():
            terminalreporter.write_line(f"FAILED {test}: nothing was run: every case was declined", red=True)


def _suspect(record: Mechanism, outcome: Outcome, grad: bool) -> str:
    """Return, in a few words, the first suspect from this case alone; "" where there is none."""
    from refattn.verify.diagnose.suspects import locate
    from refattn.verify.outcome import Report
    from refattn.verify.report.suspects import told

    found = locate(record, Report(record.name, "", grad, (outcome,), record=record)).suspects
    return f"; suspect: {told(found.ranked[0])}" if found and found.ranked else ""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "golden(*mechanisms, dtypes=None, cases=None): what golden_case runs over; all mechanisms, float32 by default",
    )
    if not hasattr(config, "workerinput"):  # where pytest-xdist runs others, they report to this one
        config.pluginmanager.register(_Watch(), "refattn-watch")


@pytest.fixture
def golden_case(request: pytest.FixtureRequest) -> GoldenCase:
    """A designed case of a mechanism in a storage type, with `inputs`, `options` and `check(kernel, grad=True)`.

    The marker `golden` says which cases: ``@pytest.mark.golden("softmax", dtypes=["float32"], cases=["causal"])``. Or
    they are parameters by name: ``@pytest.mark.parametrize("golden_case", ["softmax-causal-float32"], indirect=True)``.
    """
    if isinstance(request.param, GoldenCase):
        return request.param
    try:
        return GoldenCase.named(request.param)
    except ValueError as error:
        raise pytest.fail.Exception(f"golden_case: {error}", pytrace=False) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for `golden_case` all cases that its marker names, unless they are its parameters."""
    if "golden_case" not in metafunc.fixturenames:
        return
    for one in metafunc.definition.iter_markers("parametrize"):
        if "golden_case" in str(one.args[:1]):
            if not one.kwargs.get("indirect", one.args[2:3]):
                told = "got names of cases, needs indirect=True beside them"
                pytest.fail(f"{metafunc.definition.nodeid}: golden_case: {told}", pytrace=False)
            return
    marker = metafunc.definition.get_closest_marker("golden")
    try:
        chosen = _chosen(marker.args, **marker.kwargs) if marker else _chosen(())
    except (TypeError, ValueError) as error:
        raise pytest.fail.Exception(f"{metafunc.definition.nodeid}: golden: {error}", pytrace=False) from None
    metafunc.parametrize("golden_case", chosen, ids=str, indirect=True)


def _chosen(names: tuple[str, ...], *, dtypes: Any = None, cases: Any = None, **unknown: Any) -> list[GoldenCase]:
    from refattn.mechanisms import registry
    from refattn.messages import meant

    for name in unknown:
        raise TypeError(f"got {name}{meant(name, ('dtypes', 'cases'))}, needs dtypes and cases alone")
    dtypes = ("float32",) if dtypes is None else _several("dtypes", dtypes)
    found = []
    for name in names or registry.list_mechanisms():
        record = registry.mechanism(name)
        if record.core is not None:
            wanted = record.cases if cases is None else [record.case(each) for each in _several("cases", cases)]
            found += [GoldenCase(name, case.name, _known(dtype)) for dtype in dtypes for case in wanted]
    return found


def _several(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: got {given!r}, needs a list of names")
    return tuple(given)


def _known(dtype: Any) -> str:
    from refattn.golden.storage_types import DTYPES

    if dtype not in DTYPES:
        raise ValueError(f"dtypes: got {dtype}, needs some of {', '.join(DTYPES)}")
    return str(dtype)
