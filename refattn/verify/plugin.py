"""The pytest plugin: a test that asks for `golden_case` runs on every designed case of a mechanism, in every type.

::

    @pytest.mark.golden("softmax", dtypes=["float32", "bfloat16"])
    def test_my_kernel(golden_case):
        golden_case.check(my_attention, grad=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism
    from refattn.verify.outcome import Outcome


@dataclass(frozen=True)
class GoldenCase:
    """One designed case in one type.

    Attributes
    ----------
    mechanism, case, dtype
        Their names.
    """

    mechanism: str
    case: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.mechanism}-{self.case}-{self.dtype}"

    @property
    def inputs(self) -> dict[str, Any]:
        """The arrays that an implementation is given, by name: NumPy's, bfloat16 in float32."""
        from refattn.golden.inputs import make
        from refattn.mechanisms import registry

        return make(self.mechanism, registry.mechanism(self.mechanism).case(self.case), self.dtype)

    @property
    def options(self) -> Mapping[str, Any]:
        """The other arguments of the call."""
        from refattn.mechanisms import registry

        return registry.mechanism(self.mechanism).case(self.case).options

    def check(self, implementation: Any, *, grad: bool = False) -> Outcome:
        """Fail, in one line, where an implementation disagrees with the reference; skip where it declines.

        Parameters
        ----------
        implementation
            A function ``f(q, k, v, **options)``, or an object with ``forward`` and ``backward``, as for
            ``refattn verify``.
        grad
            Whether its gradients are judged too.
        """
        from refattn.mechanisms import registry
        from refattn.verify.run import verify_case

        record = registry.mechanism(self.mechanism)
        outcome = verify_case(record, implementation, record.case(self.case), self.dtype, grad=grad)
        if outcome.status == "declined":
            pytest.skip(outcome.detail)
        if outcome.status != "agrees":
            pytest.fail(f"{self}: {told(outcome)}{_suspect(record, outcome, grad)}", pytrace=False)
        return outcome


def _suspect(record: Mechanism, outcome: Outcome, grad: bool) -> str:
    """Return, in a few words, the first suspect from this case alone; "" where there is none."""
    from refattn.verify.blame.suspects import locate
    from refattn.verify.outcome import Report
    from refattn.verify.show.suspects import told

    found = locate(record, Report(record.name, "", grad, (outcome,))).suspects
    return f"; suspect: {told(found.ranked[0])}" if found and found.ranked else ""


def told(outcome: Outcome) -> str:
    """Return in one line what is wrong."""
    wrong = [
        f"{v.tensor}{list(v.index) if v.index else ''} is {v.got}, needs {v.expected}: "
        f"{v.share:.3g} of the allowed error ({v.statistic})"
        for v in outcome.verdicts
        if not v.agrees
    ]
    return "; ".join([*([outcome.detail] if outcome.detail else []), *wrong])


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "golden(*mechanisms, dtypes=None, cases=None): what golden_case runs over; all mechanisms, float32 by default",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for `golden_case` all cases that its marker names."""
    if "golden_case" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("golden")
    chosen = _chosen(marker.args, **marker.kwargs) if marker else _chosen(())
    metafunc.parametrize("golden_case", chosen, ids=str)


def _chosen(names: tuple[str, ...], dtypes: Any = None, cases: Any = None) -> list[GoldenCase]:
    from refattn.golden.storage import DTYPES
    from refattn.mechanisms import registry

    dtypes = ("float32",) if dtypes is None else tuple(dtypes)
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise pytest.UsageError(f"golden: dtypes: got {', '.join(unknown)}, needs some of {', '.join(DTYPES)}")
    found = []
    try:
        for name in names or registry.list_mechanisms():
            record = registry.mechanism(name)
            if record.core is not None:
                wanted = record.cases if cases is None else [record.case(each) for each in cases]
                found += [GoldenCase(name, case.name, dtype) for dtype in dtypes for case in wanted]
    except ValueError as error:
        raise pytest.UsageError(f"golden: {error}") from error
    return found
