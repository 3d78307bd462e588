"""Thresholds, rows that they empty, padding and tokens that may attend nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import Hard, core, definition, loops
from refattn.mechanisms.graph_energy.implementations.sparse import window_graph
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


def far(dtype: Any) -> dict[str, Any]:
    """Keys of which those that match best are dropped: the softmax over all of them rounds to 0 for the others."""
    scores = np.asarray([[-1.0, -111.0], [0.0, 1.0]], dtype)[None, None]
    v = np.asarray([10.0, 20.0], dtype)[None, None, :, None]
    return {"q": scores, "k": np.eye(2, dtype=dtype)[None, None], "v": v}


@pytest.mark.parametrize("implementation", ["dense", "products", "tiled", "auto"])
@pytest.mark.parametrize("state", ["token", "prefix"])
def test_a_kept_token_is_read_however_small_its_attention_is(implementation: str, state: str) -> None:
    """exp(-110) is 0 in float32: the one token that is kept gets all weight all the same."""
    out, saved = core.forward(**far(np.float32), state=state, steps=0, scale=1.0, implementation=implementation)
    attention: Any = saved.inner.graph.attention
    assert np.array_equal(out[0, 0, :, 0], [20.0, 20.0]) and np.array_equal(attention[0, 0, 0], [1.0, 0.0])
    gradients = core.backward(saved, np.ones_like(out))
    assert np.array_equal(gradients["v"][0, 0, :, 0], [0.0, 2.0]) and not np.any(gradients["q"])


def test_a_kept_token_is_read_in_the_definition_in_loops_and_on_a_sparse_graph() -> None:
    given, root = far(np.float32), np.float32(np.sqrt(2.0))
    out, saved = definition.forward(given["q"] * root, given["k"], given["v"], steps=0)
    assert np.array_equal(out[0, 0, :, 0], [20.0, 20.0])
    assert np.array_equal(definition.backward(saved, np.ones_like(out))["v"][0, 0, :, 0], [0.0, 2.0])
    far_apart = {**far(np.float64), "q": np.asarray([[-1.0, -1111.0], [0.0, 1.0]])[None, None]}
    assert np.array_equal(loops.forward(**far_apart, steps=0, scale=1.0)["GE.13"][0, 0, :, 0], [20.0, 20.0])
    sparse, _ = core.forward(**given, steps=0, scale=1.0, graph=window_graph(2, 1, given["q"]))
    assert np.array_equal(sparse[0, 0, :, 0], [20.0, 20.0])


@pytest.mark.parametrize("options", [{}, {"kind": "soft", "tau": 0.1}, {"kind": "proximal", "tau": 0.1}], ids=str)
@pytest.mark.parametrize("state", ["token", "prefix"])
@pytest.mark.filterwarnings("ignore:step. got more than")
def test_large_scores_in_float32_are_those_of_float64(state: str, options: dict[str, Any]) -> None:
    """Attention rounds to 0 for some of the tokens that are kept; their weights and gradients are right."""
    q, k, v = (draw(name, 3, 4, 9, 4) for name in "qkv")
    results: list[Any] = []
    lost = False
    for dtype in (np.float32, np.float64):
        arrays: Any = ((40.0 * q).astype(np.float32).astype(dtype), k.astype(np.float32).astype(dtype), v.astype(dtype))
        more: dict[str, Any] = {"start": np.asarray([0.8, *[0.01] * 7, 0.6], dtype)} if state == "token" else {}
        more |= {"state": state, "kappa": 0.01, "steps": 1, **options}
        out, saved = forward(*arrays, **more)
        results.append((out, core.backward(saved, np.ones_like(out) * v.astype(dtype))))
        read = np.max(np.where(saved.inner.readout.near > 0.0, saved.inner.graph.attention, 0.0), axis=-1)
        lost = lost or bool(np.any(read < 1e-30))
    assert lost
    for name, x in results[1][1].items():
        np.testing.assert_allclose(results[0][1][name], x, rtol=1e-3, atol=3e-5 * np.max(np.abs(x)), err_msg=name)
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)


def test_a_dropped_token_gets_a_gradient_straight_through_and_no_weight() -> None:
    """Its factor is exp(s - top), which is above 1 where it matches better than all that are kept."""
    start = np.asarray([0.5, 0.3, 0.3])
    q, k, v = (draw(name, 1, 1, 3, 2) for name in "qkv")
    call: dict[str, Any] = {"start": start, "steps": 0, "threshold": Hard(tau=0.4, straight_through=True), "scale": 5.0}
    out, saved = core.forward(q, k, v, **call)
    found = core.backward(saved, np.ones_like(out))["start"]
    assert saved.weights is not None
    logits, d_weights = 5.0 * q @ np.swapaxes(k, -1, -2), np.sum(v, axis=-1)[:, :, None, :]
    kept = np.where(start < 0.4, 0.0, start)
    powers = np.exp(logits)
    weights = powers * kept / np.sum(powers * kept, axis=-1, keepdims=True)
    each = powers / np.sum(powers * kept, axis=-1, keepdims=True)
    expected = np.sum(each * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True)), axis=(0, 1, 2))
    assert np.any(powers[..., 1:] > powers[..., :1]) and not np.any(saved.weights[..., 1:])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


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
