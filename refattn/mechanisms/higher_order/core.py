"""The public core of higher-order attention: arguments are checked once, cast once, and handed to an implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from refattn import equations
from refattn.args import check, check_arrays, check_gradient, check_qkv, naming
from refattn.mechanisms.core_arguments import Call, check_saved, enter, implementation_of, returned, upstream
from refattn.mechanisms.higher_order import definition, dense
from refattn.mechanisms.higher_order.implementations import chunked, linear, recurrent, tiled
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.mechanisms.higher_order.implementations.state import State, check_state, empty
from refattn.mechanisms.higher_order.options import NORMALISERS, Normaliser, Options, check_sign
from refattn.mechanisms.option_kinds import choose
from refattn.mechanisms.record import Unsupported
from refattn.mechanisms.use_definition import backward_of_definition, defined_by
from refattn.ops.masks import Causal
from refattn.tree import Shown
from refattn.xp import Array, dtype_name, is_bool, namespace, raised

IMPLEMENTATIONS = {"dense": dense, "tiled": tiled, "linear": linear, "chunked": chunked, "recurrent": recurrent}

DENSE_UP_TO = 128 * 128
"""Scores of one head up to which `implementation="auto"` takes the dense implementation."""


@dataclass(frozen=True, repr=False)
class Saved(Shown):
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    implementation
        The implementation that ran.
    normaliser
        (b, h, i): the row sums z of HOL.5, before the normaliser: where they are near 0, or below, the output is ill
        conditioned. For float16 and bfloat16 inputs they are float32.
    state
        The state after the last key, where one came in.
    """

    implementation: str
    normaliser: Array
    state: State | None
    shape: tuple[int, ...]  # of the output
    like: Array  # an input, for its dtype
    key_mask: Array | None
    learned: tuple[str, ...]  # of alpha and delta, those with a gradient
    inner: Any


def _as_printed(options: dict[str, Any], *arrays: Array) -> str | None:
    return None if options.get("order", 2) else "the paper has no order 0"


