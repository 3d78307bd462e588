"""The bifurcation diagram of a flow on a graph: all branches of equilibria that random starts lead to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from refattn.analysis.bifurcations import Bifurcation, bifurcations_on, same
from refattn.analysis.continuation import Branch, Family, at_parameter, family_of, follow
from refattn.analysis.equilibria import SAME, Equilibria, Wrap, find_equilibria
from refattn.analysis.graph_flow import GraphFlow, with_number
from refattn.analysis.graphs import Floats
from refattn.args import Function, Real, Whole, check_choice, checked

SAMPLED = (0.02, 0.27, 0.53, 0.77, 0.98)
"""Where in the range of the parameter starts are drawn; uneven, for bifurcations like to be at round numbers."""

PARAMETERS = ("kappa", "mu", "b", "t")


@dataclass(frozen=True)
class Diagram:
    """The branches of equilibria over a range of `parameter`, from `low` to `high`, and their bifurcations.

    `sampled` has the equilibria that were found at some values of the parameter, each of which is on a branch.
    """

    flow: GraphFlow
    parameter: str
    low: float
    high: float
    branches: tuple[Branch, ...]
    bifurcations: tuple[Bifurcation, ...]
    sampled: tuple[Equilibria, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the facts."""
        branches = [
            {"at": branch.at.tolist(), "x": branch.x.tolist(), "unstable": branch.unstable.tolist()}
            for branch in self.branches
        ]
        return {
            "parameter": self.parameter,
            "range": [self.low, self.high],
            "bifurcations": [found.to_json() for found in self.bifurcations],
            "branches": branches,
            "sampled": [found.to_json() for found in self.sampled],
        }


@checked(flow=GraphFlow, parameter=str, low=Real(), high=Real(), starts=Whole(1), seed=Whole(), wrap=Function)
def diagram_of(
    flow: GraphFlow,
    parameter: str,
    low: float,
    high: float,
    *,
    starts: int = 200,
    seed: int = 0,
    wrap: Wrap = lambda items: items,
) -> Diagram:
    """Return the bifurcation diagram of a flow on a dense graph.

    Parameters
    ----------
    flow
        The system; its own value of the parameter is not used.
    parameter
        `kappa`, `mu`, `b` of all nodes, or `t` on the line to another flow, `flow.towards`.
    low, high
        The range of the parameter.
    starts, seed
        How many random starts there are at each of five values of the parameter, and what draws them.
    wrap
        Is given the sequence of the work, and passes it on.

    Raises
    ------
    ValueError
        Where the range is empty, or nothing holds the scores: then no equilibrium is alone.

    Notes
    -----
    A branch that lies between two of the five values, or that no start leads to, is not found.
    """
    check_range(flow, parameter, low, high)
    family = family_of(flow, parameter)
    branches: list[Branch] = []
    bifurcations: list[Bifurcation] = []
    sampled: list[Equilibria] = []
    for share in wrap(SAMPLED):
        at = low + share * (high - low)
        found = find_equilibria(with_number(flow, parameter, at), starts, seed=seed)
        sampled.append(found)
        for x in (each.x for each in found.isolated):
            if any(_is_on(family, branch, x, at) for branch in branches):
                continue
            branch = follow(family, x, at, low, high)
            branches.append(branch)
            for new in bifurcations_on(family, branch):
                if not any(same(new, other) for other in bifurcations):
                    bifurcations.append(new)
    bifurcations.sort(key=lambda one: (round(one.at, 8), tuple(np.round(one.x, 6))))
    return Diagram(flow, parameter, low, high, tuple(branches), tuple(bifurcations), tuple(sampled))


def check_range(flow: GraphFlow, parameter: str, low: float, high: float) -> None:
    """Raise ValueError where a flow has no diagram over this range of this parameter."""
    check_choice("parameter", parameter, PARAMETERS)
    if not low < high:
        raise ValueError(f"{parameter}: got the range {low}:{high}, needs a lower and a higher number")
    if parameter == "t" and (flow.towards is None or flow.towards.n != flow.n):
        raise ValueError("t: got a flow without a line, needs one whose `towards` is another, of as many nodes")
    if flow.moves_freely:
        raise ValueError('intrinsic: got "none", whose equilibria come in lines; needs "anchor" or "double_well"')


def _is_on(family: Family, branch: Branch, x: Floats, at: float) -> bool:
    """Tell whether a branch leads through x at this value of the parameter."""
    before, after = branch.at[:-1] - at, branch.at[1:] - at
    for m in np.flatnonzero(before * after <= 0.0):
        share = before[m] / (before[m] - after[m]) if before[m] != after[m] else 0.0
        guess = branch.x[m] + share * (branch.x[m + 1] - branch.x[m])
        if np.max(np.abs(guess - x)) < 0.1:
            exact = at_parameter(family, guess, at)
            if exact is not None and np.max(np.abs(exact - x)) < SAME:
                return True
    return False
