"""The causal call is the definition over prefixes: query i is the definition's function of the keys up to i."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.mechanisms.koopman import definition
from tests.mechanisms.koopman.calls import forward

B, H, N, D = 2, 2, 5, 3
EPS = float(np.finfo(np.float64).eps)


def growth(saved: tuple[Any, ...], epsilon: float) -> float:
    """Return how many roundings may come together.

    Solving with G grows them by its condition number; psi(x) and its target are sums, whose terms may be larger than
    they are.
    """
    _, _, gram, _, _, _, tape = saved
    most = 1.0
    for _, fit in tape[1:]:
        keys, _, points, _, dual, _, _, once, _, both, *_ = fit
        functions = np.abs(definition.kernel(points[..., -2:, :], keys))  # (b, h, i, 2, o): at q' and at x
        rows = functions @ np.swapaxes(np.abs(dual), -1, -2)  # (b, h, i, 2, l)
        most = max(most, float(np.max(rows @ (np.abs(both) + epsilon * np.abs(once)))))
    return most * float(np.max(np.linalg.cond(gram)))


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_causal_call_is_the_definition_over_prefixes(seed: int, updates: int) -> None:
    """With every gradient; 10 roundings, as they may grow."""
    q, k, v, d_out = philox.normal((4, B, H, N, D), seed=seed, purpose="koopman.definition")
    ridge, epsilon = 0.1 * (1 + seed), 0.05 * (1 + seed)
    numbers: dict[str, Any] = {"updates": updates, "jitter": 1e-2, "ridge": ridge, "epsilon": epsilon}
    given = numbers | {"ridge": np.asarray(ridge), "epsilon": np.asarray(epsilon)}
    out, saved = forward(q, k, v, causal=True, **given)
    found = {"out": out, **ra.koopman.backward(saved, d_out)}
    expected: dict[str, Any] = {name: np.zeros(np.shape(x)) for name, x in found.items()}
    most = 1.0
    for i in range(N):
        at, before = np.s_[:, :, i : i + 1], np.s_[:, :, : i + 1]
        expected["out"][at], kept = definition.forward(q[at], k[before], v[before], **numbers)
        gradients = definition.backward(kept, d_out[at])
        expected["q"][at] = gradients["q"]
        expected["k"][before] += gradients["k"]
        expected["v"][before] += gradients["v"]
        expected["ridge"] += gradients["ridge"]
        expected["epsilon"] += gradients["epsilon"]
        most = max(most, growth(kept, epsilon))
    for name, value in expected.items():
        allowed = 10.0 * EPS * most * max(1.0, float(np.max(np.abs(value))))
        np.testing.assert_allclose(found[name], value, rtol=0.0, atol=allowed, err_msg=name)
