"""The recurrence as a layer: projections, short convolutions, gates of the tokens, and a norm and gate of the output.

Equations (heads splits a width into heads, act is the activation; y stands for each of queries, keys and values)::

    [DELTA.projected]  y = x w + b                          for q, k and v
    [DELTA.convolved]  z_n = sum_t omega_t y_{n-w+1+t} + b    w taps, each channel alone; y before the first token is 0
    [DELTA.learned_beta]  beta = beta_max sigmoid(x w_beta)
    [DELTA.learned_decay]  log_decay = -exp(A) softplus(x w_a + b_a)    or lower_bound sigmoid(exp(A) (x w_a + b_a))
    [DELTA.learned_momentum]  log_momentum = max(-exp(A_m) softplus(x w_m + b_m), -2)
    [DELTA.learned_step]  step = 1 + tanh(x w_s / sqrt(m))
    [DELTA.answer]  o = scale S^T q'                        DELTA.5 for heads(act(z)) and these gates
    [DELTA.normalised]  hat = o / sqrt(mean o^2 + norm_eps)    without out_norm: hat = o
    [DELTA.gated]  y = merge(hat gain) act(x w_g)           norm first, then gate; without a gate: its first factor
    [DELTA.output]  x' = x + y w_o + b_o                    without a residual: x' = y w_o + b_o

Adjoints, for given dx'::

    [dDELTA.gated]  dy = dx' w_o^T
    [dDELTA.normalised]  dhat = gain heads(dy act(x w_g))
    [dDELTA.answer]  do = r (dhat - hat mean(hat dhat)), r = 1 / sqrt(mean o^2 + norm_eps)    or dhat, without norm
    [dDELTA.projected]  dy_n = sum_t omega_t dz_{n+w-1-t}
    [dDELTA.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx' and the parts of the gates that there are

with dq, dk, dv and the gradients of the gates from the core. Those of weights and biases are those of the affine map.
Tokens that are padding give 0 to the convolution of the tokens after them.

Axes: b batch, n token, m width of the model, h query head, g state head, d and e widths of a head.

Sources: the layers of Yang et al. 2024 (arXiv:2406.06484, arXiv:2412.06464) and Kimi Team 2025 (arXiv:2510.26692) as
their code has them. Of MomentumDeltaNet there are the momentum and the step; its angle between beta and the decay, and
what it takes from the queries, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.args import check_causal
from refattn.mechanisms.context import Context
from refattn.mechanisms.delta import core
from refattn.mechanisms.delta.layer.config import Config, Params, init
from refattn.mechanisms.delta.layer.pieces import (
    activated,
    activated_backward,
    convolved,
    convolved_backward,
    next_tail,
    sigmoid,
    softplus,
)
from refattn.mechanisms.projections import State, check_params, check_tokens, output_backward, padding
from refattn.mechanisms.record import Unsupported
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array, namespace, zeros

__all__ = ["Config", "Params", "Saved", "State", "init"]

LEAST_LOG_MOMENTUM = -2.0
PROJECTED = ("q", "k", "v")


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    x: Array  # (b, n, m)
    key_mask: Array | None
    projected: dict[str, Array]  # by name (b, n, channels): y
    tails: dict[str, Array]  # by name (b, taps - 1, channels): y of the tokens before
    mixed: dict[str, Array]  # z
    logits: dict[str, Array]  # of the gates (b, n, channels)
    core: core.Saved
    hat: Array  # (b, h, n, e)
    inverse: Array | None  # (b, h, n, 1)
    gate: Array | None  # (b, n, h*e): x w_g
    normal: Array  # (b, n, h*e): before the gate
    joined: Array  # (b, n, h*e): y of DELTA.gated


def forward(params: Params, state: State, context: Context) -> tuple[State, Saved]:
    """Return the next state and what `backward` reads."""
    if check_causal(context.causal) is False:
        raise Unsupported("context.causal: got False, needs True: a recurrence cannot see the future")
    check_tokens("state.x", state.x, params.config.width)
    check_params(params)
    mask = padding(context, *state.x.shape[:2])  # (b, n)
    following, _, _, saved = advance(
        params, state.x, mask, tails_of(params, state.x.shape[0], state.x), None
    )  # (b, n, m)
    return State(following), saved


def tails_of(params: Params, batch: int, like: Array) -> dict[str, Array]:
    """Return what stands before the first token in the convolutions: 0."""
    config = params.config
    h, g, d, e = config.sizes
    widths = {"q": h * d, "k": g * d, "v": g * e}
    return {name: zeros((batch, config.conv - 1, width), like) for name, width in widths.items() if config.conv}


def advance(
    params: Params, x: Array, key_mask: Array | None, tails: dict[str, Array], memory: Array | None
) -> tuple[Array, Array, dict[str, Array], Saved]:
    """Return the next x (b, n, m), the state of the core, the tails of the convolutions, and what `backward` reads."""
    config, xp = params.config, namespace(x)
    h, g, _, _ = config.sizes
    projected: dict[str, Array] = {}
    for name in PROJECTED:
        weight, bias = getattr(params, f"w_{name}"), getattr(params, f"b_{name}")  # what they are called
        y = linear_forward(x, weight, bias)  # [DELTA.projected]: (b, n, ...)
        projected[name] = y if key_mask is None else xp.where(key_mask[:, :, None], y, 0.0)  # 0 where it is padding
    mixed, following = projected, {}
    if config.conv:
        mixed = {}
        for name, y in projected.items():
            taps, bias = getattr(params, f"conv_{name}"), getattr(params, f"conv_b_{name}")  # what they are called
            z = convolved(y, taps, bias, tails[name])  # [DELTA.convolved]: (b, n, ...)
            mixed[name], following[name] = z, next_tail(y, tails[name])  # (b, n, ...), (b, taps - 1, ...)
    parts = {"q": h, "k": g, "v": g}
    given = {name: split_heads(activated(z, config.activation), parts[name]) for name, z in mixed.items()}
    gates, logits = gates_of(params, x)
    attended, core_saved = core.forward(
        **given, **gates, qk_norm=config.qk_norm, key_mask=key_mask, state=memory
    )  # (b, h, n, e) [DELTA.answer], -
    inverse = None
    if config.out_norm:
        squares = xp.vecdot(attended, attended)[..., None] / attended.shape[-1]  # (b, h, n, 1)
        inverse = 1.0 / xp.sqrt(squares + config.norm_eps)  # (b, h, n, 1)
        hat = attended * inverse  # (b, h, n, e) [DELTA.normalised]
        normal = merge_heads(hat * params.gain)  # (b, n, h*e)
    else:
        hat, normal = attended, merge_heads(attended)  # (b, h, n, e), (b, n, h*e)
    gate = None
    if config.gate == "none":
        merged = normal  # (b, n, h*e): DELTA.gated without a gate
    else:
        gate = linear_forward(x, params.w_gate, None)  # (b, n, h*e)
        merged = normal * activated(gate, config.gate)  # (b, n, h*e) [DELTA.gated]
    out = linear_forward(merged, params.w_o, params.b_o)  # (b, n, m): DELTA.output without its residual
    result = x + out if config.residual else out  # (b, n, m) [DELTA.output]
    saved = Saved(x, key_mask, projected, tails, mixed, logits, core_saved, hat, inverse, gate, normal, merged)
    return result, core_saved.state, following, saved


def gates_of(params: Params, x: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the gates of the tokens by name, (b, g, n) or (b, g, n, d), and what they are functions of (b, n, ...)."""
    config, xp = params.config, namespace(x)
    _, g, _, _ = config.sizes
    gates: dict[str, Array] = {}
    logits: dict[str, Array] = {}
    if "beta" in config.gates:
        logits["beta"] = linear_forward(x, params.w_beta, None)  # (b, n, g)
        beta = config.beta_max * by_head(sigmoid(logits["beta"]), g)  # (b, g, n) [DELTA.learned_beta]
        gates["beta"] = beta
    if "log_decay" in config.gates:
        logits["log_decay"] = linear_forward(x, params.w_decay, params.b_decay)  # (b, n, ...)
        inner = by_head(logits["log_decay"], g)  # (b, g, n) or (b, g, n, d)
        rate = spread(xp.exp(params.a_decay), inner)  # (g, 1) or (g, 1, 1): exp(A)
        if config.decay_map == "softplus":
            log_decay = -rate * softplus(inner)  # [DELTA.learned_decay]: (b, g, n) or (b, g, n, d)
        else:
            log_decay = config.lower_bound * sigmoid(rate * inner)  # [DELTA.learned_decay]: (b, g, n) or (b, g, n, d)
        gates["log_decay"] = log_decay
    if "log_momentum" in config.gates:
        logits["log_momentum"] = linear_forward(x, params.w_momentum, params.b_momentum)  # (b, n, g)
        inner = by_head(logits["log_momentum"], g)  # (b, g, n)
        free = -spread(xp.exp(params.a_momentum), inner) * softplus(inner)  # (b, g, n): before it is bounded
        log_momentum = xp.where(
            free > LEAST_LOG_MOMENTUM, free, LEAST_LOG_MOMENTUM
        )  # (b, g, n) [DELTA.learned_momentum]
        logits["step"] = linear_forward(x, params.w_step, None) / math.sqrt(config.width)  # (b, n, g)
        step = 1.0 + by_head(xp.tanh(logits["step"]), g)  # (b, g, n) [DELTA.learned_step]
        gates |= {"log_momentum": log_momentum, "step": step}
    return gates, logits


