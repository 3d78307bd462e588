"""What tests of commands are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import refattn as ra
from tests.cli.command import KERNELS


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[[str], str]:
    """The spec of a function of KERNELS, in a file of its own."""
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    return lambda name: f"{file}:{name}"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Leave softmax five small cases, so that a test takes no longer than it must."""
    names = ("tiny", "causal-tail", "mask-keys", "grouped", "empty-rows")
    record = ra.mechanism("softmax")
    small = dataclasses.replace(record, cases=tuple(record.case(name) for name in names), kernel_sizes=())
    monkeypatch.setattr("refattn.mechanisms.softmax.record", small)
    return names
