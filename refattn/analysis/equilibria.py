"""Where a flow comes to rest: one equilibrium from a start, or all that many starts lead to.

From a start the flow is followed first, and Newton's method, damped, then takes the last digits: straight from the
start it might end at a saddle that the flow never reaches. To count, both are done, for the saddles are wanted too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import block_array, csr_array
from scipy.sparse.linalg import spsolve

from refattn import philox
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import Floats
from refattn.analysis.stability import Stability, stability
from refattn.args import Function, Maybe, Real, Whole, checked
from refattn.mechanisms.graph_energy.implementations.sparse import CSR

REST = 1e-10
"""Scores are at rest if their rates are at most that, or what changes of this share of each score may make of them."""

SAME = 1e-5
"""Largest difference of two states that count as one."""

FLAT = 1e-5
"""Eigenvalues that are smaller, relative to the size of H or 1, make an equilibrium one of many, or nearly so: Newton's
method ends near it, not at it."""

STEPS, ITERATIONS, HALVINGS = 200, 60, 25

MOST = 10_000
"""The most equilibria of a tree that are listed."""

Wrap = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True)
class Equilibrium:
    """A state at rest: x (n,), its largest rate, its energy (None where there is none) and its stability."""

    x: Floats
    residual: float
    energy: float | None
    stability: Stability

    def to_json(self) -> dict[str, Any]:
        """Return the facts."""
        known = self.stability
        signs = {"label": known.label, "negative": known.negative, "zero": known.zero}
        found = {"x": self.x.tolist(), "residual": self.residual, "energy": self.energy}
        return {**found, **signs, "eigenvalues": known.eigenvalues.tolist()}


@dataclass(frozen=True)
class Equilibria:
    """What many starts led to.

    Attributes
    ----------
    flow
        The system.
    isolated
        The equilibria that stand alone, the stable ones first, then by their number of unstable directions and energy.
    degenerate
        States at rest with a zero eigenvalue: on a line or a surface of equilibria, or at a bifurcation. Their number
        says nothing.
    starts, lost
        The number of starts, and how many of them led nowhere.
    """

    flow: GraphFlow
    isolated: tuple[Equilibrium, ...]
    degenerate: tuple[Equilibrium, ...]
    starts: int
    lost: int

    @property
    def stable(self) -> tuple[Equilibrium, ...]:
        """The stable ones."""
        return tuple(found for found in self.isolated if found.stability.label == "stable")

    def to_json(self) -> dict[str, Any]:
        """Return the facts."""
        flow = self.flow
        system = {"coupling": flow.system.coupling.name, "intrinsic": flow.system.intrinsic.name}
        numbers = {"mu": flow.mu, "kappa": flow.kappa, "b": flow.anchors.tolist()}
        counts = {"starts": self.starts, "lost": self.lost, "stable": len(self.stable)}
        return {
            **system,
            **numbers,
            "graph": flow.matrix.tolist(),
            **counts,
            "isolated": [found.to_json() for found in self.isolated],
            "degenerate": [found.to_json() for found in self.degenerate],
        }


@checked(flow=GraphFlow, start="*", steps=Whole(1, 100_000))
def find_equilibrium(flow: GraphFlow, start: Floats, steps: int = STEPS) -> Equilibrium:
    """Return the equilibrium that the flow leads to from a start (n,).

    Raises
    ------
    ValueError
        Where the start does not fit the graph.
    ArithmeticError
        Where the flow or Newton's method finds none.
    """
    if np.shape(start) != (flow.n,):
        raise ValueError(f"start: got shape {np.shape(start)}, needs ({flow.n},)")
    with np.errstate(over="ignore", invalid="ignore"):
        x = settled(flow, np.asarray(start, np.float64)[None], steps)
        x = newton_sparse(flow, x[0]) if isinstance(flow.graph, CSR) else newton(flow, x)[0]
        if not at_rest(flow, x):
            raise ArithmeticError(
                "start: the flow leads to no equilibrium from there; take more steps or another start"
            )
    return described(flow, x, tolerance=1e-9)


@checked(flow=GraphFlow)
def tree_equilibria(flow: GraphFlow) -> tuple[Equilibrium, ...]:
    """Return all equilibria of coupling alone on a tree, the first score 0, the stable ones first.

    A leaf is at rest where g is 0 on its link; then its neighbour rests as if the leaf were not there, and so on: g is
    0 on every link, and any zeros will do. So there are z^(n-1) equilibria where g has z zeros, on both sides of 0, and
    one is stable where g' is above 0 on every link.

    Raises
    ------
    ValueError
        Where there is an intrinsic force, the graph is no tree, the zeros of the coupling are not known, or there are
        more than `MOST` equilibria.
    """
    g, links = flow.system.coupling, flow.matrix.toarray() if isinstance(flow.graph, CSR) else flow.matrix
    linked = (links != 0.0) & ~np.eye(flow.n, dtype=np.bool_)
    if not flow.moves_freely or g.zeros is None:
        got = f'intrinsic="{flow.system.intrinsic.name}" and the coupling {g.name}'
        raise ValueError(f'flow: got {got}, needs "none" and a coupling whose zeros are known')
    if np.sum(linked) != 2 * (flow.n - 1) or not np.array_equal(linked, linked.T) or np.any(flow.component):
        raise ValueError("graph: got one that is no tree, needs n - 1 links, each in both directions, that connect it")
    zeros = np.unique(flow.turned(np.asarray([sign * zero for zero in g.zeros for sign in (1.0, -1.0)])).round(12))
    if len(zeros) ** (flow.n - 1) > MOST:
        raise ValueError(f"graph: got {flow.n} nodes, whose equilibria are {len(zeros)}^{flow.n - 1}, more than {MOST}")
    order = [0]
    parent: dict[int, int] = {}
    for node in order:
        new = [int(j) for j in np.flatnonzero(linked[node]) if j != parent.get(node, -1)]
        parent |= dict.fromkeys(new, node)
        order += new
    found = []
    for chosen in product(zeros, repeat=flow.n - 1):
        x = np.zeros(flow.n)
        for node, difference in zip(order[1:], chosen, strict=True):
            x[node] = x[parent[node]] + difference
        found.append(described(flow, flow.turned(x), tolerance=1e-9))
    return tuple(sorted(found, key=lambda one: one.stability.negative))


@checked(flow=GraphFlow, starts=Whole(1, 10_000_000), seed=Whole(), reach=Maybe(Real(0.0)), wrap=Function)
def find_equilibria(
    flow: GraphFlow,
    starts: int = 400,
    *,
    seed: int = 0,
    reach: float | None = None,
    wrap: Wrap = lambda items: items,
) -> Equilibria:
    """Return the equilibria that random starts lead to, each once, whatever may be added to scores without an effect.

    Parameters
    ----------
    flow
        The system, on a dense graph.
    starts
        How many: half of them are followed by the flow, all by Newton's method.
    seed
        Draws the starts.
    reach
        They lie in a cube from -reach to reach around the mean of b; by default `reach_of(flow)`.
    wrap
        Is given the sequence of the work, and passes it on.

    Notes
    -----
    An equilibrium that no start leads to is not found: the count is a lower bound.
    """
    if isinstance(flow.graph, CSR):
        raise ValueError("graph: got a sparse one, needs a dense one; find_equilibrium takes both")
    reach = reach_of(flow) if reach is None else reach
    drawn = 2.0 * philox.uniform((starts, flow.n), seed=seed, purpose="analysis.equilibria") - 1.0
    begin = float(np.mean(flow.anchors)) + reach * drawn
    isolated: list[Equilibrium] = []
    degenerate: list[Equilibrium] = []
    lost = 0
    parts = [begin[first : first + 100] for first in range(0, starts, 100)]
    with np.errstate(over="ignore", invalid="ignore"):
        for part in wrap(parts):
            half = (len(part) + 1) // 2
            flowed = settled(flow, part[:half])
            kept = np.isfinite(flowed).all(axis=-1, keepdims=True)
            ends = newton(flow, np.concatenate([np.where(kept, flowed, part[:half]), part[half:]]))
            rests = at_rest(flow, ends)
            lost += int(np.sum(~rests))
            for x in flow.reduced(ends[rests]):
                if not _known(flow, x, isolated) and not _known(flow, x, degenerate):
                    found = described(flow, x, tolerance=FLAT)
                    (degenerate if found.stability.zero else isolated).append(found)
    isolated.sort(key=lambda found: (found.stability.negative, _rounded(found.energy), tuple(np.round(found.x, 6))))
    return Equilibria(flow, tuple(isolated), tuple(degenerate), starts, lost)


def described(flow: GraphFlow, x: Floats, tolerance: float) -> Equilibrium:
    """Return a state at rest with what is known of it."""
    has_energy = flow.balance is not None and not isinstance(flow.graph, CSR)
    energy = float(flow.energy(x)) if has_energy else None
    return Equilibrium(x, float(np.max(np.abs(flow.rate(x)))), energy, stability(flow, x, tolerance))


def reach_of(flow: GraphFlow) -> float:
    """Return a size within which equilibria lie: half a period, or as far as b and the wells reach, and a margin."""
    if flow.period is not None:
        return 0.5 * flow.period
    spread = float(np.max(np.abs(flow.anchors - np.mean(flow.anchors)), initial=0.0))
    wells = math.sqrt(abs(flow.mu)) + abs(float(np.mean(flow.anchors))) ** (1.0 / 3.0)
    return {"none": 4.0, "anchor": 1.0, "double_well": 0.5 + wells}.get(flow.system.intrinsic.name, 4.0) + spread


def settled(flow: GraphFlow, x: Floats, steps: int = STEPS) -> Floats:
    """Return states (m, n) after Euler steps of 1/L, with L = sup |f'| + 2 kappa sup |g'| max_i sum_j |w_ij|.

    The slopes are those of the range that the states lie in; a state that leaves it may become infinite.
    """
    low, high = float(np.min(x)), float(np.max(x))
    every = np.linspace(low, high, 1001)
    own = np.max(np.abs(flow.system.intrinsic.d_x(every, every, flow.mu)))
    between = np.max(np.abs(flow.system.coupling.slope(np.linspace(0.0, high - low, 1001))))
    bound = own + 2.0 * abs(flow.kappa) * between * float(np.max(abs(flow.matrix).sum(axis=1)))
    for _ in range(steps if bound > 0.0 else 0):
        x = x + flow.rate(x) / bound
    return x


def newton(flow: GraphFlow, x: Floats) -> Floats:
    """Return states (m, n) after Newton's method with halved steps, on a dense graph; all at once, each by itself.

    Where J is singular the shortest step is taken: along what may be added without an effect nothing moves.
    """
    for _ in range(ITERATIONS):
        rate = flow.rate(x)
        size = np.linalg.norm(rate, axis=-1)
        active = np.isfinite(size) & (size > 1e-15)
        if not active.any():
            break
        inverse = np.linalg.pinv(flow.jacobian(x[active]), rcond=1e-10)
        step = np.zeros_like(x)
        step[active] = -(inverse @ rate[active, :, None])[..., 0]
        length = np.ones(len(x))
        for _ in range(HALVINGS):
            ahead = np.linalg.norm(flow.rate(x + length[:, None] * step), axis=-1)
            too_long = active & ~(ahead <= (1.0 - 1e-4 * length) * size)
            if not too_long.any():
                break
            length[too_long] *= 0.5
        else:
            length[too_long] = 0.0  # rounding, or a minimum of |v|
        moved = x + length[:, None] * step
        if np.array_equal(moved, x):
            break
        x = moved
    return x


def newton_sparse(flow: GraphFlow, x: Floats) -> Floats:
    """Return a state (n,) after Newton's method with halved steps, on a sparse graph.

    Where nothing holds the scores of a component, their sum is held.
    """
    parts = len(np.unique(flow.component))
    ones = csr_array((np.ones(flow.n), (np.arange(flow.n), flow.component)), shape=(flow.n, parts))
    for _ in range(ITERATIONS):
        rate, matrix = flow.rate(x), flow.jacobian(x)
        if flow.moves_freely:
            matrix = block_array([[matrix, ones], [ones.T, None]], format="csc")
        step = -spsolve(matrix, np.concatenate([rate, np.zeros(matrix.shape[0] - flow.n)]))[: flow.n]
        size, length = np.linalg.norm(rate), 1.0
        while length > 2.0**-HALVINGS and not np.linalg.norm(flow.rate(x + length * step)) < size:
            length *= 0.5
        if length <= 2.0**-HALVINGS:  # rounding, or a minimum of |v|
            break
        x = x + length * step
    return x


def at_rest(flow: GraphFlow, x: Floats) -> NDArray[np.bool_]:
    """Tell which states (m, n) are at rest, or whether one (n,) is.

    The size of scores alone is no unit: far apart, those of a coupling that levels off still have a rate.
    """
    slopes, size = abs(flow.jacobian(x)), np.abs(x)
    change = slopes @ size if isinstance(flow.graph, CSR) else np.einsum("...ij,...j->...i", slopes, size)
    return np.asarray(np.all(np.abs(flow.rate(x)) <= REST * (1.0 + change), axis=-1))


def _known(flow: GraphFlow, x: Floats, found: list[Equilibrium]) -> bool:
    if not found:
        return False
    apart = flow.turned(np.stack([other.x for other in found]) - x)
    return bool(np.any(np.max(np.abs(apart), axis=-1) < SAME))


def _rounded(energy: float | None) -> float:
    return 0.0 if energy is None else round(energy, 9)