def by_head(x: Array, heads: int) -> Array:
    """Return (b, g, n) for (b, n, g), and (b, g, n, d) for (b, n, g*d)."""
    found = split_heads(x, heads)  # (b, g, n, ...)
    return found[..., 0] if found.shape[-1] == 1 else found


def by_token(x: Array) -> Array:
    """Return (b, n, g) for (b, g, n), and (b, n, g*d) for (b, g, n, d): the inverse and the adjoint of `by_head`."""
    return merge_heads(x[..., None] if len(x.shape) == 3 else x)


def spread(numbers: Array, like: Array) -> Array:
    """Return numbers (g) so that they broadcast with (b, g, n) or (b, g, n, d)."""
    return namespace(numbers).reshape(numbers, (-1, *(1 for _ in like.shape[2:])))


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context has no gradient."""
    config, x = params.config, saved.x
    xp, heads = namespace(x), config.heads
    # forward: out = joined @ w_o + b_o
    d_merged, gradients = output_backward(params, saved, d_state)  # (b, n, h*e) [dDELTA.gated]
    d_x = d_state.x if config.residual else xp.zeros_like(x)  # (b, n, m): part of dDELTA.x
    # forward: merged = normal * activated(x @ w_gate)
    d_normal = d_merged  # (b, n, h*e): without a gate
    if saved.gate is not None:
        d_normal = d_merged * activated(saved.gate, config.gate)  # (b, n, h*e)
        d_gate = activated_backward(saved.gate, config.gate, d_merged * saved.normal)  # (b, n, h*e)
        d_part, gradients["w_gate"], _ = linear_backward(x, params.w_gate, d_gate)  # (b, n, m)
        d_x = d_x + d_part  # (b, n, m)
    # forward: hat = attended * inverse; normal = merge_heads(hat * gain)
    d_scaled = split_heads(d_normal, heads)  # (b, h, n, e)
    if config.out_norm:
        gradients["gain"] = xp.sum(d_scaled * saved.hat, axis=(0, 1, 2))  # (e)
        d_hat = d_scaled * params.gain  # (b, h, n, e) [dDELTA.normalised]
        along = xp.vecdot(d_hat, saved.hat)[..., None] / d_hat.shape[-1]  # (b, h, n, 1)
        d_attended = saved.inverse * (d_hat - saved.hat * along)  # (b, h, n, e) [dDELTA.answer]
    else:
        d_attended = d_scaled  # (b, h, n, e): dDELTA.answer without a norm
    d = core.backward(saved.core, d_attended)
    # forward: mixed = convolved(projected); given = split_heads(activated(mixed))
    for name in PROJECTED:
        d_z = activated_backward(saved.mixed[name], config.activation, merge_heads(d[name]))  # (b, n, ...)
        d_y = d_z  # (b, n, ...): without a convolution
        if config.conv:
            taps, tail = getattr(params, f"conv_{name}"), saved.tails[name]  # (t, ...), (b, t, ...)
            d_y, d_taps, d_bias = convolved_backward(saved.projected[name], taps, tail, d_z)  # [dDELTA.projected], -, -
            gradients |= {f"conv_{name}": d_taps, f"conv_b_{name}": d_bias if config.bias else None}
        if saved.key_mask is not None:
            d_y = xp.where(saved.key_mask[:, :, None], d_y, 0.0)  # (b, n, ...)
        d_part, d_w, d_b = linear_backward(x, getattr(params, f"w_{name}"), d_y)  # (b, n, m), (m, ...), (*)
        gradients |= {f"w_{name}": d_w, f"b_{name}": d_b if config.bias else None}
        d_x = d_x + d_part  # (b, n, m)
    d_gates, more = gates_backward(params, saved, d)  # (b, n, m)
    d_all = d_x + d_gates  # (b, n, m) [dDELTA.x]
    return State(d_all), Params(config, **gradients, **more), {}


def gates_backward(params: Params, saved: Saved, d: dict[str, Array]) -> tuple[Array, dict[str, Any]]:
    """Return the gradient of x (b, n, m) through the gates, and those of their parameters."""
    config, x, xp = params.config, saved.x, namespace(saved.x)  # -, (b, n, m)
    _, g, _, _ = config.sizes
    gradients: dict[str, Any] = {}
    d_x = xp.zeros_like(x)  # (b, n, m)

    def affine(name: str, d_logits: Array) -> Array:
        """Return the gradient of x through the weights of a name, and keep theirs."""
        d_part, gradients[f"w_{name}"], d_bias = linear_backward(x, getattr(params, f"w_{name}"), d_logits)  # (b, n, m)
        if f"b_{name}" in shapes:
            gradients[f"b_{name}"] = d_bias
        return d_part

    shapes = config.shapes()
    if "beta" in config.gates:
        # forward: beta = beta_max * sigmoid(x @ w_beta)
        d_beta = config.beta_max * by_token(d["beta"])  # (b, n, g)
        d_x = d_x + affine("beta", activated_backward(saved.logits["beta"], "sigmoid", d_beta))  # (b, n, m)
    if "log_decay" in config.gates:
        inner = by_head(saved.logits["log_decay"], g)  # (b, g, n) or (b, g, n, d)
        rate = spread(xp.exp(params.a_decay), inner)  # (g, 1) or (g, 1, 1)
        axes = (0, *range(2, len(inner.shape)))
        if config.decay_map == "softplus":
            # forward: log_decay = -rate * softplus(inner)
            gradients["a_decay"] = xp.sum(-rate * softplus(inner) * d["log_decay"], axis=axes)  # (g)
            d_inner = -rate * sigmoid(inner) * d["log_decay"]  # as inner
        else:
            # forward: log_decay = lower_bound * sigmoid(rate * inner)
            scaled = rate * inner  # as inner
            d_scaled = activated_backward(scaled, "sigmoid", config.lower_bound * d["log_decay"])  # as inner
            gradients["a_decay"] = xp.sum(d_scaled * scaled, axis=axes)  # (g)
            d_inner = rate * d_scaled  # as inner
        d_x = d_x + affine("decay", by_token(d_inner))  # (b, n, m)
    if "log_momentum" in config.gates:
        inner = by_head(saved.logits["log_momentum"], g)  # (b, g, n)
        rate = spread(xp.exp(params.a_momentum), inner)  # (g, 1)
        free = -rate * softplus(inner)  # (b, g, n)
        # forward: log_momentum = max(free, least); free = -rate * softplus(inner)
        d_free = xp.where(free > LEAST_LOG_MOMENTUM, d["log_momentum"], 0.0)  # (b, g, n)
        gradients["a_momentum"] = xp.sum(free * d_free, axis=(0, 2))  # (g)
        d_part = affine("momentum", by_token(-rate * sigmoid(inner) * d_free))  # (b, n, m)
        # forward: step = 1 + tanh(x @ w_step / sqrt(m))
        tanh = xp.tanh(saved.logits["step"])  # (b, n, g)
        d_step = by_token(d["step"]) * (1.0 - tanh * tanh) / math.sqrt(config.width)  # (b, n, g)
        d_x = d_x + d_part + affine("step", d_step)  # (b, n, m)
    return d_x, gradients
