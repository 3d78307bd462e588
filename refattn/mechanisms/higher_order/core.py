"""The public core of higher-order attention: arguments are checked once, cast once, and handed to one of the forms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from refattn import equations
from refattn.mechanisms.arguments import check_arrays, check_causal, check_gradient, check_is, check_qkv
from refattn.mechanisms.higher_order.forms import FORMS, choose
from refattn.mechanisms.higher_order.kernel import Kernel
from refattn.mechanisms.higher_order.options import Options, check_options, check_sign
from refattn.mechanisms.higher_order.state import State, check_state, empty
from refattn.ops.masks import Causal, causal_offset
from refattn.xp import Array, dtype_name, is_bool, namespace, raised


@dataclass(frozen=True)
class Saved:
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    form
        The form that ran.
    normaliser
        (b, h, i): the row sums z of HOL.7, before the policy: where they are near 0, or below, the output is ill
        conditioned. For float16 and bfloat16 inputs they are float32.
    state
        The state after the last key, where one came in.
    """

    form: str
    normaliser: Array
    state: State | None
    shape: tuple[int, ...]  # of the output
    like: Array  # an input, for its dtype
    key_mask: Array | None
    inner: Any


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    order: int = 2,
    alpha: float = 3.0,
    delta: float = 0.0,
    policy: str = "exact",
    layer_norm: bool = True,
    eps: float | None = None,
    norm_eps: float = 1e-5,
    denominator: str = "matched",
    key_mask: Array | None = None,
    causal: Causal = False,
    state: State | None = None,
    form: str = "auto",
) -> tuple[Array, Saved]:
    """Higher-order attention of queries q over keys k and values v.

    Parameters
    ----------
    q
        (b, h, i, d), float64, float32, float16 or bfloat16; the last two are computed in float32.
    k
        (b, g, j, d) with g a divisor of h: each key/value head serves h/g consecutive query heads.
    v
        (b, g, j, e).
    order
        p, the degree of the Taylor polynomial T_p that stands for the exponential: 0, 1, 2, ...
    alpha
        Above 0: the scores are q' . k' / (alpha sqrt(d)).
    delta
        0, 1/2 or 1: what is subtracted from every weight. With 1/2 weights of order 2 are (1 + s)^2 / 2, and 0 at
        s = -1; with 1, the author's choice, they are of both signs, and so may be the sums that divide.
    policy
        "exact", "add", "clamp" or "signed": what divides, where the sum z of the weights is near 0. See
        `refattn.mechanisms.higher_order.options`.
    layer_norm
        Whether queries and keys are normalised. Where they are rotated, normalise them, rotate, and give False.
    eps
        The number of the policy; None means 1e-6 for "add" and "signed", 1e-5 for "clamp".
    norm_eps
        What is added to the variance by the layer normalisation.
    denominator
        "matched": the sum of the weights; "plain": the sum of the weights with delta = 0, which is not the author's.
    key_mask
        Boolean (b, j); False = padding, which no query may attend, whatever it holds.
    causal
        False; True or "bottom_right": the last query attends every key; "top_left": query i attends keys 0 to i.
    state
        What earlier keys have left, which every query may attend: `saved.state` of an earlier call, or `empty_state`.
        Then `causal` is asked for, and `saved.state` is the state after the last key.
    form
        "dense" (every score at once), "tiled" (memory linear in the lengths), "linear" (work too; not causal),
        "chunked" (the same, causal), "recurrent" (token by token, causal) or "auto": the quickest for these sizes.

    Returns
    -------
    out : Array
        (b, h, i, e) in the dtype of the inputs; 0 for a query that may attend nothing.
    saved : Saved
        What `backward` reads, with `saved.form`, `saved.normaliser` and `saved.state`.

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, an alignment, the form or a device does not fit, options exclude each other, a state
        is of other options, or delta = 1 is to be causal without the policy "signed".

    Notes
    -----
    Equations HOL.1 to HOL.9, written out in `refattn.mechanisms.higher_order.dense`. Source: Mercat 2020
    (arXiv:2010.14816), equations 1 to 3. Numbers that are not finite propagate; in a tile or a chunk that holds one
    they may spread through 0 * NaN, also to earlier queries. Padding may hold any numbers.

    Layer normalisation leaves nothing of width 1 and the sign of width 2. Even orders with delta = 0 have weights above
    0. An odd order has them as long as sqrt(d) / alpha stays below the root of T_p: up to a width of 8, 22, 42 and 68
    for orders 1, 3, 5 and 7 and alpha = 3; beyond, the policy "signed" keeps numbers finite. It does not make training
    steady: for order 1 and alpha = 1 that took "clamp" with an eps of about half the number of keys.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(4).reshape(1, 1, 4, 4)
    >>> out, saved = ra.higher_order.forward(q, k, v, causal=True)
    >>> out[0, 0, :2].round(3)
    array([[1.   , 0.   , 0.   , 0.   ],
           [0.298, 0.702, 0.   , 0.   ]])
    """
    options = check_options(
        order=order,
        alpha=alpha,
        delta=delta,
        policy=policy,
        layer_norm=layer_norm,
        eps=eps,
        norm_eps=norm_eps,
        denominator=denominator,
    )
    return attend(q, k, v, options=options, key_mask=key_mask, causal=causal, state=state, form=form)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    options: Options,
    key_mask: Array | None,
    causal: Causal,
    state: State | None = None,
    form: str = "auto",
) -> tuple[Array, Saved]:
    """Return (out, saved) of `forward` for options that were checked before."""
    xp = check_arrays(q=q, k=k, v=v, **({} if key_mask is None else {"key_mask": key_mask}))
    check_qkv(q, k, v)
    check_sign(options, check_causal(causal))
    if key_mask is not None:
        _check_key_mask(key_mask, (k.shape[0], k.shape[2]))
    if state is not None:
        _check_state(state, options, causal, q, k, v)
    offset = causal_offset(causal, q.shape[2], k.shape[2])
    chosen = choose(form, options, offset, state is not None, q, k, v)
    keys, values = raised(k), raised(v)
    if key_mask is not None:
        rows = key_mask[:, None, :, None]
        keys, values = xp.where(rows, keys, 0.0), xp.where(rows, values, 0.0)
    more = {} if state is None else {"state": state}
    out, normaliser, inner = equations.active(FORMS[chosen]).forward(
        raised(q), keys, values, key_mask=key_mask, offset=offset, options=options, **more
    )
    last = None if state is None else inner.state
    return xp.astype(out, q.dtype, copy=False), Saved(chosen, normaliser, last, tuple(out.shape), q, key_mask, inner)


