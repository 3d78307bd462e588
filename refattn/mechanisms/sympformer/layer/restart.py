"""Restarts: tokens that move less than in the layer before begin the layer again, without a momentum.

The rule of a prefix is that of the whole sequence that ends there, so that no token knows its future.

Equations (x -> a is the layer as it is, x -> b the same layer with momenta and velocities of 0)::

    [SYMP.prefix_speed]  s_i = 1/(i m) sum_{j<=i} |x'_j - x_j|^2    not causal: all j, over n m; x' is a, or the result
    [SYMP.slower]  r_i = (s_i < S_i)    for x' = a; S_i is SYMP.prefix_speed of the result of the layer before
    [SYMP.restarted]  x'_i = (1 - r_i) a_i + r_i b_i    momenta and velocities so, too

Adjoints, for a given dx'; the choice r has none::

    [dSYMP.restarted]  da_i = (1 - r_i) dx'_i           db_i = r_i dx'_i

and each goes its way back through the layer.

Axes: b batch, i token, m width.

Source: the restart by speed in the authors' first program, after Su, Boyd, Candes 2016 (arXiv:1503.01243), section 5.

How their code differs: one choice for a whole sequence, by the sum over all its tokens, so that a token knows by it of
those that come after. Their other rule begins again where the loss of the layer's tokens grew: it reads the targets,
and is not here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from refattn import tree
from refattn.xp import Array, arange, namespace


@dataclass(frozen=True)
class Saved:
    """What the backward reads beside what the layer saved."""

    chosen: Array  # (b, i, 1): r
    again: Any  # of the layer that began again


def forward(state: Any, step: Callable[[Any], tuple[Any, Any]], causal: bool, begins: bool) -> tuple[Any, Any]:
    """Return the next state with the speed of its tokens, and what the layer saved, with `again` where it may begin."""
    xp = namespace(state.x)
    result, saved = step(state)
    if begins:
        slow = speed(state.x, result.x, causal)  # (b, i, 1): SYMP.prefix_speed
        chosen = xp.astype(slow < state.speed, slow.dtype)  # (b, i, 1) [SYMP.slower]
        fresh, again = step(replace(state, **weighted(state, 0.0)))
        mixed = (1.0 - chosen) * result.x + chosen * fresh.x  # (b, i, m) [SYMP.restarted]
        kept, other = weighted(result, 1.0 - chosen), weighted(fresh, chosen)
        result = replace(result, x=mixed, **{name: kept[name] + other[name] for name in kept})
        saved = replace(saved, restart=Saved(chosen, again))
    return replace(result, speed=speed(state.x, result.x, causal)), saved


def backward(
    saved: Any, d_state: Any, step: Callable[[Any, Any], tuple[Any, Any, dict[str, Array]]]
) -> tuple[Any, Any, dict[str, Array]]:
    """Return the gradients of the state and of the parameters through both ways."""
    chosen = saved.restart.chosen  # (b, i, 1)
    # forward: mixed = (1 - chosen) * result.x + chosen * fresh.x
    d_kept = (1.0 - chosen) * d_state.x  # (b, i, m) [dSYMP.restarted]
    d_fresh = chosen * d_state.x  # (b, i, m): db
    d_first, d_params, d_context = step(saved, replace(d_state, x=d_kept, **weighted(d_state, 1.0 - chosen)))
    d_still = replace(d_state, x=d_fresh, t=0.0 * d_state.t, **weighted(d_state, chosen))
    d_second, d_again, _ = step(saved.restart.again, d_still)
    # The momenta of what began again are 0, whatever came in.
    d_state = replace(d_first, x=d_first.x + d_second.x, t=d_first.t + d_second.t, speed=0.0 * chosen)
    return d_state, tree.map_leaves(lambda a, b: a + b, d_params, d_again), d_context


def weighted(state: Any, part: Array | float) -> dict[str, Array]:
    """Return the momenta and velocities that a state has, by a factor."""
    return {name: part * getattr(state, name) for name in ("p", "v") if getattr(state, name) is not None}


def speed(before: Array, after: Array, causal: bool) -> Array:
    """Return how much tokens moved, by the mean over those up to each, or over all."""
    xp, n = namespace(before), before.shape[1]
    squares = xp.mean((after - before) ** 2, axis=-1, keepdims=True)  # (b, i, 1)
    if not causal:
        return xp.mean(squares, axis=1, keepdims=True) + 0.0 * squares
    count = arange(1, n + 1, before)[:, None]  # (i, 1)
    mean = xp.cumulative_sum(squares, axis=1) / xp.astype(count, squares.dtype)  # (b, i, 1) [SYMP.prefix_speed]
    return mean
