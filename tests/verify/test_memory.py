"""Layouts, calls around a call, and equal bits: honest kernels pass, and each fault fails its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify import invariances
from refattn.verify.invariances import differing, verify_bitwise, verify_memory
from refattn.verify.outcome import CheckReport

RECORD = ra.mechanism("softmax")


def attend(q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False, hide: float = -np.inf) -> Any:
    """Plain NumPy; hidden scores become `hide`, or lose 1e3 where that is 0."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * q.dtype.type(q.shape[3] ** -0.5)
    n, m = s.shape[2:]
    allowed = np.tri(n, m, m - n, dtype=bool) if causal else np.ones((n, m), bool)
    s = np.where(allowed if mask is None else allowed & mask, s, s - 1e3 if hide == 0 else hide).astype(q.dtype)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


def in_memory_order(q: Any, k: Any, v: Any, **o: Any) -> Any:
    """Takes memory as it comes, whatever the strides are."""
    return attend(*(x.ravel(order="K").reshape(x.shape) for x in (q, k, v)), **o)


def as_if_contiguous(q: Any, k: Any, v: Any, **o: Any) -> Any:
    """Takes rows to lie one after the other."""

    def rows(x: Any) -> Any:
        strides = (*x.strides[:2], x.shape[3] * x.strides[3], x.strides[3])
        return np.lib.stride_tricks.as_strided(x, x.shape, strides)

    return attend(rows(q), rows(k), rows(v), **o)


def as_if_dense(q: Any, k: Any, v: Any, **o: Any) -> Any:
    """Takes the numbers of a row to lie one after the other."""

    def rows(x: Any) -> Any:
        return np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:3], x.itemsize))

    return attend(rows(q), rows(k), rows(v), **o)


def one_key_more(q: Any, k: Any, v: Any, **o: Any) -> Any:
    """Reads the key behind the last one, and weighs it with 0."""
    behind = np.lib.stride_tricks.as_strided(v, (*v.shape[:2], v.shape[2] + 1, v.shape[3]), v.strides)[:, :, -1:]
    return attend(q, k, v, **o) + 0 * np.repeat(behind, q.shape[1] // v.shape[1], axis=1)


def unwritten(q: Any, k: Any, v: Any, **o: Any) -> Any:
    out = np.empty_like(q)
    out *= 0
    out += attend(q, k, v, **o)
    return out


class Buffered:
    """Gives the same memory each time."""

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {}

    def __call__(self, q: Any, k: Any, v: Any, **o: Any) -> Any:
        out = self.held.setdefault(q.shape, np.zeros_like(q))
        out[...] = attend(q, k, v, **o)
        return out


class Races:
    """Is wrong now and then."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Any, k: Any, v: Any, **o: Any) -> Any:
        self.calls += 1
        return attend(q, k, v, **o) * q.dtype.type(1.01 if self.calls % 40 == 0 else 1.0)


def softly(q: Any, k: Any, v: Any, **o: Any) -> Any:
    return attend(q, k, v, hide=0, **o)


FAULTS = {
    "transposed": in_memory_order,
    "columns": in_memory_order,
    "strided": as_if_dense,
    "sliced": as_if_contiguous,
    "guarded": one_key_more,
    "poisoned": unwritten,
    "held": Buffered(),
    "repeated": Races(),
}


def status(report: CheckReport) -> dict[str, str]:
    return {row.name: row.status for row in report.rows}


@pytest.mark.parametrize("manner", FAULTS)
def test_each_manner_shows_its_fault(manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariances, "MEANING", {manner: "", "reversed": ""})
    monkeypatch.setattr(invariances, "memory_cases", lambda mechanism: [RECORD.case("plain")])
    assert status(verify_memory(RECORD, attend))[manner] == "agrees"
    found = verify_memory(RECORD, FAULTS[manner])
    assert status(found)[manner] == "disagrees" and found.exit_code == 1


def test_what_nothing_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariances, "MEANING", {})
    assert status(verify_memory(RECORD, attend)) == {"masked, large": "agrees", "masked, NaN": "not run"}
    assert status(verify_memory(RECORD, softly))["masked, large"] == "disagrees"
    assert "no convention forbids" in verify_memory(RECORD, attend).rows[1].detail


def test_what_is_wrong_anyhow_is_not_blamed_on_a_manner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariances, "MEANING", {"strided": ""})
    found = verify_memory(RECORD, lambda q, k, v, **o: 2 * attend(q, k, v, **o))
    assert (found.rows[0].status, found.rows[0].detail) == ("not run", "case memory-wide fails in C order, too")


@pytest.mark.slow
def test_a_backward_after_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariances, "MEANING", {"interleaved": ""})
    monkeypatch.setattr(invariances, "memory_cases", lambda mechanism: [RECORD.case("plain")])
    torch = pytest.importorskip("torch")
    held: dict[str, Any] = {}

    class Function(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out, held["saved"] = ra.softmax.forward(q.detach(), k.detach(), v.detach())
            return out

        @staticmethod
        def backward(ctx: Any, d_out: Any) -> Any:
            found = ra.softmax.backward(held["saved"], d_out)
            return found["q"], found["k"], found["v"]

    def careless(q: Any, k: Any, v: Any) -> Any:
        return Function.apply(q, k, v)

    def careful(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    for kernel, wanted in ((careful, "agrees"), (careless, "disagrees")):
        kernel.framework = "torch"  # type: ignore[attr-defined]
        assert status(verify_memory(RECORD, kernel, grad=True))["interleaved"] == wanted


# --- the same bits


def one_by_one(q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False) -> Any:
    """Every row and key by itself, in order: nothing else can change its bits."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    n, m = q.shape[2], k.shape[2]
    seen = np.tri(n, m, m - n, dtype=bool) if causal else np.ones((n, m), bool)
    seen = np.broadcast_to(seen if mask is None else seen & mask, (*q.shape[:3], m))
    total = np.zeros((*q.shape[:3], 1), q.dtype)
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    for j in range(m):
        s = np.add.accumulate(q * k[:, :, j : j + 1], axis=-1)[..., -1:] * q.dtype.type(0.125)
        p = np.where(seen[..., j : j + 1], np.exp(s), q.dtype.type(0))
        total, out = total + p, out + p * v[:, :, j : j + 1]
    return out / total


class Counted:
    """Differs with the size of the batch."""

    def __call__(self, q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False) -> Any:
        out = one_by_one(q, k, v, mask=mask, causal=causal)
        return np.nextafter(out, np.inf, dtype=out.dtype) if q.shape[0] == 1 else out


def test_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariances, "SIZES", {"b": 2, "h": 2, "g": 1, "n_q": 19, "n_k": 23, "d": 8})
    found = status(verify_bitwise(RECORD, one_by_one))
    assert {*found.values()} == {"agrees", "not run"} and found["padding by k_lengths"] == "not run"
    assert found["prefill and decode"] == found["padding by mask"] == found["chunk of queries"] == "agrees"
    report = verify_bitwise(RECORD, Counted())
    assert [row.name for row in report.rows if row.status == "disagrees"] == ["batch size"]
    (detail,) = [row.detail for row in report.rows if row.status == "disagrees"]
    assert "out[0, 0, 0, 0] is" in detail and "1 units in the last place" in detail

    def of_threads(q: Any, k: Any, v: Any) -> Any:
        most = max(each["num_threads"] for each in threadpoolctl.threadpool_info())
        return q * np.float32(1.0 + (most > 2))

    assert [name for name, what in status(verify_bitwise(RECORD, of_threads)).items() if what == "disagrees"] == [
        "threads"
    ]


