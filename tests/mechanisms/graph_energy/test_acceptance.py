"""The numbers that graph energy attention was accepted by, 1 to 18.

Some stand elsewhere, by name: 5 (what is proved of the flow) in test_theorems.py and test_integrators.py; more of 8 in
test_sparse.py; 12 (decoding) in test_stream.py; more of 13 (levels and shared tables) in test_hierarchy.py; more of 16
in test_bad_input.py. Bifurcations and counts of equilibria, 6 and 7, are no matter of the flow; what of them it alone
tells stands in test_deviations.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.graph_energy import core
from tests.mechanisms.graph_energy.calls import COUPLINGS, STATES, B, H, N, draw, forward, kept, qkv, run, step_of
from tests.mechanisms.graph_energy.test_gradients import FEW, errors

SEPARABLE = ("sin", "identity", "cubic")


def softmax_out() -> Any:
    return ra.softmax.forward(*qkv())[0]


def test_1_three_limits_are_softmax_attention() -> None:
    diffusion: dict[str, Any] = {"coupling": "identity", "mu": 0.0, "step": 1.0, "steps": 1, "symmetrise": "none"}
    limits = (
        run(state="query", kappa=0.0, tau=0.0),
        run(state="feature", **diffusion),
        run(state="token", mu=0.0, steps=600, tau=0.0),
    )
    for out, _ in limits:
        np.testing.assert_allclose(out, softmax_out(), rtol=0, atol=1e-12)


def test_2_gradients_agree_with_autograd() -> None:
    for combination in FEW[:6]:
        assert max(errors(combination).values()) < 1e-9


@pytest.mark.parametrize("state", STATES)
def test_3_nothing_leaks_from_the_future(state: str) -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {"state": state, "causal": True, "step": 0.1}
    base = forward(q, k, v, **options)[0]
    for now in range(1, N):
        changed = [x.copy() for x in (q, k, v)]
        for x in changed:
            x[:, :, now:] = -x[:, :, now:] + 1.0
        assert np.array_equal(forward(*changed, **options)[0][:, :, :now], base[:, :, :now])


@pytest.mark.parametrize("state", STATES)
def test_4_masked_is_as_good_as_deleted(state: str) -> None:
    keep = np.array([True, False, True, True, False, True, True])
    q, k, v = qkv()
    out, _ = forward(q, k, v, state=state, mask=keep[:, None] & keep)
    short, _ = forward(q[:, :, keep], k[:, :, keep], v[:, :, keep], state=state)
    np.testing.assert_allclose(out[:, :, keep], short, rtol=0, atol=1e-12)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_8_dense_links_products_and_edges_are_one(coupling: str, state: str) -> None:
    """One graph as a matrix, in the implementations that take one, and as a list of edges."""
    links = np.where(kept("links", N, N, keep=0.5), np.abs(draw("weights", N, N)), 0.0)
    np.fill_diagonal(links, 0.0)
    options: dict[str, Any] = {"state": state, "coupling": coupling, "step": 0.02, "kappa": 0.7}
    implementations = ("dense", "tiled", *(["products"] if coupling in SEPARABLE else []))
    calls = [run(**options, graph=links, implementation=implementation) for implementation in implementations]
    calls.append(run(**options, graph=ra.graph_energy.sparse_graph(links)))
    results = [{"out": out, **core.backward(saved, draw("d_out", *out.shape))} for out, saved in calls]
    for found in results[1:]:
        for name, x in results[0].items():
            np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-12 * max(1.0, float(np.max(np.abs(x)))))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_9_products_and_tiles_are_pairs(
    coupling: str, state: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refattn.mechanisms.graph_energy.implementations import tiled

    monkeypatch.setattr(tiled, "ELEMENTS", 2 * N)  # tiles of one or two rows
    options: dict[str, Any] = {"state": state, "coupling": coupling, "kappa": 0.7, "step": 0.1}
    if masked:
        options["mask"] = kept("mask", B, H, N, N)
    found = {}
    for implementation in ("dense", "tiled", *(["products"] if coupling in SEPARABLE else [])):
        out, saved = run(**options, implementation=implementation)
        found[implementation] = {"out": out, **core.backward(saved, draw("d_out", *out.shape))}
    for implementation in found:
        for name, x in found["dense"].items():
            np.testing.assert_allclose(
                found[implementation][name], x, rtol=0, atol=1e-12 * max(1.0, float(np.max(np.abs(x))))
            )


@pytest.mark.parametrize("empty", ["argmax", "dense", "zero"])
def test_10_emptied_rows_are_finite(empty: str) -> None:
    for state in ("token", "query"):
        out, saved = run(state=state, tau=0.99, empty=empty, mask=kept("mask", N, N))
        gradients = core.backward(saved, draw("d_out", *out.shape))
        assert all(np.all(np.isfinite(x)) for x in (out, *gradients.values()))


def test_10_emptied_rows_may_be_an_error() -> None:
    with pytest.raises(FloatingPointError, match="batch 0, head 0, token 0: no score is above tau"):
        run(tau=0.99, empty="error")


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


def test_14_the_implicit_gradient_of_a_polynomial() -> None:
    options: dict[str, Any] = {"coupling": "polynomial", "coefficients": (1.0, 0.5), "step": 0.2, "steps": 400}
    found = [
        core.backward(run(**options, adjoint=each)[1], draw("d_out", B, H, N, 5)) for each in ("unroll", "implicit")
    ]
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


@pytest.mark.parametrize("state", STATES)
def test_15_float32_in_float32_out(state: str) -> None:
    q, k, v = (x.astype(np.float32) for x in qkv())
    out, _ = forward(q, k, v, state=state)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, run(state=state)[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_17_tokens_in_another_order(coupling: str, state: str) -> None:
    order = np.array([3, 0, 6, 2, 5, 1, 4])
    q, k, v = qkv()
    options: dict[str, Any] = {"state": state, "coupling": coupling, **step_of(state)}
    moved, _ = forward(q[:, :, order], k[:, :, order], v[:, :, order], **options)
    expected = run(**options)[0][:, :, order]  # values of the cubic grow: its energy has no lower bound
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-12 * max(1.0, float(np.max(np.abs(expected)))))


def test_13_a_table_of_biases_is_shared_by_tokens_of_a_class() -> None:
    """bias = table[phi(i), phi(j)]: the gradient of the table is that of the bias, added up by classes."""
    torch: Any = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    table, classes = draw("table", 3, 3), np.array([0, 1, 2, 1, 0, 2, 2])
    for state in STATES:
        out, saved = run(state=state, bias=table[classes[:, None], classes])
        by_hand = np.zeros((3, 3))
        d_out = draw("d_out", *out.shape)
        np.add.at(by_hand, (classes[:, None], classes), core.backward(saved, d_out)["bias"])
        leaf = torch.tensor(table, requires_grad=True)
        arrays = [torch.tensor(x) for x in qkv()]
        other, _ = forward(*arrays, state=state, bias=leaf[classes[:, None], classes])
        (expected,) = torch.autograd.grad((other * torch.tensor(d_out)).sum(), [leaf])
        np.testing.assert_allclose(by_hand, expected.numpy(), rtol=0, atol=1e-12 * float(expected.abs().max()))
    for shape in ((N, N), (H, 1, N), (B, 1, 1, 1), (1,)):
        out, saved = run(bias=draw("bias", *shape))
        assert core.backward(saved, out)["bias"].shape == shape
    with pytest.raises(ValueError, match=r"bias: got shape \(3,\), needs one that broadcasts to"):
        run(bias=np.zeros(3))
    with pytest.raises(TypeError, match="bias: got float, needs an array"):
        run(bias=1.0)


def test_16_what_cannot_be_computed_says_what_to_do() -> None:
    with pytest.warns(UserWarning, match="step: got more than 2/L"):
        run(step=1.0)
    with pytest.warns(UserWarning, match="kappa: got -1.0, below 0: scores repel each other"):
        run(kappa=-1.0, step=0.1)
    for options in ({"causal": True}, {"symmetrise": "none"}):
        with pytest.raises(ValueError, match="an energy exists only for graphs with detailed balance"):
            ra.graph_energy.energy(run(**options)[1])
    with pytest.raises(ValueError, match="tau: got -0.1, needs a number at least 0"):
        run(tau=-0.1)
    with pytest.raises(ValueError, match="k: got 7 tokens and 5 in q"):
        forward(qkv()[0][:, :, :5], *qkv()[1:])


@pytest.mark.parametrize("symmetrise", ["kernel", "mean", "min", "none"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_18_scores_that_start_higher_end_higher(coupling: str, symmetrise: str) -> None:
    """By the same number, for a start that is the anchor as well."""
    start = 0.3 * draw("start", H, N)
    options: dict[str, Any] = {"coupling": coupling, "symmetrise": symmetrise, "step": 0.1, "tau": 0.0}
    low, high = (run(**options, start=start + shift)[1].scores for shift in (0.0, 0.7))
    np.testing.assert_allclose(high, low + 0.7, rtol=0, atol=1e-12)
