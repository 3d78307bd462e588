"""What a trainer may ask of a block that has run: how far its scores are from rest.

Where the graph has an energy E, the rate of the scores is minus its gradient; where it has none, the rate still tells.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.layer.block import Saved
from refattn.mechanisms.graph_energy.options import Proximal
from refattn.ops.activations import soft_threshold
from refattn.xp import Array, sum_wide


def force(saved: Saved) -> tuple[Array, int]:
    """Return the sum over batch and heads of the squared norm of the rate after the last step, and how many there are.

    With a threshold after every step the rate is that of such a step: 0 where neither the flow nor the threshold moves
    a score.
    """
    flow, options = saved.core.inner.flow, saved.core.options
    x, h = flow.states[-1], options.step
    rate = saved.core.system.rate(x)
    if isinstance(options.threshold, Proximal):
        rate = (soft_threshold(x + h * rate, h * flow.tau, signed=options.signed) - x) / h
    return sum_wide(rate * rate), x.shape[0] * x.shape[1]
