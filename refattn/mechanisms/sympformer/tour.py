"""What a reader steps through: the tour, an example of the definition, and pictures of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Example, Input, Knob, Picture, Tour
from refattn.xp import Array, namespace


def run(definition: Any, inputs: Mapping[str, Any], knobs: Mapping[str, Any], follow: int) -> None:
    """Call the definition once for each layer, all with the same weights; matrices other than w_q are the identity."""
    x = inputs["start"][None]
    xp, m = namespace(x), x.shape[2]
    p, t, same, ones = xp.zeros_like(x), xp.ones(1), xp.eye(m), xp.ones(m)
    weights = {"gain": ones, "gain_p": ones, "w_q": inputs["match"] * same, "w_k": same, "w_v": same, "w_o": same}
    numbers = {name: xp.full(1, knobs[name]) for name in ("h_x", "h_y", "c_log")}
    numbers["c_lin"] = xp.full(1, inputs["c_lin"])
    layers = []
    for _ in range(knobs["layers"]):
        (x, p), saved = definition.forward(x, p, t, w_b=same, **weights, **numbers)
        t = t + numbers["h_x"]
        layers.append(saved)
    d_x, d_p = xp.zeros_like(x), xp.zeros_like(p)
    d_x[0, follow] = x[0, follow] - inputs["target"]
    for saved in reversed(layers):
        gradients = definition.backward(saved, d_x, d_p)
        d_x, d_p = gradients["x"], gradients["p"]


TOUR = Tour(
    knobs=(
        Knob("layers", "layers", 6, 1, 8, 1),
        Knob("h_y", "kick (momentum step h_y)", 1.0, 0.2, 2.0, 0.05),
        Knob("c_log", "friction (damping c_log)", 1.0, 0.0, 4.0, 0.05),
        Knob("h_x", "drift (step size h_x)", 0.25, 0.05, 0.5, 0.01),
    ),
    given={  # three elements: of two, the normalisation would leave only signs
        "start": [[0.5, 1.6, -1.5], [-1.9, 0.7, 0.3], [-1.0, 2.0, -0.7], [2.2, -0.8, -0.2], [-0.1, -1.2, 1.0]],
        "match": 0.4,
        "c_lin": 0.0001,
        "target": [0.3, 3.8, -2.9],
    },
    table={"start": 20},
    instead="the definition moves tokens with momenta through layers, and a call of the core is one force, of their "
    "q, k and v alone",
    run=run,
)


_MATRIX = Input((3, 3), "normal", {"scale": 0.6})
_MOBILITY = (1.0, 0.2, 0.0, 0.2, 1.0, 0.1, 0.0, 0.1, 1.0)  # symmetric
_GAIN = Input((3,), "uniform", {"low": 0.5, "high": 1.5})


def _number(value: float) -> Input:
    return Input((1,), "list", {"0": value})


EXAMPLE = Example(
    {
        "x": Input((1, 4, 3)),
        "p": Input((1, 4, 3)),
        "t": _number(1.3),
        "gain": _GAIN,
        "w_q": _MATRIX,
        "w_k": _MATRIX,
        "w_v": _MATRIX,
        "w_o": _MATRIX,
        "w_b": Input((3, 3), "list", dict(zip("012345678", _MOBILITY, strict=True))),
        "gain_p": _GAIN,
        "h_x": _number(0.3),
        "h_y": _number(0.3),
        "c_log": _number(3.0),
        "c_lin": _number(0.1),
    }
)
"""A second layer of the definition: four tokens that move, as wide as a norm needs to leave more than signs."""


def weights(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the weights a_ij of the first force."""
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
