"""Hopfield attention a second time, in scalars whose adjoints come from the chain rule alone.

The gradient of a fixed point is derived otherwise than in the definition: df/dx is written down as a matrix for each
query, whose rows are the gradients of the coordinates of one update.
"""

from typing import Any

import numpy as np

from refattn.mechanisms.scalar_autodiff import Scalar, dot, scalar, scalars, slopes, softmax, sweep, values

Values = dict[str, Any]


def _allowed(options: Values, shape: tuple[int, ...]) -> Any:
    causal, mask = options.get("causal", False), options.get("mask")
    allowed = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    offset = {False: shape[3], "top_left": 0}.get(causal, shape[3] - shape[2])
    return allowed & (np.arange(shape[3]) <= np.arange(shape[2])[:, None] + offset)


def _scores(x: Any, keys: Any, beta: Scalar) -> Any:
    """Return beta x . k_j, rounded as one number each."""
    return [beta * dot(x, key) for key in keys]


def _weights(scores: Any, allowed: Any) -> list[Scalar]:
    return softmax([s if ok else Scalar(-np.inf) for s, ok in zip(scores, allowed, strict=True)])


def _mean(weights: Any, rows: Any) -> list[Scalar]:
    return [dot(weights, column) for column in np.transpose(rows)]


def _run(q: Any, k: Any, v: Any, options: Values) -> tuple[Values, Values, Any]:
    """Return the equations, the inputs, and the state that is read, all in scalars."""
    b, h, i, d = q.shape
    shape, fixed = (b, h, i, k.shape[2]), options.get("fixed_point", False)
    beta = scalar(float(d) ** -0.5 if options.get("beta") is None else float(options["beta"]))
    given, allowed = {"q": scalars(q), "k": scalars(k), "v": scalars(v), "beta": beta}, _allowed(options, shape)
    found: Values = {}

    def put(id: str, at: Any, row: Any) -> None:
        found.setdefault(id, np.empty((*shape[:3], len(row)), object))[at] = row

    states = np.empty(q.shape, object)
    for at in np.ndindex(*shape[:3]):
        group = at[1] * k.shape[1] // h
        keys, x = given["k"][at[0], group], given["q"][at]
        updates = options.get("updates", 2)
        for n in range(updates):
            end = f"[{n}]" if n else ""
            scores = _scores(x, keys, beta)
            weights = _weights(scores, allowed[at])
            x = _mean(weights, keys)
            for id, row in ((f"HOP.1{end}", scores), (f"HOP.2{end}", weights), (f"HOP.3{end}", x)):
                put(id, at, row)
        if fixed and updates:
            x = [Scalar(one.value) for one in x]  # nothing flows back to the updates
        states[at] = x
        last = _scores(x, keys, beta)
        reading = _weights(last, allowed[at])
        put("HOP.4", at, last)
        put("HOP.5", at, reading)
        put("HOP.6", at, _mean(reading, given["v"][at[0], group]))
    return found, given, states


def forward(q: Any, k: Any, v: Any, **options: Any) -> Values:
    """Return the value of each equation of the forward, by id; passes are counted."""
    return {id: values(x) for id, x in _run(q, k, v, options)[0].items()}


def backward(q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> Values:
    """Return the value of each adjoint, by id; passes are counted from the last update on."""
    found, given, states = _run(q, k, v, options)
    updates = options.get("updates", 2)
    sweep(found["HOP.6"], d_out)
    fixed = options.get("fixed_point", False) and updates
    grad = {f"d{id}": slopes(x) for id, x in found.items() if id in ("HOP.4", "HOP.5")}
    for n in () if fixed else range(updates):
        for id in ("HOP.1", "HOP.2", "HOP.3"):
            own = found[f"{id}[{updates - 1 - n}]" if n < updates - 1 else id]
            grad[f"d{id}[{n}]" if n else f"d{id}"] = slopes(own)
    inputs = {name: slopes(x) for name, x in given.items()}
    if fixed:
        iterates, own = _implicit(q, k, v, slopes(states), values(states), options)
        grad |= {f"dHOP.fixed[{n}]" if n else "dHOP.fixed": x for n, x in enumerate(iterates)}
        inputs = {name: x + own.get(name, 0.0) for name, x in inputs.items()}
        inputs["q"] = np.zeros(q.shape)
    return grad | {f"dHOP.{name}": x for name, x in inputs.items()}


def _implicit(q: Any, k: Any, v: Any, d_x: Any, x: Any, options: Values) -> tuple[list[Any], Values]:
    """Return the iterates of dx = dx0 + (df/dx)^T dx, and what the last adds to the gradients of k and beta."""
    updates, shape = options.get("updates", 2), (*q.shape[:3], k.shape[2])
    beta = scalar(float(q.shape[3]) ** -0.5 if options.get("beta") is None else float(options["beta"]))
    allowed, keys = _allowed(options, shape), scalars(k)
    iterates = [np.zeros(q.shape) for _ in range(updates)]
    moved = np.empty(q.shape, object)
    for at in np.ndindex(*shape[:3]):
        own = keys[at[0], at[1] * k.shape[1] // q.shape[1]]
        start = scalars(x[at])
        moved[at] = _mean(_weights(_scores(start, own, beta), allowed[at]), own)
        jacobian = np.empty((q.shape[3], q.shape[3]))
        for c, one in enumerate(moved[at]):
            sweep([one], [1.0])
            jacobian[c] = slopes(start)
        state = d_x[at]
        for n in range(updates):
            state = d_x[at] + state @ jacobian
            iterates[n][at] = state
    sweep(moved, iterates[-1])
    return iterates, {"k": slopes(keys), "beta": slopes(np.asarray(beta, object))}
