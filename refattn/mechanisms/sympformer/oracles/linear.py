"""The oracle of linear attention: a bilinear kernel between tokens, and a potential of each token alone.

Particles under H = 1/2n sum_ij (u_i^T A u_j) <p_i, p_j> - 1/2 sum_i u_i^T V u_i, whose sums run over the prefix.
For A and V symmetric and sums over all tokens f is dH/dp and g is -dH/dy, y the normalised tokens; over a prefix a
token is not pushed by those that see it, and there is no H.

Equations (n_i is the number of tokens that i attends, itself among them)::

    [SYMP.linear_normed]  y = gain norm(x + look p) + shift    without looking ahead, or at rest: of x
    [SYMP.linear_turned]  a = y w_a
    [SYMP.linear_velocity]  f_i = 1/n_i sum_j <a_i, y_j> p_j    the velocity, for the old momentum or the new one
    [SYMP.linear_force]  g_i = y_i w_v - 1/n_i sum_j <p_i, p_j> a_j    at rest: y_i w_v

Adjoints, for given dg and df; those of the sums are sums of the same kind, see `mixing`::

    [dSYMP.linear_velocity]  dm = df / n                of the sum in SYMP.linear_velocity
    [dSYMP.linear_force]  dm = -dg / n                  of the sum in SYMP.linear_force
    [dSYMP.linear_turned]  da = sum_j <dm_i, p_j> y_j + sum_{i>=j} <p_i, p_j> dm_i    dm of f, and of g
    [dSYMP.linear_normed]  dy = da w_a^T + dg w_v^T + sum_{i>=j} <dm_i, p_j> a_i    dm of SYMP.linear_velocity

The shift is there with bias=True, and 0 otherwise; its gradient is sum_i dy. The matrices have no biases.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its accelerated linear attention.

How the authors' code differs: it divides by the number of all tokens, also where attention is causal, which makes the
first tokens of a long sequence hardly move; here by the number of tokens that a token attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refattn.args import check_choice
from refattn.mechanisms.sympformer import maps
from refattn.mechanisms.sympformer.dense import counts
from refattn.mechanisms.sympformer.oracles.mixing import IMPLEMENTATIONS, mix, mix_backward
from refattn.mechanisms.sympformer.oracles.past import Prefix
from refattn.mechanisms.sympformer.oracles.softmax import NORMALISERS, Answer, share_of
from refattn.mechanisms.sympformer.params import Add, Layer, at_rest
from refattn.ops import layer_norm
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Bilinear:
    """What linear attention and its reduction have: the matrices A and V alone.

    Attributes
    ----------
    normaliser
        What sums over tokens are divided by: see `Softmax`.
    """

    normaliser: str = "prefix"

    may_be_causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("normaliser", self.normaliser, NORMALISERS)

    def weights(self, kicks: bool, drifts: bool) -> set[str]:
        """Return the matrices of a block, where the force is read, and where positions change."""
        return {name for name, there in (("w_a", drifts), ("w_v", kicks)) if there}


@dataclass(frozen=True)
class Linear(Bilinear):
    """Linear attention, with the matrices A and V alone: this file.

    Attributes
    ----------
    implementation
        "gram" (all pairs), "state" (time linear in the tokens) or "auto".
    """

    implementation: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("implementation", self.implementation, ("auto", *IMPLEMENTATIONS))


@dataclass(frozen=True)
class Kernel:
    """What the velocity needs beside the momentum, and how tokens are mixed."""

    y: Array  # (b, i, m)
    a: Array | None  # (b, i, m)
    n: Array  # (i, 1)
    side: int
    implementation: str
    past: Prefix | None

    def mix(self, name: str, a: Array, b: Array, c: Array) -> Array:
        """Return sum_j <a_i, b_j> c_j, with the past where tokens come one after the other."""
        if self.past is not None:
            return self.past.mix(name, a, b, c)
        return mix(a, b, c, self.side, self.implementation)

    def mix_backward(self, a: Array, b: Array, c: Array, d_o: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of a, b and c."""
        return mix_backward(a, b, c, self.side, self.implementation, d_o)


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    norm: layer_norm.Saved
    kernel: Kernel


