"""Checks of arguments that the cores share. Every message names the argument, what it got and what it needs."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from refattn import backends
from refattn.ops.masks import Causal
from refattn.tree import check_fields
from refattn.xp import (
    FLOATING,
    Array,
    ByClass,
    Namespace,
    concrete,
    device,
    dtype_name,
    has_one_device,
    is_array,
    is_bool,
    is_floating,
    namespace,
    raised,
)

ROUNDS = 1_000_000
"""How often an option may ask for a loop to run, so that a slip is an error and not days of work."""


_ALIKE = ByClass()
"""Namespaces of classes whose arrays differ in nothing that `check_arrays` looks at."""


def check_arrays(**arrays: Array) -> Namespace:
    """Return the namespace of the arrays; raise where they are no arrays, or of several libraries or devices.

    RuntimeError where the library is set to compute with fewer digits than they have.
    """
    first = next(iter(arrays.values()))
    kind = type(first)
    if (known := _ALIKE.lasting.get(kind)) is not None and all(type(x) is kind for x in arrays.values()):
        return known
    for name, x in arrays.items():
        if not is_array(x):
            raise TypeError(f"{name}: got {type(x).__name__}, needs an array of NumPy, CuPy, PyTorch, JAX, ...")
        if any(getattr(x, kind, False) for kind in ("is_sparse", "is_sparse_csr", "is_nested")):
            raise TypeError(f"{name}: got a sparse or nested tensor, needs a dense one")
    try:
        xp = namespace(*arrays.values())
    except TypeError:
        libraries = {name: type(x).__module__.partition(".")[0] for name, x in arrays.items()}
        raise TypeError(f"got arrays of several libraries ({_listed(libraries)}), needs one library") from None
    backends.check_precision(first)
    if has_one_device(xp):
        _ALIKE.set(kind, xp)
        return xp
    # What JAX traces has no device yet.
    devices = {name: str(place) for name, x in arrays.items() if (place := device(x)) is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"got arrays on several devices ({_listed(devices)}), needs one device")
    return xp


_FIT: set[Any] = set()
"""Classes, shapes and dtypes of queries, keys and values that did fit."""

_MOST = 256
"""How many of them are remembered."""


def check_inputs(q: Array, k: Array, v: Array) -> None:
    """Raise where q, k, v are no arrays that fit together, as `check_arrays` and `check_qkv` say.

    Arrays of NumPy like some that did fit are not looked at again: it would take as long as four small products.
    """
    kind, like = type(q), None
    if kind in _ALIKE.lasting and type(k) is kind and type(v) is kind:
        like = kind, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype
        if like in _FIT:
            return
    check_arrays(q=q, k=k, v=v)
    check_qkv(q, k, v)
    if like is not None:
        if len(_FIT) >= _MOST:
            _FIT.clear()
        _FIT.add(like)


def _listed(kinds: Mapping[str, str]) -> str:
    """Return "q: torch; k, v: numpy" for the library, device or dtype of each array."""
    names = {kind: ", ".join(name for name in kinds if kinds[name] == kind) for kind in kinds.values()}
    return "; ".join(f"{listed}: {kind}" for kind, listed in names.items())


def check_floating(**arrays: Array) -> None:
    """Raise where the arrays are not floating, or of several dtypes."""
    found = {dtype_name(x) for x in arrays.values()}
    if len(found) == 1 and found <= FLOATING:
        return
    dtypes = {name: dtype_name(x) for name, x in arrays.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOATING:
            raise TypeError(f"{name}: got dtype {dtype}, needs float64, float32, float16 or bfloat16")
    if dtypes:
        raise TypeError(f"got arrays of several dtypes ({_listed(dtypes)}), needs one dtype")


def check_is(name: str, value: Any, kind: type) -> None:
    """Raise where `value` is no instance of `kind`, or is one that holds something else where it is to hold arrays."""
    if not isinstance(value, kind):
        home = "" if kind.__module__ == "builtins" else f" of {kind.__module__}"
        raise TypeError(f"{name}: got {type(value).__name__}, needs a {kind.__qualname__}{home}")
    check_fields(name, value)


def check_qkv(q: Array, k: Array, v: Array, first: str = "q") -> None:
    """Raise where q (b, h, i, d), called `first`, k (b, g, j, d) and v (b, g, j, e) do not fit together."""
    check_floating(**{first: q, "k": k, "v": v})
    for name, x in ((first, q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs 4 axes (batch, heads, tokens, width)")
    b, h, _, d = q.shape
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(f"k: got shape {tuple(k.shape)}, needs ({b}, heads, keys, {d}) to fit q {tuple(q.shape)}")
    if tuple(v.shape[:3]) != tuple(k.shape[:3]):
        raise ValueError(f"v: got shape {tuple(v.shape)}, needs {tuple(k.shape[:3])} + (width,) to fit k")
    if d == 0:
        raise ValueError(f"{first}: got width 0 in shape {tuple(q.shape)}, needs a width of at least 1")
    g = k.shape[1]
    if (h and not g) or (g and h % g):
        raise ValueError(f"k: got {g} heads, needs a number that divides the {h} heads of q")


def check_mask(mask: Array | None, shape: tuple[int, int, int, int], name: str = "mask") -> Array | None:
    """Return the mask with four axes; raise where it is not boolean or not broadcastable to `shape`."""
    if mask is None:
        return None
    if not is_bool(mask):
        raise TypeError(f"{name}: got dtype {dtype_name(mask)}, needs bool (True = may attend)")
    got = tuple(mask.shape)
    full = (1,) * (4 - len(got)) + got
    if len(got) > 4 or any(size not in (1, needed) for size, needed in zip(full, shape, strict=True)):
        needs = f"one that broadcasts to (batch, heads, queries, keys) = {shape}"
        raise ValueError(f"{name}: got shape {got}, needs {needs}")
    return namespace(mask).reshape(mask, full)


def check_causal(causal: Any) -> Causal:
    """Return `causal`; raise where it is none of its four values."""
    if type(causal) in (bool, str) and causal in (True, False, "top_left", "bottom_right"):
        value: Causal = causal
        return value
    raise ValueError(f'causal: got {causal!r}, needs True, False, "top_left" or "bottom_right"')


def check_number(name: str, value: Any, *, positive: bool = False) -> float | Array:
    """Return a finite real number as a float, a floating 0-d array of one as it is; raise where it is neither."""
    needs = "a finite number above 0" if positive else "a finite number"
    if isinstance(value, bool):
        raise TypeError(f"{name}: got bool, needs {needs}")
    if isinstance(value, numbers.Real):
        try:
            number: float | Array = float(value)  # NumPy's numbers would widen float32
        except OverflowError:
            number = math.inf
        bad: bool | None = not math.isfinite(number) or (positive and number <= 0.0)
    elif is_array(value):
        if tuple(value.shape) != ():
            raise ValueError(f"{name}: got an array of shape {tuple(value.shape)}, needs {needs} or a 0-d float array")
        if not is_floating(value):
            raise TypeError(f"{name}: got an array of dtype {dtype_name(value)}, needs {needs} or a 0-d float array")
        number, outside = value, ~namespace(value).isfinite(value)
        bad = concrete(outside | (value <= 0.0) if positive else outside)
    else:
        raise TypeError(f"{name}: got {type(value).__name__}, needs {needs}")
    if bad:
        raise ValueError(f"{name}: got {value}, needs {needs}")
    return number


def check_plain(config: Any) -> None:
    """Make NumPy's numbers in a frozen configuration Python's, which no walk over its parameters takes for arrays."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_array(value) and tuple(value.shape) == () and isinstance(value, numbers.Number):
            object.__setattr__(config, field.name, value.item())  # type: ignore[attr-defined]


