"""Noise: given numbers that are added to what looks ahead, to a force or to a momentum.

Equations (n is a draw of the context, the rest of a step goes on with y')::

    [SYMP.noisy]  y' = y + n

where y is, by the name of the draw

* "noise_ahead": x + mu p of SYMP.trotter_normed, and "noise_mlp_ahead": x' + mu u of SYMP.mlp_normed;
* "noise_force": f of SYMP.attended_force and its like, and "noise_mlp_force": d of SYMP.mlp_out;
* "noise_momentum": w of SYMP.trotter_blend, and "noise_mlp_momentum": beta u + gamma d of SYMP.mlp_push;
* "noise_start": the momentum as it comes into a block, of any integrator that has one.

The adjoint hands the gradient on: dy = dy'.

Axes: b batch, i token, m width.

Source: the authors' first program, which draws n in training with the variance eta / (1 + step)^0.55 in one of the
first three places of their Lie-Trotter block and of its MLP; their second program adds it to the momentum that comes
into a presymplectic block.
"""

from __future__ import annotations

from collections.abc import Mapping

from refattn.xp import Array


def noisy(draws: Mapping[str, Array], name: str, y: Array) -> Array:
    """Return y with the noise of this name: y itself where none is given."""
    if name not in draws:
        return y
    moved = y + draws[name]  # (b, i, m) [SYMP.noisy]
    return moved
