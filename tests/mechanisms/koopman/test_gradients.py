"""Gradients of everything that learns are differences (T18): of the core by every option, of the block, of decoding."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, philox, tree
from refattn.mechanisms.koopman.options.kernel import KERNELS
from refattn.verify.selfcheck.gradients import STENCIL
from tests.mechanisms.koopman.calls import drawn, forward
from tests.mechanisms.koopman.test_own import KERNEL
from tests.thinned import thinned

BLOCK = ra.mechanism("koopman").block
STEP = 2.0**-10
IMPLEMENTATIONS = ["dense", pytest.param("shared", marks=pytest.mark.slow)]
"""That the shared implementation has the gradients of the dense one stands in test_implementations.py."""


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
    leaves = {"q": q, "k": k, "v": v}
    if options.get("kernel") not in ("linear", KERNEL):
        leaves |= {"bandwidth": np.asarray(1.4), "weight": np.asarray(0.7)}
    leaves |= {"ridge": options.pop("ridge", 0.2 + 0.1 * np.arange(later)), "epsilon": np.full((1, later), 0.3)}
    if options["perturbation"] == "pencil":
        leaves["mix"] = np.asarray(0.8)
    if options["perturbation"] == "shift":
        leaves["epsilon"] = leaves["epsilon"] + 2.0
    d_out = draw("d", 1, 2, 4, 3)

    def loss(moved: dict[str, Any]) -> float:
        return float(np.sum(forward(**moved, **options, implementation=implementation)[0] * d_out))

    _, saved = forward(**leaves, **options, implementation=implementation)
    assert_differences(loss, leaves, ra.koopman.backward(saved, d_out))


SPACES: tuple[dict[str, Any], ...] = ({}, {"space": "full"}, {"space": "augmented"})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("kernel", "fit"), [*itertools.product(KERNELS, ("stein", "separable"))])
def test_t18_kernels_fits_and_spaces(kernel: str, fit: str, space: dict[str, Any], implementation: str) -> None:
    assert_core(implementation, kernel=kernel, fit=fit, **space)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options",
    thinned(
        [
            {"tau": 1.0},
            {"tau": 1.0, "perturbation": "pencil"},
            {"tau": 1.0, "perturbation": "shift", "space": "full"},
            {"perturbation": "pencil"},
            {"perturbation": "shift"},
            {"scale": "mean", "window": 1},
            {"similarity": "kernel", "kernel": "matern52"},
            {"similarity": "kernel", "space": "augmented", "tau": 1.0},
            {"updates": 2},
            {"updates": 5},
            {"mask": np.asarray([True, False, True, True, True])[None, None, None]},
            {"causal": True, "fit": "separable"},
            {"causal": "top_left", "fit": "separable", "space": "augmented"},
            {"causal": True, "fit": "separable", "scale": "mean", "tau": 1.0},
        ],
        2,
    ),
)
def test_t18_options(options: dict[str, Any], implementation: str) -> None:
    assert_core(implementation, **options)


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
        {"kernel": KERNEL, "fit": "separable", "causal": True},
        {"kernel": KERNEL, "fit": "separable", "causal": True, "space": "full"},
        {"fit": "separable", "rank": 1, "scale": "mean", "tau": 1.0},
        pytest.param({"fit": "separable", "norm": 0.3}, marks=pytest.mark.slow),
        pytest.param({"fit": "separable", "nuclear": 0.2, "space": "full", "tau": 1.0}, marks=pytest.mark.slow),
        pytest.param(
            {"fit": "separable", "norm": 0.35, "causal": "top_left", "space": "augmented", "ridge": RIDGES},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: re.sub(" at 0x[0-9a-f]+", "", str(options)),  # all workers have to name a test alike
)
def test_t18_ridges_by_coordinate_own_kernels_and_limits(options: dict[str, Any], implementation: str) -> None:
    assert_core(implementation, jitter=1e-2, **options)


@pytest.mark.parametrize("space", SPACES)
def test_t18_masks_of_pairs(space: dict[str, Any]) -> None:
    """Of the dense implementation alone; the first row sees one key, with more transitions than observables."""
    mask = philox.uniform((4, 5), seed=2, purpose="mask") < 0.7
    mask[0] = [False, True, False, False, False]
    assert_core("dense", mask=mask, **space)
    assert_core("dense", causal="top_left", updates=4, **space)


@pytest.mark.parametrize("implementation", ["dense", "shared"])
def test_a_number_without_use_has_gradient_0(implementation: str) -> None:
    q, k, v = draw("q", 1, 1, 3, 2), draw("k", 1, 1, 3, 2), draw("v", 1, 1, 3, 2)
    numbers = {name: np.asarray(0.5) for name in ("ridge", "epsilon", "bandwidth", "weight", "mix")}
    out, saved = forward(q, k, v, updates=1, perturbation="pencil", implementation=implementation, **numbers)
    found = ra.koopman.backward(saved, np.ones_like(out))
    assert set(found) == {"q", "k", "v", *numbers}
    assert all(float(found[name]) == 0.0 for name in numbers)


# --- the block

CONFIGS = {
    "default": BLOCK.Config(width=6, heads=2),
    "full": BLOCK.Config(
        width=6,
        heads=2,
        kv_heads=1,
        head_width=4,
        bias=True,
        updates=3,
        space="augmented",
        fit="separable(tau=1.0)",
        residual=False,
    ),
    "stein": BLOCK.Config(width=6, heads=2, fit="stein", kernel="matern52", similarity="kernel"),
    "linear": BLOCK.Config(width=6, heads=1, kernel="linear", perturbation="pencil", learn_kernel=False),
}


def context(case: str) -> Context:
    if case == "memory":
        keep = philox.uniform((2, 5), seed=1, purpose="padding") < 0.7
        return Context(memory=draw("memory", 2, 5, 6), memory_mask=keep)
    if case == "draws":
        return Context(draws={"ridge": np.asarray(0.3), "epsilon": np.asarray(0.05)})
    return Context(causal=case == "causal")


def fresh(name: str) -> Any:
    params = BLOCK.init(CONFIGS[name], seed=4, like=np.zeros(1), layer=0)
    moved = {n: x + 0.1 * draw(n, *x.shape) for n, x in tree.flatten(params).items()}
    return tree.unflatten(params, moved)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[] if (n - m) % 4 in (0, 2) else pytest.mark.slow)
        for n, name in enumerate(CONFIGS)
        for m, case in enumerate(("plain", "causal", "memory", "draws"))
    ],
)
def test_the_gradients_of_a_block(name: str, case: str) -> None:
    params, x, given, d_y = fresh(name), draw("x", 2, 4, 6), context(case), draw("d_y", 2, 4, 6)
    leaves = {"x": x, **tree.flatten(params), **({} if given.memory is None else {"memory": given.memory})}

    def loss(moved: dict[str, Any]) -> float:
        at = tree.unflatten(params, {n: a for n, a in moved.items() if n not in ("x", "memory")})
        where = replace(given, memory=moved.get("memory"))
        state, _ = BLOCK.forward(at, BLOCK.start(at, moved["x"], where), where)
        return float(np.sum(BLOCK.read(at, state) * d_y))

    state, saved = BLOCK.forward(params, BLOCK.start(params, x, given), given)
    d_state, _ = BLOCK.read_backward(params, state, d_y)
    d_state, d_params, d_context = BLOCK.backward(params, saved, d_state)
    d_x, _ = BLOCK.start_backward(params, d_state)
    assert ("log_bandwidth" in tree.flatten(d_params)) == CONFIGS[name].learns
    assert_differences(loss, leaves, {"x": d_x, **tree.flatten(d_params), **d_context})


@pytest.mark.parametrize("case", ["causal", "memory"])
def test_a_block_is_the_core_between_projections(case: str) -> None:
    """Keys and values are those of the memory where there is one, without its padding."""
    params, x, given = fresh("full"), draw("x", 2, 4, 6), context(case)
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


def test_padding_is_deletion() -> None:
    params, x = fresh("default"), draw("x", 1, 5, 6)
    padded = np.concatenate([x[:, :3], 3.0 * x[:, 3:]], axis=1)
    given = Context(key_mask=np.asarray([[True, True, True, False, False]]))
    out = BLOCK.forward(params, BLOCK.start(params, padded, given), given)[0].x
    short = BLOCK.forward(params, BLOCK.start(params, x[:, :3], Context()), Context())[0].x
    np.testing.assert_allclose(out[:, :3], short, atol=1e-9)
