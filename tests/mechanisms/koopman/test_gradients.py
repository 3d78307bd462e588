"""Gradients of what no case has (T18), of a ridge for each coordinate and limits, and the block around the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, philox, tree
from refattn.verify.selfcheck.gradients import STENCIL
from tests.mechanisms.koopman.calls import drawn, forward

BLOCK = ra.mechanism("koopman").block
STEP = 2.0**-10
draw = drawn(23)


def assert_differences(loss: Callable[[dict[str, Any]], float], leaves: dict[str, Any], found: dict[str, Any]) -> None:
    """The gradient of every leaf, along one direction, is the difference of the loss, to 1e-7 of the largest."""
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in leaves.items()}
    largest = max(float(np.linalg.norm(x)) for x in found.values())
    for name, x in leaves.items():
        direction = draw(f"direction.{name}", *x.shape)
        direction = direction / np.linalg.norm(direction)
        change = 0.0
        for n, weight in enumerate(STENCIL, start=1):
            ends = [loss({**leaves, name: x + sign * n * STEP * direction}) for sign in (1.0, -1.0)]
            change += weight * (ends[0] - ends[1]) / STEP
        assert abs(float(np.sum(found[name] * direction)) - change) <= 1e-7 * max(
            float(np.linalg.norm(found[name])), 1e-2 * largest
        ), name


def assert_core(implementation: str, **options: Any) -> None:
    q, k, v = draw("q", 1, 2, 4, 3), draw("k", 1, 1, 5, 3), draw("v", 1, 1, 5, 3)
    usual: dict[str, Any] = {"perturbation": "identity", "updates": 3}
    options = usual | options
    later = options["updates"] - 1
    leaves = {"q": q, "k": k, "v": v, "bandwidth": np.asarray(1.4), "weight": np.asarray(0.7)}
    leaves |= {"ridge": options.pop("ridge", 0.2 + 0.1 * np.arange(later)), "epsilon": np.full((1, later), 0.3)}
    d_out = draw("d", 1, 2, 4, 3)

    def loss(moved: dict[str, Any]) -> float:
        return float(np.sum(forward(**moved, **options, implementation=implementation)[0] * d_out))

    _, saved = forward(**leaves, **options, implementation=implementation)
    assert_differences(loss, leaves, ra.koopman.backward(saved, d_out))


RIDGES = np.asarray([[[0.2, 0.5, 0.2], [0.4, 0.4, 0.1]], [[0.3, 0.3, 0.9], [1.0, 0.2, 0.2]]])
"""Two candidates and two updates; two coordinates share a ridge, and have gradients of their own."""


@pytest.mark.parametrize("implementation", ["dense", "shared"])
@pytest.mark.parametrize(
    "options",
    [
        {"ridge": RIDGES},
        {"ridge": RIDGES, "fit": "separable", "causal": True},
        {"ridge": RIDGES, "space": "augmented", "tau": 1.0, "scale": "mean"},
        {"ridge": RIDGES, "space": "full"},
        pytest.param({"fit": "separable", "nuclear": 0.2, "space": "full", "tau": 1.0}, marks=pytest.mark.slow),
        pytest.param(
            {"fit": "separable", "norm": 0.35, "causal": "top_left", "space": "augmented", "ridge": RIDGES},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_t18_ridges_by_coordinate_and_limits(options: dict[str, Any], implementation: str) -> None:
    assert_core(implementation, jitter=1e-2, **options)


@pytest.mark.parametrize("implementation", ["dense", "shared"])
def test_a_number_without_use_has_gradient_0(implementation: str) -> None:
    q, k, v = draw("q", 1, 1, 3, 2), draw("k", 1, 1, 3, 2), draw("v", 1, 1, 3, 2)
    numbers = {name: np.asarray(0.5) for name in ("ridge", "epsilon", "bandwidth", "weight", "mix")}
    out, saved = forward(q, k, v, updates=1, perturbation="pencil", implementation=implementation, **numbers)
    found = ra.koopman.backward(saved, np.ones_like(out))
    assert set(found) == {"q", "k", "v", *numbers}
    assert all(float(found[name]) == 0.0 for name in numbers)


# --- the block

CONFIG = BLOCK.Config(
    width=6,
    heads=2,
    kv_heads=1,
    head_width=4,
    bias=True,
    updates=3,
    space="augmented",
    fit="separable(tau=1.0)",
    residual=False,
)


def context(case: str) -> Context:
    if case == "memory":
        keep = philox.uniform((2, 5), seed=1, purpose="padding") < 0.7
        return Context(memory=draw("memory", 2, 5, 6), memory_mask=keep)
    return Context(causal=True)


def fresh() -> Any:
    params = BLOCK.init(CONFIG, seed=4, like=np.zeros(1), layer=0)
    moved = {n: x + 0.1 * draw(n, *x.shape) for n, x in tree.flatten(params).items()}
    return tree.unflatten(params, moved)


@pytest.mark.parametrize("case", ["causal", "memory"])
def test_a_block_is_the_core_between_projections(case: str) -> None:
    """Keys and values are those of the memory where there is one, without its padding."""
    params, x, given = fresh(), draw("x", 2, 4, 6), context(case)
    state, _ = BLOCK.forward(params, BLOCK.start(params, x, given), given)
    y = x if given.memory is None else given.memory
    heads = {"q": (x, 2), "k": (y, 1), "v": (y, 1)}
    q, k, v = (
        np.moveaxis(np.reshape(z @ getattr(params, f"w_{n}") + getattr(params, f"b_{n}"), (2, -1, h, 4)), 2, 1)
        for n, (z, h) in heads.items()
    )
    mask = {} if given.memory_mask is None else {"mask": given.memory_mask[:, None, None, :]}
    numbers = {"bandwidth": float(np.exp(params.log_bandwidth[0])), "weight": float(np.exp(params.log_weight[0]))}
    options = {"updates": 3, "space": "augmented", "tau": 1.0, "fit": "separable", "perturbation": "identity"}
    last, _ = forward(q, k, v, causal=given.causal, jitter=1e-2, **mask, **options, **numbers)
    joined = np.reshape(np.moveaxis(last, 1, 2), (2, 4, 8))
    np.testing.assert_allclose(BLOCK.read(params, state), joined @ params.w_o + params.b_o, rtol=1e-12, atol=1e-13)