def check_whole(name: str, value: Any, least: int = 0, *, rounds: bool = False) -> int:
    """Return a whole number of at least `least`, Python's or NumPy's, as an int; raise where it is none.

    With `rounds`, for how often a loop runs, it is at most `ROUNDS`; any other is below 2^63.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name}: got {value!r}, needs a whole number of at least {least}")
    if int(value) >= 2**63:
        raise ValueError(f"{name}: got a whole number of {int(value).bit_length()} bits, needs one below 2^63")
    if rounds and int(value) > ROUNDS:
        raise ValueError(f"{name}: got {value}, needs at most {ROUNDS}")
    return int(value)


def check_gradient(name: str, gradient: Array, shape: tuple[int, ...], like: Array) -> None:
    """Raise where an upstream gradient is not a floating array of the shape of what it is the gradient of."""
    check_arrays(**{name: gradient, "the output": like})
    check_floating(**{name: gradient})
    if tuple(gradient.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(gradient.shape)}, needs {tuple(shape)}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError where a word is none of the choices."""
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(known)}")


def check_per_head(name: str, value: Any, q: Array, nodes: int | None = None) -> Any:
    """Return a number for all heads, or one for each as (h, 1, 1), in the dtype that is computed in.

    With `nodes` there may be one for each node, too: (h, j, 1).
    """
    if value is None:
        return None
    if not is_array(value) or tuple(value.shape) == ():
        number = check_number(name, value)
        if not is_array(number):
            return number
        value = number
    elif tuple(value.shape) not in ((q.shape[1],), (q.shape[1], nodes)):
        needs = f"a number or an array ({q.shape[1]},)" + (f" or ({q.shape[1]}, {nodes})" if nodes is not None else "")
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, needs {needs}")
    if not is_floating(value):
        raise TypeError(f"{name}: got dtype {dtype_name(value)}, needs a floating one")
    xp = check_arrays(q=q, **{name: value})
    if concrete(xp.all(xp.isfinite(value))) is False:
        raise ValueError(f"{name}: got a number that is not finite, needs finite numbers")
    value = xp.astype(value, raised(q).dtype)
    return value if tuple(value.shape) == () else xp.reshape(value, (q.shape[1], 1 if len(value.shape) == 1 else -1, 1))


def check_broadcasts(name: str, value: Any, q: Array, full: tuple[int, ...]) -> Any:
    """Return an array in the dtype that is computed in; raise where it does not broadcast to a shape."""
    if value is None:
        return None
    if not is_array(value):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an array")
    xp = check_arrays(q=q, **{name: value})
    check_floating(**{name: value})
    if not fits(tuple(value.shape), full):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, needs one that broadcasts to {full}")
    return xp.astype(value, raised(q).dtype)


def fits(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Tell whether a shape broadcasts to a full one."""
    ends = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(n in (1, m) for n, m in ends)
