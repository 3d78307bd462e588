"""What a page that steps through Koopman attention draws on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.koopman import core
from refattn.mechanisms.record import Picture
from refattn.xp import Array, namespace


def operators(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the matrices tau + R of the fitted operators of head 0, one for each query."""
    given = {name: values[name] for name in ("q", "k", "v")}
    _, saved = core.forward(**given, **options, implementation="dense")
    if not saved.inner.updates:
        raise KeyError("KOOP.operator")
    matrices = saved.inner.updates[-1].koopman  # (b, h, i, l, l): R
    return saved.inner.options.tau * namespace(matrices).eye(matrices.shape[-1]) + matrices[0, 0, ...]


def ways(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the way of each query of head 0, from where it starts, in the first two coordinates."""
    roots = [x for name, x in values.items() if name.startswith("KOOP.15")]
    points = [values["q"], values["KOOP.4"], *roots]
    return namespace(values["q"]).stack(points, axis=3)[0, 0, :, :, :2]


PICTURES = (
    Picture("eigenvalues", "Eigenvalues of the fitted operators of head 0 on the unit circle.", operators),
    Picture("plane", "The way of each query of head 0: what it attended, then where its operator takes it.", ways),
)
