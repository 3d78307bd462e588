"""An ensemble for each prefix: what comes of a token is what comes of it as the last one of its prefix alone.

So a map of tokens that see each other, such as a stack of `step` or of blocks that are not causal, becomes a causal
one. The ensembles are independent from the first layer to the last: as many runs as tokens, each with its prefix.

Equations (F any map of tokens, whatever their number)::

    [SYMP.prefix_outputs]  o_i = F(x_1, ..., x_i)_i

Adjoints, for a given do::

    [dSYMP.prefix_outputs]  dx_j = sum_{i>=j} of what the adjoint of F for do_i at the last token of prefix i gives x_j

Axes: b batch, i token, m width.

Source: the "prefix geometry" of the authors' program of October 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refattn.xp import Array, namespace, zeros


def forward(evolve: Callable[[Array], tuple[Array, Any]], x: Array) -> tuple[Array, list[Any]]:
    """Return o (b, i, m) for `evolve`, from tokens to tokens and what its backward reads, and the latter by prefix."""
    last, saves = [], []
    for count in range(1, x.shape[1] + 1):
        result, saved = evolve(x[:, :count, :])  # of one prefix
        last.append(result[:, -1:, :])
        saves.append(saved)
    out = namespace(x).concat(last, axis=1)  # (b, i, m) [SYMP.prefix_outputs]
    return out, saves


def backward(evolve: Callable[[Any, Array], Array], saves: list[Any], d_out: Array) -> Array:
    """Return dx; `evolve` gives the gradient of a prefix for what was saved of it and the gradient of its result."""
    xp, n = namespace(d_out), d_out.shape[1]
    d_x = 0.0 * d_out  # (b, i, m)
    for count, saved in enumerate(saves, 1):
        above = zeros((d_out.shape[0], count - 1, d_out.shape[2]), d_out)  # of one prefix
        d_prefix = evolve(saved, xp.concat([above, d_out[:, count - 1 : count, :]], axis=1))  # of one prefix
        after = zeros((d_out.shape[0], n - count, d_out.shape[2]), d_out)  # of what comes after it
        d_x = d_x + xp.concat([d_prefix, after], axis=1)  # (b, i, m) [dSYMP.prefix_outputs]
    return d_x
