"""What SympFormer is compared with: the classical block, and the block of a Lie-Trotter splitting with momentum.

Both have attention with a softmax for each head; the core gives it at rest, o = z times the attention.

With a connection (see there) the Lie-Trotter block is what the authors' later manuscript calls H1 and R2. H1 turns the
momentum by its connection along the old momentum. R2 takes it along the new one, and moves the tokens by a momentum
that is turned by half of it.

Equations (q, k, v are those of each head; d is the width of a head; c is SYMP.56, or 0)::

    [SYMP.45]  y = gain norm(x + mu p)                  without looking ahead, or at rest: gain norm(x)
    [SYMP.46]  a = merge(o / z)                         o, z of the core for heads(y w_q), heads(y w_k), heads(y w_v)
    [SYMP.47]  f = a w_o
    [SYMP.57]  w = beta p + gamma f                     at rest: f
    [SYMP.48]  p' = gain_p norm(w - c)
    [SYMP.49]  x' = x + p'                              the classical block: x' = x + f; R2: x + gain_p norm(w - c/2)

Adjoints, for given dx' and, where p' is read later, dp'::

    [dSYMP.49]  dp' = dx' + later                       R2: later, and dx' for the other norm
    [dSYMP.57]  dw = adjoint of norm at dp'             R2: with that of the other norm, and what the connection asks
    [dSYMP.47]  df = gamma dw + what the connection asks; the classical block: dx'
    [dSYMP.46]  da = df w_o^T
    [dSYMP.45]  dy = dq w_q^T + dk w_k^T + dv w_v^T

Axes: b batch, i token, m width.

Source: Vaswani et al. 2017 (arXiv:1706.03762) with norms before the sublayers; the Lie-Trotter block of
arXiv:2601.23236. Without looking ahead the latter is what the authors' later manuscript calls H0; H1 and R2 are its
others.

How their code differs: the two substeps of the Lie-Trotter block share the gain of one norm of the momentum; here each
has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.sympformer import attend, connection
from refattn.mechanisms.sympformer.numbers import Numbers, dot
from refattn.mechanisms.sympformer.params import Add, Params
from refattn.mechanisms.sympformer.prefix import Prefix
from refattn.ops import layer_norm
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    y: Array
    norm: layer_norm.Saved
    attended: attend.Saved
    joined: Array
    force: Array
    norm_p: layer_norm.Saved | None
    connection: connection.Saved | None
    norm_half: layer_norm.Saved | None


def forward(
    params: Params, numbers: Numbers, x: Array, p: Array | None, causal: bool | Prefix
) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where there are none), and what `backward` reads."""
    config = params.config
    mu = numbers.get("attention_mu")  # (1): a number
    ahead = x if mu is None or p is None else x + mu * p  # (b, i, m): what is normalised
    y, norm = layer_norm.layer_norm_forward(ahead, params.gain)  # the first is SYMP.45
    seen = y  # (b, i, m) [SYMP.45]
    q, k, v = (split_heads(linear_forward(seen, w, None), config.heads) for w in (params.w_q, params.w_k, params.w_v))
    heads, attended = attend.forward(q, k, v, causal)  # the attention of each head
    joined = merge_heads(heads)  # (b, i, m) [SYMP.46]
    force = linear_forward(joined, params.w_o, None)  # (b, i, m) [SYMP.47]
    momentum = norm_p = bent = norm_half = None
    push = force  # (b, i, m): what moves the tokens of a classical block
    if config.carries:
        whole = force  # (b, i, m): SYMP.57 at rest
        if p is not None:
            whole = numbers["attention_beta"] * p + numbers["attention_gamma"] * force  # (b, i, m) [SYMP.57]
        turned = whole  # (b, i, m): without a connection
        along = {"h1": p, "r2": whole}.get(config.connection)  # what the connection is taken along
        if along is not None:
            own = equations.active(connection)
            turn, bent = own.forward(params, along, q, k, v, force, causal)  # SYMP.56
            turned = whole - turn  # (b, i, m): what is normalised
        unit, norm_p = layer_norm.layer_norm_forward(turned, params.gain_p)  # the first is SYMP.48
        momentum = unit  # (b, i, m) [SYMP.48]
        push = momentum  # (b, i, m): SYMP.48
        if config.connection == "r2":
            half = 0.5 * (whole + turned)  # (b, i, m): w - c/2
            push, norm_half = layer_norm.layer_norm_forward(half, params.gain_p)  # part of SYMP.49
    result = x + push  # (b, i, m) [SYMP.49]
    return result, momentum, Saved(p, seen, norm, attended, joined, force, norm_p, bent, norm_half)


