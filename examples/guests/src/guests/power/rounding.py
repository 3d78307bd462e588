"""What kernels with a state round beside the definition: they sum features, which cancel in a score near 0.

The terms of phi(Q) . phi(k) have absolute values that add up to (|Q| . |k|)^p, of the coordinates' absolute values: the
multinomial theorem again. Each is rounded a few times, however small their sum (Q . k)^p is.
"""

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.rounding_sizes import heads_of, scale_of
from refattn.xp import Array, namespace, transpose

Given = Mapping[str, Any]


def _products(inputs: Given) -> Array:
    """Return scale |q_i| . |k_j|."""
    xp = namespace(inputs["q"])
    return scale_of(inputs) * xp.abs(inputs["q"]) @ transpose(xp.abs(heads_of(inputs, "k")))


def _weights(inputs: Given, values: Mapping[str, Array]) -> Array:
    xp = namespace(inputs["q"])
    return xp.where(values["POW.2"] == 0.0, 0.0, _products(inputs) ** inputs.get("p", 2))


def _d_scores(inputs: Given, values: Mapping[str, Array]) -> Array:
    xp, p = namespace(inputs["q"]), inputs.get("p", 2)
    d_scores = p * _products(inputs) ** (p - 1) * xp.abs(values["dPOW.2"])
    return xp.where(values["POW.2"] == 0.0, 0.0, d_scores)


FURTHER = {"POW.2": _weights, "dPOW.1": _d_scores}