def backward(saved: Saved, d_out: Array, d_state: State | None = None) -> dict[str, Any]:
    """Gradients of a loss with respect to the inputs of `forward`.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, h, i, e): gradient of the loss with respect to `out`.
    d_state
        Gradient with respect to `saved.state`, where the loss depends on it.

    Returns
    -------
    dict of str to Array
        "q", "k" and "v", each of the shape of its argument, and "state", a `State`, where one came in.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device.

    Notes
    -----
    Equations dHOL.1 to dHOL.k of `refattn.mechanisms.higher_order.dense`. Called twice it gives the same bits.
    """
    check_is("saved", saved, Saved)
    check_gradient("d_out", d_out, saved.shape, saved.like)
    xp, like = namespace(saved.like), raised(saved.like)
    more = {}
    if d_state is not None:
        if saved.state is None:
            raise ValueError("d_state was given, but forward was given no state, and returned none")
        check_is("d_state", d_state, State)
        for name in ("products", "values"):
            check_gradient(f"d_state.{name}", getattr(d_state, name), getattr(saved.state, name).shape, like)
        more = {"d_state": d_state}
    gradients = equations.active(FORMS[saved.form]).backward(
        saved.inner, xp.astype(d_out, like.dtype, copy=False), **more
    )
    if saved.key_mask is not None:
        rows = saved.key_mask[:, None, :, None]
        gradients |= {name: xp.where(rows, gradients[name], 0.0) for name in ("k", "v")}
    cast = {name: xp.astype(gradients[name], saved.like.dtype, copy=False) for name in ("q", "k", "v")}
    if "state" in gradients:
        # The settings are no numbers to be learned.
        d_start: State = gradients["state"]
        cast["state"] = replace(d_start, settings=xp.zeros_like(d_start.settings))
    return cast


def empty_state(
    k: Array,
    v: Array,
    *,
    order: int = 2,
    alpha: float = 3.0,
    delta: float = 0.0,
    layer_norm: bool = True,
    norm_eps: float = 1e-5,
) -> State:
    """Return the state before any key, for keys like k (b, g, j, d) and values like v (b, g, j, e) of any lengths.

    The options are those of `forward` that a state depends on; a call with others refuses it.
    """
    check_arrays(k=k, v=v)
    check_qkv(k, k, v)
    options = check_options(
        order=order,
        alpha=alpha,
        delta=delta,
        policy="exact",
        layer_norm=layer_norm,
        eps=None,
        norm_eps=norm_eps,
        denominator="matched",
    )
    return empty(Kernel(options, k.shape[3]), (*k.shape[:2], v.shape[3]), raised(k))


def _check_state(state: State, options: Options, causal: Causal, q: Array, k: Array, v: Array) -> None:
    check_is("state", state, State)
    if causal is False:
        raise ValueError("state was given with causal=False, needs causal: a state holds the keys before all others")
    if 0 in (*q.shape[:3], k.shape[2]):
        raise ValueError(f"state was given with q {tuple(q.shape)} and k {tuple(k.shape)}, needs no size of 0")
    check_arrays(q=q, **{f"state.{name}": getattr(state, name) for name in ("products", "values", "settings")})
    check_state(state, Kernel(options, q.shape[3]), (k.shape[0], k.shape[1], v.shape[3]), raised(q))


def _check_key_mask(key_mask: Array, shape: tuple[int, int]) -> None:
    if not is_bool(key_mask):
        raise TypeError(f"key_mask: got dtype {dtype_name(key_mask)}, needs bool (True = a token)")
    if tuple(key_mask.shape) != shape:
        raise ValueError(f"key_mask: got shape {tuple(key_mask.shape)}, needs (batch, keys) = {shape}")
