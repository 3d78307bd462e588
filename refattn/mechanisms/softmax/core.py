"""The public core of softmax attention: arguments are checked once, cast once, and handed to an implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn import equations
from refattn.args import naming
from refattn.mechanisms.core_arguments import check_saved, enter, implementation_of, returned, upstream
from refattn.mechanisms.softmax import definition, dense
from refattn.mechanisms.softmax.implementations import tiled
from refattn.mechanisms.softmax.options import Options, Window, check_no_bias, check_options
from refattn.mechanisms.use_definition import backward_of_definition, defined_by
from refattn.ops.masks import Causal, where_allowed
from refattn.tree import Shown
from refattn.xp import Array, namespace

IMPLEMENTATIONS = {"dense": dense, "tiled": tiled}

DENSE_UP_TO = 128 * 128
"""Scores of one head up to which `implementation="auto"` takes the dense implementation."""


@dataclass(frozen=True, repr=False)
class Saved(Shown):
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    implementation
        The implementation that ran: "dense" or "tiled".
    lse
        (b, h, i): natural logarithm of the sum of exponentials, those of the sinks included; -inf for a query that may
        attend nothing and has no sink, or does not exist. For float16 and bfloat16 inputs it is float32.
    max
        (b, h, i): the largest score that a query attends, sinks apart, -inf where there is none; in the dtype of lse.
        It has no gradient. The tiled implementation computes it when it is asked for.
    """

    implementation: str
    lse: Array
    shape: tuple[int, ...]  # of the output
    like: Array  # an input, for its dtype
    options: tuple[str, ...]  # numbers with a gradient that were given
    given: Options
    inner: dense.Saved | tiled.Saved

    @property
    def max(self) -> Array:  # noqa: D102 (among the attributes)
        return self.inner.largest


@defined_by(definition)
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    causal: Causal = False,
    window: Window | None = None,
    offset: int | Array | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    q_lengths: Array | None = None,
    k_lengths: Array | None = None,
    keep: Array | None = None,
    scale: float | Array | None = None,
    softcap: float | Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Saved]:
    """Softmax attention of queries q over keys k and values v.

    `refattn show softmax > sm.py` writes the definition, how it is computed, as one file on NumPy alone; in a block
    ``with ra.reading():`` a debugger steps through it.

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
    window
        (left, right), each a whole number of at least 0 or None: a query at place p attends keys p - left to p + right,
        both included; None is no bound. With ``causal`` (W - 1, None) is a window of W keys.
    offset
        Query i stands at place i + offset among the keys, for ``causal`` and ``window``: a whole number, or integers
        (b,). None: the last query stands at the last key, of those that exist; with "top_left" the first at the first.
    bias
        Floating, broadcastable to (b, h, i, j): added to the scores after the soft-cap, unscaled. -inf hides a key.
    sink
        (h,) or (h, s): for each query head one or s logits that take part in the sum of exponentials and bring no
        value. They are neither scaled, capped, biased nor masked; -inf is no sink.
    q_lengths, k_lengths
        Integers (b,): how many queries and keys exist. What comes after them may hold anything, NaN too: such a query
        gives 0 and an lse of -inf, and such a key is attended by none.
    keep
        Boolean or floating, broadcastable to (b, h, i, j): what weights are multiplied by after they were normalised.
        Dropout of rate p has 0 and 1/(1-p). lse does not see it.
    scale
        Factor of the scores; None means 1/sqrt(d).
    softcap
        Above 0: scores become ``softcap * tanh(scores / softcap)`` before the bias and the mask.
    implementation
        "dense" (every score at once), "tiled" (memory linear in the lengths) or "auto".

    Returns
    -------
    out : Array
        (b, h, i, e) in the dtype of the inputs; 0 for a query that may attend nothing.
    saved : Saved
        What `backward` reads, with `saved.lse`, `saved.max` and `saved.implementation`.

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, an alignment, the implementation or a device does not fit.

    Notes
    -----
    The equations stand in `refattn.mechanisms.softmax.dense`, those of the paper alone, SM.1 to SM.5, in
    `refattn.mechanisms.softmax.definition`. Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1. Numbers that
    are not finite propagate; in a tile or a row that holds one, masked positions included, they may spread through
    0 * NaN; what does not exist is the exception.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.softmax.forward(q, k, v, causal=True)
    >>> out[0, 0].round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    """
    call = enter(q, k, v, mask=None if mask is None else check_no_bias(mask), causal=causal)
    given = check_options(
        call,
        causal,
        window=window,
        offset=offset,
        bias=bias,
        sink=sink,
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        keep=keep,
    )
    usual = "dense" if q.shape[2] * k.shape[2] <= DENSE_UP_TO else "tiled"
    chosen = implementation_of(implementation, IMPLEMENTATIONS, usual=usual, plane=call.plane)
    queries, keys, values = call.q, call.k, call.v
    if q_lengths is not None:
        queries = where_allowed(given.rows, queries, 0.0)
    if k_lengths is not None:
        keys, values = where_allowed(given.columns, keys, 0.0), where_allowed(given.columns, values, 0.0)
    out, lse, inner = equations.active(IMPLEMENTATIONS[chosen]).forward(
        queries,
        keys,
        values,
        **given.implementations,
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else call.number("scale", scale),
        softcap=None if softcap is None else call.number("softcap", softcap, positive=True),
    )
    numbers = tuple(name for name, value in (("scale", scale), ("softcap", softcap)) if value is not None)
    return call.back(out), Saved(chosen, lse, tuple(out.shape), q, numbers, given, inner)


@backward_of_definition
@naming("saved")
def backward(saved: Saved, d_out: Array, d_lse: Array | None = None) -> dict[str, Array]:
    """Gradients of a loss with respect to the inputs of `forward`.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, h, i, e): gradient of the loss with respect to `out`.
    d_lse
        (b, h, i): gradient with respect to `saved.lse`, where the loss depends on it.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", and of those that were given "scale", "softcap", "bias", "sink" and a floating "keep", each of
        the shape of its argument.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device.

    Notes
    -----
    The equations stand in `refattn.mechanisms.softmax.dense`. Called twice it gives the same bits.
    """
    check_saved(saved, Saved)
    d_out, d_lse = upstream(saved.like, d_out=(d_out, saved.shape), d_lse=(d_lse, saved.shape[:3]))
    given, rows = saved.given, saved.given.rows
    if rows is not None:
        d_out = where_allowed(rows, d_out, 0.0)
        d_lse = None if d_lse is None else where_allowed(rows[..., 0], d_lse, 0.0)
    gradients = equations.active(IMPLEMENTATIONS[saved.implementation]).backward(saved.inner, d_out, d_lse)
    # -0.0 + 0.0 is 0.0: of what is hidden not even a sign is left.
    shaped = {name: namespace(d_out).reshape(gradients[name] + 0.0, shape) for name, shape in given.shapes.items()}
    return returned({**gradients, **shaped}, ("q", "k", "v", *saved.options, *given.shapes), saved.like)
