"""The options of one call, and how long its steps may be."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.graph_energy.forces import Coupling, Intrinsic, Number
from refattn.mechanisms.graph_energy.implementations.sparse import CSR
from refattn.mechanisms.graph_energy.options.integrator import Euler, Integrator
from refattn.mechanisms.graph_energy.options.links import Given, Links
from refattn.mechanisms.graph_energy.options.state import AtGiven, Starts, State
from refattn.mechanisms.graph_energy.options.threshold import Threshold
from refattn.messages import BoundWarning
from refattn.xp import Array, backend, concrete, namespace


@dataclass(frozen=True)
class Options:
    """The options of one call, checked, with numbers that broadcast to a state (b, h, j, c).

    Attributes
    ----------
    threshold
        With `signed` as it is in this state.
    tau
        None where it is to be chosen.
    numbers
        The shapes of the numbers that have a gradient, by name.
    causal
        Whether no token may depend on a later one.
    attends
        Whether GE.2 is computed even where nobody reads it.
    """

    state: State
    coupling: Coupling
    intrinsic: Intrinsic
    mu: Number
    kappa: Number
    step: Number
    steps: int
    integrator: Integrator
    threshold: Threshold
    tau: Number | None
    links: Links
    start: Array | None
    jitter: Array | None
    scale: Number
    bias: Array | None
    numbers: dict[str, tuple[int, ...]]
    causal: bool
    attends: bool

    @property
    def graph(self) -> Array | CSR | None:
        """Links that are given."""
        found: Array | CSR | None = self.links.links if isinstance(self.links, Given) else None
        return found

    @property
    def starts(self) -> Starts:
        """Where scores start."""
        return self.state.starts if self.start is None else AtGiven(self.start)

    @property
    def reads_attention(self) -> bool:
        """Whether GE.2 is computed."""
        return self.attends or self.state.weighs or not self.links.of_alike or self.links.over == "keys"


def tau_of(options: Options, allowed: Array | None, start: Array) -> Number:
    """Return tau as a number that broadcasts to a state such as the start (b, h, j, c)."""
    return options.state.usual_tau(allowed, start) if options.tau is None else options.tau


def longest_of(options: Options, links: Any, visible: Array | None) -> Number:
    """Return 2 / L, up to which a step of Euler lowers the energy of scores between 0 and 1, 0 where L is infinite.

    L = sup |df/dx| + 2 kappa sup |g'| max_i sum_j |w_ij|, per channel where nodes are hidden.
    """
    wells = options.intrinsic.name == "double_well"
    steep = options.coupling.largest_slope(math.inf)
    if steep == math.inf and options.state.weighs and not wells:
        steep = options.coupling.largest_slope(1.0)
    if steep == math.inf or (wells and not options.state.weighs):
        return 0.0
    pulls = 2.0 * steep * abs(options.kappa)
    if not options.links.bounded:
        pulls = pulls * largest_degree(links, visible)
    size = 1.0 + abs(options.mu) ** 0.5  # from where on "double_well" points inwards, for |b| <= 1
    bound = options.intrinsic.largest_slope(options.mu, size) + pulls
    if isinstance(bound, float):
        return 2.0 / bound if bound > 0.0 else math.inf
    xp = namespace(bound)
    largest = xp.max(bound, axis=-2, keepdims=True) if len(bound.shape) > 2 and bound.shape[-2] else bound
    return xp.where(largest > 0.0, 2.0 / xp.where(largest > 0.0, largest, 1.0), math.inf)


def largest_degree(links: Any, visible: Array | None) -> Number:
    """Return max_i sum_j |w_ij|, by channel where nodes are hidden; links may be a sparse graph."""
    if links.shape[-1] == 0:
        return 1.0
    if isinstance(links, CSR):
        xp = namespace(links.data)
        return xp.max(links.by_row(xp.abs(links.data)[:, None]))
    xp, sizes = namespace(links), abs(links)
    sums = xp.sum(sizes, axis=-1, keepdims=True) if visible is None else visible * (sizes @ visible)
    return xp.max(sums, axis=-2, keepdims=True)


def check_step(options: Options, links: Any, visible: Array | None) -> None:
    """Warn where a step of Euler is longer than 2/L."""
    if not isinstance(options.integrator, Euler) or not options.steps:
        return
    longest = longest_of(options, links, visible)
    if anywhere((options.step > longest) & (longest > 0.0)):
        least = longest if isinstance(longest, float) else float(backend(longest).to_numpy(longest).min())
        text = f"step: got more than 2/L = {least:.3g}, the longest known to lower the energy"
        warnings.warn(BoundWarning(text, least), stacklevel=4)


def anywhere(condition: Array | bool) -> bool | None:
    """Tell whether a condition holds anywhere; None where values are not known yet."""
    return condition if isinstance(condition, bool) else concrete(namespace(condition).any(condition))