def forward(layer: Layer, x: Array, p: Array | None) -> tuple[Answer, Saved]:
    """Return the answer for tokens x (b, i, m) with momenta p, or at rest, and what `backward` reads."""
    params = layer.params
    y, norm = maps.normed(params, maps.ahead(layer, x, p))  # (b, i, m) [SYMP.linear_normed]
    a = force = None
    if params.w_a is not None:
        a = maps.affine(params, y, "a")  # (b, i, m) [SYMP.linear_turned]
    kernel = kernel_of(layer, y, a)
    if params.w_v is not None:
        force = maps.affine(params, y, "v")  # (b, i, m): SYMP.linear_force at rest
        if p is not None:
            force = force - kernel.mix("force", p, p, a) / kernel.n  # (b, i, m) [SYMP.linear_force]
    return Answer(force, p, kernel), Saved(p, norm, kernel)


def velocity(p: Array, kernel: Kernel) -> Array:
    """Return the velocity of tokens with momenta p."""
    speed = kernel.mix("velocity", kernel.a, kernel.y, p) / kernel.n  # (b, i, m) [SYMP.linear_velocity]
    return speed


def kernel_of(layer: Layer, y: Array, a: Array | None) -> Kernel:
    """Return the kernel of normalised tokens y, and begin a call where tokens come one after the other."""
    n, past = counted(layer, y)  # (i, 1), -
    return Kernel(y, a, n, 1 if layer.causal else 0, layer.params.config.oracle.implementation, past)


def counted(layer: Layer, y: Array) -> tuple[Array, Prefix | None]:
    """Return what sums are divided by, and the past; begin a call where tokens come one after the other."""
    tokens, causal = y.shape[1], layer.causal
    past = causal if isinstance(causal, Prefix) else None
    n = counts(0 if causal else None, (0, tokens), tokens, y)  # (i, 1): n_i
    if past is not None:
        n = n + past.begin(tokens, y)  # (i, 1): n_i, with the tokens that came before
    share = share_of(layer, y)  # (i, 1): n_i over the number of all tokens
    n = n if share is None else n / share  # (i, 1): n_i, or the number of all tokens
    return n, past


def velocity_backward(p: Array, speed: Array, kernel: Kernel, d_speed: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return the gradients of p, and of y and a."""
    # forward: speed = mix(a, y, p) / n
    d_sum = d_speed / kernel.n  # (b, i, m) [dSYMP.linear_velocity]
    d_a, d_y, d_p = kernel.mix_backward(kernel.a, kernel.y, p, d_sum)  # (b, i, m), (b, i, m)
    return d_p, (d_y, d_a)


def backward(
    layer: Layer,
    saved: Saved,
    d_force: Array | None,
    d_moved: Array | None,
    d_kernel: tuple[Array, Array] | None,
    add: Add,
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters; `d_kernel` are those of y and a from f."""
    kernel, p, params = saved.kernel, saved.p, layer.params
    none = namespace(kernel.y).zeros_like(kernel.y)  # (b, i, m)
    d_y_speed, d_a_speed = (none, none) if d_kernel is None else d_kernel  # (b, i, m), (b, i, m)
    d_y_v = d_y_a = d_a_force = none  # (b, i, m)
    d_p = None if p is None else at_rest(d_moved, p)  # (b, i, m)
    if d_force is not None:
        # forward: force = y @ w_v - mix(p, p, a) / n
        d_y_v = maps.affine_backward(params, kernel.y, "v", d_force, add)  # (b, i, m)
        if p is not None and d_p is not None:
            d_sum = -d_force / kernel.n  # (b, i, m) [dSYMP.linear_force]
            d_left, d_right, d_a_force = kernel.mix_backward(p, p, kernel.a, d_sum)  # (b, i, m), (b, i, m), (b, i, m)
            d_p = d_p + d_left + d_right  # (b, i, m)
    if kernel.a is not None:
        d_a = d_a_speed + d_a_force  # (b, i, m) [dSYMP.linear_turned]
        # forward: a = y @ w_a
        d_y_a = maps.affine_backward(params, kernel.y, "a", d_a, add)  # (b, i, m)
    d_y = d_y_speed + d_y_v + d_y_a  # (b, i, m) [dSYMP.linear_normed]
    # forward: y = norm(x + look * p)
    d_ahead = maps.normed_backward(params, saved.norm, d_y, add)  # (b, i, m)
    return d_ahead, maps.ahead_backward(layer, p, d_ahead, d_p, add)
