"""Bad input is refused with an error that names the argument, what it got and what it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from tests.mechanisms.koopman.calls import forward

X = np.ones((1, 2, 3, 4))
BLOCK = ra.mechanism("koopman").block


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": 0}, r"updates: got 0, needs a whole number of at least 1"),
        ({"updates": 10**9}, r"updates: got 1000000000, needs at most 1000000"),
        ({"kernel": "linear+rbf"}, r"kernel: got 'linear\+rbf', needs a name such as"),
        ({"kernel": "gauss"}, r"kernel: got 'gauss', needs one of linear, rbf, matern32, matern52, polynomial"),
        ({"kernel": "rbf(degree=2)"}, r"kernel: got 'degree' in 'rbf\(degree=2\)', but rbf has bandwidth, weight"),
        ({"fit": "ridge"}, r"fit: got 'ridge', needs one of stein, separable"),
        ({"space": "all"}, r"space: got 'all', needs one of keys, augmented, full"),
        ({"similarity": "cosine"}, r"similarity: got 'cosine', needs one of dot, kernel"),
        ({"perturbation": "psi"}, r"perturbation: got 'psi', needs one of identity, shift, pencil"),
        ({"scale": "max"}, r"scale: got 'max', needs one of sum, mean"),
        ({"tau": 0.5}, r"tau: got 0.5, needs 0 \(the ridge draws the operator to 0\) or 1 \(to the identity\)"),
        ({"window": 0}, r"window: got 0, needs a whole number of at least 1"),
        ({"kernel": "polynomial", "degree": 0}, r"degree: got 0, needs a whole number of at least 1"),
        ({"kernel": "polynomial", "constant": -1.0}, r"constant: got -1.0, needs a finite number from 0"),
        ({"jitter": -1e-8}, r"jitter: got -1e-08, needs a finite number from 0"),
        ({"ridge": 0.0}, r"ridge: got 0.0, needs finite numbers above 0"),
        ({"ridge": -1.0}, r"ridge: got -1.0, needs finite numbers above 0"),
        ({"epsilon": -0.1}, r"epsilon: got -0.1, needs finite numbers of at least 0"),
        ({"epsilon": np.asarray([np.nan])}, r"epsilon: got \[nan\], needs finite numbers of at least 0"),
        ({"ridge": np.ones(3)}, r"ridge: got shape \(3,\), needs a number, \(1,\) for the updates after the first, or"),
        ({"epsilon": np.ones((65, 1))}, r"epsilon: got shape \(65, 1\), needs .* \(at most 64 candidates, 1\)"),
        ({"bandwidth": 0.0}, r"bandwidth: got 0.0, needs"),
        ({"weight": -1.0}, r"weight: got -1.0, needs"),
        ({"perturbation": "pencil", "mix": 0.0}, r"mix: got 0.0, needs"),
        ({"certify": True, "kernel": "polynomial"}, r"certify: got True for a kernel whose slope has no bound"),
        ({"causal": "left"}, r"causal: got 'left', needs True, False"),
        ({"mask": np.ones((4, 4), bool)}, r"mask: got shape \(4, 4\)"),
        ({"implementation": "tiled"}, r"implementation: got 'tiled', needs one of auto, dense, shared"),
        ({"implementation": 3}, r"implementation: got 3, needs one of auto, dense, shared"),
    ],
)
def test_a_value_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(X, X, X, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": 2.0}, r"updates: got 2.0, needs a whole number of at least 1"),
        ({"updates": True}, r"updates: got True, needs a whole number"),
        ({"ridge": "0.1"}, r"ridge: got '0.1'"),
        ({"kernel": 3}, r"kernel: got int, needs one of linear, rbf, matern32, matern52, polynomial, or a Linear or"),
        ({"certify": 1}, r"certify: got 1, needs true or false"),
        ({"ridge": np.ones(1, dtype=int)}, r"ridge: got dtype int64"),
        ({"mask": np.ones((3, 3))}, r"mask: got dtype float64, needs bool"),
        ({"mask": [[True]]}, r"mask: got list, needs an array"),
    ],
)
def test_a_type_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        forward(X, X, X, **options)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"v: got width 3, needs 4 as q: what is attended is the query's next place"):
        ra.koopman.forward(X, X, X[..., :3])
    with pytest.raises(ValueError, match=r"k: got shape"):
        ra.koopman.forward(X, X[..., :3], X)
    out, saved = ra.koopman.forward(X, X, X, perturbation="identity")
    with pytest.raises(ValueError, match=r"d_out: got shape \(1, 2, 3, 3\)"):
        ra.koopman.backward(saved, X[..., :3])
    with pytest.raises(TypeError, match=r"saved: got ndarray, needs what forward returned"):
        ra.koopman.backward(out, X)


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"ridge": 0.2}, r"ridge: got an option of before, needs fit=Stein\(ridge=...\), or Separable"),
        ({"augment": True}, r'augment: got an option of before, needs space="augmented"'),
        ({"mix": 0.5, "tau": 1.0}, r"mix: got an option of before, needs perturbation=Pencil\(mix=...\)"),
        ({"steps": 3}, r"koopman.forward\(\) got an unexpected keyword argument 'steps'"),
    ],
)
def test_an_old_keyword_names_the_new_one(old: dict[str, Any], now: str) -> None:
    with pytest.raises(TypeError, match=now):
        ra.koopman.forward(X, X, X, **old)


def test_objects_names_and_texts_are_one() -> None:
    q = np.eye(4)[None, None] + 0.1
    given: dict[str, Any] = {"kernel": ra.koopman.Rbf(weight=0.5), "perturbation": ra.koopman.Identity(0.2)}
    texts: dict[str, Any] = {"kernel": "rbf(weight=0.5)", "perturbation": "identity(epsilon=0.2)"}
    out = ra.koopman.forward(q, q, q, **given)[0]
    assert np.array_equal(out, ra.koopman.forward(q, q, q, **texts)[0])
    assert BLOCK.Config(width=4, heads=2, **given) == BLOCK.Config(width=4, heads=2, **texts)
    usual: dict[str, Any] = {"fit": ra.koopman.Stein(), "perturbation": "identity", "kernel": "rbf"}
    assert np.array_equal(
        ra.koopman.forward(q, q, q, **usual)[0], ra.koopman.forward(q, q, q, perturbation="identity")[0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"heads: got 3, needs a divisor of the width 4, or a head_width"),
        ({"kv_heads": 3, "heads": 4}, r"kv_heads: got 3, needs a divisor of the 4 heads"),
        ({"width": 0}, r"width: got 0, needs a whole number of at least 1"),
        ({"updates": 0}, r"updates: got 0, needs a whole number of at least 1"),
        ({"kernel": "none"}, r"kernel: got 'none', needs one of"),
        ({"perturbation": "other"}, r"perturbation: got 'other', needs one of"),
    ],
)
def test_a_configuration_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK.Config(**{"width": 4, "heads": 2, **options})


def test_what_a_block_is_given() -> None:
    x = np.ones((1, 3, 4))
    params = BLOCK.init(BLOCK.Config(width=4, heads=2), like=x)
    state = BLOCK.start(params, x, ra.Context())
    for context, message in (
        (ra.Context(memory_mask=np.ones((1, 3), bool)), r"context.memory_mask was given without context.memory"),
        (ra.Context(memory=x[..., :3]), r"context.memory: got shape \(1, 3, 3\), needs \(1, keys, 4\)"),
        (ra.Context(key_mask=np.ones((1, 2), bool)), r"context.key_mask: got shape \(1, 2\), needs \(1, 3\)"),
        (ra.Context(memory=x, key_mask=np.ones((1, 3), bool)), r"whose tokens are the keys: use memory_mask"),
        (ra.Context(draws={"noise": x}), r"context.draws: got noise, needs ridge and epsilon"),
    ):
        with pytest.raises(ValueError, match=message):
            BLOCK.forward(params, state, context)
    with pytest.raises(ValueError, match=r"x: got shape \(1, 3, 3\), needs \(batch, tokens, 4\)"):
        BLOCK.start(params, x[..., :3], ra.Context())
    with pytest.raises(ValueError, match=r"not finite"):
        BLOCK.forward(params, BLOCK.start(params, x, ra.Context()).__class__(x * np.nan), ra.Context())
