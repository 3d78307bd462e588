"""Arrays where a kernel wants them, and what runs there is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.verify import verify
from refattn.verify.adapters import devices

RECORD = ra.mechanism("softmax")
RECORD = replace(RECORD, cases=tuple(RECORD.case(name) for name in ("tiny", "mask-keys")))


class Attend:
    """A kernel of torch with a backward, which is given tensors on its device."""

    framework, device = "torch", "cpu"

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        assert {str(x.device) for x in (q, k, v)} == {"cpu"} and (mask is None or str(mask.device) == "cpu")
        out, self.saved = ra.softmax.forward(q, k, v, mask=mask)
        return out

    def backward(self, d_out: Any) -> Any:
        assert str(d_out.device) == "cpu"
        return {f"d_{name}": x for name, x in ra.softmax.backward(self.saved, d_out).items()}  # "q" or "d_q"


def test_tensors_lie_on_the_device_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    waited: list[int] = []
    monkeypatch.setattr(type(backends.get("torch")), "synchronize", lambda self: waited.append(1))
    report = verify(RECORD, Attend(), dtypes=["float32"], grad=True)
    assert report.counts()["all"] == {"run": 2, "agreed": 2, "failed": 0, "declined": 0}
    assert len(waited) >= 2 * 4  # before and after, forward and backward

    def elsewhere(q: Any, k: Any, v: Any) -> Any:
        return q

    elsewhere.framework, elsewhere.device = "torch", "cuda:99"  # type: ignore[attr-defined]
    (outcome, _) = verify(RECORD, elsewhere, dtypes=["float32"]).outcomes
    assert outcome.status == "raises"
    del elsewhere.framework  # type: ignore[attr-defined]
    (outcome, _) = verify(RECORD, elsewhere, dtypes=["float32"]).outcomes
    assert "device: got 'cuda:99', needs framework beside it" in outcome.detail


def test_arrays_of_jax_lie_on_the_device() -> None:
    jax = pytest.importorskip("jax")
    found = devices.placed(np.ones((2, 3)), "jax", "float32", "cpu:0")
    assert (found.dtype, found.devices()) == (np.float32, {jax.devices("cpu")[0]})


def test_what_lies_elsewhere_is_read_in_place_by_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(4.0)

    class There:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **how: Any) -> Any:
            return x.__dlpack__()

    asked: list[Any] = []

    def from_dlpack(given: Any) -> Any:
        asked.append(given)
        return x

    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    there = There()
    assert np.array_equal(devices.from_dlpack(there), x.numpy()) and asked == [there]


def test_a_processor_has_what_its_flags_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : sse avx2\n")
    real = Path

    def path(name: str) -> Path:
        return tmp_path / "cpuinfo" if name == "/proc/cpuinfo" else real(name)

    monkeypatch.setattr(devices, "Path", path)
    monkeypatch.setattr(devices, "ACCELERATORS", ())
    monkeypatch.setattr("sys.platform", "linux")
    assert devices.missing_types("cpu") == devices.missing_types(None) == ("tf32", "bf16x3")
    assert devices.missing_types("cuda:0") == ()
    (tmp_path / "cpuinfo").write_text("flags : sse avx512_bf16\n")
    assert devices.missing_types("cpu") == ("tf32",)
    monkeypatch.setattr(devices, "ACCELERATORS", (str(tmp_path),))
    assert devices.missing_types(None) == ()
