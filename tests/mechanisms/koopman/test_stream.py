"""The stream whose operator lives in a matrix of constant size; what all streams have in common is a law."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import refattn as ra
from refattn import Context, tree
from refattn.mechanisms.koopman import dense
from refattn.mechanisms.koopman.implementations import features
from refattn.mechanisms.koopman.layer.stream import Cache
from refattn.mechanisms.koopman.options.kernel import Linear, Polynomial
from tests.mechanisms.koopman.calls import drawn

RECORD = ra.mechanism("koopman")
BLOCK, CAUSAL = RECORD.block, Context(causal=True)
STREAM: Any = RECORD.stream


CONFIGS: list[dict[str, Any]] = [
    {"kernel": "linear"},
    {"kernel": "linear", "space": "full", "updates": 3, "perturbation": "pencil(mix=0.9)"},
    {"kernel": "linear", "fit": "separable(scale='mean', tau=1.0)", "similarity": "kernel", "jitter": None},
    {"kernel": "polynomial", "updates": 4, "fit": "separable(window=2)"},
    {"kernel": "polynomial(degree=3, constant=0.5)", "updates": 3, "similarity": "kernel", "residual": False},
]


draw = drawn(29)


def fresh(**options: Any) -> Any:
    config = BLOCK.Config(**{"width": 8, "heads": 2, "kv_heads": 1, "bias": True, **options})
    params = BLOCK.init(config, seed=4, like=np.zeros(1))
    return tree.unflatten(params, {n: x + 0.1 * draw(n, *x.shape) for n, x in tree.flatten(params).items()})


def steps(params: Any, x: Any, cache: Any, context: Context = CAUSAL) -> tuple[Any, Any]:
    """One token after the other."""
    found = []
    for n in range(x.shape[1]):
        state, cache = STREAM.step(params, cache, BLOCK.start(params, x[:, n : n + 1], CAUSAL), context)
        found.append(state.x)
    return np.concatenate(found, axis=1), cache


def whole(params: Any, x: Any, context: Context = CAUSAL) -> Any:
    return BLOCK.forward(params, BLOCK.start(params, x, context), context)[0].x


@pytest.mark.parametrize("options", CONFIGS)
def test_a_token_is_that_of_the_whole(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params, x = fresh(**options), draw("x", 2, 14, 8)
    expected = whole(params, x)
    state, cache = STREAM.prefill(params, STREAM.start(params, 2), BLOCK.start(params, x[:, :6], CAUSAL), CAUSAL)
    np.testing.assert_allclose(state.x, expected[:, :6], rtol=1e-11, atol=1e-12)
    monkeypatch.setattr(dense, "gram_of", None)  # nothing is factored again
    found, later = steps(params, x[:, 6:], cache)
    np.testing.assert_allclose(found, expected[:, 6:], rtol=1e-11, atol=1e-12)
    assert later.span.shape == cache.span.shape


@pytest.mark.parametrize(("delta", "error"), [(1e-2, 1e-12), (1e-8, 1e-9)])
def test_many_keys_one_by_one(delta: float, error: float) -> None:
    """No error piles up: S is what it is by definition, also with more keys than features."""
    keys = draw("keys", 1, 2, 1500, 5)
    span = np.zeros((1, 2, 5, 5))
    for n in range(1500):
        span = features.with_keys(span, keys[:, :, n : n + 1], delta)
        if n in (2, 4, 5, 1499):
            seen = keys[:, :, : n + 1]
            moments = np.swapaxes(seen, -1, -2) @ seen
            np.testing.assert_allclose(span, np.eye(5) - delta * np.linalg.inv(moments + delta * np.eye(5)), atol=error)
    np.testing.assert_allclose(features.with_keys(np.zeros((1, 2, 5, 5)), keys, delta), span, atol=error)


@pytest.mark.parametrize("kernel", [Linear(), Polynomial(1.3, 0.7, 2, 0.4), Polynomial(0.9, 1.2, 3, 0.0)])
def test_features_are_those_of_the_kernel(kernel: Any) -> None:
    x, y = draw("x", 4, 3), draw("y", 5, 3)
    at_x = features.features_of(kernel, x)
    assert at_x.shape[-1] == features.count_of(kernel, 3)
    np.testing.assert_array_equal(at_x[:, :3], x)
    np.testing.assert_allclose(at_x @ features.features_of(kernel, y).T, kernel.values(x, y), rtol=1e-13, atol=1e-13)
    way, h = draw("way", 4, 3), 1e-5
    change = (features.features_of(kernel, x + h * way) - features.features_of(kernel, x - h * way)) / (2.0 * h)
    np.testing.assert_allclose((features.slopes_of(kernel, x) @ way[..., None])[..., 0], change, rtol=1e-7, atol=1e-8)


def test_masks_and_draws_go_the_way_of_all_keys() -> None:
    params, x = fresh(kernel="linear"), draw("x", 1, 6, 8)
    keep = np.asarray([[True, True, False, True, True, True]])
    drawn = Context(causal=True, draws={"ridge": np.asarray([[0.3]])})
    _, cache = steps(params, x[:, :5], STREAM.start(params, 1))
    for context in (Context(causal=True, key_mask=keep), drawn):
        found, later = steps(params, x[:, 5:], cache, context)
        np.testing.assert_allclose(found, whole(params, x, context)[:, 5:], rtol=1e-11, atol=1e-12)
        assert not np.allclose(found, whole(params, x)[:, 5:])
        assert np.array_equal(later.span, steps(params, x[:, 5:], cache)[1].span)


def test_a_cache_goes_through_a_file(tmp_path: Path) -> None:
    params, x = fresh(kernel="polynomial"), draw("x", 1, 5, 8)
    _, cache = steps(params, x[:, :4], STREAM.start(params, 1))
    save_file(tree.flatten(cache), tmp_path / "cache.safetensors")
    again = tree.unflatten(cache, load_file(tmp_path / "cache.safetensors"))
    assert isinstance(again, Cache) and again is not cache
    assert np.array_equal(steps(params, x[:, 4:], again)[0], steps(params, x[:, 4:], cache)[0])
    with pytest.raises(ValueError, match=r"cache.span: got shape \(1, 1, 19, 18\), needs \(batch, 1, 19, 19\)"):
        steps(params, x[:, 4:], replace(cache, span=cache.span[..., :-1]))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "rbf"},
        {"kernel": "linear", "fit": "stein"},
        {"kernel": "linear", "fit": "separable(norm=0.2)"},
        {"kernel": "linear", "space": "augmented"},
        {"kernel": "linear", "perturbation": "identity(certify=True)"},
        {"kernel": "linear", "jitter": 0.0},
        {"kernel": "polynomial(degree=15)"},
    ],
)
def test_what_has_no_such_matrix(options: dict[str, Any]) -> None:
    assert STREAM.start(fresh(**options), 1).span is None


def test_a_token_whose_perturbation_has_no_inverse() -> None:
    params = fresh(kernel="polynomial(weight=3.0)", perturbation="shift", jitter=None, updates=3)
    x = 3.0 * draw("x", 1, 12, 8)
    with pytest.raises(ra.koopman.KoopmanInverseError) as of_all:
        whole(params, x)
    with pytest.raises(ra.koopman.KoopmanInverseError, match=r"update \d: the perturbation was not inverted"):
        steps(params, x, STREAM.start(params, 1))
    assert of_all.value.count
