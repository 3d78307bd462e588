"""What a page that steps through higher-order linear attention draws on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Picture
from refattn.ops.softmax import softmax_forward
from refattn.xp import Array


def taylor(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the weights w_ij / D_i of head 0."""
    return (values["HOL.4"] / values["HOL.divisor"])[0, 0, ...]


def softmax(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the weights that softmax gives the same scores."""
    return softmax_forward(values["HOL.3"])[0, 0, ...]


PICTURES = (
    Picture("matrix", "Head 0: weights by the polynomial, w_ij / D_i, token i a row.", taylor),
    Picture("matrix", "The same scores by softmax: what the polynomial stands for.", softmax),
)
