"""The force of a block by softmax attention, on tokens at x with momenta p, and their velocity.

Equations (norm is layer normalisation; o and c are those of SYMP.12 and SYMP.7 for these q, k, v, e, with one head as
wide as the tokens; the product of the queries and keys of all heads is averaged by the scale)::

    [SYMP.1]  y = gain norm(x + look p) + shift         without looking ahead, or at rest: of x
    [SYMP.2]  q = y w_q + b_q
    [SYMP.3]  k = y w_k + b_k
    [SYMP.4]  v = y w_v + b_v
    [SYMP.8]  b = p w_b                                 B p; with the identity for B: p
    [SYMP.9]  as in the definition                       not at rest
    [SYMP.13]  g = o w_o + b_o
    [SYMP.17]  f = b exp(-c)                            B p / z, the velocity

Adjoints, for given dg, df and what else asks for a gradient of b and c::

    [dSYMP.12]  as in the definition
    [dSYMP.8]  db = df exp(-c) + de p + further
    [dSYMP.log_z]  dc = -sum_m df_m f_m + further
    [dSYMP.momentum]  dp = de b + db w_b^T + look dn    dn the gradient of what is normalised
    [dSYMP.1]  as in the definition

The shift and b_q to b_o are there with bias=True, and 0 otherwise; their gradients are those of y, q, k, v and g,
summed over all tokens.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its accelerated softmax attention with the matrices that learning
puts in place of A and B: w_q w_k^T for A, w_v and w_o for the derivative of the scores, a free w_b for B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.args import check_choice
from refattn.mechanisms.record import Unsupported
from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.dense import counts
from refattn.mechanisms.sympformer.forces.prefix import Prefix
from refattn.mechanisms.sympformer.params import (
    Add,
    Layer,
    affine,
    affine_backward,
    ahead,
    ahead_backward,
    normed,
    normed_backward,
)
from refattn.ops import layer_norm
from refattn.xp import Array, namespace

NORMALISERS, MOBILITIES = ("prefix", "length"), ("learned", "identity")


@dataclass(frozen=True)
class Softmax:
    """Softmax attention of the prefix: this file.

    Attributes
    ----------
    normaliser
        What sums over tokens are divided by: the tokens that a token attends ("prefix"), or all of them ("length"), as
        the authors' first program does, so that the past depends on how many tokens follow.
    mobility
        "learned", the matrix B, from the identity on; "identity": none.
    """

    normaliser: str = "prefix"
    mobility: str = "learned"

    may_be_causal: ClassVar[bool] = True
    """Whether a token may be kept from those that come later."""

    def __post_init__(self) -> None:
        check_choice("normaliser", self.normaliser, NORMALISERS)
        check_choice("mobility", self.mobility, MOBILITIES)

    def weights(self, kicks: bool, drifts: bool) -> set[str]:
        """Return the matrices of a block, where the force is read, and where positions change."""
        has = {"w_q", "w_k"} | ({"w_v", "w_o"} if kicks else set())
        return has | ({"w_b"} if drifts and self.mobility == "learned" else set())


@dataclass(frozen=True)
class Answer:
    """A force, and what the velocity needs; None where nobody reads it."""

    g: Array | None  # (b, i, m)
    b: Array | None  # (b, i, m)
    context: Any  # log z (b, i, 1): what the velocity needs beside B p


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    b: Array | None
    y: Array
    norm: layer_norm.Saved
    core: core.Saved | None
    attended: Array  # (b, i, m)
    share: Array | None  # (i, 1)


def forward(layer: Layer, x: Array, p: Array | None) -> tuple[Answer, Saved]:
    """Return the answer for tokens x (b, i, m) with momenta p, or at rest, and what `backward` reads."""
    xp, params, causal = namespace(x), layer.params, layer.causal
    y, norm = normed(params, ahead(layer, x, p))  # (b, i, m) [SYMP.1]
    q = affine(params, y, "q")  # (b, i, m) [SYMP.2]
    k = affine(params, y, "k")  # (b, i, m) [SYMP.3]
    kicks = params.w_o is not None
    if kicks:
        v = affine(params, y, "v")  # (b, i, m) [SYMP.4]
    else:
        v = y[..., :0]  # (b, i, 0): no value, only z is asked for
    share = share_of(layer, x)  # (i, 1): n_i over the number of all tokens
    moved = energy = force = saved = None
    if p is not None:
        moved = mobilised(layer, p)  # (b, i, m): SYMP.8
    if moved is not None and kicks:
        kinetic = xp.vecdot(moved, p)[..., None]  # (b, i, 1) [SYMP.9]
        other = kinetic if share is None else kinetic / (share * share)  # (b, i, 1): so that u has the other z
        energy = other[:, None, ...]  # (b, 1, i, 1): with one head, as q, k and v
    one = (q[:, None, ...], k[:, None, ...], v[:, None, ...])
    if isinstance(causal, Prefix):
        out, bounded = causal.attend(*one, energy, params.config.scale)  # (b, 1, i, e), (b, 1, i)
    else:
        out, saved = core.forward(*one, kinetic=energy, causal=causal, scale=params.config.scale)  # (b, 1, i, e)
        bounded = saved.log_z  # (b, 1, i)
    attended = out[:, 0, ...]  # (b, i, e): SYMP.12 without the head
    log_z = bounded[:, 0, :, None]  # (b, i, 1): SYMP.7 without the head
    if share is not None:
        attended = share * attended  # (b, i, e): SYMP.12 divided by all tokens
        log_z = log_z + xp.log(share)  # (b, i, 1): SYMP.7 divided by all tokens
    if kicks:
        force = affine(params, attended, "o")  # (b, i, m) [SYMP.13]
    return Answer(force, moved, log_z), Saved(p, moved, y, norm, saved, attended, share)


def backward(
    layer: Layer, saved: Saved, d_force: Array | None, d_moved: Array | None, d_log_z: Array | None, add: Add
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters."""
    xp, params, p, share = namespace(saved.y), layer.params, saved.p, saved.share  # -, -, (b, i, m), (i, 1)
    assert saved.core is not None
    d_attended = xp.zeros_like(saved.attended)  # (b, i, e): where nobody asks for the force
    if d_force is not None and params.w_o is not None:
        # forward: force = attended @ w_o
        d_attended = affine_backward(params, saved.attended, "o", d_force, add)  # (b, i, m) [dSYMP.12]
    # forward: attended = share * out
    d_out = d_attended if share is None else share * d_attended  # (b, i, e)
    d_bounded = None if d_log_z is None else xp.permute_dims(d_log_z, (0, 2, 1))  # (b, 1, i)
    d = core.backward(saved.core, d_out[:, None, ...], d_bounded)
    # forward: q = y @ w_q, and so for k and v
    asked = "qk" if d_force is None else "qkv"
    parts = [affine_backward(params, saved.y, name, d[name][:, 0, ...], add) for name in asked]
    d_y = sum(parts[1:], parts[0])  # (b, i, m) [dSYMP.1]
    # forward: y = norm(x + look * p)
    d_ahead = normed_backward(params, saved.norm, d_y, add)  # (b, i, m)
    if p is None:
        return d_ahead, None
    d_pull = xp.zeros_like(p)  # (b, i, m): what kinetic asks of p, but for B p
    d_ask = d_pull if d_moved is None else d_moved  # (b, i, m)
    if "kinetic" in d:
        # forward: kinetic = sum(moved * p); other = kinetic / share^2
        d_other = d["kinetic"][:, 0, ...]  # (b, i, 1): dSYMP.kinetic without the head
        d_kinetic = d_other if share is None else d_other / (share * share)  # (b, i, 1)
        d_pull = d_kinetic * saved.b  # (b, i, m)
        d_ask = d_ask + d_kinetic * p  # (b, i, m) [dSYMP.8]
    d_own = d_pull + mobilised_backward(layer, p, d_ask, add)  # (b, i, m): without looking ahead
    d_p = ahead_backward(layer, p, d_ahead, d_own, add)  # (b, i, m) [dSYMP.momentum]
    return d_ahead, d_p


