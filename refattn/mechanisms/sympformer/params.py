"""The parameters of a block, the maps that have them (affine ones, norms, looking ahead), and what integrators have.

A parameter that can have no gradient is None: which these are, and how the others start, stands in `config`. Each
backward of a map returns the gradient of what came in, and adds those of the parameters to what is known of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from refattn.args import check, check_number
from refattn.ops import layer_norm
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array, namespace, sum_wide

Numbers = Mapping[str, Array]
"""The numbers of a block by name, each an array of one element: steps, the damping, and what looks ahead."""

Add = Callable[[str, Array], None]
"""Adds to the gradient of a parameter or of a number."""


@dataclass(frozen=True)
class Integrator:
    """What every integrator has: its steps. Its kind says what else.

    Attributes
    ----------
    step
        Where the steps h_x and h_y of a layer start.
    learned
        Whether they are parameters.
    """

    step: float = 0.3
    learned: bool = True

    moves: ClassVar[bool] = False
    """Whether tokens at rest move: positions drift with the new momentum."""
    calls: ClassVar[int] = 1
    """How often a step computes the force."""
    remembers: ClassVar[bool] = False
    """Whether the layer before is remembered."""
    baseline: ClassVar[bool] = False
    """Whether there is no Hamiltonian."""
    carries: ClassVar[bool] = True
    """Whether layers hand a momentum on."""
    damped: ClassVar[str] = "kick"
    """What the damping acts on: the "kick", the "old" momentum alone, "both" one after the other, or "nothing"."""

    def __post_init__(self) -> None:
        check_number("step", self.step, positive=True)
        check("learned", self.learned, bool)

    def damps(self, config: Any) -> bool:
        """Return whether the damping of a layer changes anything that is read."""
        old = not config.rests
        of = {"kick": config.kicks, "old": config.kicks and old, "both": config.keeps or old, "nothing": False}
        return of[self.damped]

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return the learned numbers that the integrator has beside its steps: "positive" or "unit", and a start."""
        return {}


@dataclass(frozen=True)
class Mlp:
    """Parameters of the MLP substep; weights are (in, out)."""

    gain: Array  # (m,)
    w_in: Array  # (m, in)
    w_out: Array  # (in, m)
    gain_v: Array | None = None  # (m,)
    shift: Array | None = None  # (m,): as all biases, there with bias=True
    shift_v: Array | None = None  # (m,)
    b_in: Array | None = None  # (in,)
    b_out: Array | None = None  # (m,)
    token_embedding: Array | None = None  # (t, m): first velocities
    position_embedding: Array | None = None  # (context, m)


@dataclass(frozen=True)
class Params:
    """Parameters of a block: None for what it does not have. Weights are (in, out).

    `numbers` holds the r of each learned number, which a map of the line makes positive, or keeps between 0 and 1.
    """

    config: Any
    gain: Array | None = None  # (m,)
    w_q: Array | None = None  # (m, m), as all weights
    w_k: Array | None = None
    w_v: Array | None = None
    w_o: Array | None = None
    w_b: Array | None = None
    w_a: Array | None = None
    gain_p: Array | None = None  # (m,)
    shift: Array | None = None  # (m,): as all biases, there with bias=True
    shift_p: Array | None = None  # (m,)
    b_q: Array | None = None  # (m,)
    b_k: Array | None = None  # (m,)
    b_v: Array | None = None  # (m,)
    b_o: Array | None = None  # (m,)
    w_start: Array | None = None
    token_embedding: Array | None = None  # (t, m): first momenta
    position_embedding: Array | None = None  # (context, m)
    numbers: dict[str, Array] = field(default_factory=dict)  # (1,) each
    mlp: Mlp | None = None


@dataclass(frozen=True)
class Layer:
    """A layer at work.

    Attributes
    ----------
    force
        The module of `forces` that computes forces and velocities.
    params, numbers
        Its parameters, and its numbers, learned or not.
    causal
        Which tokens push a token: all (False), those up to itself (True), or also those of the past, a `Prefix`.
    """

    force: Any
    params: Params
    numbers: Numbers
    causal: Any


def inner(a: Array, b: Array) -> Array:
    """Return the sum of a * b as an array of one element: what a number that multiplies b has for a gradient."""
    xp = namespace(a, b)
    return xp.reshape(sum_wide(xp.vecdot(a, b)), (1,))


def at_rest(p: Array | None, like: Array) -> Array:
    """Return the momentum: 0 at rest."""
    return namespace(like).zeros_like(like) if p is None else p


def plus(a: Array | None, b: Array | None) -> Array | None:
    """Return the sum of two gradients; None is none."""
    if a is None or b is None:
        return a if b is None else b
    return a + b


def affine(owner: Params | Mlp, x: Array, name: str) -> Array:
    """Return x w + b for the matrix and, if there is one, the bias of a name."""
    return linear_forward(x, getattr(owner, f"w_{name}"), getattr(owner, f"b_{name}", None))


def affine_backward(owner: Params | Mlp, x: Array, name: str, d_y: Array, add: Add) -> Array:
    """Return the gradient of x, and add those of the matrix and the bias."""
    d_x, d_w, d_b = linear_backward(x, getattr(owner, f"w_{name}"), d_y)
    add(f"{head_of(owner)}w_{name}", d_w)
    add(f"{head_of(owner)}b_{name}", d_b)
    return d_x


def normed(owner: Params | Mlp, x: Array, name: str = "") -> tuple[Array, layer_norm.Saved]:
    """Return gain norm(x) + shift for the gain and, if there is one, the shift of a name."""
    return layer_norm.layer_norm_forward(x, getattr(owner, f"gain{name}"), getattr(owner, f"shift{name}"))


def normed_backward(owner: Params | Mlp, saved: layer_norm.Saved, d_y: Array, add: Add, name: str = "") -> Array:
    """Return the gradient of x, and add those of the gain and the shift."""
    d_x, d_gain, d_shift = layer_norm.layer_norm_backward(saved, d_y)
    add(f"{head_of(owner)}gain{name}", d_gain)
    add(f"{head_of(owner)}shift{name}", d_shift)
    return d_x


def head_of(owner: Params | Mlp) -> str:
    """Return what the names of parameters begin with."""
    return "mlp." if isinstance(owner, Mlp) else ""


def ahead(layer: Layer, x: Array, p: Array | None, name: str = "look") -> Array:
    """Return x + s p for the number s of a name: x itself at rest, or if there is no such number."""
    return x if p is None or name not in layer.numbers else x + layer.numbers[name] * p


def ahead_backward(
    layer: Layer, p: Array | None, d_ahead: Array, d_p: Array | None, add: Add, name: str = "look"
) -> Array | None:
    """Return the gradient of p, with what else asks for it, and add that of the number; that of x is `d_ahead`."""
    if p is None or name not in layer.numbers:
        return d_p
    add(name, inner(d_ahead, p))
    return plus(d_p, layer.numbers[name] * d_ahead)
