"""The formula in NumPy, as it is written down: no maximum is subtracted. numpy 2.4.6."""

import numpy as np
from common import seen


def attend(q, k, v, *, mask=None, causal=False, scale=None):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    k, v = (np.repeat(x, q.shape[1] // max(x.shape[1], 1), axis=1) for x in (k, v))
    scores = q @ np.swapaxes(k, 2, 3) * q.dtype.type(scale)
    mask = seen(np, q, k, mask, causal)
    with np.errstate(all="ignore"):
        powers = np.exp(scores if mask is None else np.where(mask, scores, -np.inf))
        return ((powers / powers.sum(axis=3, keepdims=True)) @ v).astype(q.dtype)
