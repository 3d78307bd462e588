"""Koopman attention a second time, written from the sources and sharing nothing with the other implementations.

One query after the other, each by `trajectory_loops`. Every adjoint is a derivative by its definition: a value of an
equation gets the increment ih with h = 1e-60, everything after it is computed again in complex numbers, and the
imaginary part of the loss over h is the derivative, without cancellation. All increments of one query run side by side,
as the first axis of the arrays.

Values come back by the ids of the docstring of `dense`. Slow on purpose; for small sizes.

Source: Tie 2024; Khosravi 2023 (arXiv:2208.01681); complex steps: Squire, Trapp 1998 (SIAM Review 40, 110).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.mechanisms.koopman.testing.trajectory_loops import trajectory
from refattn.mechanisms.option_kinds import read

Values = dict[str, np.ndarray]

H = 1e-60
"""Increment of a value."""


def _seen(mask: np.ndarray | None, causal: Any, place: tuple[int, int, int], queries: int, keys: int) -> list[int]:
    """Return the keys that a query (batch, head, query) sees."""
    b, h, i = place
    found = []
    for j in range(keys):
        if causal == "top_left" and j > i:
            continue
        if (causal is True or causal == "bottom_right") and queries - i > keys - j:
            continue
        if mask is not None:
            full = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            at = tuple(0 if size == 1 else n for size, n in zip(full.shape, (b, h, i, j), strict=True))
            if not full[at]:
                continue
        found.append(j)
    return found


def _options(given: dict[str, Any], d: int) -> dict[str, Any]:
    o: dict[str, Any] = {"updates": 2, "kernel": "rbf", "degree": 2, "constant": 1.0, "fit": "stein", "jitter": 1e-8}
    o |= {"space": "keys", "scale": "sum", "tau": 0.0, "perturbation": "identity", "window": None}
    o |= {"similarity": "dot", "mask": None, "causal": False, "norm": None, "rank": None, "nuclear": None}
    for option, value in given.items():
        if option in ("kernel", "fit", "perturbation"):
            o[option], numbers = _read(option, value)
            o |= {name: x for name, x in numbers.items() if x is not None}
        elif value is not None:
            o[option] = value
    o["given"] = {name: o[name] for name in ("ridge", "epsilon") if name in o}
    for name, value in (("bandwidth", math.sqrt(d)), ("weight", 1.0), ("mix", 1.0)):
        o[name] = np.reshape(o.get(name, value), (1, 1, 1)).astype(float)
    for name in ("ridge", "epsilon"):
        if np.ndim(o.get(name, 0.1)) > 2:
            raise NotImplementedError(f"{name}: one for each coordinate")
        o[name] = np.ones((1, max(o["updates"] - 1, 1))) * np.reshape(o.get(name, 0.1), (1, -1))
    return o


def _read(option: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the numbers of a family of options, an object or text such as "rbf(bandwidth=2.0)"."""
    return read(option, value) if isinstance(value, str) else (type(value).__name__.lower(), dict(vars(value)))


NUMBERS: tuple[str, ...] = ("ridge", "epsilon", "bandwidth", "weight", "mix")
ROWS = {"KOOP.2", "KOOP.masked", "KOOP.3", "KOOP.4", "KOOP.14", "KOOP.15", "first"}
"""Equations that have one row for a query."""


def _of_query(id: str, value: np.ndarray) -> np.ndarray:
    """Return a value of one query as the other implementations have it, without its axis of one."""
    return value[0] if id in ROWS else value[:, 0] if id == "KOOP.section" else value


def _name(id: str, number: int) -> str:
    return f"{id}[{number}]" if number else id


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, **given: Any) -> Values:
    """Return the value of every equation of the forward, by id."""
    return _run(q, k, v, None, given)[0]


def backward(q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, **given: Any) -> Values:
    """Return the value of every adjoint, by id."""
    return _run(q, k, v, d_out, given)[1]


