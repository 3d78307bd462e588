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
        ({"implementation": "tiled"}, r"implementation: got 'tiled', needs one of auto, dense, shared"),
    ],
)
def test_a_value_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(X, X, X, **options)


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
        ({"updates": 0}, r"updates: got 0, needs a whole number of at least 1"),
        ({"kernel": "none"}, r"kernel: got 'none', needs one of"),
        ({"perturbation": "other"}, r"perturbation: got 'other', needs one of"),
    ],
)
def test_a_configuration_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK.Config(**{"width": 4, "heads": 2, **options})
