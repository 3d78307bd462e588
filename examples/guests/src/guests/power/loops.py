"""Power attention a second time, in scalars whose adjoints come from the chain rule alone."""

from typing import Any

import numpy as np

from refattn.mechanisms.scalar_autodiff import Scalar, dot, scalars, slopes, sweep, total, values

Values = dict[str, Any]


def _run(q: Any, k: Any, v: Any, options: Values) -> tuple[Values, Values]:
    """Return the equations and the inputs, in scalars."""
    shape = (*q.shape[:3], k.shape[2])
    scale, p = options.get("scale"), options.get("p", 2)
    scale = float(q.shape[3]) ** -0.5 if scale is None else scale
    mask, causal = options.get("mask"), options.get("causal", False)
    allowed = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    offset = {False: shape[3], "top_left": 0}.get(causal, shape[3] - shape[2])
    allowed = allowed & (np.arange(shape[3]) <= np.arange(shape[2])[:, None] + offset)
    given = {"q": scalars(q), "k": scalars(k), "v": scalars(v)}
    widths = {"POW.1": shape[3], "POW.2": shape[3], "POW.3": 1, "POW.4": v.shape[3]}
    found = {id: np.empty((*shape[:3], width), object) for id, width in widths.items()}
    for at in np.ndindex(*shape[:3]):
        group = at[1] * k.shape[1] // q.shape[1]
        scores = [scale * dot(given["q"][at], key) for key in given["k"][at[0], group]]
        weights = [_power(s, p) if ok else Scalar(0.0) for s, ok in zip(scores, allowed[at], strict=True)]
        whole = total(weights)
        whole = whole if whole.value else Scalar(1.0)
        found["POW.1"][at], found["POW.2"][at], found["POW.3"][at] = scores, weights, [whole]
        found["POW.4"][at] = [dot(weights, column) / whole for column in given["v"][at[0], group].T]
    return found, given


def _power(x: Scalar, p: int) -> Scalar:
    return Scalar(x.value**p, ((x, p * x.value ** (p - 1)),))


def forward(q: Any, k: Any, v: Any, **options: Any) -> Values:
    """Return the value of each equation of the forward, by id."""
    return {id: values(x) for id, x in _run(q, k, v, options)[0].items()}


def backward(q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> Values:
    """Return the value of each adjoint, by id."""
    found, given = _run(q, k, v, options)
    sweep(found.pop("POW.4"), d_out)
    return {f"d{id}": slopes(x) for id, x in found.items()} | {f"dPOW.{name}": slopes(x) for name, x in given.items()}
