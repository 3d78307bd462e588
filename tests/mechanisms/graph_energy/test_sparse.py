"""Graphs that are given: dense and sparse ones are the same flow, on every library."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.implementations import sparse as sparse_implementation
from refattn.mechanisms.graph_energy.implementations import sparse_rows
from refattn.mechanisms.graph_energy.implementations.sparse import CSR, dense_graph
from refattn.mechanisms.graph_energy.system import balanced
from tests.conftest import Library
from tests.mechanisms.graph_energy.calls import COUPLINGS, STATES, B, H, N, draw, forward, kept, qkv, run


def weights(n: int = N, keep: float = 0.4, *, lower: bool = False) -> Any:
    found = np.where(kept("edges", n, n, keep=keep), draw("weights", n, n), 0.0)
    found[2] = 0.0  # a token without edges, in between
    found[n - 1] = 0.0  # and the last one
    return np.tril(found, -1) if lower else found


def placed(backend: Any, graph: CSR) -> CSR:
    indptr, indices, data = (backend.array(np.asarray(x)) for x in (graph.indptr, graph.indices, graph.data))
    return CSR(indptr, indices, data, graph.shape)


def both(
    options: dict[str, Any], dense: Any, sparse: CSR, arrays: Any, array: Any = np.asarray
) -> list[dict[str, Any]]:
    found = []
    for graph in (dense, sparse):
        out, saved = forward(*arrays, graph=graph, **options)
        found.append({"out": out, **core.backward(saved, array(draw("d_out", *out.shape)))})
    return found


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"coupling": coupling, "state": state, "causal": causal, "step": 0.02, "integrator": "heun"}
            for coupling in COUPLINGS
            for state in STATES
            for causal in (False, True)
        ),
        {"step": 0.05, "start": draw("start", H, N)},
        {"step": 0.05, "tau": 0.6, "empty": "dense", "scale": 0.3},
        {"step": 0.05, "kind": "soft", "tau": 0.45},
    ],
)
def test_8_dense_and_sparse_graphs_are_one(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of products for sin, identity and cubic, edge by edge for the others, three rows of attention at a time."""
    monkeypatch.setattr(sparse_rows, "ELEMENTS", 3 * N)
    dense = weights(lower=bool(options.get("causal")))
    found = both({**options, "steps": 3}, dense, ra.graph_energy.sparse_graph(dense), qkv())
    assert found[0].keys() == found[1].keys()
    for name, x in found[0].items():
        np.testing.assert_allclose(found[1][name], x, rtol=0, atol=1e-12 * max(1.0, np.max(np.abs(x))), err_msg=name)


@pytest.mark.parametrize("coupling", ["sin", "tanh"])
def test_every_library_multiplies_sparse_graphs(coupling: str, backend: Any) -> None:
    if backend.library is Library.JAX and coupling == "sin":
        pytest.skip("JAX compiles every operation for every shape: the other coupling alone")
    dense = weights()
    options: dict[str, Any] = {"state": "feature", "coupling": coupling, "step": 0.1, "steps": 2}
    wanted = both(options, dense, ra.graph_energy.sparse_graph(dense), qkv())[0]
    arrays = [backend.array(x) for x in qkv()]
    sparse = placed(backend, ra.graph_energy.sparse_graph(dense))
    found = both(options, backend.array(dense), sparse, arrays, backend.array)
    for each in found:
        for name, x in wanted.items():
            size = max(1.0, float(np.max(np.abs(x))))
            np.testing.assert_allclose(backend.host(each[name]), x, rtol=0, atol=1e-12 * size, err_msg=name)


