"""A sample of every fuzzer: no wrong result, and every error names the file."""

from __future__ import annotations

import pytest

from tests.fuzz import files


@pytest.mark.parametrize("calls", [150, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_files(calls: int) -> None:
    counts, bad = files.run(calls, seed=0)
    assert not bad, "\n".join(bad)
    assert counts["refused"] > calls // 2
