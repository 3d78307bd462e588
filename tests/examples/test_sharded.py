"""The example examples/sharded.py, in one process and in two, and a long sequence over devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def differences(*command: str) -> list[float]:
    """Run an example apart; return how far each of its results is from one device's."""
    pytest.importorskip("jax")
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [float(x) for x in re.findall(r"differ\w* by (\S+) of", result.stdout)]


@pytest.mark.slow(sampled=True)
@pytest.mark.parametrize("more", [("--mesh", "heads=2,tokens=4"), ("--mesh", "tokens=4", "--processes", "2")])
def test_shards_agree(more: tuple[str, ...]) -> None:
    found = differences(str(EXAMPLES / "sharded.py"), *more)
    assert len(found) == (6 if "--processes" in more else 3) and max(found) < 1e-14


@pytest.mark.slow
def test_a_long_sequence_over_devices() -> None:
    more = ("--tokens", "65536", "--heads", "1", "--width", "8", "--devices", "4")
    found = differences(str(EXAMPLES / "million_tokens.py"), *more)
    assert len(found) == 1 and found[0] < 1e-12
