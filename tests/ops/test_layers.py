"""What a network is made of besides attention: each piece against its definition, and its gradient in three ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

from refattn import backends, philox
from refattn.ops import activations, embedding, layer_norm, losses, mlp
from refattn.verify.selfcheck import gradients

Leaves = Mapping[str, Any]


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=13, purpose=name)


def tokens(*shape: int, size: int) -> Any:
    return philox.integers(shape, 0, size, seed=13, purpose="tokens")


def subject(name: str, leaves: Leaves, forward: Callable[..., Any], backward: Callable[..., Any]) -> gradients.Subject:
    """A map of named leaves to one output ``y``."""
    return gradients.Subject(
        name,
        dict(leaves),
        lambda given: {"y": forward(**given)},
        lambda given, up, _: backward(up["y"], **given),
        ("",),
    )


def norm_subject(gain: bool, bias: bool) -> gradients.Subject:
    leaves = (
        {"x": draw("x", 2, 3, 5)}
        | ({"gain": draw("gain", 5)} if gain else {})
        | ({"bias": draw("bias", 5)} if bias else {})
    )

    def backward(d_y: Any, x: Any, gain: Any = None, bias: Any = None) -> dict[str, Any]:
        found = layer_norm.layer_norm_backward(layer_norm.layer_norm_forward(x, gain, bias, 0.1)[1], d_y)
        return {name: value for name, value in zip(("x", "gain", "bias"), found, strict=True) if name in leaves}

    return subject("layer_norm", leaves, lambda **given: layer_norm.layer_norm_forward(**given, eps=0.1)[0], backward)


def gelu_subject(kind: str) -> gradients.Subject:
    forward, backward = mlp.GELU[kind]
    return subject(
        f"gelu {kind}",
        {"x": draw("x", 3, 4)},
        lambda x: forward(x)[0],
        lambda d_y, x: {"x": backward(x, forward(x)[1], d_y)},
    )


def mlp_subject(kind: str) -> gradients.Subject:
    leaves = {"x": draw("x", 2, 3, 4), "w_in": draw("w_in", 4, 6), "b_in": draw("b_in", 6)}
    leaves |= {"w_out": draw("w_out", 6, 4), "b_out": draw("b_out", 4)}

    def backward(d_y: Any, x: Any, **weights: Any) -> dict[str, Any]:
        params = mlp.Params(**weights)
        d_x, d_params = mlp.mlp_backward(params, mlp.mlp_forward(params, x, kind)[1], d_y, kind)
        return {"x": d_x, **vars(d_params)}

    return subject(f"mlp {kind}", leaves, lambda x, **w: mlp.mlp_forward(mlp.Params(**w), x, kind)[0], backward)


def embedding_subject() -> gradients.Subject:
    chosen = tokens(2, 7, size=5)

    def on(like: Any) -> Any:
        return backends.of(like).from_numpy(chosen)

    return subject(
        "embedding",
        {"table": draw("table", 5, 3)},
        lambda table: embedding.embedding_forward(table, on(table)),
        lambda d_y, table: {"table": embedding.embedding_backward(table, on(table), d_y)},
    )


def cross_entropy_subject() -> gradients.Subject:
    chosen = tokens(2, 3, size=5)

    def forward(logits: Any) -> tuple[Any, Any]:
        return losses.cross_entropy_forward(logits, backends.of(logits).from_numpy(chosen))

    return subject(
        "cross_entropy",
        {"logits": 3.0 * draw("logits", 2, 3, 5)},
        lambda logits: forward(logits)[0],
        lambda d_y, logits: {"logits": losses.cross_entropy_backward(forward(logits)[1], d_y)},
    )


def mse_subject() -> gradients.Subject:
    target = draw("target", 3, 4)

    def forward(x: Any) -> tuple[Any, Any]:
        return losses.mse_forward(x, backends.of(x).from_numpy(target))

    return subject(
        "mse",
        {"x": draw("x", 3, 4)},
        lambda x: forward(x)[0],
        lambda d_y, x: {"x": losses.mse_backward(forward(x)[1], d_y)},
    )


SUBJECTS: dict[str, Callable[[], gradients.Subject]] = {
    "norm": partial(norm_subject, True, True),
    "norm-without-bias": partial(norm_subject, True, False),
    "norm-alone": partial(norm_subject, False, False),
    **{f"gelu-{kind}": partial(gelu_subject, kind) for kind in mlp.GELU},
    **{f"mlp-{kind}": partial(mlp_subject, kind) for kind in mlp.GELU},
    "embedding": embedding_subject,
    "cross-entropy": cross_entropy_subject,
    "mse": mse_subject,
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_gradients_by_hand_and_by_differences(name: str) -> None:
    made = SUBJECTS[name]()
    by_hand = gradients.by_hand(made, backends.get("numpy"), "")
    assert set(by_hand) == set(made.leaves)
    error, leaf = gradients.largest_error(by_hand, gradients.by_differences(made))
    assert error < gradients.TOLERANCES["differences"], leaf


@pytest.mark.parametrize("name", SUBJECTS)
def test_gradients_by_hand_and_by_autograd(name: str) -> None:
    pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    made = SUBJECTS[name]()
    by_hand = gradients.by_hand(made, backends.get("torch"), "")
    error, leaf = gradients.largest_error(by_hand, gradients.by_autograd(made))
    assert error < gradients.TOLERANCES["autograd"], leaf


@pytest.mark.parametrize("name", SUBJECTS)
def test_over_libraries(name: str, backend: Any) -> None:
    made = SUBJECTS[name]()
    leaves = {n: backend.array(x) for n, x in made.leaves.items()}
    up = {n: backend.array(x) for n, x in made.upstream().items()}
    found = {**made.forward(leaves), **{f"d_{n}": x for n, x in made.backward(leaves, up, "").items()}}
    expected = {
        **made.forward(made.leaves),
        **{f"d_{n}": x for n, x in made.backward(made.leaves, made.upstream(), "").items()},
    }
    for n, wanted in expected.items():
        np.testing.assert_allclose(backend.host(found[n]), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", SUBJECTS)
def test_float32_stays_float32(name: str) -> None:
    made = SUBJECTS[name]()
    leaves = {n: x.astype("float32") for n, x in made.leaves.items()}
    if name == "mse":
        pytest.skip("its target is a constant of the test, in float64")
    up = {n: x.astype("float32") for n, x in made.upstream().items()}
    found = {**made.forward(leaves), **made.backward(leaves, up, "")}
    assert {x.dtype for x in found.values()} == {np.dtype("float32")}


# --- layer norm


@given(st.integers(1, 4), st.integers(2, 9), st.floats(-5.0, 5.0), st.floats(0.1, 10.0))
def test_a_norm_has_mean_0_and_variance_1_and_forgets_shift_and_scale(
    n: int, m: int, shift: float, scale: float
) -> None:
    x = draw("x", n, m) + np.arange(m)
    y, _ = layer_norm.layer_norm_forward(x, eps=0.0)
    np.testing.assert_allclose(np.mean(y, axis=-1), 0.0, atol=1e-12)
    np.testing.assert_allclose(np.mean(y * y, axis=-1), 1.0, rtol=1e-12)
    moved, _ = layer_norm.layer_norm_forward(scale * x + shift, eps=0.0)
    np.testing.assert_allclose(moved, y, rtol=1e-9, atol=1e-9)


@given(st.integers(2, 6))
def test_the_gradient_of_a_norm_has_no_part_along_1_and_none_along_x(m: int) -> None:
    x, d_y = draw("x", 3, m) + np.arange(m), draw("d_y", 3, m)
    _, saved = layer_norm.layer_norm_forward(x, eps=0.0)
    d_x, _, _ = layer_norm.layer_norm_backward(saved, d_y)
    np.testing.assert_allclose(np.sum(d_x, axis=-1), 0.0, atol=1e-12)
    np.testing.assert_allclose(np.sum(d_x * x, axis=-1), 0.0, atol=1e-11)


# --- gelu


def test_gelu_is_x_times_the_normal_distribution() -> None:
    x = np.linspace(-9.0, 9.0, 2001)
    exact, _ = activations.gelu_exact_forward(x)
    np.testing.assert_allclose(exact, x * scipy.special.ndtr(x), rtol=1e-12, atol=1e-15)
    assert 1e-4 < np.max(np.abs(activations.gelu_tanh_forward(x)[0] - exact)) < 5e-4


@pytest.mark.parametrize("kind", mlp.GELU)
def test_gelu_is_that_of_torch(kind: str) -> None:
    torch = pytest.importorskip("torch", reason='the other implementation is torch: pip install "refattn[torch]"')
    x = np.linspace(-6.0, 6.0, 501)
    expected = torch.nn.functional.gelu(torch.tensor(x), approximate={"tanh": "tanh", "exact": "none"}[kind])
    np.testing.assert_allclose(mlp.GELU[kind][0](x)[0], expected.numpy(), rtol=1e-12, atol=1e-14)


# --- embedding and losses


def test_a_row_stands_for_a_token() -> None:
    table, chosen = draw("table", 6, 3), np.asarray([[5, 0, 5], [1, 2, 3]], dtype=np.int32)
    assert np.array_equal(embedding.embedding_forward(table, chosen), table[chosen])
    gradient = embedding.embedding_backward(table, chosen, np.ones((2, 3, 3)))
    assert gradient[:, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 2.0]


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.floats(-1e3, 1e3))
def test_cross_entropy_is_that_of_a_distribution(b: int, n: int, t: int, shift: float) -> None:
    logits, chosen = 4.0 * draw("logits", b, n, t), tokens(b, n, size=t)
    found, saved = losses.cross_entropy_forward(logits, chosen)
    log_p = scipy.special.log_softmax(logits, axis=-1)
    np.testing.assert_allclose(found, -np.take_along_axis(log_p, chosen[..., None], -1)[..., 0], rtol=1e-11, atol=1e-12)
    shifted, _ = losses.cross_entropy_forward(logits + shift, chosen)
    np.testing.assert_allclose(shifted, found, rtol=1e-9, atol=1e-9)
    # Probabilities sum to one, so the gradient sums to zero.
    np.testing.assert_allclose(np.sum(losses.cross_entropy_backward(saved, np.ones((b, n))), axis=-1), 0.0, atol=1e-12)


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    found, saved = losses.cross_entropy_forward(np.asarray([[1e4, 0.0]], dtype=np.float32), np.asarray([1]))
    assert found.tolist() == [1e4]
    assert losses.cross_entropy_backward(saved, np.ones(1, np.float32)).tolist() == [[1.0, -1.0]]


def test_mse_is_the_mean_of_squares() -> None:
    loss, _ = losses.mse_forward(np.asarray([[1.0, 2.0]]), np.asarray([[0.0, 5.0]]))
    assert float(loss) == 5.0 and math.isfinite(loss)
    nothing = np.ones((2, 0))
    with pytest.raises(ValueError, match=r"^x: got shape \(2, 0\), needs at least one element"):
        losses.mse_forward(nothing, nothing)
    with pytest.raises(ValueError, match=r"^difference: got shape \(2, 0\), needs at least one element"):
        losses.mse_backward(nothing, np.asarray(1.0))


def test_a_threshold_that_fits_to_no_element_is_named() -> None:
    with pytest.raises(ValueError, match="^least: "):
        activations.soft_threshold(np.ones((2, 3)), np.ones(2), signed=True)
