"""Higher-order attention a second time: one number after the other from the paper, which shares the options alone.

The forward is written in scalars (`refattn.mechanisms.scalar_autodiff`), whose adjoints come from the chain rule alone,
where the dense implementation has formulas. The polynomial is summed term by term with its factorials. Values come back
by the ids of the dense implementation's docstring. Slow on purpose; for small sizes.

Source: Mercat 2020 (arXiv:2010.14816), equations 1 to 3, corrected as docs/deviations.md tells.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.mechanisms.higher_order.options import Add, Clamp, Normaliser, Options, Signed
from refattn.mechanisms.scalar_autodiff import Scalar, copies, copy, dot, scalars, slopes, sweep, total, values

Values = dict[str, np.ndarray]


def _root(x: Scalar) -> Scalar:
    found = math.sqrt(x.value)
    return Scalar(found, ((x, 0.5 / found),))


def _layer_norm(x: list[Scalar], eps: float) -> list[Scalar]:
    share = Scalar(1.0 / len(x))
    mean = share * total(x)
    centred = [a - mean for a in x]
    deviation = _root(share * dot(centred, centred) + eps)
    return [a / deviation for a in centred]


def _polynomial(s: Scalar, order: int) -> Scalar:
    """Return sum_r s^r / r!, with its derivative sum_r r s^(r-1) / r!."""
    slope = math.fsum(r * s.value ** (r - 1) / math.factorial(r) for r in range(1, order + 1))
    return Scalar(math.fsum(s.value**r / math.factorial(r) for r in range(order + 1)), ((s, slope),))


def _divide_by(z: Scalar, keys: int, normaliser: Normaliser) -> Scalar:
    """Return what divides the sum over so many keys."""
    if isinstance(normaliser, Add):
        return z + normaliser.eps
    if isinstance(normaliser, Clamp):
        return copy(z) if z.value > normaliser.eps else Scalar(normaliser.eps)
    if isinstance(normaliser, Signed):
        away = math.copysign(normaliser.eps, -1.0 if z.value < 0.0 else 1.0)
        return copy(z) if abs(z.value) > normaliser.eps else Scalar(away)
    if normaliser.counts and not normaliser.plain and abs(z.value) <= 32.0 * 2.0**-53 * keys:
        return Scalar(math.inf)
    return copy(z) if z.value != 0.0 else Scalar(1.0)


def _allowed(plane: tuple[int, ...], mask: Any, key_mask: Any, causal: Any) -> np.ndarray:
    """Return which query may attend which key, (b, h, i, j)."""
    found = np.array(np.broadcast_to(True if mask is None else mask, plane))
    for b, h, i, j in np.ndindex(*plane):
        if key_mask is not None and not key_mask[b, j]:
            found[b, h, i, j] = False
        # Counted from the end: the last query sees all keys, the last but one all but the last, ...
        if causal is not False and (j > i if causal == "top_left" else plane[2] - i > plane[3] - j):
            found[b, h, i, j] = False
    return found


def _run(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any, key_mask: Any, causal: Any, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scalars of every equation by id, and those of the arguments that have a gradient by name."""
    o = Options(**options)
    (batch, heads, queries, d), (groups, keys, e) = q.shape, v.shape[1:]
    plane = (batch, heads, queries, keys)
    padding = np.zeros((batch, keys), bool) if key_mask is None else ~key_mask
    k = np.where(padding[:, None, :, None], 0.0, k)  # whatever it holds there
    leaves = {"q": scalars(q), "k": scalars(k), "v": scalars(v)}
    leaves |= {"alpha": scalars(o.alpha), "delta": scalars(o.normaliser.delta)}
    alpha, delta = leaves["alpha"][()], leaves["delta"][()]
    axes = {"HOL.3": plane, "HOL.taylor": plane, "HOL.4": plane, "HOL.5": (*plane[:3], 1)}
    axes |= {"HOL.divisor": (*plane[:3], 1), "HOL.summed": (*plane[:3], e), "HOL.6": (*plane[:3], e)}
    value: dict[str, Any] = {id: np.empty(shape, dtype=object) for id, shape in axes.items()}
    value |= {"HOL.1": copies(leaves["q"]), "HOL.2": copies(leaves["k"])}
    for id in ("HOL.1", "HOL.2") if o.layer_norm else ():
        for at in np.ndindex(*value[id].shape[:3]):
            value[id][at] = _layer_norm(list(value[id][at]), o.norm_eps)
    allowed, root = _allowed(plane, mask, key_mask, causal), Scalar(math.sqrt(d))
    for row in np.ndindex(*plane[:3]):
        b, h, _ = row
        g, counted = h * groups // heads, []
        for j in range(keys):
            score = value["HOL.3"][*row, j] = dot(value["HOL.1"][row], value["HOL.2"][b, g, j]) / (alpha * root)
            power = value["HOL.taylor"][*row, j] = _polynomial(score, o.order)
            weight = value["HOL.4"][*row, j] = power - delta if allowed[*row, j] else Scalar(0.0)
            counted += [power if o.normaliser.plain else weight] if allowed[*row, j] else []
        z = total(counted)
        divisor = _divide_by(z, len(counted), o.normaliser)
        seen = np.flatnonzero(allowed[row])
        summed = [dot(value["HOL.4"][row][seen], leaves["v"][b, g][seen, c]) for c in range(e)]
        value["HOL.5"][row], value["HOL.divisor"][row], value["HOL.summed"][row] = [z], [divisor], summed
        value["HOL.6"][row] = [a / divisor for a in summed]
    return value, leaves


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
    return {id: values(x) for id, x in _run(q, k, v, mask, key_mask, causal, options)[0].items()}


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
    value, leaves = _run(q, k, v, mask, key_mask, causal, options)
    sweep(value["HOL.6"], d_out)
    ids = ("HOL.summed", "HOL.divisor", "HOL.5", "HOL.taylor", "HOL.3", "HOL.1", "HOL.2")
    return {f"d{id}": slopes(value[id]) for id in ids} | {f"dHOL.{name}": slopes(x) for name, x in leaves.items()}
