"""Higher-order attention a second time: scalar loops written from the paper, which share the options alone.

The polynomial is summed term by term with its factorials, its derivative likewise; the adjoint of the layer
normalisation is taken from its full Jacobian dx'_a / dx_b = r (delta_ab - 1/d - x'_a x'_b / d). Values come back by the
ids of the dense implementation's docstring. Slow on purpose; for small sizes.

Source: Mercat 2020 (arXiv:2010.14816), equations 1 to 3, corrected as docs/deviations.md tells.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.mechanisms.higher_order.options import Add, Clamp, Normaliser, Options, Signed

Values = dict[str, np.ndarray]


def _layer_norm(x: np.ndarray, eps: float) -> tuple[np.ndarray, float]:
    """Return the normalised vector and the factor r."""
    mean = math.fsum(x) / len(x)
    variance = math.fsum((a - mean) ** 2 for a in x) / len(x)
    r = 1.0 / math.sqrt(variance + eps)
    return np.asarray([(a - mean) * r for a in x]), r


def _layer_norm_jacobian(x: np.ndarray, eps: float) -> np.ndarray:
    normal, r = _layer_norm(x, eps)
    d = len(x)
    return np.asarray(
        [[r * ((a == b) - 1.0 / d - normal[a] * normal[b] / d) for b in range(d)] for a in range(d)], dtype=np.float64
    )


def _polynomial(s: float, order: int) -> float:
    return math.fsum(s**r / math.factorial(r) for r in range(order + 1))


def _divide_by(z: float, keys: int, normaliser: Normaliser) -> tuple[float, float]:
    """Return what divides the sum over so many keys, and its derivative."""
    if isinstance(normaliser, Add):
        return z + normaliser.eps, 1.0
    if isinstance(normaliser, Clamp):
        return (z, 1.0) if z > normaliser.eps else (normaliser.eps, 0.0)
    if isinstance(normaliser, Signed):
        return (z, 1.0) if abs(z) > normaliser.eps else (math.copysign(normaliser.eps, -1.0 if z < 0.0 else 1.0), 0.0)
    if normaliser.counts and not normaliser.plain and abs(z) <= 32.0 * 2.0**-53 * keys:
        return math.inf, 0.0
    return (z, 1.0) if z != 0.0 else (1.0, 0.0)


def _without_padding(k: np.ndarray, key_mask: np.ndarray | None) -> np.ndarray:
    """Return the keys, 0 where they are padding, whatever they hold there."""
    k = np.array(k, dtype=np.float64)
    for b, j in [] if key_mask is None else np.argwhere(~key_mask):
        k[b, :, j] = 0.0
    return k


Masks = tuple[np.ndarray | None, np.ndarray | None]
"""Of pairs, and of keys."""


def _allowed(masks: Masks, causal: Any, at: tuple[int, int, int, int], queries: int, keys: int) -> bool:
    (pairs, key_mask), (b, h, i, j) = masks, at
    if key_mask is not None and not key_mask[b, j]:
        return False
    if pairs is not None:
        # From the right: an axis that is missing, or of size 1, is the same for all.
        own = [n if size > 1 else 0 for n, size in zip((j, i, h, b), reversed(pairs.shape), strict=False)]
        if not pairs[tuple(reversed(own))]:
            return False
    if causal == "top_left":
        return j <= i
    # Counted from the end: the last query sees all keys, the last but one all but the last, ...
    return causal is False or queries - i <= keys - j


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    key_mask: np.ndarray | None = None,
    causal: Any = False,
    **options: Any,
) -> Values:
    """Return the value of every equation of the forward, by id."""
    o = Options(**options)
    normaliser = o.normaliser
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    k = _without_padding(k, key_mask)
    value = {"HOL.1": np.array(q, dtype=np.float64), "HOL.2": np.array(k, dtype=np.float64)}
    if o.layer_norm:
        for id in ("HOL.1", "HOL.2"):
            for at in np.ndindex(*value[id].shape[:3]):
                value[id][at] = _layer_norm(value[id][at], o.norm_eps)[0]
    plane = (batch, heads, queries, keys)
    value |= {id: np.zeros(plane) for id in ("HOL.3", "HOL.taylor", "HOL.4")}
    value |= {id: np.zeros((*plane[:3], 1)) for id in ("HOL.5", "HOL.divisor")}
    value |= {id: np.zeros((*plane[:3], e)) for id in ("HOL.summed", "HOL.6")}
    for b, h, i in np.ndindex(batch, heads, queries):
        g = h * groups // heads
        total, seen = 0.0, 0
        for j in range(keys):
            product = math.fsum(value["HOL.1"][b, h, i, c] * value["HOL.2"][b, g, j, c] for c in range(d))
            score = product / (o.alpha * math.sqrt(d))
            value["HOL.3"][b, h, i, j], value["HOL.taylor"][b, h, i, j] = score, _polynomial(score, o.order)
            if not _allowed((mask, key_mask), causal, (b, h, i, j), queries, keys):
                continue
            weight, seen = _polynomial(score, o.order) - normaliser.delta, seen + 1
            value["HOL.4"][b, h, i, j] = weight
            total += _polynomial(score, o.order) if normaliser.plain else weight
            for c in range(e):
                value["HOL.summed"][b, h, i, c] += weight * v[b, g, j, c]
        divisor = _divide_by(total, seen, normaliser)[0]
        value["HOL.5"][b, h, i, 0], value["HOL.divisor"][b, h, i, 0] = total, divisor
        for c in range(e):
            value["HOL.6"][b, h, i, c] = value["HOL.summed"][b, h, i, c] / divisor
    return value


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    key_mask: np.ndarray | None = None,
    causal: Any = False,
    **options: Any,
) -> Values:
    """Return the value of every equation of the backward, by id."""
    o = Options(**options)
    value = forward(q, k, v, mask=mask, key_mask=key_mask, causal=causal, **options)
    k = _without_padding(k, key_mask)
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    factor = 1.0 / (o.alpha * math.sqrt(d))
    like = {
        "dHOL.summed": "HOL.summed",
        "dHOL.divisor": "HOL.divisor",
        "dHOL.5": "HOL.5",
        "dHOL.taylor": "HOL.taylor",
        "dHOL.3": "HOL.3",
    }
    like |= {"dHOL.1": "HOL.1", "dHOL.2": "HOL.2"}
    grad = {id: np.zeros(value[of].shape) for id, of in like.items()}
    grad |= {"dHOL.v": np.zeros(v.shape), "dHOL.q": np.zeros(q.shape), "dHOL.k": np.zeros(k.shape)}
    d_alpha, d_delta = [], []
    for b, h, i in np.ndindex(batch, heads, queries):
        g = h * groups // heads
        total = value["HOL.5"][b, h, i, 0]
        seen = [j for j in range(keys) if _allowed((mask, key_mask), causal, (b, h, i, j), queries, keys)]
        divisor, slope = _divide_by(total, len(seen), o.normaliser)
        # o_c = a_c / D: d o_c / d a_c = 1 / D, d o_c / d D = -a_c / D^2
        d_divisor = -math.fsum(d_out[b, h, i, c] * value["HOL.summed"][b, h, i, c] / divisor**2 for c in range(e))
        d_total = d_divisor * slope
        grad["dHOL.divisor"][b, h, i, 0], grad["dHOL.5"][b, h, i, 0] = d_divisor, d_total
        for c in range(e):
            grad["dHOL.summed"][b, h, i, c] = d_out[b, h, i, c] / divisor
        for j in seen:
            score = value["HOL.3"][b, h, i, j]
            d_weight = math.fsum(d_out[b, h, i, c] / divisor * v[b, g, j, c] for c in range(e))
            d_value = d_weight + d_total
            # delta stands in every weight, and in the sum that divides unless that is plain.
            d_delta.append(-d_weight if o.normaliser.plain else -d_value)
            # The derivative of s^r / r! is r s^(r-1) / r!.
            d_score = d_value * math.fsum(r * score ** (r - 1) / math.factorial(r) for r in range(1, o.order + 1))
            d_alpha.append(-d_score * score / float(o.alpha))  # the score is a product over alpha
            grad["dHOL.taylor"][b, h, i, j], grad["dHOL.3"][b, h, i, j] = d_value, d_score
            for c in range(e):
                grad["dHOL.v"][b, g, j, c] += value["HOL.4"][b, h, i, j] * d_out[b, h, i, c] / divisor
            for c in range(d):
                grad["dHOL.1"][b, h, i, c] += factor * d_score * value["HOL.2"][b, g, j, c]
                grad["dHOL.2"][b, g, j, c] += factor * d_score * value["HOL.1"][b, h, i, c]
    for name, x, id in (("q", q, "dHOL.1"), ("k", k, "dHOL.2")):
        for at in np.ndindex(*x.shape[:3]):
            jacobian = _layer_norm_jacobian(x[at], o.norm_eps) if o.layer_norm else np.eye(d)
            grad[f"dHOL.{name}"][at] = [math.fsum(grad[id][at] * jacobian[:, c]) for c in range(d)]
    grad["dHOL.alpha"], grad["dHOL.delta"] = np.asarray(math.fsum(d_alpha)), np.asarray(math.fsum(d_delta))
    return grad
