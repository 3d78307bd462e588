"""The evaluations of the flow, and which of them runs."""

from __future__ import annotations

from types import ModuleType

from refattn import equations
from refattn.mechanisms.graph_energy import pairs, products, sparse, tiled
from refattn.mechanisms.graph_energy.options import Options
from refattn.xp import Array

FORMS = {"dense": pairs, "products": products, "tiled": tiled}

DENSE_UP_TO = 64 * 64
"""Differences of scores of one head up to which `form="auto"` takes the dense form."""


def module_of(form: str) -> ModuleType:
    """Return the module that sums over pairs: that of a form, or that of sparse graphs."""
    return sparse if form == "sparse" else FORMS[form]


def form_of(form: str, options: Options, q: Array, v: Array) -> str:
    """Return the form to run."""
    if not isinstance(form, str) or form not in ("auto", *FORMS):
        raise ValueError(f"form: got {form!r}, needs one of auto, {', '.join(FORMS)}")
    if isinstance(options.graph, sparse.CSR):
        if form != "auto":
            raise ValueError(f'form: got "{form}" with a sparse graph, needs "auto"')
        return "sparse"
    if form != "auto":
        return form
    n = v.shape[2]
    channels = {"token": 1, "query": q.shape[2], "feature": v.shape[3]}[options.state]
    # A trace shows the definition.
    if equations.is_active() or n * n * channels <= DENSE_UP_TO:
        return "dense"
    between_states = options.integrator == "discrete_gradient"
    return "tiled" if options.coupling.terms is None or between_states else "products"
