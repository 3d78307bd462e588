"""The derivative of each operation of the array API, in the direction of tangents.

A rule is a function (result, given, options, tangents) -> tangent of the result: `given` and `options` are what NumPy's
function was called with, and `tangents` has an array of the same shape for each array in `given`, 0.0 for anything
else, lists where `given` has lists. `RULES` has them by the name of the operation.

At a kink the derivative is that of the branch that was taken: of the first of several equal maxima; of the inside at
the bounds of clip; of the first argument where maximum and minimum have equal ones; 0 of abs at 0 and of every function
that is constant between its jumps (sign, floor, round, ...). A tangent of 0 stays 0 where a derivative is infinite, so
that what a mask has made a constant does not become NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import backends

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any], list[Any]], Any]

RULES: dict[str, Rule] = {}

CONSTANT = frozenset(
    "all any arange argmax argmin argsort ceil count_nonzero empty empty_like eye floor floor_divide floordiv full "
    "isfinite isinf isnan linspace nonzero ones ones_like round searchsorted sign signbit sparse_rows trunc zeros "
    "zeros_like eq ne lt le gt ge and_ or_ xor invert equal not_equal less less_equal greater greater_equal "
    "logical_and logical_or logical_not logical_xor matrix_rank".split()
)
"""Operations whose derivative is 0 wherever there is one."""

_LINEAR = (
    "astype broadcast_to conj cumulative_sum diagonal diff expand_dims flip getitem imag matrix_transpose mean "
    "moveaxis negative neg permute_dims positive real repeat reshape roll squeeze sum tile trace tril triu"
)
_JOINED = "broadcast_arrays concat stack unstack"
_BILINEAR = "cross matmul outer tensordot vecdot"


def times(slope: Any, tangent: Any) -> Any:
    """Return slope x tangent, with 0 where the tangent is 0, whatever the slope."""
    found = slope * tangent
    return found if np.all(np.isfinite(found)) else np.where(tangent == 0.0, 0.0, found)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations."""

    def put(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return put


def _linear(function: Callable[..., Any]) -> Rule:
    return lambda r, given, options, t: function(t[0], *given[1:], **options)


def _joined(function: Callable[..., Any]) -> Rule:
    def found(r: Any, given: Any, options: Any, t: Any) -> Any:
        if isinstance(given[0], tuple | list):
            return function(type(given[0])(t[0]), *given[1:], **options)
        return function(*t, **options)

    return found


def _bilinear(function: Callable[..., Any]) -> Rule:
    def found(r: Any, given: Any, options: Any, t: Any) -> Any:
        a, b, *rest = given
        left = function(t[0], b, *rest, **options) if isinstance(a, np.ndarray) else 0.0
        return left + (function(a, t[1], *rest, **options) if isinstance(b, np.ndarray) else 0.0)

    return found


_ELSEWHERE: dict[str, Callable[..., Any]] = {
    "broadcast_arrays": lambda *arrays: tuple(np.broadcast_arrays(*arrays)),
    "cross": np.linalg.cross,
    "diagonal": np.linalg.diagonal,
    "getitem": operator.getitem,
    "neg": operator.neg,
    "outer": np.linalg.outer,
    "trace": np.linalg.trace,
}
for _names, _make in ((_LINEAR, _linear), (_JOINED, _joined), (_BILINEAR, _bilinear)):
    for _name in _names.split():
        RULES[_name] = _make(_ELSEWHERE.get(_name) or getattr(np, _name))


# --- element-wise: the slope at x, of which r is the function

SLOPES: dict[str, Callable[[Any, Any], Any]] = {
    "acos": lambda x, r: -1.0 / np.sqrt(1.0 - x * x),
    "acosh": lambda x, r: 1.0 / np.sqrt(x * x - 1.0),
    "asin": lambda x, r: 1.0 / np.sqrt(1.0 - x * x),
    "asinh": lambda x, r: 1.0 / np.sqrt(1.0 + x * x),
    "atan": lambda x, r: 1.0 / (1.0 + x * x),
    "atanh": lambda x, r: 1.0 / (1.0 - x * x),
    "cos": lambda x, r: -np.sin(x),
    "cosh": lambda x, r: np.sinh(x),
    "erf": lambda x, r: (2.0 / math.sqrt(math.pi)) * np.exp(-x * x),
    "exp": lambda x, r: r,
    "expm1": lambda x, r: r + 1.0,
    "log": lambda x, r: 1.0 / x,
    "log1p": lambda x, r: 1.0 / (1.0 + x),
    "log2": lambda x, r: 1.0 / (math.log(2.0) * x),
    "log10": lambda x, r: 1.0 / (math.log(10.0) * x),
    "reciprocal": lambda x, r: -r * r,
    "sin": lambda x, r: np.cos(x),
    "sinh": lambda x, r: np.cosh(x),
    "sqrt": lambda x, r: 0.5 / r,
    "square": lambda x, r: 2.0 * x,
    "tan": lambda x, r: 1.0 + r * r,
    "tanh": lambda x, r: 1.0 - r * r,
}


def _elementwise(slope: Callable[[Any, Any], Any]) -> Rule:
    return lambda r, given, options, t: times(slope(given[0], r), t[0])


for _name, _slope in SLOPES.items():
    RULES[_name] = _elementwise(_slope)


@rule("abs")
def _abs(r: Any, given: Any, options: Any, t: Any) -> Any:
    if np.iscomplexobj(given[0]):
        return np.real(np.conj(np.sign(given[0])) * t[0])
    return np.sign(given[0]) * t[0]


@rule("add")
def _add(r: Any, given: Any, options: Any, t: Any) -> Any:
    return t[0] + t[1]


@rule("subtract")
def _subtract(r: Any, given: Any, options: Any, t: Any) -> Any:
    return t[0] - t[1]


@rule("multiply")
def _multiply(r: Any, given: Any, options: Any, t: Any) -> Any:
    return times(given[1], t[0]) + times(given[0], t[1])


@rule("divide")
def _divide(r: Any, given: Any, options: Any, t: Any) -> Any:
    b = np.asarray(given[1])
    return times(1.0 / b, t[0]) - (times(r / b, t[1]) if isinstance(given[1], np.ndarray) else 0.0)


@rule("remainder")
def _remainder(r: Any, given: Any, options: Any, t: Any) -> Any:
    return t[0] - np.floor(given[0] / given[1]) * t[1]


@rule("pow")
def _pow(r: Any, given: Any, options: Any, t: Any) -> Any:
    a, b = given
    base = times(b * np.where(b == 0.0, 1.0, np.asarray(a)) ** (b - 1.0), t[0]) if isinstance(a, np.ndarray) else 0.0
    return base + (times(r * np.log(a), t[1]) if isinstance(b, np.ndarray) else 0.0)


@rule("atan2")
def _atan2(r: Any, given: Any, options: Any, t: Any) -> Any:
    y, x = given
    square = x * x + y * y
    return times(x / square, t[0]) - times(y / square, t[1])


@rule("hypot")
def _hypot(r: Any, given: Any, options: Any, t: Any) -> Any:
    return times(given[0] / r, t[0]) + times(given[1] / r, t[1])


@rule("logaddexp")
def _logaddexp(r: Any, given: Any, options: Any, t: Any) -> Any:
    return times(np.exp(given[0] - r), t[0]) + times(np.exp(given[1] - r), t[1])


@rule("copysign")
def _copysign(r: Any, given: Any, options: Any, t: Any) -> Any:
    return np.where(np.signbit(given[0]) == np.signbit(given[1]), t[0], -t[0])


@rule("maximum")
def _maximum(r: Any, given: Any, options: Any, t: Any) -> Any:
    return np.where(given[0] >= given[1], t[0], t[1])


@rule("minimum")
def _minimum(r: Any, given: Any, options: Any, t: Any) -> Any:
    return np.where(given[0] <= given[1], t[0], t[1])


@rule("clip")
def _clip(r: Any, given: Any, options: Any, t: Any) -> Any:
    names, tangents = ("x", "min", "max"), dict(zip(("x", "min", "max"), t, strict=False))
    bounds = dict(zip(names, given, strict=False)) | {name: options[name] for name in names if name in options}
    found = tangents["x"]
    for name, beyond in (("min", np.less), ("max", np.greater)):
        if bounds.get(name) is not None:
            found = np.where(beyond(given[0], bounds[name]), tangents.get(name, 0.0), found)
    return found


@rule("where")
def _where(r: Any, given: Any, options: Any, t: Any) -> Any:
    return np.where(given[0], t[1], t[2])


@rule("asarray")
def _asarray(r: Any, given: Any, options: Any, t: Any) -> Any:
    # The copy is one where that of the values was.
    return np.asarray(t[0], dtype=r.dtype, copy=not np.shares_memory(r, given[0]))


@rule("full_like")
def _full_like(r: Any, given: Any, options: Any, t: Any) -> Any:
    return np.full_like(given[0], t[1], dtype=r.dtype)


# --- what takes elements


@rule("take")
def _take(r: Any, given: Any, options: Any, t: Any) -> Any:
    return np.take(t[0], *given[1:], **options)


@rule("take_along_axis")
def _take_along_axis(r: Any, given: Any, options: Any, t: Any) -> Any:
    return np.take_along_axis(t[0], *given[1:], **options)


@rule("max", "min")
def _largest(r: Any, given: Any, options: Any, t: Any) -> Any:
    """The tangent of the first element, in the order of the axes, that is the maximum."""
    x, axis = given[0], options.get("axis", given[1] if len(given) > 1 else None)
    axes = tuple(range(x.ndim)) if axis is None else tuple(n % x.ndim for n in np.atleast_1d(axis))
    kept = tuple(n for n in range(x.ndim) if n not in axes)
    shape = (*(x.shape[n] for n in kept), math.prod(x.shape[n] for n in axes))
    rows, moved = (np.reshape(np.transpose(a, (*kept, *axes)), shape) for a in (x, t[0]))
    value = np.reshape(r, rows.shape[:-1])[..., None]
    at = np.argmax((rows == value) | np.isnan(rows), axis=-1)[..., None]
    return np.reshape(np.take_along_axis(moved, at, axis=-1), r.shape)


@rule("sort")
def _sort(r: Any, given: Any, options: Any, t: Any) -> Any:
    down, axis = options.get("descending", False), options.get("axis", -1)
    order = np.argsort(-given[0] if down else given[0], axis=axis, kind="stable")
    return np.take_along_axis(t[0], order, axis=axis)


@rule("sparse_product")
def _sparse_product(r: Any, given: Any, options: Any, t: Any) -> Any:
    (indptr, indices, data, x), product = given, backends.get("numpy").sparse_product
    return product(indptr, indices, t[2], x) + product(indptr, indices, data, t[3])
