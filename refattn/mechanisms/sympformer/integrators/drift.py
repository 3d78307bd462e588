"""What integrators share that drift with the old momentum: they ask the oracle, and move the tokens by its velocity.

Equations (g, f are SYMP.13 and SYMP.17 for the momentum that came in)::

    [SYMP.drifted]  x' = x + h_x f                      at rest: x

A layer whose tokens are at rest moves nothing, and one whose new momentum nobody reads has no force.

Adjoints, for given dx' and dg: df = h_x dx' and dh_x = sum dx' f; what df and dg ask of x and p says the oracle, and dx
= dx' beside it.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    force: Array | None  # g
    moved: Array | None  # B p
    speed: Array | None  # f
    context: Any
    asked: Any


def ask(layer: Layer, x: Array, p: Array | None) -> Saved:
    """Return the force and the velocity of tokens x with momenta p, or at rest."""
    answer, asked = layer.oracle.forward(layer, x, p)
    speed = None if answer.b is None else layer.oracle.velocity(answer.b, answer.context)  # (b, i, m)
    return Saved(answer.g, answer.b, speed, answer.context, asked)


def ask_backward(
    layer: Layer, saved: Saved, d_speed: Array | None, d_force: Array | None, add: Add
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters."""
    d_moved = d_context = None
    if d_speed is not None:
        # forward: speed = velocity(mobilised(p), z)
        d_moved, d_context = layer.oracle.velocity_backward(
            saved.moved, saved.speed, saved.context, d_speed
        )  # (b, i, m)
    d_x, d_p = layer.oracle.backward(layer, saved.asked, d_force, d_moved, d_context, add)  # (b, i, m), (b, i, m)
    return d_x, d_p


def forward(layer: Layer, x: Array, p: Array | None) -> tuple[Array, Saved]:
    """Return the next tokens, and what was saved: the force among it."""
    saved = ask(layer, x, p)
    if saved.speed is None:
        return x, saved
    result = x + layer.numbers["h_x"] * saved.speed  # (b, i, m) [SYMP.drifted]
    return result, saved


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_force: Array | None, add: Add
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters and of h_x."""
    d_speed = None
    if saved.speed is not None:
        # forward: result = x + h_x * speed
        d_speed = layer.numbers["h_x"] * d_result  # (b, i, m): dSYMP.17
        add("h_x", inner(d_result, saved.speed))
    d_x, d_p = ask_backward(layer, saved, d_speed, d_force, add)  # (b, i, m), (b, i, m)
    return d_result + d_x, d_p


def at_rest(p: Array | None, x: Array) -> Array:
    """Return the momentum: 0 at rest."""
    return namespace(x).zeros_like(x) if p is None else p


def plus(a: Array | None, b: Array | None) -> Array | None:
    """Return the sum of two gradients; None is none."""
    if a is None or b is None:
        return a if b is None else b
    return a + b
