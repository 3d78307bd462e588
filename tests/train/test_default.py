"""The run that `refattn train softmax` makes when nothing else is said: it learns, and its folder tells."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from refattn.train import loop, settings
from tests.train.runs import Listener


@pytest.mark.slow
def test_the_default_run_beats_the_bigram(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """At most 0.85 of the bigram's bits per byte; the sample of the slow tests makes few, and comes near it."""
    sampled = {"steps": 120, "score_bytes": 32768} if os.environ.get("REFATTN_SLOW_SAMPLE") else {}
    result = loop.run(settings.build("softmax", sampled), tmp_path / "run", Listener())
    facts = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result.finished and facts["heldout_bytes"] == sampled.get("score_bytes", 262144)
    assert 3.3 < facts["bigram_bits"] < 3.9 and 1.5 < facts["gzip_bits"] < 2.5  # the fewer bytes, the more
    ratio = facts["heldout_bits"] / facts["bigram_bits"]
    told = f"softmax, {facts['step']} steps: {facts['heldout_bits']:.3f} bits per byte, {ratio:.2f} of the bigram's"
    record_property("rate", told)
    assert ratio <= (1.15 if sampled else 0.85)
