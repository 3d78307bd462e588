"""Who attends whom, and what takes part beside the scores: options of the core, checked, and as its implementations
take them.

Everything that is integer or boolean (a mask, lengths, an offset) has no gradient; everything that is floating has one.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refattn.args import check_arrays, check_floating, fits, refused
from refattn.mechanisms.core_arguments import Call
from refattn.ops.masks import existing
from refattn.xp import Array, any_outside, arange, dtype_name, is_array, is_bool, is_floating, namespace, raised

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Options:
    """The options of one call.

    Attributes
    ----------
    implementations
        What an implementation is given beside q, k, v, scale and softcap.
    rows, columns
        Which queries and which keys exist, (b, 1, i, 1) and (b, 1, j, 1); None where all do.
    shapes
        Of the floating arrays that were given, by name: those of their gradients.
    """

    implementations: Mapping[str, Any]
    rows: Array | None
    columns: Array | None
    shapes: Mapping[str, tuple[int, ...]]


def check_options(
    call: Call,
    causal: Any,
    *,
    window: Any,
    offset: Any,
    bias: Array | None,
    sink: Array | None,
    q_lengths: Array | None,
    k_lengths: Array | None,
    keep: Array | None,
) -> Options:
    """Return the options of `forward`, which says what each of them means.

    Raises
    ------
    TypeError, ValueError
        Where one is of a wrong type, dtype, shape, library or device, or has a value that means nothing.
    """
    q, (_, heads, queries, keys) = call.like, call.plane
    rows = columns = first = last = None
    if q_lengths is not None:
        q_lengths = check_lengths("q_lengths", q_lengths, q, queries)
        rows = existing(q_lengths, queries, q)
    if k_lengths is not None:
        k_lengths = check_lengths("k_lengths", k_lengths, q, keys)
        columns = existing(k_lengths, keys, q)
    if causal is not False or window is not None or offset is not None:
        first, last = _band(causal, window, offset, q, queries, keys, q_lengths, k_lengths)
    given = {"bias": bias, "sink": sink, "keep": keep}
    shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None and is_array(x) and is_floating(x)}
    implementations = {
        "mask": call.mask,
        "first": first,
        "last": last,
        "q_lengths": q_lengths,
        "k_lengths": k_lengths,
        "bias": None if bias is None else _check_bias(bias, q, call.plane),
        "sink": None if sink is None else _check_sink(sink, q, heads),
        "keep": None if keep is None else _check_keep(keep, q, call.plane),
    }
    return Options(implementations, rows, columns, shapes)


def check_no_bias(mask: Array | None) -> Array | None:
    """Return the mask; TypeError where it is of numbers, which are a bias."""
    if mask is not None and is_array(mask) and is_floating(mask):
        raise TypeError(f"mask: got dtype {dtype_name(mask)}, needs bool (True = may attend); what is added is a bias")
    return mask


FAR = 2**28
"""How far offsets that differ from one batch element to the next may move queries."""


def check_window(window: Any) -> Window:
    """Return a window (left, right); raise where it is none."""
    needs = "a tuple (left, right) of whole numbers of at least 0 or None, which means no bound"
    if not isinstance(window, tuple):
        raise refused("window", window, needs)
    if len(window) != 2:
        raise ValueError(f"window: got {len(window)} numbers, needs {needs}")
    for side in window:
        if side is not None and (type(side) is bool or not isinstance(side, numbers.Integral)):
            raise TypeError(f"window: got {type(side).__name__} in {window}, needs {needs}")
        if side is not None and side < 0:
            raise ValueError(f"window: got {window}, needs {needs}: None is what others write as -1")
    left, right = (None if side is None else int(side) for side in window)
    return left, right


def check_lengths(name: str, lengths: Any, q: Array, size: int) -> Array:
    """Return lengths (b,) in the library's own integers; raise where they are none, or not between 0 and `size`."""
    found = _whole(name, lengths, q)
    if any_outside(found, size + 1):
        raise ValueError(f"{name}: got lengths outside of 0 to {size}, needs at most the {size} that there are")
    return found


