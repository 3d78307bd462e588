"""Scores that begin a little off where they start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Context, mechanism
from tests.mechanisms.graph_energy.calls import STATES, B, H, N, draw, run

CHANNELS = {"token": 1, "prefix": N, "query": N, "feature": 5}


def test_it_takes_scores_off_a_ridge() -> None:
    """At b = 0 a score between two wells stays for ever, and with a jitter falls into the well on its side."""
    options: dict[str, Any] = {"intrinsic": "double_well", "kappa": 0.0, "step": 0.1, "steps": 400, "tau": 0.0}
    start, jitter = np.zeros((H, N)), 1e-3 * draw("jitter", B, H, N, 1)
    assert not np.any(run(**options, start=start)[1].scores)
    found = run(**options, start=start, jitter=jitter)[1]
    np.testing.assert_allclose(found.scores, np.sign(jitter), rtol=0, atol=1e-12)
    assert np.array_equal(found.inner.flow.states[0], jitter) and not np.any(found.inner.graph.start)


@pytest.mark.parametrize("state", STATES)
def test_scores_forget_it_where_they_are_drawn_to_one_rest(state: str) -> None:
    """It is no part of the anchor, and a jitter of 0 changes no bit."""
    options: dict[str, Any] = {"state": state, "symmetrise": "min", "steps": 200, "coupling": "tanh"}
    plain, zero, far = (
        run(**options, jitter=jitter)[1].scores
        for jitter in (None, np.zeros((1,)), 0.1 * draw("jitter", B, H, N, CHANNELS[state]))
    )
    assert np.array_equal(plain, zero)
    np.testing.assert_allclose(far, plain, rtol=0, atol=1e-12)


def test_a_block_takes_it_from_the_draws() -> None:
    block, x = mechanism("graph_energy").block, draw("x", B, N, 6)
    draws = {"start": draw("draws", B, 2, N, 1)}
    params = block.init(block.Config(width=6, heads=2, jitter=0.1), seed=1, like=x)
    _, saved = block.forward(params, block.start(params, x, Context()), Context(draws=draws))
    np.testing.assert_allclose(
        saved.core.inner.flow.states[0] - saved.core.inner.graph.start, 0.1 * draws["start"], rtol=0, atol=1e-15
    )
    stream = mechanism("graph_energy").stream
    assert stream is not None
    with pytest.raises(ValueError, match="jitter: got a block with one"):
        stream.prefill(params, stream.start(params, B), block.start(params, x, Context()), Context(causal=True))
