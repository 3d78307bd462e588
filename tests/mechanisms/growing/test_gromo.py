"""A peer: gromo's optimal added parameters of a linear layer, from the same statistics.

Queries and keys are grown as the two factors of one kernel, a linear map of tokens to tokens, which is what gromo's
layer is; what it calls the covariance of the gradient is the metric on the other side. Both sides have the same here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.growing.growth.bottleneck import bottleneck
from refattn.mechanisms.growing.growth.metric import kronecker
from refattn.mechanisms.growing.growth.statistics import Statistics

WIDTH, TOKENS, SEQUENCES = 9, 40, 3


@pytest.mark.parametrize("old", [0, 2, 4])
def test_gromo_adds_the_same_columns(old: int) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("gromo")
    from gromo.utils.tools import compute_optimal_added_parameters

    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((SEQUENCES, TOKENS, WIDTH)) @ rng.standard_normal((WIDTH, WIDTH)) * 0.3
    gradient = rng.standard_normal((1, WIDTH, WIDTH))
    gram = np.einsum("bni,bnj->ij", tokens, tokens)
    statistics = Statistics(gradient, gram, gram, SEQUENCES, float(SEQUENCES * TOKENS**2), False, (), 1.0)
    metric = kronecker(statistics)
    w: Any = SimpleNamespace(w_q=rng.standard_normal((1, WIDTH, old)), w_k=rng.standard_normal((1, WIDTH, old)))
    found = bottleneck(w, statistics, metric)

    one_side = gram / np.sqrt(SEQUENCES)  # the metric is the product of both sides

    def free_of(x: np.ndarray) -> np.ndarray:
        """The projector on what the columns x cannot follow, in the metric."""
        return np.eye(WIDTH) - one_side @ x @ np.linalg.pinv(x.T @ one_side @ x) @ x.T

    left = free_of(w.w_q[0]) @ gradient[0] @ free_of(w.w_k[0]).T  # gromo knows of no old columns
    alpha, omega, sigma = compute_optimal_added_parameters(
        torch.tensor(one_side),
        torch.tensor(left),
        numerical_threshold=0.0,
        statistical_threshold=0.0,
        matrix_covariance_loss_gradient=torch.tensor(one_side),
        e_numerical_threshold=0.0,
    )
    theirs, ours = (omega[:, :2] @ alpha[:2]).numpy().T, found.u[0][:, :2] * found.sigma[0][:2] @ found.v[0][:, :2].T
    back = metric.left.back
    np.testing.assert_allclose(sigma.numpy(), found.sigma[0], rtol=0, atol=1e-13 * found.sigma[0].max())
    np.testing.assert_allclose(theirs, back @ ours @ back.T, rtol=0, atol=1e-13 * np.abs(theirs).max())
