"""What a page that steps through SympFormer draws on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Picture
from refattn.xp import Array, namespace


def weights(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the weights a_ij of the first oracle."""
    return values["SYMP.11"][0, 0, ...]


def positions(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return, for each token, the way from x to x' and on by the MLP, in the first two coordinates."""
    points = (values["x"], values["SYMP.18"], values["SYMP.mlp_moved"])
    return namespace(points[0]).stack(points, axis=2)[0, :, :, :2]


def momenta(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return, for each token, the way of the momentum: the kick, and what damping leaves of it."""
    kicked = values["SYMP.14"]
    return namespace(kicked).stack((0.0 * kicked, kicked, values["SYMP.16"]), axis=2)[0, :, :, :2]


PICTURES = (
    Picture("matrix", "The weights a_ij: how much token i, a row, is pushed by token j.", weights),
    Picture("plane", "Tokens as particles: from x by the drift to x', then by the MLP (two coordinates).", positions),
    Picture("plane", "Their momenta: from rest by the kick to p*, then damped to p' (two coordinates).", momenta),
)
