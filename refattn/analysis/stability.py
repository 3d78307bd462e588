"""Whether a flow comes back to an equilibrium: the eigenvalues of H = -J there.

Where the graph has detailed balance with weights pi, J is that of a gradient flow in the inner product with these
weights, and pi^(1/2) H pi^(-1/2) is symmetric: its eigenvalues are real. Where nothing holds the scores of a connected
component, H has an eigenvalue 0 for it, which says nothing; such zeros are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import eigvals, eigvalsh
from scipy.sparse import diags_array
from scipy.sparse.linalg import eigs, eigsh, norm

from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import Floats
from refattn.mechanisms.graph_energy.implementations.sparse import CSR

ZERO = 1e-9
"""Eigenvalues that are smaller, relative to the size of H or 1, count as 0."""

SMALLEST = 6
"""How many eigenvalues of a large sparse H are computed, beside those that say nothing."""


@dataclass(frozen=True)
class Stability:
    """The eigenvalues of H at an equilibrium.

    Attributes
    ----------
    eigenvalues
        From the smallest real part on, without the structural zeros; of a sparse graph the smallest ones.
    negative, zero
        How many of them have a negative real part, and a real part of 0.
    """

    eigenvalues: Floats
    negative: int
    zero: int

    @property
    def label(self) -> str:
        """`unstable` where one is negative, else `degenerate` where one is 0, else `stable`."""
        return "unstable" if self.negative else "degenerate" if self.zero else "stable"


def stability(flow: GraphFlow, x: Floats, tolerance: float = ZERO) -> Stability:
    """Return the eigenvalues of H at an equilibrium x (n,), and their signs."""
    matrix = -flow.jacobian(x)
    sparse = isinstance(flow.graph, CSR)
    values = _of_sparse(flow, matrix) if sparse else _of_dense(flow, matrix)
    small = tolerance * max(1.0, float(norm(matrix, np.inf) if sparse else np.linalg.norm(matrix, np.inf)))
    flat = np.flatnonzero(np.abs(values) <= small)
    flat = flat[np.argsort(np.abs(values[flat]), kind="stable")][: flow.free]
    values = np.delete(values, flat)
    return Stability(values, int(np.sum(values < -small)), int(np.sum(np.abs(values) <= small)))


def _of_dense(flow: GraphFlow, matrix: Floats) -> Floats:
    if flow.balance is None:
        return np.sort(eigvals(matrix).real)
    root = np.sqrt(flow.balance)
    even = root[:, None] * matrix / root
    return np.asarray(eigvalsh(0.5 * (even + even.T)), np.float64)


def _of_sparse(flow: GraphFlow, matrix: Any) -> Floats:
    count = SMALLEST + flow.free
    if flow.n <= 2 * count + 2:
        return _of_dense(flow, matrix.toarray())
    start = np.sin(1.0 + np.arange(flow.n))  # the same numbers each time
    if flow.balance is None:
        return np.sort(eigs(matrix, count, which="SR", v0=start, return_eigenvectors=False).real)
    # All eigenvalues lie above the lowest disc of Gershgorin; the nearest ones to a point below it are the smallest.
    own = matrix.diagonal()
    beside = np.asarray(abs(matrix - diags_array(own)).sum(axis=1)).ravel()
    below = float(np.min(own - beside)) - 1e-3 * float(np.max(np.abs(own) + beside))
    return np.sort(eigsh(matrix, count, sigma=below, v0=start, return_eigenvectors=False))