def _run(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray | None, given: dict[str, Any]
) -> tuple[Values, Values]:
    batch, heads, queries, d = q.shape
    groups, keys = k.shape[1:3]
    o = _options(given, d)
    value: Values = {}
    grad: Values = {}
    if 0 in (batch, heads, queries, keys):
        return value, grad
    grad = {f"dKOOP.{name}": np.zeros(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    names: tuple[str, ...] = ("bandwidth", "weight") if o["updates"] == 1 else NUMBERS
    names = tuple(name for name in names if name != "mix" or o["perturbation"] == "pencil")
    grad |= {f"dKOOP.{name}": np.zeros(o[name].shape) for name in names}

    def put(into: Values, key: str, at: tuple[int, ...], x: np.ndarray, *, add: bool = False) -> None:
        place = at[:2] if key in ("KOOP.1", "dKOOP.1") else at
        full = into.setdefault(key, np.zeros((batch, heads, queries)[: len(place)] + x.shape))
        full[place] = full[place] + x if add else x

    # Queries that see a key come first: they tell the shapes that the others have.
    places = list(np.ndindex(batch, heads, queries))
    seen_of = {at: _seen(o["mask"], o["causal"], at, queries, keys) for at in places}
    for at in sorted(places, key=lambda at: not seen_of[at]):
        b, h, i = at
        group, seen = h * groups // heads, seen_of[at]
        inputs = {"q": q[b, h, i][None, None], "k": k[b, group][None], "v": v[b, group][None]}
        one, own = _One(inputs, seen, o), {"q": at, "k": (b, group), "v": (b, group)}
        for (id, number), found in one.values.items():
            if number >= 0 and id != "first":
                put(value, _name(id, number), at, _of_query(id, found[0]))
        if not seen:  # the query goes to 0, whatever its numbers are
            if d_out is not None:
                put(grad, "dKOOP.15", at, d_out[at])
                if o["updates"] == 1:
                    put(grad, "dKOOP.4", at, d_out[at])
                    put(grad, "dKOOP.3", at, v[b, group] @ d_out[at])
            continue
        for (id, number), found in {} if d_out is None else one.gradients(d_out[at]).items():
            if id in inputs or id in NUMBERS:
                if f"dKOOP.{id}" in grad:
                    target = grad[f"dKOOP.{id}"][own.get(id, ...)]
                    target += found.reshape(target.shape)
            else:
                passes = 1 if id in ("KOOP.1", "KOOP.visible") else one.passes(id)
                turned = o["updates"] - 1 if id == "first" else passes - 1 - number
                key = _name("dKOOP.15" if id == "first" else f"d{id}", turned)
                put(grad, key, at, _of_query(id, found), add=id == "KOOP.1")
    for name in names:
        x = grad[f"dKOOP.{name}"]
        grad[f"dKOOP.{name}"] = x[0] if name in ("ridge", "epsilon") else np.sum(x)
    return value, grad


class _One:
    """One trajectory: its values, and its derivatives by complex steps."""

    def __init__(self, inputs: Values, seen: list[int], o: dict[str, Any]) -> None:
        self.inputs, self.seen, self.o = inputs | {name: o[name] for name in NUMBERS}, seen, o
        self.values: dict[tuple[str, int], np.ndarray] = {}
        self._go(lambda key, x: self.values.setdefault(key, x))

    def passes(self, id: str) -> int:
        return sum(name == id for name, _ in self.values)

    def _go(self, visit: Callable[[tuple[str, int], np.ndarray], np.ndarray]) -> np.ndarray:
        counts: dict[str, int] = {}

        def see(id: str, x: np.ndarray) -> np.ndarray:
            number = counts.get(id, 0)
            counts[id] = number + 1
            return visit((id, number), x)

        given = {name: visit((name, -1), x) for name, x in self.inputs.items()}
        return trajectory(given["q"], given["k"], given["v"], self.seen, self.o | given, see)

    def gradients(self, d_out: np.ndarray) -> dict[tuple[str, int], np.ndarray]:
        """Return the derivative of the inner product of the last query with d_out with respect to every value."""
        first: dict[tuple[str, int], int] = {}
        total = 0
        shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        for key, x in self.values.items():
            if key[0] == "KOOP.masked":  # which has no adjoint of its own
                continue
            first[key], shapes[key] = total, x.shape[1:]
            total += x[0].size

        def visit(key: tuple[str, int], x: np.ndarray) -> np.ndarray:
            moved = np.array(np.broadcast_to(x, (total, *x.shape[1:])), dtype=complex, order="C")
            if key in first:
                rows, flat = np.arange(math.prod(x.shape[1:])), moved.reshape(total, -1)
                if key[0] == "KOOP.1":  # which is symmetric: two elements get half of the increment each
                    flat[first[key] + rows, rows.reshape(x.shape[1:]).T.ravel()] += 0.5j * H
                    flat[first[key] + rows, rows] += 0.5j * H
                else:
                    flat[first[key] + rows, rows] += 1j * H
            return moved

        slopes = np.sum(self._go(visit)[:, 0] * d_out, axis=-1).imag / H
        return {key: slopes[at : at + math.prod(shapes[key])].reshape(shapes[key]) for key, at in first.items()}
