"""The public core of Koopman attention: arguments are checked once, cast once, and handed to one of the forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.arguments import (
    check_arrays,
    check_causal,
    check_gradient,
    check_is,
    check_mask,
    check_qkv,
)
from refattn.mechanisms.koopman.forms import FORMS, choose
from refattn.mechanisms.koopman.options import DIFFERENTIABLE, check_numbers, check_options
from refattn.ops.masks import Causal, causal_offset
from refattn.xp import Array, namespace, raised, zeros


@dataclass(frozen=True)
class Saved:
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    form
        The form that ran.
    trajectory
        The queries q^0, q^1, ..., the last of them the output, (b, h, i, d) each; float32 for float16 and bfloat16.
    """

    form: str
    trajectory: tuple[Array, ...]
    shape: tuple[int, ...]  # of the output
    inputs: tuple[Array, Array, Array]  # q, k, v: for their shapes and dtype
    given: dict[str, tuple[int, ...]]  # the differentiable options that were given, with their shapes
    inner: Any


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    updates: int = 2,
    kernel: str = "linear+rbf",
    bandwidth: float | Array | None = None,
    weight: float | Array | None = None,
    degree: int = 2,
    constant: float = 1.0,
    fit: str = "stein",
    space: str = "keys",
    augment: bool = False,
    ridge: float | Array | None = None,
    ridge_scale: str = "sum",
    tau: float = 0.0,
    epsilon: float | Array | None = None,
    perturbation: str = "shift",
    mix: float | Array | None = None,
    similarity: str = "dot",
    window: int | None = None,
    jitter: float | None = None,
    certify: bool = False,
    mask: Array | None = None,
    causal: Causal = False,
    form: str = "auto",
) -> tuple[Array, Saved]:
    """Queries q, updated by a Koopman operator that is fitted to the trajectory of each.

    Parameters
    ----------
    q
        (b, h, i, d), float64, float32, float16 or bfloat16; the last two are computed in float32.
    k
        (b, g, j, d) with g a divisor of h: each key/value head serves h/g consecutive query heads.
    v
        (b, g, j, d): as wide as k, because what a query attends is its next place.
    updates
        m, at least 1. The first update is plain attention; each later one fits an operator to all transitions so far.
    kernel
        "linear" (x . y alone), or with a second kernel "linear+rbf", "linear+matern32", "linear+matern52",
        "linear+polynomial".
    bandwidth, weight
        Of the second kernel, above 0; None means sqrt(d) and 1.
    degree, constant
        Of the polynomial (x . y / bandwidth^2 + constant)^degree.
    fit
        "stein" (least squares over all observables) or "separable" (over the kernel's space; cheaper where causal).
    space
        "keys": the operator acts on the span of the kernel's sections at the keys; "full": on all functions.
    augment
        Whether the coordinate functions are observables too.
    ridge
        Above 0, the weight of the operator's norm; an array () for all, (updates - 1,) for each update after the first,
        or (candidates, updates - 1), of which at most 8 are tried in order; with a third axis of size d a ridge for
        each coordinate, and an operator for each of its different values. None means 0.1.
    ridge_scale
        "sum": the ridge is as given; "mean": it is multiplied by the number of transitions times that of seen keys.
    tau
        0: the ridge draws the operator to 0; 1: to the identity.
    epsilon
        At least 0, in the shapes of `ridge` but the last: the size of the perturbation psi. None means 0.1.
    perturbation
        "shift" (psi = phi + epsilon pi), "identity" (psi = pi + epsilon phi) or "pencil" (psi = mix pi + epsilon phi).
    mix
        Above 0, for "pencil"; None means 1.
    similarity
        "dot" (q . k / sqrt(d)) or "kernel": what the softmax is taken of.
    window
        The operator is fitted to so many of the last transitions; None: to all.
    jitter
        At least 0: what is added to the diagonal of the Gram matrix, relative to its elements. None means 1e-8 in
        float64 and 1e-4 in float32.
    certify
        Whether to raise where psi is not certain to be one to one.
    mask
        Boolean, broadcastable to (b, h, i, j); True = may attend, and is an observable of the query.
    causal
        False; True or "bottom_right": the last query sees every key; "top_left": query i sees keys 0 to i.
    form
        "dense", "shared" (one factorisation for all queries, in chunks: where all see the same keys, or the fit is
        "separable"), or "auto".

    Returns
    -------
    out : Array
        (b, h, i, d): the last query of each trajectory; 0 for a query that sees no key.
    saved : Saved
        What `backward` reads, with `saved.trajectory`.

    Raises
    ------
    KoopmanInverseError
        Where psi was not inverted for some query by any candidate. Under ``jax.jit`` the query is NaN instead, and
        only the first candidate is tried. Numbers that come in as NaN or infinite go on as NaN, and raise nothing.
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, a choice, an alignment, the form or a device does not fit, or psi is not certified.

    Notes
    -----
    Equations KOOP.1 to KOOP.17 of `refattn.mechanisms.koopman.dense` and `refattn.mechanisms.koopman.update`. Source:
    Tie 2024; Khosravi 2023 (arXiv:2208.01681).

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.koopman.forward(q, k, v, perturbation="identity")
    >>> out.shape, len(saved.trajectory)
    ((1, 1, 2, 2), 3)
    """
    xp = check_arrays(q=q, k=k, v=v, **({} if mask is None else {"mask": mask}))
    check_qkv(q, k, v)
    if v.shape[3] != q.shape[3]:
        raise ValueError(
            f"v: got width {v.shape[3]}, needs {q.shape[3]} as q: what is attended is the query's next place"
        )
    options = check_options(
        updates=updates,
        kernel=kernel,
        degree=degree,
        constant=constant,
        fit=fit,
        space=space,
        tau=tau,
        augment=augment,
        ridge_scale=ridge_scale,
        perturbation=perturbation,
        similarity=similarity,
        window=window,
        jitter=jitter,
        certify=certify,
    )
    asked = {"ridge": ridge, "epsilon": epsilon, "bandwidth": bandwidth, "weight": weight, "mix": mix}
    usual = {"bandwidth": math.sqrt(q.shape[3]), "weight": 1.0, "mix": 1.0}
    values = {name: usual.get(name) if value is None else value for name, value in asked.items()}
    numbers = check_numbers(options, raised(q), **values)
    shape = (*q.shape[:3], k.shape[2])
    mask = check_mask(mask, shape)
    offset = causal_offset(check_causal(causal), *shape[2:])
    chosen = choose(form, options, mask, offset, shape, q.shape[3])
    given = {name: tuple(getattr(x, "shape", ())) for name, x in asked.items() if x is not None}
    if 0 in shape:
        nothing = 0.0 * raised(q)
        trajectory = (raised(q), *([nothing] * updates))
        return xp.astype(nothing, q.dtype, copy=False), Saved(
            chosen, trajectory, tuple(q.shape), (q, k, v), given, None
        )
    out, inner = equations.active(FORMS[chosen]).forward(
        raised(q), raised(k), raised(v), mask=mask, offset=offset, options=options, numbers=numbers
    )
    saved = Saved(chosen, inner.trajectory, tuple(out.shape), (q, k, v), given, inner)
    return xp.astype(out, q.dtype, copy=False), saved


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Gradients of a loss with respect to the inputs of `forward`.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, h, i, d): gradient of the loss with respect to `out`.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", and "ridge", "epsilon", "bandwidth", "weight" and "mix" where they were given, each of the shape
        of its argument. A candidate that was not taken has gradient 0.

    Raises
    ------
    TypeError, ValueError
        Where the gradient is of a wrong type, dtype, shape, library or device.

    Notes
    -----
    Equations dKOOP.1 to dKOOP.weight. Called twice it gives the same bits.
    """
    check_is("saved", saved, Saved)
    like = saved.inputs[0]
    check_gradient("d_out", d_out, saved.shape, like)
    xp, wide = namespace(like), raised(like)
    if saved.inner is None:
        gradients = {name: xp.zeros_like(x) for name, x in zip("qkv", saved.inputs, strict=True)}
    else:
        d_wide = xp.astype(d_out, wide.dtype, copy=False)
        gradients = equations.active(FORMS[saved.form]).backward(saved.inner, d_wide)
    for name, shape in saved.given.items():
        gradients[name] = _shaped(gradients.get(name), shape, wide)
    names = ("q", "k", "v", *(name for name in DIFFERENTIABLE if name in saved.given))
    return {name: xp.astype(gradients[name], like.dtype, copy=False) for name in names}


def _shaped(gradient: Array | None, shape: tuple[int, ...], like: Array) -> Array:
    """Return the gradient of an option in the shape of the option; 0 where it was not used."""
    if gradient is None:
        return zeros(shape, like)
    xp = namespace(like)
    return xp.reshape(gradient if math.prod(gradient.shape) == math.prod(shape) else xp.sum(gradient), shape)
