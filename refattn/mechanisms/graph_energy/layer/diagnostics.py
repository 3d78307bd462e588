"""What a trainer may ask of a block that has run: how far its scores are from rest.

Where the graph has an energy E, the rate of the scores is minus its gradient; where it has none, the rate still tells.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.layer import hierarchy
from refattn.mechanisms.graph_energy.layer.block import Saved
from refattn.mechanisms.graph_energy.options.call import tau_of
from refattn.mechanisms.graph_energy.options.threshold import Proximal
from refattn.ops.activations import soft_threshold
from refattn.ops.sums import sum_of
from refattn.xp import Array, sum_wide


def force(saved: Saved) -> tuple[Array, int]:
    """Return the sum over batch and heads of the squared norm of the rate after the last step, and how many there are.

    With a threshold after every step the rate is that of such a step: 0 where neither the flow nor the threshold moves
    a score. Those of several levels of tokens are added.
    """
    options = saved.core.options
    h = options.step
    if isinstance(saved.core, hierarchy.Saved):
        ends = [(stage.scores, stage.rate, tau_of(options, None, stage.scores)) for stage in saved.core.stages]
    else:
        x = saved.core.scores
        ends = [(x, saved.core.system.rate(x), saved.core.inner.flow.tau)]
    squares: list[Array] = []
    for x, rate, tau in ends:
        if isinstance(options.threshold, Proximal):
            rate = (soft_threshold(x + h * rate, h * tau, signed=bool(options.threshold.signed)) - x) / h
        squares.append(sum_wide(rate * rate))
    return sum_of(*squares), x.shape[0] * x.shape[1]
