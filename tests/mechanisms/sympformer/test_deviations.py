"""Where the authors' code does something else: each effect in a small witness, and that it is absent here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, model
from refattn.mechanisms.sympformer.testing import READINGS
from tests.mechanisms.sympformer.calls import BLOCK, RECORD, draw, run, second_layer, stack
from tests.rows import claimed, holds

N, D = 7, 4


def inputs() -> dict[str, Any]:
    shapes = {"q": (1, 1, N, D), "k": (1, 1, N, D), "v": (1, 1, N, D), "kinetic": (1, 1, N, 1)}
    return {name: draw(name, *shape) for name, shape in shapes.items()}


def global_force(u: Any, energy: Any, w_q: Any, w_k: Any, scale: float, length: int | None = None) -> Any:
    """-dH/du of sum_i e_i / 2 z_i - 1/2 sum_ij E_ij, causal E and z_i = sum_j E_ij / T, as first published."""
    n = u.shape[0]
    growth = np.tril(np.exp(scale * (u @ w_q) @ (u @ w_k).T))
    total = n if length is None else length
    s = energy / (np.sum(growth, axis=1) / total) ** 2
    half = 0.5 * growth * (s[:, None] / total + 1.0)
    return scale * (half @ (u @ w_k) @ w_q.T + half.T @ (u @ w_q) @ w_k.T)


def energy_of(u: Any, energy: Any, w_q: Any, w_k: Any, scale: float) -> float:
    growth = np.tril(np.exp(scale * (u @ w_q) @ (u @ w_k).T))
    z = np.sum(growth, axis=1) / u.shape[0]
    return float(0.5 * np.sum(energy / z) - 0.5 * np.sum(growth))


def test_the_gradient_of_a_masked_hamiltonian_knows_the_future() -> None:
    u, energy, w_q, w_k = draw("u", N, D), np.abs(draw("e", N)), draw("w_q", D, D), draw("w_k", D, D)
    force, other, h = global_force(u, energy, w_q, w_k, 0.2), u.copy(), 1e-5
    for i, c in ((0, 0), (3, 2)):  # it is that gradient
        step = np.zeros((N, D))
        step[i, c] = h
        slope = energy_of(u + step, energy, w_q, w_k, 0.2) - energy_of(u - step, energy, w_q, w_k, 0.2)
        assert force[i, c] == pytest.approx(-slope / (2.0 * h), abs=1e-6)
    other[-1] += 1.0  # the last token moves, and with it the force on the first
    assert np.max(np.abs(global_force(other, energy, w_q, w_k, 0.2)[0] - force[0])) > 1e-2
    x: dict[str, Any] = inputs()
    out, _ = ra.sympformer.forward(**x, causal=True)
    changed: dict[str, Any]
    changed = {name: np.concatenate([value[:, :, :-1], value[:, :, -1:] + 1.0], axis=2) for name, value in x.items()}
    assert np.array_equal(ra.sympformer.forward(**changed, causal=True)[0][:, :, :-1], out[:, :, :-1])


def test_the_first_strang_knows_no_future() -> None:
    """Its force is no gradient: 1/2T sum_j E_ij (s_i + s_j - 2) v_j over what a token attends."""

    def force(u: Any, p: Any, causal: bool = True) -> Any:
        growth = np.exp(0.2 * (u @ draw("w_q", D, D)) @ (u @ draw("w_k", D, D)).T)
        growth = np.tril(growth) if causal else growth
        s = np.sum(p * p, axis=1) / (np.sum(growth, axis=1) / N) ** 2
        return (growth * (s[:, None] + s[None, :] - 2.0)) @ (u @ draw("w_v", D, D)) / (2.0 * N)

    u, p = draw("u", N, D), draw("p", N, D)
    end = np.arange(N)[:, None] == N - 1  # the last token moves, and its momentum
    np.testing.assert_allclose(force(u + end, p + end)[:-1], force(u, p)[:-1], rtol=1e-13)
    steps = 1e-6 * np.eye(N * D).reshape(-1, N, D)
    for causal in (True, False):  # of a gradient these slopes would be a symmetric matrix
        slopes = np.stack([(force(u + h, p, causal) - force(u - h, p, causal)).ravel() for h in steps]) / 2e-6
        assert np.max(np.abs(slopes - slopes.T)) > 0.1 * np.max(np.abs(slopes))


def test_dividing_by_all_tokens_makes_the_past_depend_on_how_many_follow() -> None:
    wrong, x = READINGS["z is a mean over all tokens"], inputs()
    short = {name: value[:, :, :3] for name, value in x.items()}
    assert np.max(np.abs(wrong(**short, causal=True)[0] - wrong(**x, causal=True)[0][:, :, :3])) > 1e-2
    out, _ = ra.sympformer.forward(**x, causal=True)
    np.testing.assert_allclose(ra.sympformer.forward(**short, causal=True)[0], out[:, :, :3], rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_dividing_by_all_tokens_is_there_to_compare_with(attention: str) -> None:
    """normaliser='length': the block as first published, whose first tokens move less the more tokens follow."""
    given: dict[str, Any] = {"mlp": "none", "start": "linear", "integrator": "forward_euler"}
    oracles = (f"{attention}(normaliser={name!r})" for name in ("length", "prefix"))
    (params,), (ours,) = (stack(1, oracle=oracle, **given) for oracle in oracles)
    x = draw("x", 1, N, 6)
    state, saves = run((params,), x)
    saved = saves[0].attention
    asked = saved.asked
    y, p, lower = asked.kernel.y if attention == "linear" else asked.y, saved.entering, np.tri(N)
    if attention == "linear":
        speed = lower * ((y @ params.w_a) @ np.swapaxes(y, 1, 2)) @ p / N
    else:
        scores = params.config.scale * (y @ params.w_q) @ np.swapaxes(y @ params.w_k, 1, 2)
        speed = p @ params.w_b / (np.sum(lower * np.exp(scores), axis=2, keepdims=True) / N)
    np.testing.assert_allclose(state.x, x + saves[0].numbers["h_x"] * speed, rtol=0.0, atol=1e-12)
    assert np.max(np.abs(run((params,), x[:, :3])[0].x - state.x[:, :3])) > 1e-3
    np.testing.assert_allclose(run((ours,), x[:, :3])[0].x, run((ours,), x)[0].x[:, :3], rtol=0.0, atol=1e-12)
    past, stream = Context(causal=True), RECORD.stream
    assert stream is not None
    with pytest.raises(ValueError, match="normaliser: got 'length', but a stream does not know how many tokens come"):
        stream.prefill(params, stream.start(params, 1), BLOCK.start(params, x, past), past)


def test_the_force_divided_by_all_tokens() -> None:
    """1/2T sum_j E_ij (s_i + s_j + 2) v_j with z_i = 1/T sum_j E_ij, in the middle of a stack."""
    params = stack(3, oracle="softmax(normaliser='length')", mlp="none")
    state, _, saved = second_layer(params, draw("x", 1, N, 6))
    each, y, p = params[1], saved.attention.asked.y[0], state.p[0]
    growth = np.tril(np.exp(each.config.scale * (y @ each.w_q) @ (y @ each.w_k).T))
    s = np.sum(p * (p @ each.w_b), axis=1) / (np.sum(growth, axis=1) / N) ** 2
    force = (growth * (s[:, None] + s[None, :] + 2.0)) @ (y @ each.w_v) / (2.0 * N) @ each.w_o
    np.testing.assert_allclose(saved.attention.force[0], force, rtol=1e-11, atol=1e-12)


def test_the_sign_of_the_potential() -> None:
    """With -2 in place of +2 tokens at rest are pushed away from what they attend."""
    x = {**inputs(), "kinetic": None}
    attention, _ = ra.softmax.forward(x["q"], x["k"], x["v"], causal=True)
    ours, _ = ra.sympformer.forward(**x, causal=True)
    theirs, _ = READINGS["a potential that repels"](**x, causal=True)
    assert claimed("sympformer", "the potential enters with -2").holds.startswith("no: with +2")
    assert np.all(np.sum(ours * attention, axis=-1) > 0.0)
    np.testing.assert_allclose(theirs, -ours, rtol=1e-12)


def test_the_scale_of_the_potential() -> None:
    """Without the 1/n of the mean the potential part of the force is n times as large, the kinetic part the same."""
    u, w_q, w_k = draw("u", N, D), draw("w_q", D, D), draw("w_k", D, D)
    at_rest = global_force(u, np.zeros(N), w_q, w_k, 0.2)
    growth = np.tril(np.exp(0.2 * (u @ w_q) @ (u @ w_k).T))
    mean_field = 0.1 / N * (growth @ (u @ w_k) @ w_q.T + growth.T @ (u @ w_q) @ w_k.T)
    np.testing.assert_allclose(at_rest, N * mean_field, rtol=1e-12)
    x: dict[str, Any] = {**inputs(), "kinetic": None}
    out, saved = ra.sympformer.forward(**x)
    doubled: dict[str, Any]
    doubled = {name: None if value is None else np.concatenate([value, value], axis=2) for name, value in x.items()}
    # Two copies of every token push like one: the force is a mean.
    np.testing.assert_allclose(ra.sympformer.forward(**doubled)[0][:, :, :N], out, rtol=1e-12)


def test_b_starts_as_the_identity() -> None:
    """Theirs is drawn again with all other matrices once the model is made."""
    config = model.Config("sympformer", width=8, heads=2, layers=2, context=4)
    for layer in model.init(config, like=np.zeros(1)).layers:
        assert np.array_equal(layer.block.w_b, np.eye(8))


def test_b_from_an_inverse_is_ill_conditioned() -> None:
    """B = Sym(W_V A^-1), A = c W_Q^T W_K + 1e-6, for weights of standard deviation 0.02 and width 32."""
    for seed in range(3):
        w_q, w_k, w_v = (0.02 * draw(f"{name} {seed}", 32, 32) for name in ("w_q", "w_k", "w_v"))
        a = w_q.T @ w_k / math.sqrt(4 * 32) + 1e-6 * np.eye(32)
        b = w_v @ np.linalg.inv(a)
        assert np.linalg.norm(0.5 * (b + b.T), 2) > (least := 1000)
    assert f"its norm exceeds {least} at the start" in holds("sympformer", "B is the symmetric part of")
    free = BLOCK.Config(width=8, heads=2, layer=1, layers=2)
    assert free.shapes()["w_b"] == (8, 8) and "w_b" not in replace(free, oracle="softmax(mobility='identity')").shapes()


def test_exponentials_as_they_stand_overflow() -> None:
    clip = 60.0
    claimed("sympformer", f"exponentials are clipped at {clip:g}, and 1e-8 is added to z^2")
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(np.exp(clip)) ** np.float32(2.0))
    ones = np.ones((1, 1, 3, 1), np.float32)
    for score in (clip + 10.0, -30.0):  # theirs are e^60, and u is 1e8 in place of e^60
        out, saved = ra.sympformer.forward(score * ones, ones, ones, kinetic=ones, causal=True, scale=1.0)
        np.testing.assert_allclose(out, math.exp(score) * (1.0 + math.exp(-2.0 * score)), rtol=1e-5)
        gradients = ra.sympformer.backward(saved, ones)
        assert all(np.all(np.isfinite(value)) for value in (out, *gradients.values()))


def test_averaging_heads_leaves_one_kernel() -> None:
    """The mean over heads of <q_h, k_h> / sqrt(d_h) is one product over the whole width."""
    q, k, heads = draw("q", N, 12), draw("k", N, 12), 3
    width = 12 // heads
    per_head = [q[:, n * width : (n + 1) * width] @ k[:, n * width : (n + 1) * width].T for n in range(heads)]
    scale = ra.mechanism("sympformer").block.Config(width=12, heads=heads).scale
    np.testing.assert_allclose(sum(per_head) / heads / math.sqrt(width), scale * (q @ k.T), rtol=1e-12)
    _, saved = ra.sympformer.forward(*(x[None, None] for x in (q, k, k)), scale=scale)
    mean = np.mean(np.exp(sum(per_head) / heads / math.sqrt(width)), axis=-1)
    np.testing.assert_allclose(saved.log_z[0, 0], np.log(mean), rtol=1e-12, atol=1e-14)
