"""The blocks that SympFormer is compared with, against their equations written with the attention of `softmax`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.ops.activations import gelu_exact_forward
from tests.mechanisms.sympformer.calls import draw, run, second_layer, stack


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


@pytest.mark.parametrize("name", ["h1", "r2"])
def test_linear_attention_of_heads_and_its_connection(name: str) -> None:
    """In the middle of a stack, token by token from the matrices of the tokens so far."""
    kind: dict[str, Any] = {
        "integrator": f"lie_trotter(connection={name!r})",
        "oracle": "signed(ridge=0.3)",
        "mlp": "none",
    }
    params = stack(3, **kind)
    state, result, saved = second_layer(params, draw("x", 1, 5, 6))
    each, s, d, p = params[1], saved.numbers, 3, state.p[0]
    ways: list[Any] = []
    z = norm(state.x[0], each.gain)
    for i in range(5):
        joined = [
            (z[: i + 1] @ each.w_v[:, cols]).T @ (z[: i + 1] @ each.w_k[:, cols]) @ (z[i] @ each.w_q[:, cols])
            for cols in (slice(0, 3), slice(3, 6))
        ]
        f = np.concatenate(joined) / (np.sqrt(d) * (i + 1)) @ each.w_o
        w = s["attention_beta"] * p[i] + s["attention_gamma"] * f
        ways.append(w)
        u = p[: i + 1] if name == "h1" else np.asarray(ways)
        turn = np.zeros(6)
        for cols in (slice(0, 3), slice(3, 6)):
            w_q, w_k = each.w_q[:, cols] / d**0.25, each.w_k[:, cols] / d**0.25
            q, k, uq, uk = z[: i + 1] @ w_q, z[: i + 1] @ w_k, u @ w_q, u @ w_k
            inverse = np.linalg.inv(k.T @ k + 0.3 * np.eye(3))
            e = np.linalg.inv(q.T @ q + 0.3 * np.eye(3)) @ q.T @ u
            first = -(k.T @ k @ inverse @ uq[i]) @ e
            second = -(inverse @ k.T @ uk @ q[i]) @ e
            third = (e @ u[i]) @ (inverse @ k.T @ q) @ w_k.T
            turn += (first + second + third) / 2
        moved = norm(w - (turn if name == "h1" else 0.5 * turn), each.gain_p)
        np.testing.assert_allclose(result.p[0, i], norm(w - turn, each.gain_p), rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(result.x[0, i], state.x[0, i] + moved, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("integrator", ["classical", "lie_trotter"])
def test_linear_attention_of_the_baselines(integrator: str) -> None:
    """h/n_i sum_j (a_i . y_j) w_j in place of softmax attention: all pairs, one layer from rest."""
    (params,) = stack(1, integrator=f"{integrator}(step=0.3)", mlp="none", oracle="linear")
    x = draw("x", 2, 5, 6)
    y = norm(x, params.gain)
    step = np.log1p(np.exp(params.numbers["attention_step"]))
    pairs = np.tril((y @ params.w_a) @ np.swapaxes(y, 1, 2)) / np.arange(1.0, 6.0)[:, None]
    force = step * (pairs @ (y @ params.w_v))
    moved = force if integrator == "classical" else norm(force, params.gain_p)
    np.testing.assert_allclose(run((params,), x)[0].x, x + moved, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("look_ahead", [True, False])
def test_the_lie_trotter_block(look_ahead: bool, shared: bool) -> None:
    """With a momentum, in the middle of a stack; without looking ahead it is H0. Both substeps may share a norm."""
    mlp_kind = f"momentum(shared_norm={shared})"
    params = stack(3, integrator="lie_trotter", mlp=mlp_kind, look_ahead=look_ahead)
    state, result, saved = second_layer(params, draw("x", 2, 5, 6))
    each, s = params[1], saved.numbers
    mu = s["attention_mu"] if look_ahead else 0.0
    force = attention(each, norm(state.x + mu * state.p, each.gain))
    p = norm(s["attention_beta"] * state.p + s["attention_gamma"] * force, each.gain_p)
    moved = state.x + p
    pushed = mlp(each, moved + s["mu"] * p)
    assert (each.mlp.gain_v is None) == shared
    p = norm(s["beta"] * p + s["gamma"] * pushed, each.gain_p if shared else each.mlp.gain_v)
    np.testing.assert_allclose(result.p, p, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(result.x, moved + p, rtol=1e-12, atol=1e-13)


def connection(params: Any, z: Any, u: Any, f: Any) -> Any:
    """C along u, from the derivatives of all scores by all pairs."""
    number, (_, n, width) = params.config.heads, z.shape
    q, k, v, uq, uk = (
        heads(x @ w, number)
        for x, w in ((z, params.w_q), (z, params.w_k), (z, params.w_v), (u, params.w_q), (u, params.w_k))
    )
    factor = (width // number) ** -0.5
    scores = np.where(np.tri(n, dtype=bool), factor * q @ np.swapaxes(k, 2, 3), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    changes = factor * (uq @ np.swapaxes(k, 2, 3) + q @ np.swapaxes(uk, 2, 3))
    rate = np.mean(np.sum(weights * changes, axis=3), axis=1)[:, :, None]
    s = np.sum(u * u, axis=-1, keepdims=True)
    pulled = np.concatenate(np.moveaxis(weights @ (s[:, None] * v), 1, 0), axis=-1) @ params.w_o
    return rate * u - 0.5 * (s * f + pulled)


@pytest.mark.parametrize("strength", [None, 0.6])
@pytest.mark.parametrize("name", ["h1", "r2"])
def test_the_connection_turns_the_momentum(name: str, strength: float | None) -> None:
    """In the middle of a stack: H1 along the old momentum, R2 along the new one, which moves tokens by half of it."""
    params = stack(3, integrator=f"lie_trotter(connection={name!r}, strength={strength})", mlp="none")
    state, result, saved = second_layer(params, draw("x", 2, 5, 6))
    each, s = params[1], saved.numbers
    z = norm(state.x, each.gain)
    f = attention(each, z)
    w = s["attention_beta"] * state.p + s["attention_gamma"] * f
    c = s.get("attention_eta", 1.0) * connection(each, z, state.p if name == "h1" else w, f)
    assert ("attention_eta" in s) == (strength is not None)
    p = norm(w - c, each.gain_p)
    np.testing.assert_allclose(result.p, p, rtol=1e-11, atol=1e-12)
    moved = p if name == "h1" else norm(w - 0.5 * c, each.gain_p)
    np.testing.assert_allclose(result.x, state.x + moved, rtol=1e-11, atol=1e-12)


def test_at_rest_the_connection_along_the_old_momentum_is_none() -> None:
    params = [stack(1, integrator=f"lie_trotter(connection={name!r})", mlp="none") for name in ("none", "h1", "r2")]
    free, old, new = (run(each, draw("x", 1, 5, 6))[0].x for each in params)
    assert np.array_equal(old, free)
    assert np.max(np.abs(new - free)) > 1e-3


def test_the_rate_of_the_scores_is_their_derivative() -> None:
    """The weights' mean of s', for one head: the slope of log sum exp s along u, with the sum over the same tokens."""
    (params,) = stack(1, integrator="lie_trotter(connection='r2')", mlp="none", heads=1)
    z, u, h = draw("z", 1, 5, 6), draw("u", 1, 5, 6), 1e-5
    c = connection(params, z, u, np.zeros_like(z))
    s = np.sum(u * u, axis=-1, keepdims=True)

    def level(t: float) -> Any:
        y = z + t * u
        scores = np.where(np.tri(5, dtype=bool), (y @ params.w_q) @ np.swapaxes(y @ params.w_k, 1, 2) / 6**0.5, -np.inf)
        return np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))

    weights = np.tri(5) * np.exp((z @ params.w_q) @ np.swapaxes(z @ params.w_k, 1, 2) / 6**0.5)
    weights /= weights.sum(axis=-1, keepdims=True)
    pulled = weights @ (s * (z @ params.w_v)) @ params.w_o
    slope = (level(h) - level(-h)) / (2.0 * h)
    np.testing.assert_allclose(c + 0.5 * pulled, slope * u, rtol=0.0, atol=1e-8)
