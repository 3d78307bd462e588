"""The force of linear attention: a bilinear kernel between tokens, and a potential of each token alone.

Particles under H = 1/2n sum_ij (u_i^T A u_j) <p_i, p_j> - 1/2 sum_i u_i^T V u_i, whose sums run over the prefix.
For A and V symmetric and sums over all tokens f is dH/dp and g is -dH/dy, y the normalised tokens; over a prefix a
token is not pushed by those that see it, and there is no H.

Equations (n_i is the number of tokens that i attends, itself among them)::

    [SYMP.linear_normed]  y = gain norm(x + look p) + shift    without looking ahead, or at rest: of x
    [SYMP.linear_turned]  a = y w_a
    [SYMP.linear_velocity]  f_i = 1/n_i sum_j <a_i, y_j> p_j    the velocity, for the old momentum or the new one
    [SYMP.linear_force]  g_i = y_i w_v - 1/n_i sum_j <p_i, p_j> a_j    at rest: y_i w_v

Adjoints, for given dg and df; those of the sums are sums of the same kind, see `prefix`::

    [dSYMP.linear_velocity]  dm = df / n                of the sum in SYMP.linear_velocity
    [dSYMP.linear_force]  dm = -dg / n                  of the sum in SYMP.linear_force
    [dSYMP.linear_turned]  da = sum_j <dm_i, p_j> y_j + sum_{i>=j} <p_i, p_j> dm_i    dm of f, and of g
    [dSYMP.linear_normed]  dy = da w_a^T + dg w_v^T + sum_{i>=j} <dm_i, p_j> a_i    dm of SYMP.linear_velocity

The shift is there with bias=True, and 0 otherwise; its gradient is sum_i dy. The matrices have no biases.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its accelerated linear attention.

How the authors' code differs: it divides by the number of all tokens, also where attention is causal, which makes the
first tokens of a long sequence hardly move; here by the number of tokens that a token attends.

The linear attention that it is compared with adds f to a token, or to the momentum of "lie_trotter", with the matrices
A and V alone.

Equations of that (y the normalised tokens, n_i the number of tokens that i attends, h a number of the block)::

    [SYMP.linear_attention_turned]  a = y w_a
    [SYMP.linear_attention_values]  w = y w_v
    [SYMP.linear_attention_force]  f_i = h/n_i sum_j <a_i, y_j> w_j

Adjoints, for a given df::

    [dSYMP.linear_attention_force]  dm = h df / n       of the sum
    [dSYMP.linear_attention_values]  dw_j = sum_{i>=j} <a_i, y_j> dm_i
    [dSYMP.linear_attention_turned]  da_i = sum_j <dm_i, w_j> y_j

and dy = da w_a^T + dw w_v^T + sum_{i>=j} <dm_i, w_j> a_i, dh = sum df f / h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refattn.args import check_choice
from refattn.mechanisms.sympformer.dense import counts
from refattn.mechanisms.sympformer.forces.prefix import IMPLEMENTATIONS, Prefix, mix, mix_backward
from refattn.mechanisms.sympformer.forces.softmax import NORMALISERS, Answer, share_of
from refattn.mechanisms.sympformer.params import (
    Add,
    Layer,
    affine,
    affine_backward,
    ahead,
    ahead_backward,
    at_rest,
    inner,
    normed,
    normed_backward,
)
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
    y, norm = normed(params, ahead(layer, x, p))  # (b, i, m) [SYMP.linear_normed]
    a = force = None
    if params.w_a is not None:
        a = affine(params, y, "a")  # (b, i, m) [SYMP.linear_turned]
    kernel = kernel_of(layer, y, a)
    if params.w_v is not None:
        force = affine(params, y, "v")  # (b, i, m): SYMP.linear_force at rest
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
        d_y_v = affine_backward(params, kernel.y, "v", d_force, add)  # (b, i, m)
        if p is not None and d_p is not None:
            d_sum = -d_force / kernel.n  # (b, i, m) [dSYMP.linear_force]
            d_left, d_right, d_a_force = kernel.mix_backward(p, p, kernel.a, d_sum)  # (b, i, m), (b, i, m), (b, i, m)
            d_p = d_p + d_left + d_right  # (b, i, m)
    if kernel.a is not None:
        d_a = d_a_speed + d_a_force  # (b, i, m) [dSYMP.linear_turned]
        # forward: a = y @ w_a
        d_y_a = affine_backward(params, kernel.y, "a", d_a, add)  # (b, i, m)
    d_y = d_y_speed + d_y_v + d_y_a  # (b, i, m) [dSYMP.linear_normed]
    # forward: y = norm(x + look * p)
    d_ahead = normed_backward(params, saved.norm, d_y, add)  # (b, i, m)
    return d_ahead, ahead_backward(layer, p, d_ahead, d_p, add)


Attended = tuple[Kernel, Array, Array]
"""What `attend_backward` reads: w, and the sum of SYMP.linear_attention_force over n."""


def attend(layer: Layer, y: Array) -> tuple[Array, Attended]:
    """Return f of normalised tokens y, and what `attend_backward` reads."""
    a = affine(layer.params, y, "a")  # (b, i, m) [SYMP.linear_attention_turned]
    w = affine(layer.params, y, "v")  # (b, i, m) [SYMP.linear_attention_values]
    kernel = kernel_of(layer, y, a)
    mean = kernel.mix("force", a, y, w) / kernel.n  # (b, i, m)
    force = layer.numbers["attention_step"] * mean  # (b, i, m) [SYMP.linear_attention_force]
    return force, (kernel, w, mean)


def attend_backward(layer: Layer, saved: Attended, d_force: Array, d_further: None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights and of h; there is nothing else that asks."""
    kernel, w, mean = saved  # -, (b, i, m), (b, i, m)
    # forward: force = attention_step * mix(a, y, w) / n
    add("attention_step", inner(d_force, mean))
    d_sum = layer.numbers["attention_step"] * d_force / kernel.n  # (b, i, m) [dSYMP.linear_attention_force]
    d_a, d_y, d_w = kernel.mix_backward(
        kernel.a, kernel.y, w, d_sum
    )  # (b, i, m) [dSYMP.linear_attention_turned], (b, i, m), (b, i, m) [dSYMP.linear_attention_values]
    # forward: a = y @ w_a, w = y @ w_v
    d_y = d_y + affine_backward(layer.params, kernel.y, "a", d_a, add)  # (b, i, m)
    return d_y + affine_backward(layer.params, kernel.y, "v", d_w, add)