def share_of(layer: Layer, x: Array) -> Array | None:
    """Return which share of all tokens each one attends (i, 1), where sums are divided by all; otherwise None."""
    if layer.params.config.oracle.normaliser == "prefix" or layer.causal is False:
        return None
    if isinstance(layer.causal, Prefix):
        lacks = "a stream does not know how many tokens come"
        raise Unsupported(f"normaliser: got 'length', but {lacks}: it needs 'prefix'")
    tokens = x.shape[1]
    return counts(0, (0, tokens), tokens, x) / tokens


def mobilised(layer: Layer, p: Array) -> Array:
    """Return B p."""
    if layer.params.w_b is None:
        return p
    moved = affine(layer.params, p, "b")  # (b, i, m) [SYMP.8]
    return moved


def mobilised_backward(layer: Layer, p: Array, d_moved: Array, add: Add) -> Array:
    """Return the gradient of p, and add that of B."""
    if layer.params.w_b is None:
        return d_moved
    # forward: moved = p @ w_b
    return affine_backward(layer.params, p, "b", d_moved, add)


def velocity(moved: Array, log_z: Array) -> Array:
    """Return B p / z, the velocity."""
    speed = moved * namespace(moved).exp(-log_z)  # (b, i, m) [SYMP.17]
    return speed


def velocity_backward(moved: Array, speed: Array, log_z: Array, d_speed: Array) -> tuple[Array, Array]:
    """Return the gradients of B p and of log z."""
    xp = namespace(speed)
    # forward: speed = moved * exp(-log_z)
    d_moved = d_speed * xp.exp(-log_z)  # (b, i, m): part of dSYMP.8
    d_log_z = -xp.vecdot(d_speed, speed)[..., None]  # (b, i, 1) [dSYMP.log_z]
    return d_moved, d_log_z
