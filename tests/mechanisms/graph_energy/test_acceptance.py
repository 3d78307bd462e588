"""Some of the numbers that graph energy attention was accepted by, 1 to 18.

The others stand by name elsewhere: 1, 3 and 5 in test_theorems.py, 2 and 9 in test_gradients.py, 8 in test_sparse.py,
10 in test_readout.py, 12 in test_stream.py, more of 13 in test_hierarchy.py, 16 in test_bad_input.py. Padding and other
orders of the tokens, 4 and 17, are properties that `refattn check` holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.precision import PrecisionWarning
from tests.mechanisms.graph_energy.calls import (
    COUPLINGS,
    STATES,
    B,
    H,
    N,
    agree,
    draw,
    forward,
    gradients_of,
    kept,
    qkv,
    run,
)


def test_11_attention_that_flows_stays_attention() -> None:
    for causal in (False, True):
        _, saved = run(state="query", causal=causal, empty="error")  # no row is emptied
        np.testing.assert_allclose(np.sum(saved.scores, axis=2), np.ones((B, H, N)), rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.sum(saved.weights, axis=3), np.ones((B, H, N)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("symmetrise", ["kernel", "mean", "min", "none"])
def test_14_the_implicit_gradient_is_that_of_many_steps(symmetrise: str, state: str, masked: bool) -> None:
    options: dict[str, Any] = {"state": state, "symmetrise": symmetrise, "steps": 900, "kind": "soft", "tau": 0.02}
    options |= {"mu": np.array([0.5, 1.0, 1.5, 2.0]), "kappa": np.array([1.0, 0.5, 2.0, 0.2]), "step": 0.1}
    if masked:
        options["mask"] = kept("mask", B, H, N, N)
    found = []
    for adjoint in ("unroll", "implicit"):
        out, saved = run(**options, adjoint=adjoint)
        found.append(core.backward(saved, draw("d_out", *out.shape)))
    for name, x in found[0].items():
        np.testing.assert_allclose(found[1][name], x, rtol=0, atol=1e-8 * max(1.0, float(np.max(np.abs(x)))))


def test_14_the_implicit_gradient_is_refused_where_there_is_none() -> None:
    refused: dict[str, dict[str, Any]] = {
        "the scores are not at rest: take more steps": {"steps": 3},
        "at or near a bifurcation, or not isolated": {"intrinsic": "none", "steps": 400},
    }
    for message, options in refused.items():
        out, saved = run(**options, adjoint="implicit")
        with pytest.raises(ArithmeticError, match=message):
            core.backward(saved, out)


def test_14_the_implicit_gradient_says_where_rounding_may_move_it() -> None:
    """Nearly without a way back to the start J is nearly singular: float32 may lose all but two digits, and says so."""
    for dtype in ("float32", "float64"):
        out, saved = forward(*(x.astype(dtype) for x in qkv(N)), adjoint="implicit", mu=1e-5, steps=400)
        if dtype == "float64":
            core.backward(saved, out)  # a warning is an error in tests
            continue
        with pytest.warns(PrecisionWarning, match="adjoint: rounding may move it by .*, needs float64, or") as said:
            core.backward(saved, out)
        assert said[0].filename == __file__


def test_13_a_table_of_biases_is_shared_by_tokens_of_a_class() -> None:
    """bias = table[phi(i), phi(j)]: the gradient of the table is that of the bias, added up by classes."""
    table, classes = draw("table", 3, 3), np.array([0, 1, 2, 1, 0, 2, 2])
    for state in STATES:
        out, saved = run(state=state, bias=table[classes[:, None], classes])
        by_hand = np.zeros((3, 3))
        d_out = draw("d_out", *out.shape)
        np.add.at(by_hand, (classes[:, None], classes), core.backward(saved, d_out)["bias"])

        def call(table: Any, state: str = state) -> Any:
            arrays = (table.new_tensor(x) for x in qkv())
            return forward(*arrays, state=state, bias=table[classes[:, None], classes])

        agree({"table": by_hand}, gradients_of(call, {"table": table}, d_out))
    for shape in ((N, N), (H, 1, N), (B, 1, 1, 1), (1,)):
        out, saved = run(bias=draw("bias", *shape))
        assert core.backward(saved, out)["bias"].shape == shape


@pytest.mark.parametrize("symmetrise", ["kernel", "mean", "min", "none"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_18_scores_that_start_higher_end_higher(coupling: str, symmetrise: str) -> None:
    """By the same number, for a start that is the anchor as well."""
    start = 0.3 * draw("start", H, N)
    options: dict[str, Any] = {"coupling": coupling, "symmetrise": symmetrise, "step": 0.1, "tau": 0.0}
    low, high = (run(**options, start=start + shift)[1].scores for shift in (0.0, 0.7))
    np.testing.assert_allclose(high, low + 0.7, rtol=0, atol=1e-12)
