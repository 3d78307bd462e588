"""A second layer of the definition, for `refattn trace sympformer`."""

from __future__ import annotations

from refattn.mechanisms.record import Example, Input

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