@defined_by(definition, _as_printed)
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    order: int = Options.order,
    alpha: float | Array = Options.alpha,
    normaliser: Normaliser | str = Options.normaliser,
    layer_norm: bool = Options.layer_norm,
    norm_eps: float = Options.norm_eps,
    mask: Array | None = None,
    key_mask: Array | None = None,
    causal: Causal = False,
    state: State | None = None,
    implementation: str = "auto",
) -> tuple[Array, Saved]:
    """Higher-order attention of queries q over keys k and values v.

    `refattn show higher_order > ho.py` writes the definition, how it is computed, as one file on NumPy alone; in a
    block ``with ra.reading():`` a debugger steps through it.

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
        Above 0: the scores are q' . k' / (alpha sqrt(d)). A 0-d array has a gradient.
    normaliser
        What divides: "exact", "add", "clamp" or "signed", or one with its numbers, as text such as "signed(eps=2.0)"
        or an object of `refattn.mechanisms.higher_order.options`. All have `delta`, which is subtracted from every
        weight: 0, 1 as the author has it, or any number. A 0-d array has a gradient: ``Signed(delta=...)``.
    layer_norm
        Whether queries and keys are normalised. Where they are rotated, normalise them, rotate, and give False.
    norm_eps
        What is added to the variance by the layer normalisation.
    mask
        Boolean, broadcastable to (b, h, i, j); True = may attend. Any mask takes an implementation with pairs: dense or
        tiled.
    key_mask
        Boolean (b, j), beside a mask or alone; False = padding, which no query may attend, whatever it holds.
    causal
        False; True or "bottom_right": the last query attends every key; "top_left": query i attends keys 0 to i.
    state
        What earlier keys have left, which every query may attend: `saved.state` of an earlier call, or `empty_state`.
        Then `causal` is asked for, and `saved.state` is the state after the last key.
    implementation
        "dense" (every score at once), "tiled" (memory linear in the lengths), "linear" (work too; not causal),
        "chunked" (the same, causal), "recurrent" (token by token, causal) or "auto": the quickest for these sizes. The
        last three have a sum over keys that all queries share, and so no mask.

    Returns
    -------
    out : Array
        (b, h, i, e) in the dtype of the inputs; 0 for a query that may attend nothing.
    saved : Saved
        What `backward` reads, with `saved.implementation`, `saved.normaliser` and `saved.state`.

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype, the arrays are of several libraries, or a keyword is an old one.
    ValueError
        Where a shape, a number, an alignment, the implementation or a device does not fit, options exclude each other,
        a state is of other options, or delta = 1 is to be causal without the normaliser "signed".

    Notes
    -----
    The equations stand in `refattn.mechanisms.higher_order.dense`, those of the paper alone, HOL.1 to HOL.6, in
    `refattn.mechanisms.higher_order.definition`. Source: Mercat 2020 (arXiv:2010.14816), equations 1 to 3. Numbers that
    are not finite propagate; in a tile or a chunk that holds one they may spread through 0 * NaN, also to earlier
    queries. Padding may hold any numbers.

    Layer normalisation leaves nothing of width 1 and the sign of width 2. Even orders with delta = 0 have weights above
    0. An odd order has them as long as sqrt(d) / alpha stays below the root of T_p: up to a width of 8, 22, 42 and 68
    for orders 1, 3, 5 and 7 and alpha = 3; beyond, the normaliser "signed" keeps numbers finite. It does not make
    training steady: for order 1 that took a divisor that hardly depends on the sums, "clamp" with an eps near the
    number of keys or above (docs/experiments/higher_order.md).

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(4).reshape(1, 1, 4, 4)
    >>> out, saved = ra.higher_order.forward(q, k, v, causal=True)
    >>> out[0, 0, :2].round(3)
    array([[1.   , 0.   , 0.   , 0.   ],
           [0.298, 0.702, 0.   , 0.   ]])
    """
    options = Options(order, alpha, choose("normaliser", normaliser, NORMALISERS), layer_norm, norm_eps)
    return attend(
        q,
        k,
        v,
        options=options,
        mask=mask,
        key_mask=key_mask,
        causal=causal,
        state=state,
        implementation=implementation,
    )


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    options: Options,
    mask: Array | None = None,
    key_mask: Array | None,
    causal: Causal,
    state: State | None = None,
    implementation: str = "auto",
) -> tuple[Array, Saved]:
    """Return (out, saved) of `forward` for options that were checked before."""
    call = enter(q, k, v, mask=mask, causal=causal)
    check_sign(options, causal)
    options = options.like(call.q)
    keys, values = call.k, call.v
    implementation_of(implementation, IMPLEMENTATIONS, usual="dense")  # which checks it
    if key_mask is not None:
        xp = check_arrays(q=q, key_mask=key_mask)
        _check_key_mask(key_mask, (k.shape[0], k.shape[2]))
        rows = key_mask[:, None, :, None]
        keys, values = xp.where(rows, keys, 0.0), xp.where(rows, values, 0.0)
    more: dict[str, Any] = {} if call.mask is None else {"mask": call.mask}
    if state is not None:
        if more:
            raise Unsupported("mask was given with a state, whose keys every query attends, needs the one or the other")
        _check_state(state, options, call)
        more = {"state": state}
    chosen = _chosen(implementation, options, call, state)
    out, normaliser, inner = equations.active(IMPLEMENTATIONS[chosen]).forward(
        call.q, keys, values, key_mask=key_mask, offset=call.offset, options=options, **more
    )
    last = None if state is None else inner.state
    return call.back(out), Saved(chosen, normaliser, last, tuple(out.shape), q, key_mask, options.learned, inner)


