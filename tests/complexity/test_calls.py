"""How many functions of refattn a call enters: what it costs beside its mathematics, counted without a clock.

A number that has grown is a check, a lookup or a walk over a tree that is made once more than it was. See which one
with ``python -m tools.calls NAME -v``, and raise the bound if what was added is worth it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from refattn.mechanisms.registry import list_mechanisms
from refattn.xp import namespace, zeros
from tools import calls

CORE = {
    "softmax": (15, 30),
    "higher_order": (70, 58),
    "sympformer": (40, 28),
    "graph_energy": (150, 185),
    "koopman": (345, 215),
    "growing": (15, 30),
    "delta": (58, 68),
}
BLOCK = {
    "softmax": (155, 140),
    "higher_order": (215, 170),
    "sympformer": (330, 400),
    "graph_energy": (510, 475),
    "koopman": (490, 350),
    "growing": (168, 155),
    "delta": (260, 310),
}
"""At most so many functions, forward and backward: what was counted, and about a twentieth more."""

STEP = {"softmax": 1770, "sympformer": 2130}
"""The same for a training step."""


@pytest.mark.parametrize("name", list_mechanisms())
def test_a_core_and_a_block_enter_few_functions(name: str) -> None:
    for made, bounds in ((calls.core_calls, CORE), (calls.block_calls, BLOCK)):
        found = [calls.count(call) for call in made(name)]
        counts = [one.total() for one in found]
        within = [0 < n <= bound for n, bound in zip(counts, bounds[name], strict=True)]
        assert all(within), f"{counts}, at most {bounds[name]}: {[one.most_common(5) for one in found]}"


@pytest.mark.parametrize("name", STEP)
def test_a_training_step_enters_few_functions(name: str) -> None:
    found = calls.count(calls.training_step(name))
    assert 0 < found.total() <= STEP[name], found.most_common(10)


def test_functions_are_counted_and_not_what_comprehensions_run_as() -> None:
    x = np.ones(2)
    found = calls.count(lambda: [namespace(x) for _ in range(3)] + list(zeros((2,), x) for _ in range(2)))
    assert found == Counter({("xp.py", "namespace"): 5, ("xp.py", "zeros"): 2, ("xp.py", "device"): 2})
