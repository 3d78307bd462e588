"""The public core: arguments are checked once, cast once, and handed to one of the forms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.arguments import (
    check_arrays,
    check_causal,
    check_floating,
    check_gradient,
    check_is,
    check_mask,
    check_number,
    check_qkv,
)
from refattn.mechanisms.growing import dense, tiled
from refattn.mechanisms.record import Unsupported
from refattn.ops.masks import Causal, causal_offset
from refattn.xp import Array, is_array, namespace, raised

FORMS = {"dense": dense, "tiled": tiled}

DENSE_UP_TO = 128 * 128
"""Scores of one head up to which `form="auto"` takes the dense form."""


@dataclass(frozen=True)
class Saved:
    """What `backward` reads; `form` is the one that ran, "dense" or "tiled"."""

    form: str
    shape: tuple[int, ...]  # of the output
    like: Array  # an input, for its dtype
    scaled: bool  # whether a scale was given
    inner: dense.Saved | tiled.Saved


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    causal: Causal = False,
    scale: float | Array | None = None,
    form: str = "auto",
) -> tuple[Array, Saved]:
    """Softmax attention of queries q over keys k and values v, with a scale that does not follow from their width.

    Parameters
    ----------
    q
        (b, h, i, d), float64, float32, float16 or bfloat16; the last two are computed in float32.
    k
        (b, g, j, d) with g a divisor of h: each key/value head serves h/g consecutive query heads.
    v
        (b, g, j, e).
    mask
        Boolean, broadcastable to (b, h, i, j); True = may attend.
    causal
        False; True or "bottom_right": the last query attends every key; "top_left": query i attends keys 0 to i.
    scale
        Factor of the scores. None means 1/sqrt(d), which is right before the first growth alone: a block stores its
        scale, since a change of d must not change what the old columns mean.
    form
        "dense" (every score at once), "tiled" (memory linear in the lengths) or "auto".

    Returns
    -------
    out : Array
        (b, h, i, e) in the dtype of the inputs; 0 for a query that may attend nothing.
    saved : Saved
        What `backward` reads, with `saved.form`.

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, an alignment, the form or a device does not fit.

    Notes
    -----
    Equations GROW.1 to GROW.6, written out in `refattn.mechanisms.growing.dense`. Source: L. Burgund, Attention Growing
    Networks, section 1. Numbers that are not finite propagate.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.growing.forward(q, k, v, scale=0.0)
    >>> out[0, 0]
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    xp = check_arrays(q=q, k=k, v=v, **({} if mask is None else {"mask": mask}))
    check_qkv(q, k, v)
    shape = (*q.shape[:3], k.shape[2])
    mask = check_mask(mask, shape)
    offset = causal_offset(check_causal(causal), *shape[2:])
    factor: float | Array = 1.0 / math.sqrt(q.shape[3]) if scale is None else check_number("scale", scale)
    if is_array(factor):
        check_arrays(q=q, scale=factor)
        factor = xp.astype(factor, raised(q).dtype)
    chosen = _form(form, shape)
    out, inner = equations.active(FORMS[chosen]).forward(
        raised(q), raised(k), raised(v), mask=mask, offset=offset, scale=factor
    )
    return xp.astype(out, q.dtype, copy=False), Saved(chosen, tuple(out.shape), q, scale is not None, inner)


def backward(saved: Saved, d_out: Array, *, scores: bool = False) -> dict[str, Array]:
    """Gradients of a loss with respect to the inputs of `forward`, and to the scores before the softmax.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, h, i, e): gradient of the loss with respect to `out`.
    scores
        Whether the functional gradient is wanted; the dense form alone holds it.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", and "scale" where it was given, each of the shape of its argument; with `scores` also "scores"
        (b, h, i, j), whose rows sum to 0.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device.
    Unsupported
        Where `scores` is asked of the tiled form.

    Notes
    -----
    Equations dGROW.1 to dGROW.scale of `refattn.mechanisms.growing.dense`. Called twice it gives the same bits.
    """
    check_is("scores", scores, bool)
    d_out = _upstream(saved, d_out)
    if scores and saved.form != "dense":
        raise Unsupported('scores: got True with the form "tiled", which never holds them; needs form="dense"')
    gradients = equations.active(FORMS[saved.form]).backward(saved.inner, d_out)
    xp = namespace(saved.like)
    names = ("q", "k", "v", *(["scale"] if saved.scaled else []), *(["scores"] if scores else []))
    return {name: xp.astype(gradients[name], saved.like.dtype, copy=False) for name in names}


def contract(saved: Saved, d_out: Array, x: Array, *, total: bool = False) -> Array:
    """Contract the functional gradient g with tokens that are queries and keys at once: x^T g x, for each head.

    Parameters
    ----------
    saved, d_out
        As for `backward`.
    x
        (b, n, in): tokens, as many as queries and as many as keys; of any floating dtype, in which the sums are taken.
    total
        Whether the sum over all sequences is wanted.

    Returns
    -------
    Array
        (b, h, in, in), or (h, in, in) with `total`. The gradient of the loss with respect to a kernel M with which the
        scores are x M x^T.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong type, dtype, shape, library or device.
    """
    return contract_and_square(saved, d_out, x, total=total)[0]


def contract_and_square(saved: Saved, d_out: Array, x: Array, *, total: bool = False) -> tuple[Array, Array]:
    """Return what `contract` does, and the sum () of the squares of the functional gradient of all heads."""
    d_out = _upstream(saved, d_out)
    check_is("total", total, bool)
    check_arrays(x=x, d_out=d_out)
    check_floating(x=x)
    b, _, queries, _ = saved.shape
    keys = saved.inner.k.shape[2]
    if len(x.shape) != 3 or x.shape[:2] != (b, queries) or keys != queries:
        needs = f"({b}, {queries}, width)" if keys == queries else f"as many queries ({queries}) as keys ({keys})"
        raise ValueError(f"x: got shape {tuple(x.shape)}, needs {needs}")
    return equations.active(FORMS[saved.form]).contract(saved.inner, d_out, x, total)


def _upstream(saved: Saved, d_out: Array) -> Array:
    """Return the gradient of the output in the dtype of the computation."""
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {type(saved).__name__}, needs what forward returned")
    check_gradient("d_out", d_out, saved.shape, saved.like)
    return namespace(d_out).astype(d_out, raised(saved.like).dtype, copy=False)


def _form(form: str, shape: tuple[int, ...]) -> str:
    """Return the form to run for scores of this shape."""
    if not isinstance(form, str) or form not in ("auto", *FORMS):
        raise ValueError(f"form: got {form!r}, needs one of auto, {', '.join(FORMS)}")
    # A trace shows whole equations; an empty plane has no tiles.
    if form != "auto" and 0 not in shape:
        return form
    small = shape[2] * shape[3] <= DENSE_UP_TO
    return "dense" if small or equations.is_active() or 0 in shape else "tiled"
