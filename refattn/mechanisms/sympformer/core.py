"""The public core, the force of a prefix: arguments are checked, cast once and given to an implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn import equations
from refattn.args import check_arrays, check_floating, check_number, naming, spelled
from refattn.mechanisms.core_arguments import check_saved, enter, implementation_of, returned, upstream
from refattn.mechanisms.sympformer import dense, tiled
from refattn.ops.masks import Causal
from refattn.tree import Shown
from refattn.xp import Array, is_array, raised, zeros

IMPLEMENTATIONS = {"dense": dense, "tiled": tiled}

DENSE_UP_TO = 64 * 64
"""Scores of one head up to which `implementation="auto"` takes the dense implementation."""


@dataclass(frozen=True, repr=False)
class Saved(Shown):
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    implementation
        The implementation that ran: "dense" or "tiled".
    log_z
        (b, h, n): logarithm of the mean over the attended tokens of e to the power of the scores. For float16 and
        bfloat16 inputs it is float32.
    """

    implementation: str
    log_z: Array
    shape: tuple[int, ...]  # of the output
    like: Array  # an input, for its dtype
    moving: bool  # whether kinetic was given
    inner: dense.Saved | tiled.Saved


@spelled
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    kinetic: Array | None = None,
    causal: Causal = False,
    scale: float | None = None,
    implementation: str = "auto",
) -> tuple[Array, Saved]:
    """Force of a prefix on tokens with queries q, keys k, values v and kinetic terms.

    `refattn show sympformer > symp.py` writes the definition, a whole step of which this is the force, as one file on
    NumPy alone.

    Parameters
    ----------
    q
        (b, h, n, d), float64, float32, float16 or bfloat16; the last two are computed in float32.
    k
        (b, g, n, d) with g a divisor of h: each key/value head serves h/g consecutive query heads.
    v
        (b, g, n, e).
    kinetic
        (b, h, n, 1): <B p, p> of each token, for momenta p and a mobility B. None: all tokens are at rest.
    causal
        True, "bottom_right" or "top_left": a token attends those up to itself, and is pushed by them alone. False: by
        all.
    scale
        Factor of the scores; None means 1/sqrt(d).
    implementation
        "dense" (every score at once), "tiled" (memory linear in n) or "auto".

    Returns
    -------
    out : Array
        (b, h, n, e) in the dtype of the inputs: the force, in the space of the values.
    saved : Saved
        What `backward` reads, with `saved.log_z` and `saved.implementation`; the velocity of a token is B p /
        exp(log_z).

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, the implementation or a device does not fit.

    Notes
    -----
    Equations SYMP.5 to SYMP.7 and SYMP.10 to SYMP.12 of the definition, with options in
    `refattn.mechanisms.sympformer.dense`. Source: Stein, Li, Steidl 2026 (arXiv:2603.16535). At rest the force is
    exp(log_z) times softmax attention. Adding a number to all scores is no symmetry: it changes log_z.

    Nothing is clipped: where exp(log_z), exp(-log_z) or kinetic exp(-2 log_z) is beyond the range of the dtype, results
    are infinite or NaN. In float32 tokens at rest have finite results for log_z from -87 to 88, and those with a
    kinetic term of 1 for log_z above -44.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.sympformer.forward(q, k, v, causal=True)
    >>> out[0, 0].round(3)
    array([[2.028, 0.   ],
           [0.5  , 1.014]])
    """
    call = enter(q, k, v, causal=causal)
    b, h, n, d = q.shape
    if k.shape[2] != n:
        raise ValueError(f"k: got {k.shape[2]} tokens, needs the {n} tokens of q: they push each other")
    if n == 0:
        raise ValueError(f"q: got no token in shape {tuple(q.shape)}, needs at least 1")
    if kinetic is not None:
        check_arrays(q=q, kinetic=kinetic)
        check_floating(q=q, kinetic=kinetic)
        if tuple(kinetic.shape) != (b, h, n, 1):
            raise ValueError(f"kinetic: got shape {tuple(kinetic.shape)}, needs {(b, h, n, 1)}")
    if scale is not None and is_array(scale):
        raise TypeError("scale: got an array, needs a finite number")
    usual = "dense" if n * n <= DENSE_UP_TO else "tiled"
    chosen = implementation_of(implementation, IMPLEMENTATIONS, usual=usual, plane=q.shape)
    out, log_z, inner = equations.active(IMPLEMENTATIONS[chosen]).forward(
        call.q,
        call.k,
        call.v,
        zeros((b, h, n, 1), call.q) if kinetic is None else raised(kinetic),
        offset=call.offset,
        scale=1.0 / math.sqrt(d) if scale is None else check_number("scale", scale),
    )
    return call.back(out), Saved(chosen, log_z, tuple(out.shape), q, kinetic is not None, inner)


@naming("saved")
def backward(saved: Saved, d_out: Array, d_log_z: Array | None = None) -> dict[str, Array]:
    """Gradients of a loss with respect to the inputs of `forward`.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, h, n, e): gradient of the loss with respect to `out`.
    d_log_z
        (b, h, n): gradient with respect to `saved.log_z`, where the loss depends on it.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", and "kinetic" where it was given, each of the shape of its argument.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device.

    Notes
    -----
    Equations dSYMP.q to dSYMP.kinetic of `refattn.mechanisms.sympformer.dense`. Called twice it gives the same bits.
    """
    check_saved(saved, Saved)
    d_out, d_log_z = upstream(saved.like, d_out=(d_out, saved.shape), d_log_z=(d_log_z, saved.shape[:3]))
    gradients = equations.active(IMPLEMENTATIONS[saved.implementation]).backward(saved.inner, d_out, d_log_z)
    return returned(gradients, ("q", "k", "v", "kinetic") if saved.moving else ("q", "k", "v"), saved.like)
