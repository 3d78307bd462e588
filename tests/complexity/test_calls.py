"""How many functions of refattn a call enters: what it costs beside its mathematics, counted without a clock.

A number that has grown is a check, a lookup or a walk over a tree that is made once more than it was. The message has
the functions that are called most; raise the bound if what was added is worth it.

Counted is a call like earlier ones: what is remembered from one call to the next is there. What a comprehension or a
generator is run as depends on the interpreter, and is left out.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import refattn
from refattn import backends
from refattn.golden.inputs import make, make_upstream
from refattn.mechanisms.context import Context
from refattn.mechanisms.registry import list_mechanisms, mechanism
from refattn.train import data, loop
from refattn.train.settings import Settings
from refattn.xp import namespace, zeros

CORE = {
    "softmax": (15, 30),
    "higher_order": (70, 58),
    "sympformer": (43, 28),
    "graph_energy": (162, 193),
    "koopman": (438, 233),
    "growing": (15, 30),
    "delta": (58, 68),
}
BLOCK = {
    "softmax": (155, 140),
    "higher_order": (215, 170),
    "sympformer": (330, 400),
    "graph_energy": (510, 475),
    "koopman": (580, 372),
    "growing": (168, 155),
    "delta": (260, 310),
}
"""At most so many functions, forward and backward: what was counted, and about a twentieth more."""

STEP = {"softmax": 1770, "sympformer": 2130}
"""The same for a training step."""


HOME = str(Path(str(refattn.__file__)).parent)

INLINE = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")

Place = tuple[str, str]
"""A file and a function of it."""


def count(call: Callable[[], Any]) -> Counter[Place]:
    """Return how often each Python function is called."""
    for _ in range(3):
        call()
    found: Counter[Place] = Counter()

    def seen(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and code.co_name not in INLINE:
            found[code.co_filename.removeprefix(HOME).lstrip(os.sep), code.co_qualname] += 1

    with backends.use_workers(1):
        sys.setprofile(seen)
        try:
            call()
        finally:
            sys.setprofile(None)
    return found


def core_calls(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the forward and the backward of a core, on its case "tiny"."""
    record = mechanism(name)
    core, case = record.core, record.case("tiny")
    assert core is not None
    given = {**make(name, case, "float32"), **case.options}
    out, saved = core.forward(**given)
    d_out = make_upstream(name, case, "out", out.shape, "float32")
    return lambda: core.forward(**given), lambda: core.backward(saved, d_out)


def block_calls(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the forward and the backward of a block, on eight tokens."""
    record, x = mechanism(name), np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(1, 8, 8)
    block, context = record.block, Context(causal="causal" in record.context_fields)
    params = block.init(block.Config(width=8, heads=2), like=x)
    state = block.start(params, x, context)
    last, saved = block.forward(params, state, context)
    d_state, _ = block.read_backward(params, last, x)
    return lambda: block.forward(params, state, context), lambda: block.backward(params, saved, d_state)


def training_step(mechanism: str) -> Callable[[], Any]:
    """Return a step of a model of one layer: data, loss, gradients, clipping and AdamW."""
    settings = Settings(mechanism, context=8, width=8, heads=2, layers=1, batch=2, warmup=1)
    state, given = loop.fresh(settings), np.arange(64, dtype=np.uint8)
    return lambda: loop.step(state, settings, data.Text("made", given, given, data.Counts(), ""))


@pytest.mark.parametrize("name", list_mechanisms())
def test_a_core_and_a_block_enter_few_functions(name: str) -> None:
    for made, bounds in ((core_calls, CORE), (block_calls, BLOCK)):
        found = [count(call) for call in made(name)]
        counts = [one.total() for one in found]
        within = [0 < n <= bound for n, bound in zip(counts, bounds[name], strict=True)]
        assert all(within), f"{counts}, at most {bounds[name]}: {[one.most_common(5) for one in found]}"


@pytest.mark.parametrize("name", STEP)
def test_a_training_step_enters_few_functions(name: str) -> None:
    found = count(training_step(name))
    assert 0 < found.total() <= STEP[name], found.most_common(10)


def test_functions_are_counted_and_not_what_comprehensions_run_as() -> None:
    x = np.ones(2)
    found = count(lambda: [namespace(x) for _ in range(3)] + list(zeros((2,), x) for _ in range(2)))
    assert found == Counter({("xp.py", "namespace"): 5, ("xp.py", "zeros"): 2, ("xp.py", "device"): 2})
