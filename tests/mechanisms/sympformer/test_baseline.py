"""The blocks that SympFormer is compared with, against their equations written with the attention of `softmax`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context
from refattn.ops.activations import gelu_exact_forward
from tests.mechanisms.sympformer.calls import BLOCK, draw, run, stack


def norm(x: Any, gain: Any) -> Any:
    centred = x - np.mean(x, axis=-1, keepdims=True)
    return gain * centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def heads(x: Any, number: int) -> Any:
    return np.stack(np.split(x, number, axis=-1), axis=1)


def attention(params: Any, u: Any) -> Any:
    q, k, v = (heads(u @ w, params.config.heads) for w in (params.w_q, params.w_k, params.w_v))
    out, _ = ra.softmax.forward(q, k, v, causal=True)
    return np.concatenate(np.moveaxis(out, 1, 0), axis=-1) @ params.w_o


def mlp(params: Any, x: Any) -> Any:
    return gelu_exact_forward(norm(x, params.mlp.gain) @ params.mlp.w_in)[0] @ params.mlp.w_out


def test_the_classical_block() -> None:
    (params,) = stack(1, integrator="classical", mlp="plain")
    x = draw("x", 2, 5, 6)
    moved = x + attention(params, norm(x, params.gain))
    expected = moved + mlp(params, moved)
    np.testing.assert_allclose(run((params,), x)[0].x, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("look_ahead", [True, False])
def test_the_lie_trotter_block(look_ahead: bool) -> None:
    """With a momentum, in the middle of a stack; without looking ahead it is H0."""
    params = stack(3, integrator="lie_trotter", mlp="momentum", look_ahead=look_ahead)
    x, context = draw("x", 2, 5, 6), Context(causal=True)
    state, _ = BLOCK.forward(params[0], BLOCK.start(params[0], x, context), context)
    result, saved = BLOCK.forward(params[1], state, context)
    each, s = params[1], saved.numbers
    mu = s["attention_mu"] if look_ahead else 0.0
    force = attention(each, norm(state.x + mu * state.p, each.gain))
    p = norm(s["attention_beta"] * state.p + s["attention_gamma"] * force, each.gain_p)
    moved = state.x + p
    pushed = mlp(each, moved + s["mu"] * p)
    p = norm(s["beta"] * p + s["gamma"] * pushed, each.mlp.gain_v)
    np.testing.assert_allclose(result.p, p, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(result.x, moved + p, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"integrator": "classical", "mlp": "momentum"}, "mlp: got 'momentum', classical has none"),
        ({"integrator": "classical"}, "mlp: got 'attention_velocity', classical has no steps"),
        (
            {"integrator": "classical", "mlp": "plain", "start": "linear"},
            "start: got 'linear', classical has no momentum",
        ),
        ({"integrator": "lie_trotter", "attention": "linear"}, "attention: got 'linear', lie_trotter has softmax"),
    ],
)
def test_a_wrong_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK.Config(**{"width": 6, "heads": 2, **changes})
