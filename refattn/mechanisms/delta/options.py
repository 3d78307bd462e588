"""What may be given to the core, checked: arrays of gates and states, sequences, and numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.args import Real, check, check_arrays, check_floating, check_number, check_whole
from refattn.xp import Array, dtype_name, is_bool, namespace, raised

GATES = ("beta", "log_decay", "log_momentum", "step")


@dataclass(frozen=True)
class Given:
    """The arguments of a call, in the dtype that is computed in, with padding that changes nothing.

    Attributes
    ----------
    q, k, v
        (b, h, n, d), (b, f, n, d), (b, g, n, e).
    gates
        beta, log_decay, log_momentum and step by name, (b, g, n) or, of log_decay, (b, g, n, d); None where absent.
    state
        Before the first token, None for 0; its shape is `state_shape`.
    lengths
        Of the sequences that are packed, or None.
    """

    q: Array
    k: Array
    v: Array
    gates: dict[str, Array | None]
    state: Array | None
    state_shape: tuple[int, ...]
    lengths: tuple[int, ...] | None


def check_given(
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array | None],
    state: Array | None,
    key_mask: Array | None,
    lengths: Any,
) -> Given:
    """Return what was given, checked.

    Raises
    ------
    TypeError
        Where an array is of a wrong class, library or dtype, or lengths are no tuple of whole numbers.
    ValueError
        Where a shape or a device does not fit, heads do not divide, or arrays exclude each other.
    """
    present = {name: x for name, x in gates.items() if x is not None}
    xp = check_arrays(q=q, k=k, v=v, **present)
    check_floating(q=q, k=k, v=v, **present)
    groups, d = _check_shapes(q, k, v)
    b, _, n, e = v.shape
    _check_rules(present)
    for name, x in present.items():
        needs = [(b, groups, n)] + ([(b, groups, n, d)] if name == "log_decay" else [])
        if tuple(x.shape) not in needs:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs {' or '.join(map(str, needs))} to fit v and k")
    if "log_momentum" in present and "log_decay" in present and len(present["log_decay"].shape) == 4:
        raise ValueError("log_momentum: got it with a log_decay of channels, needs a log_decay of heads (b, g, n)")
    spans = _check_lengths(lengths, b, n)
    heads = (b if spans is None else len(spans), groups)
    needed = (*heads, 2, d, e) if "log_momentum" in present else (*heads, d, e)
    if state is not None:
        state = xp.astype(_check_state(state, q, needed), raised(q).dtype, copy=False)
    keys, values = raised(k), raised(v)
    cast: dict[str, Array | None] = {name: None if x is None else raised(x) for name, x in gates.items()}
    if key_mask is not None:
        check_arrays(q=q, key_mask=key_mask)
        if not is_bool(key_mask):
            raise TypeError(f"key_mask: got dtype {dtype_name(key_mask)}, needs bool (True = a token)")
        if tuple(key_mask.shape) != (b, n):
            raise ValueError(f"key_mask: got shape {tuple(key_mask.shape)}, needs (batch, tokens) = {(b, n)}")
        keys, values = hidden(keys, key_mask), hidden(values, key_mask)
        cast = {name: None if x is None else hidden(x, key_mask) for name, x in cast.items()}
    return Given(raised(q), keys, values, cast, state, needed, spans)


def hidden(x: Array, key_mask: Array) -> Array:
    """Return an array (b, g, n, ...), 0 where a token (b, n) is padding; its own adjoint."""
    rows = key_mask[:, None, :] if len(x.shape) == 3 else key_mask[:, None, :, None]
    return namespace(x).where(rows, x, 0.0)


def check_scale(scale: Any, q: Array) -> float | Array:
    """Return the scale of the read in the dtype that is computed in; 1 / sqrt(d) for None."""
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    number = check_number("scale", scale)
    if isinstance(number, float):
        return number
    return check_arrays(q=q, scale=number).astype(number, raised(q).dtype)


def check_eps(norm_eps: Any) -> float:
    """Return a number that is added to squared lengths: finite, and not below 0."""
    check("norm_eps", norm_eps, Real(0.0))
    return float(norm_eps)


def check_chunk(chunk: Any) -> int:
    """Return the number of tokens of a chunk."""
    return check_whole("chunk", chunk, 1)


def _check_shapes(q: Array, k: Array, v: Array) -> tuple[int, int]:
    """Return the number of state heads and the width of keys."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs 4 axes (batch, heads, tokens, width)")
    b, h, n, d = q.shape
    f, g = k.shape[1], v.shape[1]
    if (k.shape[0], *k.shape[2:]) != (b, n, d):
        raise ValueError(f"k: got shape {tuple(k.shape)}, needs ({b}, heads, {n}, {d}) to fit q {tuple(q.shape)}")
    if (v.shape[0], v.shape[2]) != (b, n):
        raise ValueError(f"v: got shape {tuple(v.shape)}, needs ({b}, heads, {n}, width) to fit q {tuple(q.shape)}")
    if 0 in (f, g, h) or g % f:
        raise ValueError(f"k: got {f} heads, needs a number that divides the {g} heads of v")
    if h % g and g % h:
        raise ValueError(f"q: got {h} heads, needs a multiple or a divisor of the {g} heads of v")
    return g, d


def _check_rules(present: dict[str, Array]) -> None:
    if "log_momentum" in present and "beta" not in present:
        raise ValueError("log_momentum: got it without beta, needs beta too")
    if "step" in present and "log_momentum" not in present:
        raise ValueError("step: got it without log_momentum, needs log_momentum too")


def _check_lengths(lengths: Any, batch: int, tokens: int) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    needs = "a tuple of whole numbers, the lengths of sequences that are packed"
    if not isinstance(lengths, tuple | list):
        raise TypeError(f"lengths: got {type(lengths).__name__}, needs {needs}")
    for length in lengths:
        if isinstance(length, bool | type) or not hasattr(length, "__index__"):
            raise TypeError(f"lengths: got {type(length).__name__} in it, needs {needs}")
    found = tuple(int(length) for length in lengths)
    if batch != 1 or any(length < 0 for length in found) or sum(found) != tokens or not found:
        raise ValueError(
            f"lengths: got {found} for a batch of {batch}, needs numbers of at least 0 that sum to the {tokens} tokens "
            "of a batch of 1"
        )
    return found


def _check_state(state: Array, q: Array, needed: tuple[int, ...]) -> Array:
    check_arrays(q=q, state=state)
    allowed = dict.fromkeys((dtype_name(raised(q)), dtype_name(q)))
    if dtype_name(state) not in allowed:
        raise TypeError(f"state: got dtype {dtype_name(state)}, needs {' or '.join(allowed)}")
    if tuple(state.shape) != needed:
        axes = "(sequences or batch, state heads, 2 with momentum, width of keys, width of values)"
        raise ValueError(f"state: got shape {tuple(state.shape)}, needs {axes} = {needed}")
    return state
