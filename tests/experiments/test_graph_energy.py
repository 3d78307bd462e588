"""The experiment on graph energy attention: its script, its results, and that its page says what these say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from docs.experiments.graph_energy import (
    PLAN,
    VARIANTS,
    Perturbed,
    Trial,
)
from docs.experiments.tasks import Recall


def test_what_a_model_is_asked_after_its_training() -> None:
    task = Recall(pairs=2, keys=3, values=3, judged=8)
    plan = replace(PLAN, steps=2, warmup=1, batch=2, width=8, heads=2)
    result = Trial("graph_energy", task, plan, 0, VARIANTS["flow, soft"][1]).result()
    assert len(result["zeros"]) == 2 and all(0.0 <= share < 1.0 for share in result["zeros"])
    assert all(end < start for start, end in result["spreads"])
    assert abs(result["bits at rest"] - result["bits"]) < 0.1


def test_a_share_of_the_tokens_is_replaced_and_no_target() -> None:
    task = Recall(pairs=4, keys=16, values=16, judged=64)
    ((plain, other),) = zip(task.held_out(), Perturbed(task, 0.25).held_out(), strict=True)
    assert 0.15 < np.mean(plain.inputs != other.inputs) < 0.3
    assert np.array_equal(plain.targets, other.targets)
