"""The smallest case that fails: found, still failing in the same way, and told in lines of Python that run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify.run import verify
from refattn.verify.selfcheck.samples import resized
from refattn.verify.shrink import least, lines

RECORD = ra.mechanism("softmax")

KERNELS = """
import numpy as np
import refattn

def attend(q, k, v, *, mask=None, causal=False, **options):
    n, m = q.shape[2], k.shape[2]
    if causal == "top_left" or mask is not None:
        return refattn.Decline("no")
    mask = np.tri(n, m, m - n + 1, dtype=bool) if causal else None  # one key too many
    return refattn.softmax.forward(q, k, v, mask=mask, **options)[0]
"""


def small(*names: str) -> Any:
    """The record with these cases, in sizes that cost little."""
    cases = (RECORD.case(name) for name in names)
    shared = {case.name: case.inputs["q"].shape[1] // case.inputs["k"].shape[1] for case in RECORD.cases}
    smaller = tuple(resized(c, 2, 2, shared[c.name], 16, 16, 4, 4) for c in cases)
    return dataclasses.replace(RECORD, cases=smaller, kernel_sizes=())


def smallest(
    record: Any, kernel: Any, report: Any, text: str = "kernel", rounding: Any = (), **extra: Any
) -> tuple[str, ...]:
    pair = least(record, kernel, report, rounding=rounding, **extra)
    return lines(record.name, *pair, text, report.grad, rounding, report.seed) if pair else ()


def found(kernel: Any, *names: str, text: str = "kernel", **extra: Any) -> tuple[str, ...]:
    record = small(*names)
    report = verify(record, kernel, dtypes=["float32"], grad=extra.pop("grad", False))
    return smallest(record, kernel, report, text, **extra)


def executed(lines: tuple[str, ...], **names: Any) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec("\n".join(lines), dict(names))
    return said.getvalue()


def test_the_lines_of_the_report_run_and_show_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kernels.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.setattr("refattn.mechanisms.softmax.record", small("tiny", "causal", "mask-full"))
    result = CliRunner().invoke(
        cli, ["verify", "softmax", "--impl", "kernels.py:attend", "--dtype", "float32", "--in-process"]
    )
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    start = lines.index("The smallest case found that fails") + 1
    six = tuple(lines[start : start + 6])
    assert six[0].startswith("import") and six[5].startswith("print") and lines[start + 6] == ""
    assert "Input((1, 1, 2, 1)" in six[3] and "{'causal': True}" in six[3] and "seed=0" in six[4]
    said = executed(six)
    got, expected = six[5].partition("# ")[2].partition(": ")[2].split(", not ")
    assert said.startswith("disagrees") and f"got='{got}'" in said and f"expected='{expected}'" in said


def test_what_does_not_matter_is_left_out() -> None:
    def halves(q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Wrong from the fifth query on, with grouped heads alone."""
        out = np.array(ra.softmax.forward(q, k, v, **options)[0])
        if q.shape[1] != k.shape[1]:
            out[:, :, 4:] *= np.float32(0.5)
        return out

    def named(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return np.array(ra.softmax.forward(q, k, v)[0]) if "softcap" in options else halves(q, k, v, **options)

    line = found(halves, "grouped")[3]
    assert "Input((1, 2, " in line and '"k": Input((1, 1, 1, 1))' in line
    queries = int(line.partition("Input((1, 2, ")[2].partition(",")[0])
    assert 5 <= queries <= 9
    line = found(named, "softcap-mask")[3]
    assert "mask" not in line.partition("{")[2] and "{'softcap': 2.0}" in line


def test_gradients_errors_and_roundings_are_kept() -> None:
    class Wrong:
        def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            out, self.saved = ra.softmax.forward(q, k, v, **options)
            return out

        def backward(self, d_out: Any) -> Any:
            found = ra.softmax.backward(self.saved, d_out)
            return found | {"k": found["k"] * np.float32(2.0)}

    def raises(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if q.shape[2] > 3:
            raise MemoryError(f"{q.shape}")
        return ra.softmax.forward(q, k, v, **options)[0]

    lines = found(Wrong(), "tiny", grad=True, rounding=("SM.1",))
    assert "grad=True" in lines[4] and "rounding=('SM.1',)" in lines[4] and "# d_k[" in lines[5]
    assert "tensor='d_k'" in executed(lines, kernel=Wrong())
    lines = found(raises, "plain")
    assert "# raised MemoryError: (1, 1, 4, 1)" in lines[5]
    assert "raises\nraised MemoryError: (1, 1, 4, 1)" in executed(lines, kernel=raises)


def test_it_is_bounded_in_time_and_silent_where_nothing_fails() -> None:
    def slow(q: Any, k: Any, v: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return np.zeros_like(q)

    assert found(lambda q, k, v, **options: ra.softmax.forward(q, k, v, **options)[0], "tiny") == ()
    begun = time.monotonic()
    assert len(found(slow, "plain", seconds=0.0)) == 6
    assert time.monotonic() - begun < 5.0


def test_widths_that_belong_together_are_halved_together() -> None:
    record = ra.mechanism("sympformer")
    record = dataclasses.replace(record, cases=tuple(c for c in record.cases if c.inputs["q"].shape[2] > 4)[:1])
    report = verify(record, wrong := lambda q, k, v, **options: v * 0, dtypes=["float32"])
    six = smallest(record, wrong, report)
    assert six[3].count("Input((1, 1, 1, 1)") >= 3
    assert "disagrees" in executed(six, kernel=wrong)
