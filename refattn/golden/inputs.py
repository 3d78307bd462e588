"""Designed inputs: arrays that any language reproduces bit for bit from a case's numbers and `refattn.philox`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import philox
from refattn.golden.storage_types import has_gradient, largest, stored
from refattn.mechanisms.record import Case, Input


def _normal(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """`scale` (1 if absent) times a number of unit variance between -3 and 3."""
    return philox.normal(shape, seed=seed, purpose=purpose) * numbers.get("scale", 1.0)


def _shifted(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """The same, with `shift` added to row `first` (0 if absent) and every `every`-th after (1); rows are last axes."""
    x = _normal(shape, numbers, seed, purpose)
    x[..., int(numbers.get("first", 0)) :: int(numbers.get("every", 1)), :] += numbers["shift"]
    return x


def _repeated(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """The same, and row j is row j mod `period`."""
    x = _normal(shape, numbers, seed, purpose)
    return x[..., np.arange(shape[-2]) % int(numbers["period"]), :]


def _integers(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """Whole numbers from `low` to `high`."""
    low, high = int(numbers["low"]), int(numbers["high"])
    return philox.integers(shape, low, high + 1, seed=seed, purpose=purpose).astype(np.float64)


def _powers(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """2^n or -2^n, n from `low` to `high`: (-1)^m 2^(m // 2) for whole numbers m from 2 `low` to 2 `high` + 1."""
    m = philox.integers(shape, 2 * int(numbers["low"]), 2 * int(numbers["high"]) + 2, seed=seed, purpose=purpose)
    return np.ldexp(1.0 - 2.0 * (m % 2), m // 2)


def _ranks(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """`step` times 1 + j // `ties` in the first column of row j, and 0 in the others."""
    x = np.zeros(shape)
    x[..., 0] = numbers["step"] * (1 + np.arange(shape[-2]) // int(numbers["ties"]))
    return x


def _counts(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """The whole numbers that are given under "0", "1", ..., one for each batch element."""
    return np.asarray([int(numbers[str(n)]) for n in range(shape[0])], dtype=np.int64)


def _dropout(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """0 with probability `p`, otherwise 1/(1 - p)."""
    p = numbers["p"]
    return np.where(philox.uniform(shape, seed=seed, purpose=purpose) < p, 0.0, 1.0 / (1.0 - p))


def _biased(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """`normal`, and -inf with probability `hidden` (0 if absent)."""
    hidden = philox.uniform(shape, seed=seed, purpose=f"{purpose}.hidden") < numbers.get("hidden", 0.0)
    return np.where(hidden, -np.inf, _normal(shape, numbers, seed, purpose))


def _alibi(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """-slope |i + `offset` - j| (b, h, i, j), with the slopes 2^(-8 n / h) of heads n = 1, 2, ..., h; h a power of two.

    With a `step` (0 if absent) other than 0 all slopes are that number.
    """
    heads, queries, keys = shape[-3:]
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    slopes = np.full(heads, numbers["step"]) if numbers.get("step", 0.0) else slopes
    distance = np.abs(np.arange(queries)[:, None] + int(numbers["offset"]) - np.arange(keys))
    return np.broadcast_to(-slopes[:, None, None] * distance, shape).copy()


def _list(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """The numbers that are given under "0", "1", ..., in order and over again."""
    given = [numbers[str(n)] for n in range(len(numbers))]
    return np.resize(np.asarray(given, np.float64), shape)


def _mask(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """True with probability `keep`."""
    return np.asarray(philox.uniform(shape, seed=seed, purpose=purpose) < numbers["keep"])


def _band(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """True in row i, column j where i - `before` <= j <= i + `after`; rows and columns are the last two axes."""
    ahead = np.arange(shape[-1]) - np.arange(shape[-2])[:, None]
    return np.broadcast_to((-ahead <= numbers["before"]) & (ahead <= numbers["after"]), shape).copy()


def _uniform(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """Numbers from `low` to `high`, each rounded to float32."""
    low, high = numbers["low"], numbers["high"]
    return (low + (high - low) * philox.uniform(shape, seed=seed, purpose=purpose)).astype("f4").astype("f8")


def _burst(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """Numbers from `low` to 0, each rounded to float32, and `value` in row `at`; rows are last axes."""
    x = _uniform(shape, {"low": numbers["low"], "high": 0.0}, seed, purpose)
    x[..., int(numbers["at"]) : int(numbers["at"]) + 1, :] = numbers["value"]
    return x


def _resets(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """Numbers from `low` to 0, each rounded to float32, and -inf in the last of every `every` rows."""
    x, every = _uniform(shape, {"low": numbers["low"], "high": 0.0}, seed, purpose), int(numbers["every"])
    x[..., every - 1 :: every, :] = -np.inf
    return x


def _units(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """Row j is 1 in column (j `step`) mod `period`, and 0 in all others; a column that is not there is left out."""
    column = np.arange(shape[-2]) * int(numbers["step"]) % int(numbers["period"])
    return np.broadcast_to(column[:, None] == np.arange(shape[-1]), shape).astype(np.float64)


DESIGNS: dict[str, Callable[[tuple[int, ...], Mapping[str, float], int, str], NDArray[Any]]] = {
    "normal": _normal,
    "shifted": _shifted,
    "repeated": _repeated,
    "integers": _integers,
    "powers": _powers,
    "ranks": _ranks,
    "uniform": _uniform,
    "burst": _burst,
    "resets": _resets,
    "units": _units,
    "mask": _mask,
    "band": _band,
    "counts": _counts,
    "dropout": _dropout,
    "biased": _biased,
    "alibi": _alibi,
    "list": _list,
}
"""Design of an `Input` -> array in float64, int64 or bool, from its shape, its numbers, a seed and a purpose."""


def make(mechanism: str, case: Case, dtype: str, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return the arrays of a case by argument name, rounded to `dtype` (bfloat16 held in float32).

    Where the case says so, what its lengths leave out of q, k and v holds NaN, or the largest number of the type.
    """
    arrays = {
        name: _captured(case.given[name], dtype)
        if name in case.given
        else _make_one(f"{mechanism}.{case.name}.{name}", given, dtype, seed)
        for name, given in case.inputs.items()
    }
    lengths = {"q": "q_lengths", "k": "k_lengths", "v": "k_lengths"}
    return {name: _with_slack(x, case, arrays.get(lengths.get(name, "")), dtype) for name, x in arrays.items()}


def _captured(given: Any, dtype: str) -> NDArray[Any]:
    """Return a captured array, or nested lists of numbers, as a kernel is given them."""
    x = np.asarray(given)
    return stored(x.astype(np.float64), dtype) if has_gradient(x) else x


def upstream_input(case: Case, shape: tuple[int, ...]) -> Input:
    """Return the design of an upstream gradient: of unit variance, or small whole numbers where results are exact."""
    return Input(shape, "integers", {"low": 1, "high": 4}) if case.exact else Input(shape)


def make_upstream(mechanism: str, case: Case, name: str, shape: tuple[int, ...], dtype: str, *, seed: int = 0) -> Any:
    """Return an upstream gradient for the output `name` of a case."""
    if f"d_{name}" in case.given:
        return _captured(case.given[f"d_{name}"], dtype)
    made = _make_one(f"{mechanism}.{case.name}.d_{name}", upstream_input(case, shape), dtype, seed)
    given = case.inputs.get("q_lengths")
    lengths = None if given is None else _make_one(f"{mechanism}.{case.name}.q_lengths", given, dtype, seed)
    return _with_slack(made, case, lengths, dtype)


def _with_slack(x: NDArray[Any], case: Case, lengths: NDArray[Any] | None, dtype: str) -> NDArray[Any]:
    """Return x (b, h, n, ...) with what the case says in the rows from its lengths (b,) on."""
    if not case.slack or lengths is None:
        return x
    left_out = np.arange(x.shape[2]) >= lengths[:, None]
    poison = np.nan if case.slack == "nan" else largest(dtype)
    return np.where(left_out.reshape(left_out.shape[0], 1, -1, *(1,) * (x.ndim - 3)), x.dtype.type(poison), x)


def _make_one(purpose: str, given: Input, dtype: str, seed: int) -> NDArray[Any]:
    values = DESIGNS[given.design](given.shape, given.numbers, seed, purpose)
    return stored(values, dtype) if has_gradient(values) else values
