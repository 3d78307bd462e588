"""The options of a call as cases have them, with those that are one of several kinds as objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.graph_energy.options import FAMILIES


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
