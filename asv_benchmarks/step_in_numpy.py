"""A training step of the small language model in NumPy's functions and nothing else: what refattn could at best take.

The equations are refattn's, those of its blocks and of AdamW. No argument is looked at, nothing can be chosen, results
overwrite what is not read again, sums over rows are products with ones. Shards and workers are refattn's own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Arrays = dict[str, Any]

_C = math.sqrt(2.0 / math.pi)


def loss_and_gradients(p: Arrays, inputs: Any, targets: Any, layers: int, heads: int, weight: float) -> Any:
    """Return the summed loss of one shard (b, n), and the gradients of `weight` times it by the parameters' names."""
    (b, n), embedding, grads = inputs.shape, p["token_embedding"], Arrays()
    width = embedding.shape[1]
    future = np.arange(n) > np.arange(n)[:, None]
    x = (embedding[inputs] + p["position_embedding"][:n]).reshape(b * n, width)
    kept = []
    for at in (f"layers.{number}." for number in range(layers)):
        u, norm_1 = _norm(p, at + "norm_1", x)
        q, k, v = (_split(u @ p[f"{at}block.w_{name}"], b, heads) for name in "qkv")
        weights = q @ k.mT
        weights *= 1.0 / math.sqrt(width // heads)
        weights[..., future] = -math.inf
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= np.vecdot(weights, np.ones(n, x.dtype))[..., None]
        attended = _merge(weights @ v)
        x = x + attended @ p[at + "block.w_o"]
        outer, norm_2 = _norm(p, at + "norm_2", x)
        wide = outer @ p[at + "mlp.w_in"]
        wide += p[at + "mlp.b_in"]
        gate = wide * wide
        gate *= 0.044715 * _C
        gate += _C
        gate *= wide
        np.tanh(gate, out=gate)
        gate += 1.0
        gate *= 0.5
        active = wide * gate
        out = active @ p[at + "mlp.w_out"]
        out += p[at + "mlp.b_out"]
        x = x + out
        kept.append((at, norm_1, u, q, k, v, weights, attended, norm_2, outer, wide, gate, active))
    y, norm = _norm(p, "norm", x)
    logits = y @ embedding.T
    logits -= logits.max(axis=-1, keepdims=True)
    at_target = np.arange(b * n), targets.reshape(-1)
    own = logits[at_target]
    np.exp(logits, out=logits)
    total = logits.sum(axis=-1, keepdims=True)
    loss = np.log(total).sum() - own.sum()
    logits *= weight / total
    logits[at_target] -= weight
    d_head = logits.T @ y
    d_x = _norm_backward(p, grads, "norm", norm, logits @ embedding)
    for at, norm_1, u, q, k, v, weights, attended, norm_2, outer, wide, gate, active in reversed(kept):
        grads[at + "mlp.w_out"], grads[at + "mlp.b_out"] = active.T @ d_x, _rows(d_x)
        slope = wide * wide
        slope *= 6.0 * 0.044715 * _C
        slope += 2.0 * _C
        slope *= wide
        slope *= 1.0 - gate
        slope += 1.0
        slope *= gate
        slope *= d_x @ p[at + "mlp.w_out"].T
        grads[at + "mlp.w_in"], grads[at + "mlp.b_in"] = outer.T @ slope, _rows(slope)
        d_x = d_x + _norm_backward(p, grads, at + "norm_2", norm_2, slope @ p[at + "mlp.w_in"].T)
        grads[at + "block.w_o"] = attended.T @ d_x
        d_attended = _split(d_x @ p[at + "block.w_o"].T, b, heads)
        d_v = weights.mT @ d_attended
        d_scores = d_attended @ v.mT
        d_scores -= np.vecdot(d_scores, weights)[..., None]
        d_scores *= weights
        d_scores *= 1.0 / math.sqrt(width // heads)
        d_u = 0.0
        for name, d in (("q", d_scores @ k), ("k", d_scores.mT @ q), ("v", d_v)):
            rows = _merge(d)
            grads[f"{at}block.w_{name}"] = u.T @ rows
            d_u = d_u + rows @ p[f"{at}block.w_{name}"].T
        d_x = d_x + _norm_backward(p, grads, at + "norm_1", norm_1, d_u)
    hot = np.zeros_like(logits)
    hot[np.arange(b * n), inputs.reshape(-1)] = 1.0
    grads["token_embedding"] = d_head + hot.T @ d_x
    grads["position_embedding"] = np.zeros_like(p["position_embedding"])
    grads["position_embedding"][:n] = d_x.reshape(b, n, width).sum(axis=0)
    return loss, grads


def adamw(p: Arrays, m: Arrays, v: Arrays, grads: Arrays, number: int, rate: float, decays: Arrays, betas: Any) -> None:
    """Overwrite parameters and moments by those after one step."""
    for name, g in grads.items():
        for moment, beta, by in ((m[name], betas[0], g), (v[name], betas[1], g * g)):
            moment *= beta
            moment += (1.0 - beta) * by
        root = np.sqrt(v[name] / (1.0 - betas[1] ** number))
        root += betas[2]
        p[name] *= 1.0 - rate * decays[name]
        p[name] -= rate / (1.0 - betas[0] ** number) * (m[name] / root)


def clip(grads: Arrays, limit: float) -> None:
    """Scale the gradients down in place where their norm is larger."""
    norm = math.sqrt(sum(float(np.vdot(g, g)) for g in grads.values()))
    if norm > limit:
        for g in grads.values():
            g *= limit / (norm + 1e-6)


def _norm(p: Arrays, name: str, x: Any) -> tuple[Any, Any]:
    width = x.shape[-1]
    normalised = x - (x @ np.ones((width, 1), x.dtype)) / width
    inverse = 1.0 / np.sqrt(np.vecdot(normalised, normalised)[..., None] / width + 1e-5)
    normalised *= inverse
    y = normalised * p[name + ".gain"]
    y += p[name + ".bias"]
    return y, (normalised, inverse)


def _norm_backward(p: Arrays, grads: Arrays, name: str, saved: Any, d_y: Any) -> Any:
    (normalised, inverse), width = saved, d_y.shape[-1]
    grads[name + ".gain"], grads[name + ".bias"] = _rows(d_y * normalised), _rows(d_y)
    d = d_y * p[name + ".gain"]
    along_x = np.vecdot(d, normalised)[..., None] / width
    d -= (d @ np.ones((width, 1), d.dtype)) / width
    d -= normalised * along_x
    d *= inverse
    return d


def _rows(x: Any) -> Any:
    return np.ones(len(x), x.dtype) @ x


def _split(x: Any, b: int, heads: int) -> Any:
    return x.reshape(b, -1, heads, x.shape[-1] // heads).transpose(0, 2, 1, 3)


def _merge(x: Any) -> Any:
    b, h, n, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b * n, h * d)
