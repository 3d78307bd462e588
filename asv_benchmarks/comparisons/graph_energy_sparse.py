"""One evaluation of the flow on a graph of 32 neighbours: sparse, and in tiles of the dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Side
from refattn import philox

NEIGHBOURS = 32


def graph_of(n: int) -> Any:
    """Return symmetric links (n, n) of 1/64: each token has 32 others at random, and those that have it."""
    ranks = np.argsort(philox.uniform((n, n), seed=0, purpose="graph_energy.neighbours"), axis=1)
    chosen = np.zeros((n, n), dtype=np.bool_)
    np.put_along_axis(chosen, ranks[:, :NEIGHBOURS], True, axis=1)
    np.fill_diagonal(chosen, False)
    return np.where(chosen | chosen.T, 0.5 / NEIGHBOURS, 0.0)


def sparse(n: int, coupling: str, channels: int) -> Callable[[], Any]:
    """The sparse form."""
    from refattn.mechanisms.graph_energy import sparse_graph
    from refattn.mechanisms.graph_energy.implementations.sparse import SPARSE

    return evaluation(SPARSE, sparse_graph(graph_of(n)), n, coupling, channels)


def dense(n: int, coupling: str, channels: int) -> Callable[[], Any]:
    """Tiles of every difference of two scores."""
    from refattn.mechanisms.graph_energy.implementations.pairs import TILED

    return evaluation(TILED, graph_of(n)[None, None], n, coupling, channels)


def evaluation(form: Any, graph: Any, n: int, coupling: str, channels: int) -> Callable[[], Any]:
    """Return the call that sums over the edges once, in float64."""
    from refattn.mechanisms.graph_energy.forces import COUPLINGS

    x = philox.normal((1, 1, n, channels), seed=0, purpose="graph_energy.x")
    return lambda: form.couple_forward(COUPLINGS[coupling], graph, None, x)


COMPARISON = Comparison(
    name="graph_energy_sparse",
    title="Graph energy attention on a sparse graph",
    text=(
        f"One evaluation of the coupling in float64, where each token has {NEIGHBOURS} neighbours at random and those "
        "whose neighbour it is: the sparse form beside the dense one in tiles."
    ),
    sides=(Side("sparse", f"{__name__}:sparse", ours=True), Side("tiled", f"{__name__}:dense")),
    grid=tuple(
        {"n": n, "coupling": coupling, "channels": channels}
        for n in (512, 2048)
        for coupling, channels in (("tanh", 1), ("sin", 64))
    ),
    quick=lambda point: point["n"] <= 512,
    agree=1e-11,
)
