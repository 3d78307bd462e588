"""Claims of sources that no other test of the room holds."""

from __future__ import annotations

from typing import Any

import numpy as np

import refattn as ra
from tests.mechanisms.delta.test_properties import call, close, draw, run, tokens


def test_the_delta_rule_is_a_step_down_the_error() -> None:
    """Yang et al. 2024: S' = S - beta grad of |v - S^T k|^2 / 2, the gradient by differences."""
    x = call("delta", 1, b=1)
    s, k, v, beta, h = x["state"][0, 0], x["k"][0, 0, 0], x["v"][0, 0, 0], x["beta"][0, 0, 0], 1e-4

    def error(at: float, i: int, j: int) -> float:
        moved = s + at * np.outer(np.eye(4)[i], np.eye(3)[j])
        return float(np.sum((v - moved.T @ k) ** 2)) / 2.0

    gradient = np.asarray([[(error(h, i, j) - error(-h, i, j)) / (2.0 * h) for j in range(3)] for i in range(4)])
    np.testing.assert_allclose(run(x)[1].state[0, 0], s - beta * gradient, rtol=0.0, atol=1e-10)


def test_a_momentum_gathers_steps_down_the_error() -> None:
    """MomentumDeltaNet: M' = mu M - step grad and S' = S + beta M', heavy-ball descent of the same error."""
    x = call("momentum", 6, b=1, h=1, f=1, g=1)
    s, m = x["state"][0, 0, 0], x["state"][0, 0, 1]
    for n in range(6):
        one = {name: array[0, 0, n] for name, array in tokens(x, slice(None)).items() if name != "state"}
        s = np.exp(one.get("log_decay", 0.0)) * s
        m = np.exp(one["log_momentum"]) * m - one["step"] * np.outer(one["k"], s.T @ one["k"] - one["v"])
        s = s + one["beta"] * m
    close(run(x)[1].state[0, 0], np.stack([s, m]))


def test_a_state_that_decays_is_masked_attention() -> None:
    """Dao and Gu 2024: the output is (L * q k^T) v, L the products of the decays between two tokens."""
    q, k, v = (draw(name, 1, 2, 7, 4) for name in "qkv")
    log_decay = -np.abs(draw("decay", 1, 2, 7))
    total = np.cumsum(log_decay, axis=2)
    decays = np.tril(np.exp(total[..., :, None] - total[..., None, :]))
    wanted = (decays * (q @ np.swapaxes(k, 2, 3))) @ v
    more: dict[str, Any]  # the mask within a chunk has the decays, too
    for more in ({"implementation": "recurrent"}, {"implementation": "chunked", "chunk": 3}):
        close(ra.delta.forward(q, k, v, log_decay=log_decay, scale=1.0, **more)[0], wanted)


def test_a_row_of_the_state_is_a_channel_of_the_keys() -> None:
    """Yang et al. 2024 have it transposed: what is written first is beta k v^T here."""
    q, k, v, beta = draw("q", 1, 2, 1, 4), draw("k", 1, 2, 1, 4), draw("v", 1, 2, 1, 3), np.full((1, 2, 1), 0.7)
    close(ra.delta.forward(q, k, v, beta=beta)[1].state, 0.7 * k[:, :, 0, :, None] * v[:, :, 0, None, :])