def backward(
    params: Params, numbers: Numbers, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters and the numbers."""
    config, xp = params.config, namespace(d_result)
    p = saved.p  # (b, i, m): it came in
    none = xp.zeros_like(d_result)  # (b, i, m): no gradient
    # forward: result = x + push
    moved = d_result if saved.norm_half is None else none  # (b, i, m): where tokens move by p'
    d_push = moved if d_momentum is None else moved + d_momentum  # (b, i, m) [dSYMP.49]
    d_asked = d_push  # (b, i, m): of the force of a classical block
    d_p = d_bent = None
    if saved.norm_p is not None:
        d_whole, d_force, d_p, d_bent = _turned_backward(params, saved, d_push, d_result, add)  # in there
        d_asked = d_whole + d_force  # (b, i, m): where gamma is 1
        if p is not None:
            # forward: whole = beta * p + gamma * force
            add("attention_beta", dot(d_whole, p))
            add("attention_gamma", dot(d_whole, saved.force))
            carried = numbers["attention_beta"] * d_whole  # (b, i, m): part of the gradient of p
            d_p = carried if d_p is None else d_p + carried  # (b, i, m): part of the gradient of p
            d_asked = numbers["attention_gamma"] * d_whole + d_force  # (b, i, m): part of dSYMP.47
    d_given = d_asked  # (b, i, m) [dSYMP.47]
    # forward: force = joined @ w_o
    d_from, d_w_o, _ = linear_backward(saved.joined, params.w_o, d_given)  # the first is dSYMP.46
    d_joined = d_from  # (b, i, m) [dSYMP.46]
    add("w_o", d_w_o)
    # forward: joined = merge(attention(q, k, v))
    d_qkv = attend.backward(saved.attended, split_heads(d_joined, config.heads))
    if d_bent is not None:
        d_qkv = tuple(a + b for a, b in zip(d_qkv, d_bent, strict=True))
    # forward: q = split(seen @ w_q), and so for k and v
    parts = []
    for name, value in zip("qkv", d_qkv, strict=True):
        weight = getattr(params, f"w_{name}")  # (m, m): a parameter
        d_y, d_w, _ = linear_backward(saved.y, weight, merge_heads(value))  # part of dSYMP.45
        add(f"w_{name}", d_w)
        parts.append(d_y)
    d_seen = parts[0] + parts[1] + parts[2]  # (b, i, m) [dSYMP.45]
    # forward: seen = norm(x + mu * p)
    d_ahead, d_gain, _ = layer_norm.layer_norm_backward(saved.norm, d_seen)  # the gradient of x
    add("gain", d_gain)
    if p is not None and d_p is not None and "attention_mu" in numbers:
        add("attention_mu", dot(d_ahead, p))
        d_p = d_p + numbers["attention_mu"] * d_ahead  # (b, i, m): the gradient of p
    return d_result + d_ahead, d_p


def _turned_backward(
    params: Params, saved: Saved, d_push: Array, d_result: Array, add: Add
) -> tuple[Array, Array, Array | None, tuple[Array, Array, Array] | None]:
    """Return the gradients of w, f and p, and of (q, k, v) where there is a connection."""
    assert saved.norm_p is not None
    # forward: momentum = norm(whole - turn)
    d_turned, d_gain, _ = layer_norm.layer_norm_backward(saved.norm_p, d_push)  # part of dSYMP.57
    add("gain_p", d_gain)
    d_half = d_along = d_bent = None
    d_force = namespace(d_push).zeros_like(d_push)  # (b, i, m): no gradient
    if saved.norm_half is not None:
        # forward: push = norm(whole - turn / 2)
        d_half, d_gain, _ = layer_norm.layer_norm_backward(saved.norm_half, d_result)  # part of dSYMP.57
        add("gain_p", d_gain)
    if saved.connection is not None:
        d_turn = -d_turned if d_half is None else -d_turned - 0.5 * d_half  # (b, i, m): of SYMP.56
        own = equations.active(connection)
        d_along, *d_qkv, d_force = own.backward(params, saved.connection, d_turn, add)  # in the function
        d_bent = tuple(d_qkv)
    parts = [d_turned, *(() if d_half is None else (d_half,))]
    along_old = params.config.connection == "h1"
    if d_along is not None and not along_old:
        parts.append(d_along)
    d_whole = sum(parts[1:], parts[0])  # (b, i, m) [dSYMP.57]
    return d_whole, d_force, d_along if along_old else None, d_bent
