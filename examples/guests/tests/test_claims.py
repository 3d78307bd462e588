"""Every claim has a call that runs, and tests that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guests import hopfield, power

import refattn as ra

CLAIMS = [(record.name, n) for record in (hopfield.record, power.record) for n in range(len(record.claims))]


@pytest.mark.parametrize(("name", "n"), CLAIMS)
def test_a_claim_is_shown_and_held(name: str, n: int) -> None:
    claim = {"hopfield": hopfield.record, "power": power.record}[name].claims[n]
    if not claim.shown.startswith("python "):
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 4))
        found: Any = eval(claim.shown, {"np": np, "ra": ra, "q": q, "k": k, "v": v})
        assert found is not False
    for test in claim.tests:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[1] / file).read_text()
