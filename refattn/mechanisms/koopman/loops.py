"""Koopman attention a second time, written from the sources and sharing nothing with the other forms.

One query of one head at a time, among the keys that it sees alone: there is no mask here, only a shorter list of keys.
The operator is found from the eigenvectors of its two Gram matrices, and the perturbation is inverted by Newton's
method without damping. Every adjoint is a derivative by its definition: a value of an equation gets the increment ih
with h = 1e-60, everything after it is computed again in complex numbers, and the imaginary part of the loss over h is
the derivative, without cancellation. All increments of one query run side by side, as the first axis of the arrays.

Values come back by the ids of the docstrings of `dense` and `update`. Slow on purpose; for small sizes.

Source: Tie 2024; Khosravi 2023 (arXiv:2208.01681); complex steps: Squire, Trapp 1998 (SIAM Review 40, 110).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]
See = Callable[[str, np.ndarray], np.ndarray]

H = 1e-60
"""Increment of a value."""

J = 1e-20
"""Increment for the Jacobian within Newton's method: the other one vanishes beside it."""


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


def _t(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _kernel(x: np.ndarray, y: np.ndarray, o: dict[str, Any]) -> np.ndarray:
    """k(x, y) of rows x (., p, d) and y (., q, d), written out with differences in place of squares of norms."""
    dot = x @ _t(y)
    difference = x[..., :, None, :] - y[..., None, :, :]
    rho = np.sum(difference * difference, axis=-1)
    width, kind = o["bandwidth"], o["kernel"]
    if kind == "linear":
        return dot
    if kind == "linear+rbf":
        second = np.exp(-0.5 * rho / width**2)
    elif kind == "linear+polynomial":
        second = (dot / width**2 + o["constant"]) ** o["degree"]
    else:
        # At equal points the root has no derivative, and k2 the derivative 0.
        r = np.sqrt(np.where(np.abs(rho) < 1e-30, 1e-30, rho)) / width
        if kind == "linear+matern32":
            second = (1.0 + math.sqrt(3.0) * r) * np.exp(-math.sqrt(3.0) * r)
        else:
            second = (1.0 + math.sqrt(5.0) * r + 5.0 * r * r / 3.0) * np.exp(-math.sqrt(5.0) * r)
    return dot + o["weight"] * second


def _fit(z: np.ndarray, g: np.ndarray, y: np.ndarray, o: dict[str, Any], ridge: Any) -> np.ndarray:
    """A of Z A G + ridge A = Y: a real solution from eigenvectors, and one correction for the imaginary parts."""
    if o["fit"] == "separable":
        left = np.linalg.solve(z + ridge * np.eye(z.shape[-1]), y)
        return _t(np.linalg.solve(_t(g), _t(left)))
    (s, u), (e, w) = np.linalg.eigh(z.real), np.linalg.eigh(g.real)
    pairs = np.real(ridge) + s[..., :, None] * e[..., None, :]

    def real(right: np.ndarray) -> np.ndarray:
        return u @ ((_t(u) @ right @ w) / pairs) @ _t(w)

    a = real(y.real).astype(y.dtype)
    for _ in range(2):  # the residual of the real part is rounding, that of the imaginary part is linear in h
        left = y - z @ a @ g - ridge * a
        a = a + real(left.real) + (1j * real(left.imag) if np.iscomplexobj(left) else 0.0)
    return a


def _trajectory(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: dict[str, Any], see: See) -> np.ndarray:
    """Return the last query (., 1, d) for q (., 1, d) and the k, v (., j, d) that it sees; `see` gets every value."""
    d, count = q.shape[-1], k.shape[-2]
    x, points = q, [q]
    gram: np.ndarray = np.zeros((1, 1, 1))
    coordinates: np.ndarray = gram
    for number in range(1, o["updates"] + 1):
        if number == 2:
            between = see("KOOP.5", _kernel(k, k, o))
            if o["causal"] is not False:
                delta = o["jitter"] * (1.0 + (0.0 if o["kernel"] == "linear" else o["weight"])) * np.ones((1, 1, 1))
            else:
                delta = o["jitter"] * np.mean(np.sum(between * np.eye(count), -1), -1)[..., None, None]
            norm, coordinates = 1.0, k
            if o["kernel"] == "linear+polynomial":
                norm = 1.0 / (
                    1.0 + o["weight"] * o["degree"] * o["constant"] ** (o["degree"] - 1) / o["bandwidth"] ** 2
                )
            gram = between
            if o["augment"]:
                corner = norm * np.eye(d) * np.ones((len(k), 1, 1))
                coordinates = np.concatenate([k, corner], axis=-2)
                gram = np.concatenate([np.concatenate([between, k], -1), np.concatenate([_t(k), corner], -1)], -2)
            gram = see("KOOP.6", gram + delta * np.eye(gram.shape[-1]))
        raw = x @ _t(k) / math.sqrt(d) if o["similarity"] == "dot" else _kernel(x, k, o)
        scores = see("KOOP.2", see("KOOP.1", raw))
        powers = np.exp(scores - np.max(scores.real, axis=-1, keepdims=True))
        weights = see("KOOP.3", powers / np.sum(powers, axis=-1, keepdims=True))
        attended = see("KOOP.4", weights @ v)
        x = see("first", attended) if number == 1 else _update(points, attended, k, gram, coordinates, o, see, number)
        points.append(x)
    return x


def _update(
    points: list[np.ndarray],
    attended: np.ndarray,
    k: np.ndarray,
    gram: np.ndarray,
    coordinates: np.ndarray,
    o: dict[str, Any],
    see: See,
    number: int,
) -> np.ndarray:
    """q^r by the operator of the trajectory: K acts on a function f as (K f)(x) = tau f(x) + kappa(x)^T A f(P)."""
    size = len(points) if o["window"] is None else min(len(points), o["window"] + 1)
    shape = np.broadcast_shapes(*(p.shape for p in points))
    path = np.concatenate([np.broadcast_to(p, shape) for p in points[-size:]], axis=-2)
    first, last, d, tau = path[..., :-1, :], path[..., 1:, :], path.shape[-1], o["tau"]

    def g(y: np.ndarray) -> np.ndarray:
        at = _kernel(y, k, o)
        return np.concatenate([at, y + 0.0 * at[..., :1]], axis=-1) if o["augment"] else at

    b_ = see("KOOP.7", g(first))
    y_ = see("KOOP.8", g(last) - tau * b_)
    if o["space"] == "keys":
        n_ = see("KOOP.9", _t(np.linalg.solve(_t(gram) + 0.0 * b_[..., :1, :1], _t(b_))))
        z_ = see("KOOP.10", n_ @ _t(b_))
    else:
        n_, z_ = None, see("KOOP.10", _kernel(first, first, o))
    ridge = o["ridge"][..., number - 2][..., None, None]
    epsilon = o["epsilon"][..., number - 2][..., None, None]
    factor = first.shape[-2] * k.shape[-2] if o["ridge_scale"] == "mean" else 1.0
    a_ = see("KOOP.11", _fit(z_, gram, y_, o, ridge * factor))
    d_ = see("KOOP.12", a_ @ coordinates)
    r_ = see("KOOP.13", a_ @ _t(b_))
    a, b = {"identity": (1.0, epsilon), "shift": (epsilon, 1.0), "pencil": (o["mix"], epsilon)}[o["perturbation"]]
    h_ = see("KOOP.14", (a + 2.0 * tau * b) * d_ + b * (r_ @ d_))

    def kappa(y: np.ndarray) -> np.ndarray:
        return _kernel(first, y, o) if n_ is None else n_ @ _t(g(y))

    c_ = see("KOOP.15", kappa(attended))
    z = see("KOOP.16", (a + b) * tau * attended + _t(c_) @ h_)

    def residual(y: np.ndarray) -> np.ndarray:
        return (a + b * tau) * y + b * (_t(kappa(y)) @ d_) - z

    root = tau * attended + _t(c_) @ d_
    for _ in range(60):
        columns = [residual(root.real + J * 1j * np.eye(d)[n]).imag / J for n in range(d)]
        move = np.linalg.solve(_t(np.concatenate(columns, axis=-2)), _t(residual(root)))
        root = root - _t(move)
        if np.max(np.abs(move.real)) <= 1e-15 * (1.0 + np.max(np.abs(root.real))):
            break
    return see("KOOP.17", root)


# --- all queries


def _options(given: dict[str, Any], d: int) -> dict[str, Any]:
    usual: dict[str, Any] = {"updates": 2, "kernel": "linear+rbf", "degree": 2, "constant": 1.0, "fit": "stein"}
    usual |= {"space": "keys", "augment": False, "ridge_scale": "sum", "tau": 0.0, "perturbation": "shift"}
    usual |= {"similarity": "dot", "window": None, "mask": None, "causal": False}
    o = usual | {name: x for name, x in given.items() if x is not None}
    o["jitter"] = o.get("jitter", 1e-8)
    for name, value in (("bandwidth", math.sqrt(d)), ("weight", 1.0), ("mix", 1.0)):
        o[name] = np.reshape(o.get(name, value), (1, 1, 1)).astype(float)
    for name in ("ridge", "epsilon"):
        o[name] = np.ones((1, max(o["updates"] - 1, 1))) * np.reshape(o.get(name, 0.1), (1, -1))
    return o


NUMBERS: tuple[str, ...] = ("ridge", "epsilon", "bandwidth", "weight", "mix")
OBSERVED = {"KOOP.7", "KOOP.8", "KOOP.9", "KOOP.11"}
"""Equations with an axis of observables, of which those of unseen keys come from elsewhere: they are 0."""


def _scatter(id: str, value: np.ndarray, seen: list[int], keys: int) -> np.ndarray:
    """Return a value (p, q) of the seen keys with 0 in the place of the others."""
    beyond = list(range(keys, keys + max(value.shape[-1] - len(seen), 0)))  # augmented: the coordinates
    if id in {"KOOP.1", "KOOP.2", "KOOP.3"}:
        full = np.zeros((1, keys))
        full[:, seen] = value
        return full[0]
    if id in OBSERVED:
        full = np.zeros((value.shape[0], keys + len(beyond)))
        full[:, seen + beyond] = value
        return full
    if id == "KOOP.6":
        full = np.zeros((keys + len(beyond),) * 2)
        full[np.ix_(seen + beyond, seen + beyond)] = value
        return full
    if id == "KOOP.5":
        full = np.zeros((keys, keys))
        full[np.ix_(seen, seen)] = value
        return full
    if id == "KOOP.15":
        return value[:, 0]
    return value[0] if id in {"KOOP.4", "KOOP.16", "KOOP.17"} else value


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
        place = at[:2] if key.startswith(("KOOP.5", "dKOOP.5")) else at
        full = into.setdefault(key, np.zeros((batch, heads, queries)[: len(place)] + x.shape))
        full[place] = full[place] + x if add else x

    # Queries that see a key come first: they tell the shapes that the others have.
    places = list(np.ndindex(batch, heads, queries))
    seen_of = {at: _seen(o["mask"], o["causal"], at, queries, keys) for at in places}
    for at in sorted(places, key=lambda at: not seen_of[at]):
        b, h, i = at
        group, seen = h * groups // heads, seen_of[at]
        own_q, all_k, all_v = q[b, h, i][None, None], k[b, group][None], v[b, group][None]
        whole = all_k if seen else all_k[:, :0]
        one = _One(own_q, whole[:, seen], all_v[:, seen], o)
        if seen:
            for (id, number), found in one.values.items():
                if number >= 0 and id != "first":
                    put(value, _name(id, number), at, _scatter(id, found[0], seen, keys))
        else:
            _unseen(value, at, o["updates"], put, d, keys)
        _whole(value, at, one, (own_q, all_k), o, seen, put)
        if d_out is None:
            continue
        if not seen:
            _unseen_backward(grad, at, o, put, d_out[at], all_v[0])
            continue
        for (id, number), found in one.gradients(d_out[at]).items():
            if id in "qkv" or id in NUMBERS:
                target = grad.get(f"dKOOP.{id}")
                if target is not None:
                    _add_input(target, id, found, (b, h, i, group), seen)
                continue
            if id == "KOOP.2":
                continue
            passes = 1 if id in ("KOOP.5", "KOOP.6") else one.passes(id)
            key = "KOOP.17" if id == "first" else id
            turned = o["updates"] - 1 if id == "first" else passes - 1 - number
            put(grad, _name(f"d{key}", turned), at, _scatter(key, found, seen, keys), add=id == "KOOP.5")
            if id == "KOOP.4":
                # A weight that is 0, because its key is not seen, would still have acted through its value.
                beside = all_v[0] @ found[0]
                beside[seen] = 0.0
                put(grad, _name("dKOOP.3", turned), at, beside, add=True)
    for name in names:
        shape = np.shape(given.get(name, 0.0)) if name in ("ridge", "epsilon") else ()
        x = grad[f"dKOOP.{name}"]
        if name in ("ridge", "epsilon"):
            grad[f"dKOOP.{name}"] = np.sum(x).reshape(1, 1) if shape in ((), (1,)) else x
        else:
            grad[f"dKOOP.{name}"] = np.sum(x)
    return value, grad


class _One:
    """One trajectory: its values, and its derivatives by complex steps."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: dict[str, Any]) -> None:
        self.inputs = {"q": q, "k": k, "v": v, **{name: o[name] for name in NUMBERS}}
        self.o = o
        self.values: dict[tuple[str, int], np.ndarray] = {}
        if k.shape[-2]:
            self._go(lambda key, x: self.values.setdefault(key, x))

    def passes(self, id: str) -> int:
        return sum(name == id for name, _ in self.values)

    def _go(self, visit: Callable[[tuple[str, int], np.ndarray], np.ndarray]) -> np.ndarray:
        counts: dict[str, int] = {}

        def see(id: str, x: np.ndarray) -> np.ndarray:
            number = counts.get(id, 0)
            counts[id] = number + 1
            return visit((id, number), x)

        given = {
            name: visit((name, -1), x) if name in NUMBERS or name in "qkv" else x for name, x in self.inputs.items()
        }
        numbers = {name: given[name] for name in NUMBERS}
        return _trajectory(given["q"], given["k"], given["v"], self.o | numbers, see)

    def gradients(self, d_out: np.ndarray) -> dict[tuple[str, int], np.ndarray]:
        """Return the derivative of the inner product of the last query with d_out with respect to every value."""
        first: dict[tuple[str, int], int] = {}
        total = 0
        shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        for key, x in self.values.items():
            first[key], shapes[key] = total, x.shape[1:]
            total += x[0].size

        def visit(key: tuple[str, int], x: np.ndarray) -> np.ndarray:
            moved = np.array(np.broadcast_to(x, (total, *x.shape[1:])), dtype=complex, order="C")
            size = math.prod(x.shape[1:])
            flat = moved.reshape(total, size)
            rows = np.arange(size)
            flat[first[key] + rows, rows] += 1j * H
            return moved

        slopes = np.sum(self._go(visit)[:, 0] * d_out, axis=-1).imag / H
        return {key: slopes[at : at + math.prod(shapes[key])].reshape(shapes[key]) for key, at in first.items()}


def _whole(
    value: Values,
    at: tuple[int, ...],
    one: _One,
    inputs: tuple[np.ndarray, np.ndarray],
    o: dict[str, Any],
    seen: list[int],
    put: Callable[..., None],
) -> None:
    """Put what does not depend on which keys are seen, and what stands for those that are not."""
    q, k = inputs
    keys = k.shape[-2]
    unseen = [j for j in range(keys) if j not in seen]
    for number in range(o["updates"]):
        x = q
        if number:
            x = one.values[("first", 0) if number == 1 else ("KOOP.17", number - 2)] if seen else 0.0 * q
        raw = x @ _t(k) / math.sqrt(q.shape[-1]) if o["similarity"] == "dot" else _kernel(x, k, o)
        put(value, _name("KOOP.1", number), at, raw[0, 0])
        value[_name("KOOP.2", number)][at][unseen] = -math.inf
    if o["updates"] > 1:
        put(value, "KOOP.5", at, _kernel(k, k, o)[0])
        delta = 0.0
        if o["causal"] is not False:
            delta = o["jitter"] * (1.0 + (0.0 if o["kernel"] == "linear" else float(o["weight"][0, 0, 0])))
        elif seen:
            delta = o["jitter"] * float(np.mean(np.diagonal(_kernel(k[:, seen], k[:, seen], o)[0])))
        value["KOOP.6"][at][unseen, unseen] = 1.0 + delta
        if not seen and o["augment"]:
            raise NotImplementedError("an empty row with augmented observables")


def _unseen(value: Values, at: tuple[int, ...], updates: int, put: Callable[..., None], d: int, keys: int) -> None:
    """Make sure that the equations of a query without keys exist: they are 0."""
    for number in range(updates):
        put(value, _name("KOOP.2", number), at, np.zeros(keys))
        put(value, _name("KOOP.3", number), at, np.zeros(keys))
        put(value, _name("KOOP.4", number), at, np.zeros(d))
    if updates > 1:
        put(value, "KOOP.6", at, np.zeros((keys, keys)))


def _unseen_backward(
    grad: Values, at: tuple[int, ...], o: dict[str, Any], put: Callable[..., None], d_out: np.ndarray, v: np.ndarray
) -> None:
    """A query without keys: only the last query's own value moves the loss."""
    put(grad, "dKOOP.17", at, d_out)
    if o["updates"] == 1:
        put(grad, "dKOOP.4", at, d_out)
        put(grad, "dKOOP.3", at, v @ d_out)


def _add_input(target: np.ndarray, id: str, found: np.ndarray, at: tuple[int, int, int, int], seen: list[int]) -> None:
    b, h, i, group = at
    if id == "q":
        target[b, h, i] += found[0]
    elif id in "kv":
        target[b, group, seen] += found
    else:
        target += found.reshape(target.shape)
