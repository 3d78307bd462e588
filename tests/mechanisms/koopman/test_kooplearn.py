"""A peer: kooplearn's kernel ridge regression with a linear kernel, on the path of one query.

The operator that it fits to the states before the last is the separable fit in the full space. kooplearn 2.0.3 predicts
n - 1 steps where n are asked: its regressor takes the observable after a step, and is given the one before it. So the
observable is the next state here.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.koopman.core import forward
from refattn.mechanisms.koopman.options.fits import Separable
from refattn.mechanisms.koopman.options.perturbation import Identity

RIDGE, WIDTH, UPDATES = 0.05, 4, 7


def test_kooplearn_predicts_the_same_state_by_the_same_spectrum() -> None:
    pytest.importorskip("kooplearn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kooplearn.kernel import KernelRidge

        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal((1, 1, n, WIDTH)) for n in (1, 9, 9))
        fit, start = Separable(ridge=RIDGE), Identity(epsilon=1e-7)
        given: dict[str, Any] = {
            "updates": UPDATES,
            "kernel": "linear",
            "space": "full",
            "fit": fit,
            "perturbation": start,
        }
        _, saved = forward(q, k, v, jitter=1e-12, **given)
        path = np.array([np.asarray(x)[0, 0, 0] for x in saved.trajectory])
        before, last = path[:-1], path[-1]
        scores = before[-1] @ k[0, 0].T / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        attended = weights / weights.sum() @ v[0, 0]

        pairs = len(before) - 1
        options = {"reduced_rank": False, "kernel": "linear", "eigen_solver": "dense", "n_components": pairs}
        next_states = np.vstack([before[1:], before[-1:]])
        model = KernelRidge(alpha=RIDGE / pairs, **options).fit(before, next_states)
        following = model.predict(attended[None].copy(), n_steps=1, observable=True)[0]
        present = model.predict(attended[None].copy(), n_steps=1)[0]
        theirs = np.asarray(model.eig())
    x, y = before[:-1], before[1:]
    gram = x @ x.T + RIDGE * np.eye(pairs)
    ours = np.linalg.eigvals(np.linalg.solve(gram, y @ x.T))
    np.testing.assert_allclose(following, last, rtol=0, atol=1e-11)
    np.testing.assert_allclose(present, attended @ x.T @ np.linalg.solve(gram, x), rtol=0, atol=1e-11)
    np.testing.assert_allclose(np.sort_complex(theirs), np.sort_complex(ours), rtol=0, atol=1e-12)