@pytest.mark.parametrize("state", ["token", "feature"])
def test_nothing_on_a_sparse_graph_is_as_large_as_all_pairs(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, and the making of graphs, in less than half of what one number for each pair takes."""
    for module in (sparse_rows, sparse_implementation):
        monkeypatch.setattr(module, "ELEMENTS", 2**12)

    def call(n: int) -> Any:
        q, k, v = (np.sin(np.arange(3 * n).reshape(1, 1, n, 3) * at) for at in (1.0, 2.0, 3.0))
        graph = ra.graph_energy.nearest_graph(q[0, 0], 2)
        lower = dataclasses.replace(graph, indices=np.minimum(graph.indices, graph.ends()[0]))
        out, saved = core.forward(q, k, v, graph=lower, state=state, causal=True, coupling="sin", steps=2)
        core.backward(saved, out)
        return ra.graph_energy.window_graph(n, 2, q), saved

    call(9)  # which imports
    n = 700
    tracemalloc.start()
    try:
        _, saved = call(n)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 0.5 * 8 * n * n and saved.weights is None


def test_a_sparse_graph_is_its_matrix() -> None:
    for dense in (weights(), np.zeros((4, 4)), weights(5, 1.0)):
        sparse = ra.graph_energy.sparse_graph(dense)
        assert np.array_equal(dense_graph(sparse), dense)
        assert np.array_equal(dense_graph(sparse.turned()), dense.T)
        assert np.array_equal(np.stack(sparse.ends()), np.stack(np.nonzero(dense)))


def test_windows_and_nearest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_implementation, "ELEMENTS", 20)  # two rows at a time
    n, like = 9, np.zeros(1)
    apart = np.abs(np.arange(n)[:, None] - np.arange(n))
    window = dense_graph(ra.graph_energy.window_graph(n, 2, like))
    assert np.array_equal(window, np.where((apart > 0) & (apart <= 2), 0.25, 0.0))
    points = draw("points", n, 3)
    near = dense_graph(ra.graph_energy.nearest_graph(points, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1) + np.diag(np.full(n, np.inf))
    chosen = np.zeros((n, n), bool)
    np.put_along_axis(chosen, np.argsort(distances, axis=1)[:, :2], True, axis=1)
    assert np.array_equal(near, np.where(chosen | chosen.T, 0.5, 0.0))
    wrong: Any
    for wrong in (0, n, 1.5):
        with pytest.raises((TypeError, ValueError), match="count: got"):
            ra.graph_energy.nearest_graph(points, wrong)
    with pytest.raises(ValueError, match="width: got 0"):
        ra.graph_energy.window_graph(n, 0, like)


@pytest.mark.parametrize(
    ("make", "given", "kind", "message"),
    [
        ("window_graph", (-3, 1, np.zeros(1)), ValueError, "n: got -3, needs a whole number of at least 0"),
        ("window_graph", (2.5, 1, np.zeros(1)), TypeError, "n: got 2.5, needs a whole number"),
        ("window_graph", (3, 1, np.zeros(1, int)), TypeError, "like: got dtype int64"),
        ("nearest_graph", (np.array([[0.0], [np.nan], [1.0]]), 1), ValueError, "points: got some without finite"),
        ("nearest_graph", (np.array([[200], [10], [1]], np.uint8), 1), TypeError, "points: got dtype uint8"),
        ("nearest_graph", (np.zeros(3), 1), ValueError, r"points: got shape \(3,\), needs 2 axes"),
        ("sparse_graph", (np.ones((4, 8)),), ValueError, r"weights: got shape \(4, 8\), needs as many rows as columns"),
        ("sparse_graph", (1j * np.eye(2),), TypeError, "weights: got dtype complex128, needs one of real numbers"),
    ],
)
def test_what_is_no_graph(make: str, given: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        getattr(ra.graph_energy, make)(*given)


def test_the_longest_step_follows_the_degrees() -> None:
    dense = weights() * (1.0 - np.eye(N))
    degree = np.max(np.sum(np.abs(dense), axis=1))
    for graph in (dense, ra.graph_energy.sparse_graph(dense)):
        _, saved = run(graph=graph, steps=0)
        np.testing.assert_allclose(ra.graph_energy.longest_step(saved), 2.0 / (1.0 + 2.0 * degree), rtol=1e-15)


def balanced_links(n: int) -> Any:
    """Links (2, 4, n, n) with detailed balance and without symmetry, in two components, with loops."""
    symmetric = np.where(kept("links", n, n, keep=0.6), np.abs(draw("links", B, H, n, n)), 0.0)
    symmetric = symmetric + np.swapaxes(symmetric, 2, 3)
    apart = np.arange(n) < 3
    return np.where(apart[:, None] == apart, symmetric, 0.0) / np.exp(draw("balance", B, H, n, 1))


def test_energy_falls_where_there_is_detailed_balance() -> None:
    """pi_i w_ij is symmetric, by component; and the rate is minus the gradient of the energy, over pi."""
    links = balanced_links(N) / 20.0
    pi: Any = balanced(links)
    flux = pi * links
    np.testing.assert_allclose(flux, np.swapaxes(flux, 2, 3), rtol=0, atol=1e-13 * np.max(flux))
    _, saved = run(graph=links, integrator="euler(stop_plateau=1e-9)", steps=20)
    levels = ra.graph_energy.energy(saved)
    assert np.all(np.diff(levels, axis=-1) <= 1e-14) and np.all(levels[..., -1] < levels[..., 0])
    start, h, moved = saved.inner.flow.states[0], 1e-5, np.zeros((B, H, N, 1))
    moved[:, :, 2] = h
    sides = [np.sum(saved.system.energy(pi, start + sign * moved), axis=(2, 3)) for sign in (1.0, -1.0)]
    slope = -(sides[0] - sides[1]) / (2.0 * h) / pi[:, :, 2, 0]
    np.testing.assert_allclose(slope, saved.system.rate(start)[:, :, 2, 0], rtol=0, atol=1e-8)


def test_the_energy_of_a_sparse_graph_is_that_of_its_matrix() -> None:
    dense = balanced_links(N)[0, 0] / 20.0
    found = []
    for graph in (dense, ra.graph_energy.sparse_graph(dense)):
        _, saved = run(graph=graph, steps=3)
        d = core.backward(saved, 0.0 * draw("d_out", B, H, N, 5), d_energy=draw("d_energy", B, H))
        found.append({"energy": ra.graph_energy.energy(saved), "pi": balanced(graph), **d})
    for name, x in found[0].items():
        np.testing.assert_allclose(found[1][name], x, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (np.triu(np.ones((3, 3)), 1), "a link has none back"),
        (np.array([[0.0, 1.0], [-1.0, 0.0]]), "of another sign"),
        (np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 2.0], [1.0, 1.0, 0.0]]), "a loop of links"),
    ],
)
def test_what_has_no_detailed_balance(links: Any, message: str) -> None:
    for graph in (links, ra.graph_energy.sparse_graph(links)):
        with pytest.raises(ValueError, match=f"with detailed balance: .*({message}|a link has none back)"):
            balanced(graph)


def test_the_future_is_hidden_from_a_given_graph() -> None:
    q, k, v = qkv()
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[:, :, 4:] += 1.0
    graphs = np.abs(weights()), ra.graph_energy.sparse_graph(weights(lower=True))
    for graph in graphs:
        options: dict[str, Any] = {"graph": graph, "causal": True, "step": 0.1}
        first, second = (forward(*x, **options)[0] for x in ((q, k, v), changed))
        assert np.array_equal(first[:, :, :4], second[:, :, :4])
