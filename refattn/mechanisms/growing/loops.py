"""A block and its growth step a second time: one sequence and one head after the other, from the report.

The step is that of the usual options: the Kronecker metric, damped, its truncation, a given amplitude; no mask, no
bias, no soft-cap. It shares no code with the other implementations, and goes other ways where there are others: ds by
the full Jacobian of the softmax, N pair by pair, projectors from pseudo-inverses, D from the equations A D A = N,
balanced factors from the singular value decomposition of the kernel, and the turn from that of a product.

Values come back by the ids of the docstrings of `layer.block`, `dense` and `growth`. Directions of eigenvectors and of
singular vectors are theirs up to a sign, and so are the entries of GROW.5, GROW.6 and GROW.11, the columns of all four
factors, the rows of the rotation GROW.16, and in it and the weights the one new column; all others are what they are.

Source: L. Burgund, Attention Growing Networks, sections 1 and 2; Schoenemann 1966.
"""

from __future__ import annotations

import math

import numpy as np

Values = dict[str, np.ndarray]


def block(
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    w_o: np.ndarray,
    d_result: np.ndarray,
    scale: float,
) -> Values:
    """Return the value of every equation of a block with biases and a residual, forward and backward, by id.

    Parameters
    ----------
    x, d_result
        (b, n, m): tokens, and the gradient of the loss with respect to the next ones.
    w_q, w_k, w_v
        (h, in, d), (h, in, d), (h, in, e): the last of `in` is the bias.
    w_o
        (h*e + 1, m).
    scale
        Of the scores.
    """
    (b, n, m), h, e = x.shape, w_q.shape[0], w_v.shape[2]
    one, found = np.ones((n, 1)), dict[str, list[object]]()
    for s in range(b):
        y, d_joined = np.hstack([x[s], one]), d_result[s] @ w_o.T
        attended, d_y = [], np.zeros((n, m + 1))
        heads: dict[str, list[np.ndarray]] = {id: [] for id in ("GROW.queries", "GROW.keys", "GROW.values", "dGROW.o")}
        for head in range(h):
            q, k, v = (y @ w[head] for w in (w_q, w_k, w_v))
            d_out = d_joined[:, head * e : (head + 1) * e]
            weights = _weights(q, k, scale)
            g = _functional_gradient(weights, v, d_out)
            attended.append(weights @ v)
            for d, w in ((scale * g @ k, w_q), (scale * g.T @ q, w_k), (weights.T @ d_out, w_v)):
                d_y += d @ w[head].T
            for values, value in zip(heads.values(), (q, k, v, d_out), strict=True):
                values.append(value)
        joined = np.hstack([*attended, one])
        whole = {"GROW.augmented": y, "GROW.joined": joined, "GROW.next": x[s] + joined @ w_o}
        whole |= {"dGROW.joined": d_joined, "dGROW.augmented": d_y, "dGROW.x": d_y[:, :m] + d_result[s]}
        for id, value_of in (*whole.items(), *heads.items()):
            found.setdefault(id, []).append(value_of)
    return {id: np.asarray(value) for id, value in found.items()}


def step(
    y: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    *,
    scale: float,
    damping: float,
    rank: int,
    amplitude: float,
) -> Values:
    """Return the value of every equation of a growth step, by id.

    Parameters
    ----------
    y
        (b, n, in): tokens, queries and keys at once.
    w_q, w_k
        (h, in, d).
    v, d_out
        (b, h, n, e): values, and the gradient of the loss with respect to what the heads attend.
    scale, damping, rank, amplitude
        Of the scores; of the metric; the width after the step; how far it goes.
    """
    (b, n, width), h = y.shape, w_q.shape[0]
    g = np.zeros((b, h, n, n))
    for s, head in np.ndindex(b, h):
        weights = _weights(y[s] @ w_q[head], y[s] @ w_k[head], scale)
        g[s, head] = _functional_gradient(weights, v[s, head], d_out[s, head])
    c = sum(np.outer(token, token) for token in np.reshape(y, (-1, width)))
    a = c / math.sqrt(b)
    eigenvalues, vectors = np.linalg.eigh(a)
    r = np.sqrt(eigenvalues + damping * np.mean(eigenvalues))
    w, back = np.diag(r) @ vectors.T, vectors @ np.diag(1.0 / r)
    found: dict[str, list[np.ndarray]] = {}

    def put(values: Values) -> None:
        for id, value in values.items():
            found.setdefault(id, []).append(value)

    for head in range(h):
        pulled = np.zeros((width, width))
        for s, i, j in np.ndindex(b, n, n):
            pulled += g[s, head, i, j] * np.outer(y[s, i], y[s, j])
        # A D A = N: two systems of equations, A X = N and A D^T = X^T.
        p = np.linalg.solve(w.T @ w, np.linalg.solve(w.T @ w, pulled).T).T
        whole = back.T @ pulled @ back
        left, right = (np.eye(width) - side @ np.linalg.pinv(side) for side in (w @ w_q[head], w @ w_k[head]))
        hidden = left @ whole @ right
        put({"dGROW.1": pulled, "GROW.5": whole, "GROW.6": hidden, "GROW.7": np.linalg.svd(hidden)[1], "GROW.8": p})
    nu = math.sqrt(np.sum(np.multiply(found["GROW.8"], found["dGROW.1"])) / (b * h * n * n))
    for head in range(h):
        kernel = scale * w_q[head] @ w_k[head].T
        f = kernel - amplitude / nu * found["GROW.8"][head]
        whitened = w @ f @ w.T
        u, kappa, t = np.linalg.svd(whitened)
        left, right = (back @ side[:, :rank] * np.sqrt(kappa[:rank]) for side in (u, t.T))
        x, tau, z = np.linalg.svd(left @ right.T)
        even_q, even_k = (side[:, :rank] * np.sqrt(tau[:rank]) for side in (x, z.T))
        old_q, old_k = (np.hstack([side[head], np.zeros((width, rank - side.shape[2]))]) for side in (w_q, w_k))
        one, _, other = np.linalg.svd(even_q.T @ old_q + even_k.T @ old_k)
        turn = one @ other
        put({"GROW.1": kernel, "GROW.10": f, "GROW.11": whitened, "GROW.singular_values": kappa})
        put({"GROW.left_factor": left, "GROW.right_factor": right, "GROW.14": even_q, "GROW.15": even_k})
        put({"GROW.16": turn, "GROW.17": even_q @ turn / math.sqrt(scale), "GROW.18": even_k @ turn / math.sqrt(scale)})
    heads = {id: np.asarray(values) for id, values in found.items()}
    return heads | {"GROW.functional_gradient": g, "GROW.2": c, "GROW.3": a, "GROW.4": r}


def _weights(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Return the weights of one head of one sequence."""
    powers = np.exp(scale * q @ k.T)
    return powers / np.sum(powers, axis=1, keepdims=True)


def _functional_gradient(weights: np.ndarray, v: np.ndarray, d_out: np.ndarray) -> np.ndarray:
    """Return ds of one head of one sequence, by the full Jacobian of the softmax of each row."""
    rows = [(np.diag(row) - np.outer(row, row)) @ (v @ d) for row, d in zip(weights, d_out, strict=True)]
    return np.asarray(rows)
