"""What SympFormer is compared with: the classical block, and the block of a Lie-Trotter splitting with momentum.

Both have attention with a softmax for each head; the core gives it at rest, o = z times the attention.

Equations (q, k, v are those of each head; d is the width of a head)::

    [SYMP.45]  y = gain norm(x + mu p)                  without looking ahead, or at rest: gain norm(x)
    [SYMP.46]  a = merge(o / z)                         o, z of the core for heads(y w_q), heads(y w_k), heads(y w_v)
    [SYMP.47]  f = a w_o
    [SYMP.48]  p' = gain_p norm(beta p + gamma f)       at rest: gain_p norm(f)
    [SYMP.49]  x' = x + p'                              the classical block: x' = x + f

Adjoints, for given dx' and, where p' is read later, dp'::

    [dSYMP.49]  dp' = dx' + later
    [dSYMP.47]  df = gamma times the adjoint of norm at dp', or dx'
    [dSYMP.46]  da = df w_o^T
    [dSYMP.45]  dy = dq w_q^T + dk w_k^T + dv w_v^T

Axes: b batch, i token, m width.

Source: Vaswani et al. 2017 (arXiv:1706.03762) with norms before the sublayers; the Lie-Trotter block of
arXiv:2601.23236. Without looking ahead the latter is what the authors' later manuscript calls H0.

How their code differs: the two substeps of the Lie-Trotter block share the gain of one norm of the momentum; here each
has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.sympformer import core
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
    core: core.Saved | None
    log_z: Array  # (b, h, i, 1)
    heads: Array  # (b, h, i, d): the attention of each head
    joined: Array
    force: Array
    norm_p: layer_norm.Saved | None


def forward(
    params: Params, numbers: Numbers, x: Array, p: Array | None, causal: bool | Prefix
) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where there are none), and what `backward` reads."""
    config, xp = params.config, namespace(x)
    mu = numbers.get("attention_mu")  # (1) untagged: a number
    ahead = x if mu is None or p is None else x + mu * p  # (b, i, m) untagged: what is normalised
    y, norm = layer_norm.layer_norm_forward(ahead, params.gain)  # untagged: the first is SYMP.45
    seen = y  # (b, i, m) [SYMP.45]
    q, k, v = (split_heads(linear_forward(seen, w, None), config.heads) for w in (params.w_q, params.w_k, params.w_v))
    saved = None
    if isinstance(causal, Prefix):
        out, log_z = causal.attend(q, k, v, None, (config.width // config.heads) ** -0.5)  # untagged: in the core
    else:
        out, saved = core.forward(q, k, v, causal=causal)  # untagged: tagged in the core
        log_z = saved.log_z  # untagged: SYMP.7
    attended = out * xp.exp(-log_z)[..., None]  # untagged: o / z
    joined = merge_heads(attended)  # (b, i, m) [SYMP.46]
    force = linear_forward(joined, params.w_o, None)  # (b, i, m) [SYMP.47]
    momentum = norm_p = None
    push = force  # (b, i, m) untagged: what moves the tokens of a classical block
    if config.carries:
        total = force  # (b, i, m) untagged: what is normalised at rest
        if p is not None:
            total = numbers["attention_beta"] * p + numbers["attention_gamma"] * force  # (b, i, m) untagged: normalised
        unit, norm_p = layer_norm.layer_norm_forward(total, params.gain_p)  # untagged: the first is SYMP.48
        momentum = unit  # (b, i, m) [SYMP.48]
        push = momentum  # (b, i, m) untagged: SYMP.48
    result = x + push  # (b, i, m) [SYMP.49]
    kept = Saved(p, seen, norm, saved, log_z[..., None], attended, joined, force, norm_p)
    return result, momentum, kept


def backward(
    params: Params, numbers: Numbers, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters and the numbers."""
    config, xp = params.config, namespace(d_result)
    p = saved.p  # (b, i, m) untagged: it came in
    # forward: result = x + push
    d_push = d_result if d_momentum is None else d_result + d_momentum  # (b, i, m) [dSYMP.49]
    d_total = d_push  # (b, i, m) untagged: of the force of a classical block
    d_p = None
    if saved.norm_p is not None:
        # forward: momentum = norm(beta * p + gamma * force)
        d_total, d_gain, _ = layer_norm.layer_norm_backward(saved.norm_p, d_push)  # untagged: part of dSYMP.47
        add("gain_p", d_gain)
    scaled = d_total  # (b, i, m) untagged: where gamma is 1
    if p is not None:
        add("attention_beta", dot(d_total, p))
        add("attention_gamma", dot(d_total, saved.force))
        d_p = numbers["attention_beta"] * d_total  # (b, i, m) untagged: part of the gradient of p
        scaled = numbers["attention_gamma"] * d_total  # (b, i, m) untagged: part of dSYMP.47
    d_force = scaled  # (b, i, m) [dSYMP.47]
    # forward: force = joined @ w_o
    d_given, d_w_o, _ = linear_backward(saved.joined, params.w_o, d_force)  # untagged: the first is dSYMP.46
    d_joined = d_given  # (b, i, m) [dSYMP.46]
    add("w_o", d_w_o)
    # forward: joined = merge(out * exp(-log_z))
    d_heads = split_heads(d_joined, config.heads)  # untagged: of the attention of each head
    d_log_z = -xp.sum(d_heads * saved.heads, axis=-1)  # untagged: of the core's log z
    assert saved.core is not None
    d = core.backward(saved.core, d_heads * xp.exp(-saved.log_z), d_log_z)
    # forward: q = split(seen @ w_q), and so for k and v
    parts = []
    for name in ("q", "k", "v"):
        weight = getattr(params, f"w_{name}")  # (m, m) untagged: a parameter
        d_y, d_w, _ = linear_backward(saved.y, weight, merge_heads(d[name]))  # untagged: part of dSYMP.45
        add(f"w_{name}", d_w)
        parts.append(d_y)
    d_seen = parts[0] + parts[1] + parts[2]  # (b, i, m) [dSYMP.45]
    # forward: seen = norm(x + mu * p)
    d_ahead, d_gain, _ = layer_norm.layer_norm_backward(saved.norm, d_seen)  # untagged: the gradient of x
    add("gain", d_gain)
    if p is not None and d_p is not None and "attention_mu" in numbers:
        add("attention_mu", dot(d_ahead, p))
        d_p = d_p + numbers["attention_mu"] * d_ahead  # (b, i, m) untagged: the gradient of p
    return d_result + d_ahead, d_p
