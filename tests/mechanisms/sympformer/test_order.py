"""Orders of convergence: blocks that share their parameters are steps of one system, damped and causal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Context, tree
from refattn.mechanisms.sympformer.config import Number
from tests.mechanisms.sympformer.calls import BLOCK, INTEGRATORS, draw, stack
from tests.rows import holds

SECOND = ("presymplectic", "strang", "ab2", "etd_ab2")
TIME = 0.5


def solution(steps: int, integrator: str, learned: bool = False, **options: Any) -> Any:
    """Where the tokens are after `steps` steps of the time that each has."""
    kind = f"{integrator}(step={TIME / steps}, learned=False{', angle=1.0' if learned else ''})"
    given = {"mlp": "none", "normalise": "none", "start": "linear", "damping": "loglin(c_log=3.0, c_lin=0.3)"}
    first, middle, _ = stack(3, moved=0.05, spread=0.2, integrator=kind, **given, **options)
    shared = {name: value for name, value in tree.flatten(first).items() if name != "w_start"}
    if "xi" in first.numbers:
        shared["numbers.xi"] = np.asarray([Number("unit", 0.3).raw()])
    later = tree.unflatten(middle, {name: shared[name] for name in tree.flatten(middle)})
    first = tree.unflatten(first, {**shared, "w_start": first.w_start})
    context = Context(causal=True)
    state = BLOCK.start(first, draw("x", 1, 4, 6), context)
    for n in range(steps):
        state, _ = BLOCK.forward(first if n == 0 else later, state, context)
    return state.x


def slope(integrator: str, first: int = 20, **options: Any) -> float:
    coarse, middle, fine = (solution(first * times, integrator, **options) for times in (1, 2, 4))
    return float(np.log2(np.linalg.norm(coarse - middle) / np.linalg.norm(middle - fine)))


@pytest.mark.parametrize("integrator", [name for name in INTEGRATORS if name != "plain_euler"])
def test_order(integrator: str) -> None:
    """What `plain_euler` keeps of a momentum does not depend on the step: it has no limit."""
    assert slope(integrator) == pytest.approx(2.0 if integrator in SECOND else 1.0, abs=0.1)


@pytest.mark.parametrize("integrator", ["presymplectic_euler", "half_damped", *SECOND])
def test_order_of_linear_attention(integrator: str) -> None:
    order = 2.0 if integrator in SECOND else 1.0
    assert slope(integrator, oracle="linear") == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("integrator", ["presymplectic", "strang"])
def test_a_learned_rotation_is_of_first_order(integrator: str) -> None:
    first = 20 if integrator == "presymplectic" else 80
    assert slope(integrator, first, learned=True) == pytest.approx(1.0, abs=0.1)
    said = "as said, with a rotation by a fixed rate; with a learned angle presymplectic and Strang are of first order"
    assert holds("sympformer", "presymplectic, Strang, AB2 and ETD-AB2 are of second order") == said


def test_all_go_to_one_limit() -> None:
    exact = solution(160, "presymplectic")
    for integrator in INTEGRATORS:
        if integrator != "plain_euler":
            error = np.linalg.norm(solution(80, integrator) - exact) / np.linalg.norm(exact)
            assert error < (2e-4 if integrator in SECOND else 1e-2), integrator
