"""What a page that steps through graph energy attention draws on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.system import energy
from refattn.mechanisms.record import Picture
from refattn.xp import Array, namespace


def scores(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the score of each node of head 0, before the first step and after each."""
    later = [values[name] for name in values if name.startswith("GE.8")]
    return namespace(values["GE.5"]).stack([values["GE.5"], *later], axis=-1)[0, 0, :, 0, :]


def energies(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the energy of each head, before the first step and after each; ValueError where there is none."""
    given = {name: values[name] for name in ("q", "k", "v")}
    _, saved = core.forward(**given, **options, form="dense")
    return energy(saved)[0, ...]


PICTURES = (
    Picture("matrix", "The graph: links w_ij of head 0.", lambda values, options: values["GE.links"][0, 0, ...]),
    Picture("lines", "The flow: the score x_j of each token of head 0, step by step.", scores),
    Picture("lines", "The energy of each head, step by step.", energies),
)
