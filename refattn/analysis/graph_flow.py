"""The flow of graph energy attention as a system of its own: x' = v(x) for one score at each node of a graph.

Everything is computed by `refattn.mechanisms.graph_energy`: couplings, intrinsic forces, rates, Jacobian and energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from refattn.analysis.graphs import Floats, balance_of, component_of
from refattn.args import Real, Whole, check, checked
from refattn.mechanisms.graph_energy.core import Saved
from refattn.mechanisms.graph_energy.equilibrium import jacobian_of
from refattn.mechanisms.graph_energy.forces import COUPLINGS, INTRINSICS, Coupling, Intrinsic
from refattn.mechanisms.graph_energy.implementations.pairs import DENSE, between
from refattn.mechanisms.graph_energy.implementations.sparse import CSR, SPARSE
from refattn.mechanisms.graph_energy.system import System

MECHANISM = Saved.__module__.split(".")[2]
"""The name of the mechanism whose flows these are."""


@dataclass(frozen=True)
class GraphFlow:
    """x_i' = f(x_i; b_i) + kappa sum_j w_ij g(x_j - x_i).

    Attributes
    ----------
    graph
        The links w, float64 (n, n), or a sparse graph.
    coupling, intrinsic
        g and f, or their names.
    b
        What the intrinsic force draws to, (n,) or one number for all nodes.
    mu, kappa
        The strengths of f and g.
    towards, t
        Where a line of flows leads from this one, on as many nodes; `t` is where on it, 0 here and 1 there.

    Raises
    ------
    ValueError
        Where the graph is not square, b does not fit it, or a name is none.
    """

    graph: Floats | CSR
    coupling: Coupling | str = "sin"
    intrinsic: Intrinsic | str = "none"
    b: Floats | Sequence[float] | float = 0.0
    mu: float = 1.0
    kappa: float = 1.0
    towards: GraphFlow | None = None
    t: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        for what, name, known in (("coupling", self.coupling, COUPLINGS), ("intrinsic", self.intrinsic, INTRINSICS)):
            if isinstance(name, str) and name not in known:
                raise ValueError(f"{what}: got {name!r}, needs one of {', '.join(known)}")
        for name in ("mu", "kappa"):
            check(name, getattr(self, name), Real())
        if not isinstance(self.graph, CSR):
            check("graph", self.graph, "*")
        if np.asarray(self.b).dtype.kind not in "fiu":
            raise TypeError(f"b: got {type(self.b).__name__}, needs a number or one for each node")
        shape = tuple(self.graph.shape)
        if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
            raise ValueError(f"graph: got shape {shape}, needs (n, n)")
        if np.shape(self.b) not in ((), (self.n,)):
            raise ValueError(f"b: got shape {np.shape(self.b)}, needs a number or ({self.n},), one for each node")

    @property
    def n(self) -> int:
        """The number of nodes."""
        return int(self.graph.shape[0])

    @cached_property
    def system(self) -> System:
        """The flow in the terms of the mechanism: one batch, head and channel."""
        g = COUPLINGS[self.coupling] if isinstance(self.coupling, str) else self.coupling
        f = INTRINSICS[self.intrinsic] if isinstance(self.intrinsic, str) else self.intrinsic
        links: Any = self.graph if isinstance(self.graph, CSR) else self.graph[None, None]
        implementation, start = SPARSE if isinstance(self.graph, CSR) else DENSE, self.anchors[None, None, :, None]
        return System(g, f, float(self.mu), float(self.kappa), links, start, None, implementation)

    @cached_property
    def matrix(self) -> Any:
        """The links, as an array (n, n) or as one of SciPy's sparse arrays."""
        g = self.graph
        return csr_array((g.data, g.indices, g.indptr), shape=g.shape) if isinstance(g, CSR) else g

    @cached_property
    def component(self) -> NDArray[np.int64]:
        """The number of the connected component of each node, (n,)."""
        return component_of(self.matrix)

    @cached_property
    def balance(self) -> Floats | None:
        """The weights of detailed balance, 1 where the graph is symmetric, or None where there is no energy."""
        if isinstance(self.graph, CSR):
            return np.ones(self.n) if abs(self.matrix - self.matrix.T).max() == 0.0 else None
        return balance_of(self.graph)

    @cached_property
    def anchors(self) -> Floats:
        """What the intrinsic force draws each node to, (n,)."""
        return np.zeros(self.n) + np.asarray(self.b, np.float64)

    @property
    def moves_freely(self) -> bool:
        """Whether the scores of a component may be raised together without any effect."""
        return self.system.intrinsic.name == "none"

    @property
    def free(self) -> int:
        """The number of zero eigenvalues that every equilibrium has: one for each component without an own force."""
        return len(np.unique(self.component)) if self.moves_freely else 0

    @property
    def period(self) -> float | None:
        """What may be added to any score without an effect; None where nothing may."""
        return self.system.coupling.period if self.moves_freely else None

    def rate(self, x: Floats) -> Floats:
        """Return v at x, (..., n)."""
        return self._of_state(self.system.rate(self._state(x)), x)

    def energy(self, x: Floats) -> Floats:
        """Return E at x, (...); ValueError where there is no energy, or the graph is sparse."""
        if isinstance(self.graph, CSR) or self.balance is None:
            raise ValueError("graph: got a sparse or a directed one, needs a dense one with detailed balance")
        weights = self.balance[:, None]
        levels = self.system.energy(weights, self._state(x))
        return np.asarray(levels, np.float64).reshape(np.shape(x)[:-1])

    def jacobian(self, x: Floats) -> Any:
        """Return dv_i / dx_j at x, (..., n, n); for a sparse graph that of one x, as a sparse array."""
        f, g = self.system.intrinsic, self.system.coupling
        state = self._state(x)
        own = f.d_x(state, self.system.start, self.system.mu)
        if isinstance(self.graph, CSR):
            rows, columns = self.graph.ends()
            slopes = self.system.kappa * self.graph.data * g.slope(x[columns] - x[rows])
            links = csr_array((slopes, (rows, columns)), shape=self.graph.shape)
            return (links + diags_array(self._of_state(own, x) - links.sum(axis=1))).tocsc()
        each = jacobian_of(self.system, g.slope(between(state)), own)
        return np.asarray(each, np.float64).reshape(*np.shape(x)[:-1], self.n, self.n)

    def by_mu(self, x: Floats) -> Floats:
        """Return dv / dmu at x, (..., n)."""
        return self._of_state(self.system.intrinsic.d_mu(self._state(x), self.system.start, self.system.mu), x)

    def by_kappa(self, x: Floats) -> Floats:
        """Return dv / dkappa at x, (..., n)."""
        return self._of_state(self.system.coupled(self._state(x)), x)

    def reduced(self, x: Floats) -> Floats:
        """Return the one state (..., n) that stands for x and all that differ from it by what has no effect.

        The first score of each component is 0.
        """
        if not self.moves_freely:
            return x
        first = np.unique(self.component, return_index=True)[1]
        return self.turned(x - x[..., first[self.component]])

    def turned(self, x: Floats) -> Floats:
        """Return x with every score taken above minus half a period, where there is one, and up to half a period.

        What is half a period but for rounding is so on the upper side.
        """
        return x if self.period is None else x - self.period * np.ceil(x / self.period - 0.5 - 1e-9)

    def _state(self, x: Floats) -> Any:
        return np.reshape(x, (-1, 1, self.n, 1))

    def _of_state(self, state: Any, x: Floats) -> Floats:
        return np.asarray(state, np.float64).reshape(np.shape(x))