def test_how_far_bits_differ() -> None:
    a = np.asarray([[1.0, 2.0], [0.0, np.nan]], np.float32)
    b = a.copy()
    assert differing("out", a, b, "float32") == ""
    b[0, 1] += 2.0**-20
    assert differing("out", a, b, "float32").startswith(
        "out[0, 1] is 2 and 2.00000095, 4 units in the last place; 1 of 4"
    )
    assert "other signs" in differing("out", np.zeros(2), -np.zeros(2), "float64")
    assert "shape (2,)" in differing("out", np.zeros(2), np.zeros(3), "float64")


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariances, "MEANING", {"strided": "every other element"})
    file = tmp_path / "mine.py"
    file.write_text("import refattn as ra\ndef attend(q, k, v):\n    return ra.softmax.forward(q, k, v)[0]\n")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["verify", "softmax", "--impl", f"{file}:attend", "--in-process", *arguments])

    assert run("--memory").exit_code == 0 and "every other element" in run("--memory").stdout
    assert "position in the batch" in run("--bitwise").stdout
    for wrong in (("--memory", "--bitwise"), ("--memory", "--cases", "x.json"), ("--bitwise", "--html", "x.html")):
        assert run(*wrong).exit_code == 2


def test_a_stride_of_one_width_is_seen_in_a_shape_of_that_width(tmp_path: Path) -> None:
    """None of its own cases is so wide."""
    file = tmp_path / "kernel.py"
    file.write_text(
        "import numpy as np, refattn as ra\n"
        "def attend(q, k, v):\n"
        "    if q.shape[3] == 48:\n"
        "        q = q.ravel(order='K').reshape(q.shape)\n"
        "    return ra.softmax.forward(q, k, v)[0]\n"
    )
    command = ["verify", "softmax", "--impl", f"{file}:attend", "--in-process", "--memory"]
    assert CliRunner().invoke(cli, command).exit_code == 0
    found = CliRunner().invoke(cli, [*command, "--shape", "b=2,h=2,n=8,d=48"])
    assert found.exit_code == 1 and "case b=2,h=2,n=8,d=48" in " ".join(found.stdout.split())


def test_a_stride_of_one_path_is_seen_in_the_cases_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that lie as (b, n, h, d) are read as (b, h, n, d) where they are many, or wide."""

    def faulty(q: Any, k: Any, v: Any, **o: Any) -> Any:
        other = k.shape[2] > 512 if path == "decode" else k.shape[3] > 128
        return attend(q, in_order(k) if other else k, v, **o)

    def in_order(x: Any) -> Any:
        return np.lib.stride_tricks.as_strided(x, x.shape, np.zeros(x.shape, x.dtype).strides)

    monkeypatch.setattr(invariances, "MEANING", {"transposed": ""})
    for path in ("decode", "wide"):
        row = verify_memory(RECORD, faulty).rows[0]
        assert row.status == "disagrees" and f"memory-{path}" in row.detail