def _whole(name: str, value: Any, q: Array) -> Array:
    """Return whole numbers (b,) in the library's own integers."""
    check_arrays(q=q, **{name: value})
    if is_bool(value) or not dtype_name(value).startswith(("int", "uint")):
        raise TypeError(f"{name}: got dtype {dtype_name(value)}, needs integers")
    if tuple(value.shape) != (q.shape[0],):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, needs ({q.shape[0]},), one for each batch element")
    return namespace(value).astype(value, arange(0, 1, q).dtype)


def _band(
    causal: Any,
    window: Any,
    offset: Any,
    q: Array,
    queries: int,
    keys: int,
    q_lengths: Array | None,
    k_lengths: Array | None,
) -> tuple[Any, Any]:
    """Return the first and the last key that query 0 may attend, as `refattn.ops.masks.band_pairs` takes them."""
    left, right = (None, None) if window is None else check_window(window)
    at: Any
    if offset is None:
        if causal == "top_left":
            at = 0
        elif q_lengths is None and k_lengths is None:
            at = keys - queries
        else:
            at = (keys if k_lengths is None else k_lengths) - (queries if q_lengths is None else q_lengths)
    else:
        if isinstance(causal, str):
            raise ValueError(f'offset: got one beside causal="{causal}", which aligns the queries; needs causal=True')
        if type(offset) is int or (isinstance(offset, numbers.Integral) and is_array(offset)):
            at = int(offset)
        elif is_array(offset):
            at = _whole("offset", offset, q)
            least = 0 if dtype_name(offset).startswith("u") else FAR
            if any_outside(at + least, FAR + least + 1):
                raise ValueError(f"offset: got one outside of {-least} to {FAR}, needs whole numbers within")
        else:
            needs = f"a whole number, or an integer array ({q.shape[0]},)"
            raise TypeError(f"offset: got {type(offset).__name__}, needs {needs}")
    if causal is not False:
        right = 0  # a bound to the right of the query would let it see its future
    if isinstance(at, int):  # a bound that is further than all tokens is as good as any
        first, last = (None if left is None else at - left), (None if right is None else at + right)
        first, last = (None if bound is None else min(max(bound, -queries), keys) for bound in (first, last))
        return first, last
    at = at[:, None, None, None]
    far = 2 * FAR  # and sums of these stay in 32 bits
    return None if left is None else at - min(left, far), None if right is None else at + min(right, far)


def _check_plane(name: str, x: Array, plane: tuple[int, ...]) -> Array:
    """Return an array with four axes; raise where it does not broadcast to the plane of the scores."""
    got = tuple(x.shape)
    if not fits(got, plane):
        raise ValueError(
            f"{name}: got shape {got}, needs one that broadcasts to (batch, heads, queries, keys) = {plane}"
        )
    return namespace(x).reshape(x, (1,) * (4 - len(got)) + got)


def _check_bias(bias: Array, q: Array, plane: tuple[int, ...]) -> Array:
    check_arrays(q=q, bias=bias)
    if is_bool(bias):
        raise TypeError("bias: got dtype bool, needs numbers that are added to the scores; True = may attend is a mask")
    check_floating(q=q, bias=bias)
    return raised(_check_plane("bias", bias, plane))


def _check_sink(sink: Array, q: Array, heads: int) -> Array:
    check_arrays(q=q, sink=sink)
    check_floating(q=q, sink=sink)
    got = tuple(sink.shape)
    if len(got) not in (1, 2) or got[0] != heads or (len(got) == 2 and not got[1]):
        raise ValueError(f"sink: got shape {got}, needs ({heads},) or ({heads}, sinks) with one sink at least")
    return raised(namespace(sink).reshape(sink, (heads, -1)) if len(got) == 2 else sink[:, None])


def _check_keep(keep: Array, q: Array, plane: tuple[int, ...]) -> Array:
    xp = check_arrays(q=q, keep=keep)
    if not is_bool(keep):
        if not is_floating(keep):
            raise TypeError(f"keep: got dtype {dtype_name(keep)}, needs bool, or the floating dtype of q")
        check_floating(q=q, keep=keep)
    return xp.astype(_check_plane("keep", keep, plane), raised(q).dtype)