@backward_of_definition
@naming("saved")
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
        "q", "k" and "v", each of the shape of its argument, "alpha" and "delta" where these are arrays, and "state", a
        `State`, where one came in. Of a sequence in parts the gradients of alpha and delta add up.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device.

    Notes
    -----
    The equations stand in `refattn.mechanisms.higher_order.dense`. Called twice it gives the same bits.
    """
    check_saved(saved, Saved)
    (d_out,) = upstream(saved.like, d_out=(d_out, saved.shape))
    more = {}
    if d_state is not None:
        if saved.state is None:
            raise ValueError("d_state was given, but forward was given no state, and returned none")
        check("d_state", d_state, State)
        for name in ("products", "values"):
            needed = getattr(saved.state, name)
            check_gradient(f"d_state.{name}", getattr(d_state, name), needed.shape, needed)
        more = {"d_state": d_state}
    gradients = equations.active(IMPLEMENTATIONS[saved.implementation]).backward(saved.inner, d_out, **more)
    if saved.key_mask is not None:
        xp, rows = namespace(saved.like), saved.key_mask[:, None, :, None]
        gradients |= {name: xp.where(rows, gradients[name], 0.0) for name in ("k", "v")}
    found: dict[str, Any] = returned(gradients, ("q", "k", "v", *saved.learned), saved.like)
    if "state" in gradients:
        # The settings are no numbers to be learned.
        d_start: State = gradients["state"]
        found["state"] = replace(d_start, settings=namespace(saved.like).zeros_like(d_start.settings))
    return found


def empty_state(
    k: Array,
    v: Array,
    *,
    order: int = Options.order,
    alpha: float | Array = Options.alpha,
    normaliser: Normaliser | str = Options.normaliser,
    layer_norm: bool = Options.layer_norm,
    norm_eps: float = Options.norm_eps,
) -> State:
    """Return the state before any key, for keys like k (b, g, j, d) and values like v (b, g, j, e) of any lengths.

    The options are those of `forward`; a call refuses a state of others. Of the normaliser only its delta counts.
    """
    check_arrays(k=k, v=v)
    check_qkv(k, k, v, first="k")
    options = Options(order, alpha, choose("normaliser", normaliser, NORMALISERS), layer_norm, norm_eps).like(raised(k))
    return empty(Kernel(options, k.shape[3]), (*k.shape[:2], v.shape[3]), raised(k))


FOR = {
    "with a mask": ("dense", "tiled"),
    "with a state": ("chunked", "recurrent"),
    "with a causal mask": ("dense", "chunked", "recurrent", "tiled"),
    "without a causal mask": ("dense", "linear", "tiled"),
}
"""The implementations of each kind of call: queries that share sums know no pair of a query and a key."""


def _chosen(implementation: str, options: Options, call: Call, state: State | None) -> str:
    """Return the implementation that runs; raise where it is not for such a call."""
    if call.mask is not None or state is not None:
        kind = "with a state" if state is not None else "with a mask"
        usual = "chunked" if state is not None else _of_pairs(call)
    else:
        kind = "without a causal mask" if call.offset is None else "with a causal mask"
        usual = _quickest(options, call) if implementation == "auto" else "dense"
    if implementation not in ("auto", *FOR[kind]):
        with_pairs = ("dense", "tiled")
        needs = " or ".join(f'"{name}"' for name in sorted(FOR[kind], key=lambda name: name in with_pairs))
        raise Unsupported(f'implementation: got "{implementation}" {kind}, needs {needs}')
    return implementation_of(implementation, FOR[kind], usual=usual, plane=call.plane)


def _of_pairs(call: Call) -> str:
    return "dense" if call.plane[2] * call.plane[3] <= DENSE_UP_TO else "tiled"


def _quickest(options: Options, call: Call) -> str:
    """Return the implementation that takes the least time, as measured on one core of a CPU for widths of 16 to 64.

    A pair of a query and a key costs about as much as a feature of a token.
    """
    (queries, d), (keys, e), causal = call.q.shape[2:], call.v.shape[2:], call.offset is not None
    if _of_pairs(call) == "dense":
        return "dense"
    features = Kernel(options, d).features
    pairs = queries * keys - (min(queries, keys) ** 2 // 2 if causal else 0)
    per_token = 1.2 * features if causal else 1.1 * features + 150
    if not e or pairs * (d + e) / (2.0 * e) < per_token * (queries + keys) / 2.0:
        return "tiled"
    return "chunked" if causal else "linear"


def _check_state(state: State, options: Options, call: Call) -> None:
    check("state", state, State)
    if call.offset is None:
        raise ValueError("state was given with causal=False, needs causal: a state holds the keys before all others")
    if 0 in call.plane:
        shapes = f"q {tuple(call.q.shape)} and k {tuple(call.k.shape)}"
        raise ValueError(f"state was given with {shapes}, needs no size of 0")
    check_arrays(q=call.q, **{f"state.{name}": getattr(state, name) for name in ("products", "values", "settings")})
    b, g, _, e = call.v.shape
    check_state(state, Kernel(options, call.q.shape[3]), (b, g, e), call.q)


def _check_key_mask(key_mask: Array, shape: tuple[int, int]) -> None:
    if not is_bool(key_mask):
        raise TypeError(f"key_mask: got dtype {dtype_name(key_mask)}, needs bool (True = a token)")
    if tuple(key_mask.shape) != shape:
        raise ValueError(f"key_mask: got shape {tuple(key_mask.shape)}, needs (batch, keys) = {shape}")
