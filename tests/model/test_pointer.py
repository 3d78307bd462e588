"""The head that points: its probabilities by loops, its gradients in four ways, and the model around it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, model, philox, tree
from refattn.model import decode, pointer
from refattn.train.loop import continued
from refattn.train.settings import build, parse
from refattn.verify.selfcheck import gradients
from tests.train.runs import train


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=31, purpose=name)


TOKENS = np.asarray([[2, 4, 2, 0], [1, 1, 1, 3]])
"""Of five in all: some come again, and some never."""


def log_weights_of(scores: Any) -> Any:
    """What a query may see: the empty token, and those up to its own."""
    rows, columns = scores.shape[-2:]
    masked = np.where(np.arange(columns) <= np.arange(rows)[:, None] + 1, scores, -math.inf)
    return masked - np.log(np.sum(np.exp(masked), axis=-1, keepdims=True))


def test_probabilities_by_loops() -> None:
    weights, following, table = log_weights_of(draw("s", 2, 3, 4, 5)), draw("x", 2, 4, 6), draw("e", 5, 6)
    z, _ = pointer.mixed(weights, following, None, table, TOKENS)
    for b in range(2):
        for i in range(4):
            words = np.exp(table @ following[b, i])
            expected = np.mean(np.exp(weights[b, :, i, 0])) * words / np.sum(words)
            for n in range(i + 1):
                expected[TOKENS[b, n]] += np.mean(np.exp(weights[b, :, i, n + 1]))
            np.testing.assert_allclose(np.exp(z[b, i]), expected, rtol=1e-13)
            assert np.sum(expected) == pytest.approx(1.0)


def test_gradients_in_four_ways() -> None:
    leaves = {"scores": draw("s", 2, 3, 4, 5), "following": draw("x", 2, 4, 6), "table": draw("e", 5, 6)}
    seen = np.arange(5) <= np.arange(4)[:, None] + 1

    def run(at: Any) -> tuple[Any, Any]:
        # The empty token and one's own are never hidden: their logarithms are finite, whatever else is -inf.
        here = backends.of(at["table"])
        weights = at["scores"] + here.from_numpy(np.where(seen, 0.0, -math.inf))
        return pointer.mixed(weights, at["following"], None, at["table"], here.from_numpy(TOKENS))

    def by_hand(at: Any, upstream: Any, implementation: str) -> dict[str, Any]:
        found = pointer.mixed_backward(at["table"], run(at)[1], upstream["z"])
        return dict(zip(leaves, found, strict=True))

    subject = gradients.Subject("pointer", leaves, lambda at: {"z": run(at)[0]}, by_hand, ("",))
    found = gradients.by_hand(subject, backends.get("numpy"), "")
    ways = ["differences", *(["autograd"] if gradients_of_torch() else [])]
    for way in ways:
        error, leaf = gradients.beside(subject, way)(found)
        assert error < gradients.TOLERANCES[way], (way, leaf)
    along = {name: draw(f"along {name}", *x.shape) for name, x in leaves.items()}
    z, d_z = ra.tangent(lambda **at: run(at)[0], leaves, along)
    weights = draw("d_z", *z.shape)
    given = pointer.mixed_backward(leaves["table"], run(leaves)[1], weights)
    np.testing.assert_allclose(
        np.sum(d_z * weights), sum(np.sum(a * b) for a, b in zip(given, along.values(), strict=True))
    )


def gradients_of_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def test_what_nobody_points_at_has_a_finite_logarithm() -> None:
    """A query that is all but certain of one token, in float32: nothing overflows, there and on the way back."""
    scores = np.full((1, 2, 2, 3), -400.0, "float32")
    scores[..., 1:] = (0.0, -120.0)  # the exponential of the last is 0 here
    following, table = draw("x", 1, 2, 4).astype("float32"), draw("e", 5, 4).astype("float32")
    z, saved = pointer.mixed(log_weights_of(scores), following, None, table, TOKENS[:1, :2])
    assert np.all(np.isfinite(z)) and np.min(z) < -390.0
    for gradient in pointer.mixed_backward(table, saved, np.ones_like(z)):
        assert np.all(np.isfinite(gradient))


# --- the model


def params_of(**options: Any) -> model.Params:
    sizes: dict[str, Any] = {"vocabulary": 5, "context": 6, "width": 4, "heads": 2, "layers": 1}
    params = model.init(model.Config("koopman", **sizes, decode="pointer", options=options), like=np.zeros(1))
    moved = {n: x + (1.0 if "embedding" in n else 0.1) * draw(n, *x.shape) for n, x in tree.flatten(params).items()}
    return tree.unflatten(params, moved)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1, "bias": True, "similarity": "kernel", "updates": 3}])
def test_the_gradient_of_the_model_is_the_derivative_along_a_direction(options: dict[str, Any]) -> None:
    params, d_z = params_of(**options), draw("d_z", 2, 4, 5)
    along = {n: draw(f"along {n}", *x.shape) for n, x in tree.flatten(params).items()}
    z, saved = model.forward(params, TOKENS)
    given, way = {"params": params, "tokens": TOKENS}, {"params": tree.unflatten(params, along)}
    _, change = ra.tangent(lambda params, tokens: model.forward(params, tokens)[0], given, way)
    found = tree.flatten(model.backward(params, saved, d_z))
    assert set(found) == set(along) and np.allclose(np.sum(np.exp(z), axis=-1), 1.0)
    for name, gradient in found.items():
        assert np.max(np.abs(gradient)) > 1e-9, name
    total = sum(np.sum(gradient * along[name]) for name, gradient in found.items())
    np.testing.assert_allclose(np.sum(change * d_z), total, rtol=1e-10)


def test_token_by_token_and_without_the_future() -> None:
    params = params_of(kv_heads=1)
    whole, _ = model.forward(params, TOKENS)
    other, _ = model.forward(params, np.concatenate([TOKENS[:, :2], (TOKENS[:, 2:] + 1) % 5], axis=1))
    assert np.array_equal(whole[:, :2], other[:, :2]) and not np.any(whole[:, 2:] == other[:, 2:])
    for streams in (True, False):
        cache, first = decode.start(params, 2), 0
        cache = cache if streams else decode.Cache(None, None)
        for stop in (1, 3, 4):
            z, cache = decode.extend(params, cache, TOKENS[:, first:stop])
            np.testing.assert_allclose(z, whole[:, stop - 1], rtol=1e-12)
            first = stop


def test_it_learns_to_say_a_word_again(tmp_path: Path) -> None:
    """A few steps of a run from the command line's settings, and the same bits from its checkpoint."""
    given = parse(["model.decode=pointer", "context=16", "width=8", "heads=1", "layers=1", "steps=4", "warmup=1"])
    more = {"batch": 2, "checkpoint_every": 2, "score_bytes": 64, "sample_bytes": 4, "data": "repeats"}
    result = train(build("koopman", given | more), tmp_path / "run")
    assert result.finished and result.facts["heldout_bits"] < 8.0 and len(result.sample) == 9
    again = continued(tmp_path / "run", b"abcdefg abc", 5, print, temperature=0.0)
    assert len(again) == 5


def test_who_can_point() -> None:
    with pytest.raises(ValueError, match=r"decode: got 'pointer' with softmax, needs one of koopman"):
        model.Config("softmax", decode="pointer")
    with pytest.raises(ValueError, match=r"decode: got 'finger', needs one of vocabulary, pointer"):
        model.Config("koopman", decode="finger")
    assert replace(params_of().config, decode="vocabulary").decode == model.Config("koopman").decode
