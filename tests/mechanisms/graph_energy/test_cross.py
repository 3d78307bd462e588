"""Queries that attend other tokens: nodes are keys, links come from their own scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context
from refattn.mechanisms.graph_energy import core
from tests.mechanisms.graph_energy.calls import B, D, E, G, H, draw, flat, forward, qkv, run

ROWS, KEYS = 5, 8
GRAPHS = ("kernel", "mean", "min", "none")


def arrays() -> dict[str, Any]:
    return {"q": draw("q", B, H, ROWS, D), "k": draw("k", B, G, KEYS, D), "v": draw("v", B, G, KEYS, E)}


def cross(state: str = "token", **options: Any) -> tuple[Any, Any]:
    given = arrays() | ({"start": np.abs(draw("start", H, KEYS))} if state == "token" else {}) | options
    return forward(**given, state=state, over="keys")


def test_limits_are_softmax_attention() -> None:
    expected = ra.softmax.forward(**arrays())[0]
    out, _ = cross("query", kappa=0.0, tau=0.0)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-15)
    out, saved = cross(mu=0.0, steps=900, tau=0.0)
    assert np.max(np.ptp(saved.scores, axis=2)) < 1e-13
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("symmetrise", ["kernel", "mean", "min"])
def test_tied_queries_and_keys_have_the_graph_of_both(symmetrise: str) -> None:
    """Where q = k the scores of keys with keys are those of the tokens."""
    _, k, v = qkv()
    q = np.repeat(k, 2, axis=1)
    out, saved = forward(q, k, v, symmetrise=symmetrise, step=0.1)
    options: dict[str, Any] = {"symmetrise": symmetrise, "step": 0.1, "over": "keys"}
    other, again = forward(q, k, v, start=saved.inner.graph.start[..., 0], **options)
    np.testing.assert_allclose(np.asarray(again.graph), np.asarray(saved.graph), rtol=0, atol=1e-15)
    np.testing.assert_allclose(other, out, rtol=0, atol=1e-14)


@pytest.mark.parametrize("symmetrise", GRAPHS)
@pytest.mark.parametrize("state", ["token", "query"])
def test_a_key_that_no_query_may_attend_is_as_good_as_deleted(state: str, symmetrise: str) -> None:
    keep = np.array([True, False, True, True, False, True, True, True])
    given = arrays()
    more: dict[str, Any] = {"symmetrise": symmetrise, "step": 0.1}
    start = np.abs(draw("start", H, KEYS))
    out, saved = cross(state, **more, mask=keep[None, :], **({"start": start} if state == "token" else {}))
    short = given | {"k": given["k"][:, :, keep], "v": given["v"][:, :, keep]}
    other, again = cross(state, **more, **short, **({"start": start[:, keep]} if state == "token" else {}))
    np.testing.assert_allclose(out, other, rtol=0, atol=1e-14)
    d = draw("d_out", *out.shape)
    long_d, short_d = core.backward(saved, d), core.backward(again, d)
    np.testing.assert_allclose(long_d["q"], short_d["q"], rtol=0, atol=1e-13)
    np.testing.assert_allclose(long_d["k"][:, :, keep], short_d["k"], rtol=0, atol=1e-13)
    assert not np.any(long_d["k"][:, :, ~keep])


@pytest.mark.parametrize("state", ["token", "query"])
def test_a_graph_of_ones_own_links_keys(state: str) -> None:
    """Dense or sparse, and a key that no query may attend is no node of it."""
    keep = np.array([True, False, True, True, False, True, True, True])
    links, start = np.abs(draw("links", KEYS, KEYS)), {"start": np.abs(draw("start", H, KEYS))}
    more: dict[str, Any] = {"step": 0.02, **(start if state == "token" else {})}
    dense, _ = cross(state, **more, graph=links)
    sparse, _ = cross(state, **more, graph=ra.graph_energy.sparse_graph(links))
    np.testing.assert_allclose(sparse, dense, rtol=0, atol=1e-13)
    out, saved = cross(state, **more, graph=links, mask=keep[None, :])
    assert not np.any(saved.graph[:, :, ~keep]) and not np.any(saved.graph[..., ~keep])
    short = {name: arrays()[name][:, :, keep] for name in "kv"} | {"step": 0.02, "graph": links[keep][:, keep]}
    short |= {"start": start["start"][:, keep]} if state == "token" else {}
    np.testing.assert_allclose(out, cross(state, **short)[0], rtol=0, atol=1e-14)


def test_no_query_and_no_key() -> None:
    for n, m in ((0, 4), (3, 0)):
        q, k, v = draw("q", B, H, n, D), draw("k", B, G, m, D), draw("v", B, G, m, E)
        out, saved = forward(q, k, v, over="keys", start=np.zeros((H, m)))
        assert out.shape == (B, H, n, E) and not np.any(out)
        assert core.backward(saved, out)["k"].shape == k.shape


def test_a_start_of_ones_own() -> None:
    """It takes the place of the sigmoid of s_jj, and queries of any other kind need as many tokens."""
    out, saved = run()
    again, _ = run(start=saved.inner.graph.start[..., 0])
    assert np.array_equal(out, again)
    with pytest.raises(ValueError, match="k: got 8 tokens and 5 in q, needs as many.*unless its links are over keys"):
        forward(**arrays())


# --- the block


def layer(**config: Any) -> tuple[Any, Any, Any]:
    block = ra.mechanism("graph_energy").block
    x = draw("x", 2, 5, 8)
    return block, x, block.init(block.Config(width=8, heads=2, **flat(**config)), like=x)


def test_a_block_attends_a_memory_and_its_own_tokens() -> None:
    block, x, params = layer(over="keys")
    state = block.start(params, x, Context())
    own, _ = block.forward(params, state, Context())
    same, _ = block.forward(params, state, Context(memory=x))
    np.testing.assert_allclose(own.x, same.x, rtol=0, atol=1e-15)
    memory, mask = draw("memory", 2, 3, 8), np.array([[True, True, False], [True, True, True]])
    out, saved = block.forward(params, state, Context(memory=memory, memory_mask=mask))
    alone, _ = block.forward(params, block.start(params, x[:1], Context()), Context(memory=memory[:1, :2]))
    np.testing.assert_allclose(out.x[:1], alone.x, rtol=0, atol=1e-14)
    d_context = block.backward(params, saved, out)[2]
    assert set(d_context) == {"memory"} and not np.any(d_context["memory"][0, 2])


def test_a_step_and_a_threshold_that_are_learned_start_where_the_configuration_says() -> None:
    softplus = lambda x: np.log1p(np.exp(x))  # noqa: E731
    block, x, params = layer(learn_step=True, learn_tau=True, kind="soft")
    np.testing.assert_allclose(softplus(params.raw_step), np.full(2, 1.0 / 3.0), rtol=1e-14)
    np.testing.assert_allclose(softplus(params.raw_tau), np.full(2, 0.4), rtol=1e-14)
    plain, _, others = layer(kind="soft")
    state = block.start(params, x, Context())
    found, expected = block.forward(params, state, Context())[0], plain.forward(others, state, Context())[0]
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-14)
    _, _, given = layer(learn_step=True, step=0.05, learn_tau=True, tau=0.01, kind="proximal", state="query")
    np.testing.assert_allclose(softplus(given.raw_step), np.full(2, 0.05), rtol=1e-13)
