"""First momenta from tables: what they are, who has them, and the model, which tells a block its tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, model, philox, tree
from refattn.model import decode
from tests.mechanisms.sympformer.calls import BLOCK, back, draw, run, stack, told

NAMES = ["token_embedding", "position_embedding"]


def test_tables_hold_the_first_momenta() -> None:
    params, x = stack(2, integrator="lie_trotter", mlp="momentum", start="table"), draw("x", 2, 7, 6)
    first = params[0]
    tokens: Any = told(params, x).tokens
    table, places = first.token_embedding, first.position_embedding
    expected = [[table[token] + places[n] for n, token in enumerate(row)] for row in tokens]
    assert np.array_equal(run(params, x)[1][0].attention.p, expected)


def test_a_linear_map_of_different_tokens_is_a_table() -> None:
    """E = x W: the same layers, and dW = x^T dE."""
    x, d_x, tokens = draw("x", 1, 5, 6), draw("d_x", 1, 5, 6), np.asarray([[3, 0, 4, 1, 2]])
    options: dict[str, Any] = {"integrator": "forward_euler", "mlp": "none", "vocabulary": 5, "layers": 2}
    linear = stack(**options, start="linear")
    config, later = (dataclasses.replace(each.config, start="table") for each in linear)
    rows = (x @ linear[0].w_start)[0, np.argsort(tokens[0])]
    given = {"w_start": None, "token_embedding": rows, "position_embedding": np.zeros((12, 6))}
    table = (dataclasses.replace(linear[0], config=config, **given), dataclasses.replace(linear[1], config=later))
    context = Context(causal=True, tokens=tokens)
    (one, one_saves), (other, other_saves) = run(linear, x), run(table, x, context)
    np.testing.assert_allclose(other.x, one.x, rtol=0.0, atol=1e-13)
    d_linear, d_table = back(linear, one, one_saves, d_x), back(table, other, other_saves, d_x)
    d_rows = d_table["params.0.token_embedding"][tokens[0]]
    np.testing.assert_allclose(x[0].T @ d_rows, d_linear["params.0.w_start"], rtol=0.0, atol=1e-12)
    np.testing.assert_allclose(d_table["params.0.position_embedding"][:5], d_rows, rtol=0.0, atol=1e-12)


def test_tables_of_zeros_are_a_start_at_rest() -> None:
    """Of integrators that move tokens at rest; of the others the first layer has no steps of the positions at rest."""
    x = draw("x", 2, 7, 6)
    (rest,), (table,) = (stack(1, mlp="none", start=start, moved=0.0) for start in ("rest", "table"))
    given = {name: np.zeros_like(getattr(table, name)) for name in NAMES}
    np.testing.assert_allclose(
        run((dataclasses.replace(table, **given),), x)[0].x, run((rest,), x)[0].x, rtol=0.0, atol=1e-13
    )


def test_first_velocities_of_the_mlp_step_have_tables_of_their_own() -> None:
    params, x = stack(2, mlp="velocity(ratio=2, start='table')"), draw("x", 2, 7, 6)
    tokens: Any = told(params, x).tokens
    table, places = params[0].mlp.token_embedding, params[0].mlp.position_embedding
    ahead = run(params, x)[1][0].mlp.ahead
    assert np.array_equal(ahead, [[table[token] + places[n] for n, token in enumerate(row)] for row in tokens])
    assert params[0].token_embedding is None and params[1].mlp.token_embedding is None


def test_only_a_first_layer_that_is_asked_has_tables() -> None:
    for start in ("rest", "linear", "table"):
        for n, each in enumerate(stack(3, start=start)):
            has = [name for name in NAMES if getattr(each, name) is not None]
            assert has == (NAMES if start == "table" and n == 0 else [])


@pytest.mark.parametrize("integrator", ["presymplectic_euler", "strang", "lie_trotter"])
def test_a_looked_up_momentum_knows_nothing_of_its_future(integrator: str) -> None:
    params = stack(2, integrator=integrator, start="table", look_ahead=True, mlp="plain")
    x, now = draw("x", 1, 9, 6), 4
    assert "look" in params[0].numbers or "attention_mu" in params[0].numbers
    tokens: Any = told(params, x).tokens
    later = np.concatenate([tokens[:, :now], 3 - tokens[:, now:]], axis=1)
    before, after = (run(params, x, Context(causal=True, tokens=t))[0].x for t in (tokens, later))
    assert np.array_equal(before[:, :now], after[:, :now]) and not np.array_equal(before, after)
    short = run(params, x[:, :now], told(params, x[:, :now]))[0].x
    np.testing.assert_allclose(short, before[:, :now], rtol=0.0, atol=1e-12)


def config(**options: Any) -> model.Config:
    sizes: dict[str, Any] = {"vocabulary": 11, "context": 13, "width": 8, "heads": 2, "layers": 2}
    return model.Config("sympformer", **sizes, options={"start": "table", **options})


def test_a_model_gives_its_sizes_and_its_tokens() -> None:
    params = model.init(config(), seed=5, like=np.zeros(1))
    tokens = philox.integers((2, 13), 0, 11, seed=5, purpose="tokens")
    shapes = {name: leaf.shape for name, leaf in tree.flatten(params).items()}
    assert shapes["layers.0.block.token_embedding"] == (11, 8)
    assert shapes["layers.0.block.position_embedding"] == (13, 8)
    logits, saved = model.forward(params, tokens)
    found = tree.flatten(model.backward(params, saved, draw("d_logits", *logits.shape)))
    assert {name: gradient.shape for name, gradient in found.items()} == shapes
    assert [name for name, gradient in found.items() if not np.any(gradient)] == []


@pytest.mark.parametrize("streams", [True, False])
def test_decoding_gives_the_logits_of_the_whole(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    params = tree.map_leaves(lambda w: w + 0.1 * draw("moved", *w.shape), model.init(config(), like=np.zeros(1)))
    tokens = philox.integers((2, 13), 0, 11, seed=5, purpose="tokens")
    whole = model.forward(params, tokens)[0]
    record = params.config.record if streams else dataclasses.replace(params.config.record, stream=None)
    monkeypatch.setattr(model.Config, "record", property(lambda self: record))
    cache, first = decode.start(params, 2), 0
    for stop in (5, 6, 13):
        logits, cache = decode.extend(params, cache, tokens[:, first:stop])
        np.testing.assert_allclose(logits, whole[:, stop - 1], rtol=1e-11, atol=1e-12)
        first = stop


# --- bad input


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (None, ValueError, r"context.tokens: got None, start='table' needs the numbers of the tokens \(1, 4\)"),
        (np.zeros((1, 3), np.int64), ValueError, r"context.tokens: got shape \(1, 3\), needs \(1, 4\)"),
        (np.full((1, 4), 4), ValueError, "context.tokens: got one outside of 0 to 3"),
        (np.full((1, 4), -1), ValueError, "context.tokens: got one outside of 0 to 3"),
        (np.zeros((1, 4)), TypeError, "context.tokens: got dtype float64, needs an integer type"),
    ],
)
def test_wrong_tokens(tokens: Any, kind: type[Exception], message: str) -> None:
    (params,), x = stack(1, start="table"), draw("x", 1, 4, 6)
    state = BLOCK.start(params, x, Context())
    with pytest.raises(kind, match=message):
        BLOCK.forward(params, state, Context(tokens=tokens))


@pytest.mark.parametrize("start", ["rest", "linear"])
def test_tokens_that_nothing_reads(start: str) -> None:
    (params,), x = stack(1, start=start), draw("x", 1, 4, 6)
    message = f'context.tokens was given with start="{start}", which reads none; needs "table"'
    with pytest.raises(ValueError, match=message):
        BLOCK.forward(params, BLOCK.start(params, x, Context()), Context(tokens=np.zeros((1, 4), int)))


def test_more_tokens_than_positions() -> None:
    (params,), x = stack(1, start="table", context=3), draw("x", 1, 4, 6)
    with pytest.raises(ValueError, match="context.tokens: got 4 in all, needs at most 3"):
        run((params,), x)


def test_a_mechanism_that_reads_no_tokens_raises() -> None:
    block, x = ra.mechanism("softmax").block, draw("x", 1, 4, 6)
    params = block.init(block.Config(width=6, heads=2), like=x)
    with pytest.raises(ValueError, match="context.tokens was given, but Softmax attention reads only"):
        block.start(params, x, Context(causal=True, tokens=np.zeros((1, 4), int)))
