"""The options of the core, as objects: each has its equations, its forward and its backward.

A call has one of each family: `links` of the graph, an `integrator`, a `threshold` with what a row gets that it leaves
empty. Its `state` says what flows, and where it starts. The core takes an object, its name, or text such as
``soft(tau=0.1)``, and makes the `Options` of a `call`. Forces are objects of their own kind: see
`refattn.mechanisms.graph_energy.forces`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from refattn.args import check_choice
from refattn.mechanisms.graph_energy.forces import COUPLINGS, INTRINSICS, Coupling, Intrinsic, Polynomial
from refattn.mechanisms.graph_energy.options.integrator import INTEGRATORS
from refattn.mechanisms.graph_energy.options.integrator import STOPS as STOPS
from refattn.mechanisms.graph_energy.options.links import LINKS
from refattn.mechanisms.graph_energy.options.state import Start
from refattn.mechanisms.graph_energy.options.threshold import THRESHOLDS
from refattn.mechanisms.option_kinds import choose


def _intrinsic(given: Any) -> str | Intrinsic:
    """Return a name of `INTRINSICS`, or functions of the user's own."""
    return given if isinstance(given, Intrinsic) else check_choice("intrinsic", given, tuple(INTRINSICS))


def _coupling(given: Any) -> str | Coupling | Polynomial:
    """Return a name of `COUPLINGS`, a polynomial or functions of the user's own."""
    if isinstance(given, (Coupling, Polynomial)) or (isinstance(given, str) and given in COUPLINGS):
        return given
    if isinstance(given, str) and given.partition("(")[0].strip() not in ("polynomial", *COUPLINGS):
        names = ", ".join(COUPLINGS)
        raise ValueError(f"coupling: got {given!r}, needs one of {names}, polynomial(coefficients=...) or a Coupling")
    return choose("coupling", given, {"polynomial": Polynomial})


FAMILIES: dict[str, Callable[[Any], Any]] = {
    "coupling": lambda given: _coupling(given),
    "intrinsic": lambda given: _intrinsic(given),
    "integrator": lambda given: choose("integrator", given, INTEGRATORS),
    "threshold": lambda given: choose("threshold", given, THRESHOLDS),
    "graph": lambda given: choose("graph", given, LINKS) if isinstance(given, str) else given,
    "start": lambda given: given if isinstance(given, Start) else Start(at=given),
}
"""What makes an object of an option that is given as a name or as text."""


# --- of the options of a call, as cases have them


def threshold_of(options: Mapping[str, Any]) -> Any:
    """Return the threshold of a call."""
    return FAMILIES["threshold"](options.get("threshold", "hard"))


def graph_of(options: Mapping[str, Any]) -> Any:
    """Return the links of a call; None where they are not given."""
    given = options.get("graph")
    return None if given is None else FAMILIES["graph"](given)


def integrator_of(options: Mapping[str, Any]) -> str:
    """Return the name of the integrator of a call."""
    name: str = FAMILIES["integrator"](options.get("integrator", "euler")).name
    return name


def coupling_of(options: Mapping[str, Any]) -> Any:
    """Return the coupling of a call, its name or an object."""
    usual = "tanh" if options.get("state") == "feature" else "sin"
    return FAMILIES["coupling"](options.get("coupling") or usual)


def start_of(options: Mapping[str, Any]) -> Any:
    """Return where scores start, an object."""
    return FAMILIES["start"](options.get("start"))
