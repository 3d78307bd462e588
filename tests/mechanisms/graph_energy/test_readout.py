"""Thresholds, rows that they empty, padding and tokens that may attend nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import core
from tests.mechanisms.graph_energy.calls import STATES, B, H, N, draw, forward, kept, qkv, run


def emptied(**options: Any) -> tuple[Any, Any, Any]:
    """A call in which the threshold empties some rows and leaves others, and which rows those are."""
    # The diagonal may be attended; few others.
    mask = kept("few", B, H, N, N, keep=0.3) | np.eye(N, dtype=np.bool_)
    out, saved = run(mask=mask, tau=0.5, **options)
    rows = ~saved.inner.readout.filled[..., 0]
    assert np.any(rows) and not np.all(rows)
    return out, saved, rows


def test_emptied_rows_go_to_the_largest_score() -> None:
    out, saved, rows = emptied()
    attention, x = saved.inner.graph.attention, saved.scores[..., 0]
    best = np.argmax(np.where(attention > 0.0, attention * x[:, :, None, :], -np.inf), axis=-1)
    v = np.repeat(qkv()[2], 2, axis=1)
    expected = np.take_along_axis(v, best[..., None], axis=2)
    assert np.array_equal(out[rows], expected[rows])
    assert np.array_equal(np.sum(saved.weights, axis=-1)[rows], np.ones(np.sum(rows)))


def test_emptied_rows_keep_their_attention() -> None:
    out, saved, rows = emptied(empty="dense")
    assert np.array_equal(saved.weights[rows], saved.inner.graph.attention[rows])


def test_emptied_rows_are_an_error() -> None:
    _, _, rows = emptied()
    first = tuple(int(n) for n in np.argwhere(rows)[0])
    message = f"batch {first[0]}, head {first[1]}, token {first[2]}: no score is above tau"
    with pytest.raises(FloatingPointError, match=message):
        emptied(empty="error")
    run(empty="error", tau=0.0, mask=kept("few", B, H, N, N, keep=0.1))  # a row that may attend nothing is none


@pytest.mark.parametrize("empty", ["argmax", "dense", "zero"])
@pytest.mark.parametrize("tau", [0.3, 10.0])
@pytest.mark.parametrize("state", STATES)
def test_a_token_that_may_attend_nothing(state: str, tau: float, empty: str) -> None:
    """Its output is 0, and no gradient comes from it."""
    mask = np.ones((N, N), dtype=np.bool_)
    mask[2] = False
    out, saved = run(state=state, mask=mask, tau=tau, empty=empty)
    assert not np.any(out[:, :, 2])
    d_out = np.zeros(out.shape)
    d_out[:, :, 2] = draw("d_out", *out.shape)[:, :, 2]
    assert all(not np.any(d) for d in core.backward(saved, d_out).values())


def test_a_score_at_the_threshold() -> None:
    """ "hard" keeps it, "soft" drops it."""
    q = k = np.zeros((1, 1, 3, 2))
    v = draw("v", 1, 1, 3, 2)
    for kind, rest in (("hard", 0.5), ("soft", 0.0)):
        _, saved = forward(q, k, v, tau=0.5, kind=kind)
        assert np.array_equal(saved.inner.readout.kept, np.full((1, 1, 3, 1), rest))


def test_what_an_unmasked_row_of_padding_would_do() -> None:
    """Masked as a key alone, padding still acts on others where the graph is symmetric."""
    keep = np.array([True] * 6 + [False])
    q, k, v = qkv()
    other = q.copy()
    other[:, :, ~keep] += 1.0
    for mask, same in ((keep[None, :], False), (keep[:, None] & keep, True)):
        outs = [forward(x, k, v, mask=mask, symmetrise="mean", step=0.1)[0][:, :, keep] for x in (q, other)]
        assert np.array_equal(*outs) == same


def test_default_thresholds() -> None:
    assert run()[1].inner.readout.tau == 0.4
    assert run(state="feature")[1].inner.readout.tau == 0.0
    mask = kept("mask", B, H, N, N)
    seen = np.maximum(np.sum(mask, axis=-1), 1)
    assert np.array_equal(run(state="query", mask=mask)[1].inner.readout.tau[:, :, 0], 0.25 / seen)
