"""Noise that is given and restarts: gradients, steps spelled out, causality, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, model
from refattn.model import decode
from tests.mechanisms.sympformer.calls import BLOCK, check_gradients, draw, run, stack

YURII: dict[str, Any] = {"integrator": "lie_trotter", "mlp": "momentum", "look_ahead": True, "start": "linear"}
PLACES = ("ahead", "force", "momentum", "mlp_ahead", "mlp_force", "mlp_momentum", "start")


def noise(*places: str) -> dict[str, Any]:
    return {f"noise_{place}": 0.3 * draw(f"noise {place}", 2, 5, 6) for place in places}


@pytest.mark.parametrize(
    ("options", "draws", "causal"),
    [
        ({**YURII}, noise(*PLACES), True),
        ({"integrator": "strang", "mlp": "velocity", "start": "linear"}, noise("start"), True),
        ({**YURII, "restart": 1, "mlp": "velocity(start='table')", "start": "table"}, None, True),
        ({**YURII, "restart": 2}, noise(*PLACES), False),
    ],
    ids=["noise", "noise of a momentum", "restarts", "both"],
)
def test_gradients_agree(options: dict[str, Any], draws: Any, causal: bool) -> None:
    tokens = np.asarray([[0, 1, 1, 3, 2], [2, 2, 0, 1, 3]]) if options.get("start") == "table" else None
    params = stack(4 if "restart" in options else 2, **options)
    saves = check_gradients(params, Context(causal=causal, tokens=tokens, draws=draws), alive=False)
    if "restart" in options:
        shares = [float(np.mean(saved.restart.chosen)) for saved in saves if saved.restart is not None]
        assert 0.0 < np.mean(shares) < 1.0


def normed(x: Any, gain: Any) -> Any:
    return gain * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def theirs(params: Any, x: Any, v: Any, n: dict[str, Any]) -> tuple[Any, Any]:
    """The Lie-Trotter block of the first program for one sequence (i, m), with noise in all of its places."""
    num = {name: number.value(params.numbers[name], x) for name, number in params.config.numbers().items()}
    y = normed(x + num["attention_mu"] * v + n.get("noise_ahead", 0.0), params.gain)
    heads = [np.split(y @ w, 2, axis=1) for w in (params.w_q, params.w_k, params.w_v)]
    parts = []
    for q, k, values in zip(*heads, strict=True):
        weights = np.tril(np.exp(q @ k.T / np.sqrt(q.shape[1])))
        parts.append(weights / weights.sum(-1, keepdims=True) @ values)
    force = np.concatenate(parts, axis=1) @ params.w_o + n.get("noise_force", 0.0)
    whole = num["attention_beta"] * v + num["attention_gamma"] * force + n.get("noise_momentum", 0.0)
    v = normed(whole, params.gain_p)
    x = x + v
    y = normed(x + num["mu"] * v + n.get("noise_mlp_ahead", 0.0), params.mlp.gain)
    hidden = y @ params.mlp.w_in
    erf = np.vectorize(__import__("math").erf)
    added = (0.5 * hidden * (1.0 + erf(hidden / np.sqrt(2.0)))) @ params.mlp.w_out + n.get("noise_mlp_force", 0.0)
    v = normed(num["beta"] * v + num["gamma"] * added + n.get("noise_mlp_momentum", 0.0), params.mlp.gain_v)
    return x + v, v


def test_a_stack_is_that_of_the_authors() -> None:
    """For each prefix alone: the last of its tokens begins again where the whole prefix moves less than before."""
    params, draws, x = stack(4, **YURII, restart=1), noise(*PLACES[:-1]), draw("x", 2, 5, 6)
    state, saves = run(params, x, Context(causal=True, draws=draws))
    known, v, before, chosen = x[0], x[0] @ params[0].w_start, None, []
    for layer, each in enumerate(params):
        own = {name: value[0] for name, value in draws.items()}
        after, new = theirs(each, known, v, own)
        fresh, still = theirs(each, known, 0.0 * v, own)
        for i in range(5) if layer else ():
            assert before is not None
            again = np.sum((after - known)[: i + 1] ** 2) < np.sum(before[: i + 1] ** 2)
            chosen.append(again)
            after_i, new_i = (fresh[i], still[i]) if again else (after[i], new[i])
            fresh[i], still[i] = after_i, new_i
        known, before, v = (fresh, fresh - known, still) if layer else (after, after - known, new)
    np.testing.assert_allclose(state.x[0], known, rtol=1e-10)
    assert chosen == [bool(r) for saved in saves[1:] for r in saved.restart.chosen[0, :, 0]]
    assert len(set(chosen)) == 2


def test_a_token_knows_nothing_of_its_future() -> None:
    params, x = stack(4, **YURII, restart=1), draw("x", 2, 5, 6)
    whole, other = run(params, x)[0].x, x.copy()
    other[:, 3:] += 1.0
    np.testing.assert_array_equal(run(params, other)[0].x[:, :3], whole[:, :3])
    # Products of fewer rows may round in another way.
    np.testing.assert_allclose(run(params, x[:, :3])[0].x, whole[:, :3], rtol=1e-12)
    # The whole sequence decides together where attention is not causal.
    _, saves = run(params, x, Context())
    assert all(np.ptp(saved.restart.chosen, axis=1).max() == 0.0 for saved in saves[1:])


@pytest.mark.parametrize(
    ("draws", "options", "message"),
    [
        ("ahead", {}, "got 'noise_ahead', a block of this configuration takes force, velocity, mlp"),
        ("force", {**YURII, "integrator": "lie_trotter(connection='r2')"}, "got 'noise_force', a block of this"),
        ("start", {**YURII, "start": "rest"}, "got 'noise_start', a block of this configuration takes force, weights"),
    ],
)
def test_noise_that_there_is_nothing_for(draws: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(stack(2, **options), draw("x", 2, 5, 6), Context(causal=True, draws=noise(draws)))


def test_restarts_are_of_one_integrator() -> None:
    with pytest.raises(ValueError, match="restart: got 1, which lie_trotter alone has: presymplectic_euler needs None"):
        BLOCK.Config(width=4, heads=2, restart=1)
    for other in (0, "loss"):
        told = f"restart: got {other!r}, needs a whole number of at least 1"
        with pytest.raises((TypeError, ValueError), match=told):
            BLOCK.Config(width=4, heads=2, integrator="lie_trotter", mlp="none", restart=other)


def test_a_model_with_restarts_is_sampled_from_all_tokens() -> None:
    sizes: dict[str, Any] = {"vocabulary": 5, "context": 6, "width": 4, "heads": 2, "layers": 1, "loops": 3}
    options = {**YURII, "mlp": "momentum(ratio=1)", "start": "table", "restart": 1}
    params, tokens = model.init(model.Config("sympformer", options=options, **sizes), like=np.ones(1)), [[0, 3, 1, 4]]
    found, cache = decode.extend(params, decode.start(params, batch=1), np.asarray(tokens)[:, :3])
    found, _ = decode.extend(params, cache, np.asarray(tokens)[:, 3:])
    np.testing.assert_array_equal(found, model.forward(params, np.asarray(tokens))[0][:, -1])
    stream = ra.mechanism("sympformer").stream
    assert stream is not None
    one = stack(1, **YURII, restart=1)[0]
    state = BLOCK.start(one, draw("x", 1, 2, 6), Context(causal=True))
    with pytest.raises(ra.mechanisms.record.Unsupported, match="restart: got 1, but a stream begins no layer again"):
        stream.prefill(one, stream.start(one, 1), state, Context(causal=True))
