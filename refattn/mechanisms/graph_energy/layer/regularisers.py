"""What may be added to a loss: sums over the weights or the scores of a call, each with its gradient.

::

    entropy(p)       -sum p log p                     d_weights = -(log p + 1), 0 where p = 0
    gini(p)          sum_i (1 - sum_j p_ij^2)         d_weights = -2 p
    size(x)          sum |x|                          d_scores = sign x
    roughness(x, w)  1/4 sum_ij w_ij (x_j - x_i)^2    d_scores_i = 1/2 sum_j (w_ij + w_ji) (x_i - x_j),
                                                      d_graph_ij = 1/4 (x_j - x_i)^2
    level(saved)     sum over heads of E(x)           d_energy = 1

E is the energy after the last step, which also reads where scores start, mu and kappa; its gradient is that of
`refattn.mechanisms.graph_energy.system`. p are the weights, x the scores and w the links of `saved`. The
gradients go into `backward` by these names, times what the sum is weighted with. A sum of the sizes of weights would be
constant, for those of a row add up to 1.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), which regularises a loss without
saying how.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.core import Saved
from refattn.mechanisms.graph_energy.implementations.sparse import CSR
from refattn.mechanisms.graph_energy.system import energy
from refattn.xp import Array, namespace, sum_wide

NAMES = ("entropy", "gini", "size", "roughness", "level")
"""The sums by name."""

OF_SCORES = ("size", "roughness", "level")
"""Those that do not read weights."""


def entropy(weights: Array) -> tuple[Array, dict[str, Array]]:
    """Return the entropy of all rows of weights (b, h, i, j), and its gradient."""
    xp = namespace(weights)
    logs = xp.log(xp.where(weights > 0.0, weights, 1.0))
    return -sum_wide(weights * logs), {"d_weights": xp.where(weights > 0.0, -logs - 1.0, 0.0)}


def gini(weights: Array) -> tuple[Array, dict[str, Array]]:
    """Return the Gini impurity of all rows of weights (b, h, i, j), and its gradient."""
    rows = 1.0 - namespace(weights).sum(weights * weights, axis=-1)
    return sum_wide(rows), {"d_weights": -2.0 * weights}


def size(scores: Array) -> tuple[Array, dict[str, Array]]:
    """Return the sum of the sizes of scores (b, h, j, c), and its gradient."""
    xp = namespace(scores)
    return sum_wide(xp.abs(scores)), {"d_scores": xp.sign(scores)}


def roughness(scores: Array, graph: Array) -> tuple[Array, dict[str, Array]]:
    """Return the Dirichlet energy of scores (b, h, j, c) on links (b, h, j, j), and its gradients."""
    xp = namespace(scores, graph)
    between = scores[:, :, None, :, :] - scores[:, :, :, None, :]
    squares = xp.sum(between * between, axis=4)
    both = graph + xp.matrix_transpose(graph)
    d_scores = 0.5 * (xp.sum(both, axis=-1, keepdims=True) * scores - both @ scores)
    return 0.25 * sum_wide(graph * squares), {"d_scores": d_scores, "d_graph": 0.25 * squares}


def level(saved: Saved) -> tuple[Array, dict[str, Array]]:
    """Return the energy of all heads after the last step, and its gradient; ValueError where the graph has none."""
    last = energy(saved)[..., -1]
    return sum_wide(last), {"d_energy": namespace(last).ones_like(last)}


def part_of(name: str, saved: Saved) -> tuple[Array, dict[str, Array]]:
    """Return the sum of a name, one of `NAMES`, of a call."""
    if name in ("entropy", "gini"):
        if saved.weights is None:
            raise ValueError(f'name: got {name!r}, but state="feature" has no weights')
        return {"entropy": entropy, "gini": gini}[name](saved.weights)
    if name == "roughness":
        if isinstance(saved.graph, CSR):
            raise ValueError("saved: got a flow on a sparse graph with roughness; needs a dense one")
        return roughness(saved.scores, saved.graph)
    return level(saved) if name == "level" else size(saved.scores)


def added(name: str | None, strength: float, saved: Saved) -> dict[str, Array]:
    """Return what a backward adds for `strength` times the sum of a name: nothing for None."""
    if name is None:
        return {}
    if name == "level" and saved.options.links.name == "none":
        raise ValueError('regulariser: got "level" on a graph without symmetry, which has no energy; needs another one')
    return {of: strength * gradient for of, gradient in part_of(name, saved)[1].items()}