def with_number(flow: GraphFlow, name: str, value: float) -> GraphFlow:
    """Return the flow with another `mu` or `kappa`, another `b` of all nodes, or that at `t` on its line."""
    if name != "t":
        changed: dict[str, Any] = {name: float(value)}
        return replace(flow, **changed)
    if (end := flow.towards) is None:
        raise ValueError("t: got a flow without a line, needs one whose `towards` is another")
    ends: dict[str, Any] = {"graph": (flow.graph, end.graph), "b": (flow.anchors, end.anchors)}
    ends |= {"mu": (flow.mu, end.mu), "kappa": (flow.kappa, end.kappa)}
    between = {key: (1.0 - value) * x + value * y for key, (x, y) in ends.items()}
    return replace(flow, t=float(value), **between)


@checked(batch=Whole(), head=Whole())
def flow_of_call(saved: Saved, batch: int = 0, head: int = 0) -> GraphFlow:
    """Return the flow of one head of a call of graph energy attention, in state "query" that of the last query.

    Raises
    ------
    ValueError
        Where there is no such head, the graph is sparse, nodes have strengths of their own or are hidden, or the call
        has several levels of tokens.
    """
    if not isinstance(saved, Saved):
        raise ValueError("saved: got levels of tokens, each with a graph of its own; needs a call with one graph")
    options, graph = saved.options, saved.inner.graph
    if isinstance(graph.links, CSR) or not (batch < graph.links.shape[0] and head < graph.links.shape[1]):
        raise ValueError(f"head: got batch {batch} and head {head}, needs those of a call on a dense graph")
    if graph.visible is not None and not np.all(graph.visible[..., -1]):
        raise ValueError("saved: got a call whose last query is masked, needs one that sees all nodes")
    given = (np.asarray(x, np.float64) for x in (options.mu, options.kappa))
    mu, kappa = (np.unique(np.broadcast_to(x, (*graph.start.shape[1:3], 1))[head]) for x in given)
    if len(mu) > 1:
        raise ValueError("mu: got one for each node, needs one of all")
    links, b = (np.asarray(x[batch, head], np.float64) for x in (graph.links, graph.start))
    return GraphFlow(links, options.coupling, options.intrinsic, b[:, -1], float(mu[0]), float(kappa[0]))
