"""The classical block: attention and an MLP, each behind a norm, without a momentum.

Equations (f is SYMP.attended_force for y; with oracle="linear" SYMP.linear_attention_force, with "signed"
SYMP.signed_force)::

    [SYMP.classical_normed]  y = gain norm(x) + shift    without biases shift = 0
    [SYMP.classical_moved]  x' = x + f

Adjoints, for a given dx'::

    [dSYMP.classical_normed]  dy = Y                    Y: the dy of the attention's own file at df = dx'

and dx = dx' + the adjoint of norm at dy, dshift = sum_i dy.

Axes: b batch, i token, m width.

Source: Vaswani et al. 2017 (arXiv:1706.03762), with norms before the sublayers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.mechanisms.sympformer import maps
from refattn.mechanisms.sympformer.params import Add, Integrator, Layer
from refattn.ops import layer_norm
from refattn.xp import Array


@dataclass(frozen=True)
class Classical(Integrator):
    """The classical block: this file. With linear attention its step is where the factor h of that starts."""

    moves: ClassVar[bool] = True
    baseline: ClassVar[bool] = True
    damped: ClassVar[str] = "nothing"
    carries: ClassVar[bool] = False


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    norm: layer_norm.Saved
    attended: Any


def forward(layer: Layer, x: Array, p: Array | None, t: Array, history: None) -> tuple[Array, None, None, Saved]:
    """Return the next tokens, no momenta, no history, and what `backward` reads."""
    y, norm = maps.normed(layer.params, x)  # (b, i, m) [SYMP.classical_normed]
    force, attended = layer.oracle.forward(layer, y)  # (b, i, m): SYMP.attended_force
    result = x + force  # (b, i, m) [SYMP.classical_moved]
    return result, None, None, Saved(norm, attended)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, d_following: None, add: Add
) -> tuple[Array, None, None, None]:
    """Return the gradient of x, and none of a momentum, a history and the time; add those of the parameters."""
    # forward: result = x + attend(norm(x))
    d_y = layer.oracle.backward(layer, saved.attended, d_result, None, add)  # (b, i, m) [dSYMP.classical_normed]
    return d_result + maps.normed_backward(layer.params, saved.norm, d_y, add), None, None, None
