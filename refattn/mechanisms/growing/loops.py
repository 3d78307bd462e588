"""A block and its growth step a second time: loops from the report and its sources, which share no code with the rest.

The step is that of the usual options: the Kronecker metric, damped, its truncation, a given amplitude; no mask, no
bias, no soft-cap. Eigenvalues come from Jacobi's rotations and singular values from Hestenes' one-sided ones, D from
Gaussian elimination on the equations A D A = N, balanced factors from the singular value decomposition of the kernel,
and the turn from that of a product, where the other derivation factors by Householder's reflections and LAPACK.

Values come back by the ids of the docstrings of `layer.block`, `dense` and `growth`. Directions of eigenvectors and of
singular vectors are theirs up to a sign, and so are the entries of GROW.5, GROW.6 and GROW.11, the columns of all four
factors, the rows of the rotation GROW.16, and in it and the weights the one new column; all others are what they are.

Source: L. Burgund, Attention Growing Networks, sections 1 and 2; Jacobi 1846; Hestenes 1958; Schoenemann 1966.
"""

from __future__ import annotations

import math

import numpy as np

Values = dict[str, np.ndarray]
Matrix = list[list[float]]

SWEEPS = 40


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
    (b, _, m), h, e = x.shape, w_q.shape[0], w_v.shape[2]
    found: dict[str, list[np.ndarray]] = {}
    for s in range(b):
        y: Matrix = [[*row, 1.0] for row in x[s].tolist()]
        d_joined = _product(d_result[s].tolist(), _transposed(w_o.tolist()))
        joined: Matrix = [[] for _ in y]
        d_y: Matrix = [[0.0] * len(row) for row in y]
        heads: dict[str, list[Matrix]] = {id: [] for id in ("GROW.queries", "GROW.keys", "GROW.values", "dGROW.o")}
        for head in range(h):
            of_q, of_k, of_v = (w[head].tolist() for w in (w_q, w_k, w_v))
            q, k, v = (_product(y, w) for w in (of_q, of_k, of_v))
            d_out = [row[head * e : (head + 1) * e] for row in d_joined]
            weights = _weights(q, k, scale)
            g = _functional_gradient(weights, v, d_out)
            joined = [[*row, *more] for row, more in zip(joined, _product(weights, v), strict=True)]
            d_q, d_k = (
                [[scale * z for z in row] for row in side] for side in (_product(g, k), _product(_transposed(g), q))
            )
            for d, w in ((d_q, of_q), (d_k, of_k), (_product(_transposed(weights), d_out), of_v)):
                d_y = _added(d_y, _product(d, _transposed(w)))
            for all_heads, one_head in zip(heads.values(), (q, k, v, d_out), strict=True):
                all_heads.append(one_head)
        joined = [[*row, 1.0] for row in joined]
        result = _added(x[s].tolist(), _product(joined, w_o.tolist()))
        d_x = _added([row[:m] for row in d_y], d_result[s].tolist())
        one = {"GROW.augmented": y, "GROW.joined": joined, "GROW.next": result}
        one |= {"dGROW.joined": d_joined, "dGROW.augmented": d_y, "dGROW.x": d_x}
        for id, value in (*one.items(), *heads.items()):
            found.setdefault(id, []).append(np.asarray(value))
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
    for at in np.ndindex(b, h):
        q, k = (_product(y[at[0]].tolist(), w[at[1]].tolist()) for w in (w_q, w_k))
        g[at] = _functional_gradient(_weights(q, k, scale), v[at].tolist(), d_out[at].tolist())
    c = [
        [math.fsum(y[s, i, k] * y[s, i, l] for s in range(b) for i in range(n)) for l in range(width)]
        for k in range(width)
    ]
    a = [[x / math.sqrt(b) for x in row] for row in c]
    eigenvalues, vectors = _eigen(a)
    mean = math.fsum(eigenvalues) / width
    r = [math.sqrt(value + damping * mean) for value in eigenvalues]
    w = [[r[k] * vectors[i][k] for i in range(width)] for k in range(width)]
    back = [[vectors[i][k] / r[k] for k in range(width)] for i in range(width)]
    metric = _product(_transposed(w), w)
    found: dict[str, list[Matrix | list[float]]] = {}

    def put(id: str, value: Matrix | list[float]) -> None:
        found.setdefault(id, []).append(value)

    directions: list[Matrix] = []
    inner = 0.0
    for head in range(h):
        pulled = [
            [
                math.fsum(
                    y[s, i, k] * g[s, head, i, j] * y[s, j, l] for s in range(b) for i in range(n) for j in range(n)
                )
                for l in range(width)
            ]
            for k in range(width)
        ]
        put("dGROW.1", pulled)
        p = _between(metric, pulled)
        directions.append(p)
        put("GROW.8", p)
        inner += math.fsum(p[k][l] * pulled[k][l] for k in range(width) for l in range(width))
        whole = _product(_transposed(back), _product(pulled, back))
        left, right = (_outside(_product(w, weights[head].tolist())) for weights in (w_q, w_k))
        hidden = _product(left, _product(whole, right))
        put("GROW.5", whole)
        put("GROW.6", hidden)
        put("GROW.7", _singular(hidden)[1])
    nu = math.sqrt(inner / (b * h * n * n))
    for head in range(h):
        old_q, old_k = w_q[head].tolist(), w_k[head].tolist()
        kernel = [[scale * x for x in row] for row in _product(old_q, _transposed(old_k))]
        p = directions[head]
        f = [[kernel[k][l] - amplitude / nu * p[k][l] for l in range(width)] for k in range(width)]
        whitened = _product(w, _product(f, _transposed(w)))
        u, s, t = _singular(whitened)
        factors = [
            _product(back, [[x[i][j] * math.sqrt(s[j]) for j in range(rank)] for i in range(width)]) for x in (u, t)
        ]
        low = _product(factors[0], _transposed(factors[1]))
        x, sizes, z = _singular(low)
        even = [[[side[i][j] * math.sqrt(sizes[j]) for j in range(rank)] for i in range(width)] for side in (x, z)]
        ends = [[[value / math.sqrt(scale) for value in row] for row in side] for side in even]
        wanted = [
            [*row, *([0.0] * (rank - len(row)))]
            for row in _added(*(_product(_transposed(e), o) for e, o in zip(ends, (old_q, old_k), strict=True)))
        ]
        one, _, other = _singular(wanted)
        turn = _product(one, _transposed(other))
        put("GROW.1", kernel)
        put("GROW.10", f)
        put("GROW.11", whitened)
        put("GROW.singular_values", s)
        for id, value in zip(("GROW.left_factor", "GROW.right_factor"), factors, strict=True):
            put(id, value)
        for id, value in zip(("GROW.14", "GROW.15"), even, strict=True):
            put(id, value)
        put("GROW.16", turn)
        put("GROW.17", _product(ends[0], turn))
        put("GROW.18", _product(ends[1], turn))
    return {
        "GROW.functional_gradient": g,
        "GROW.2": np.asarray(c),
        "GROW.3": np.asarray(a),
        "GROW.4": np.asarray(r),
        **{id: np.asarray(heads) for id, heads in found.items()},
    }


def _weights(q: Matrix, k: Matrix, scale: float) -> Matrix:
    """Return the weights of one head of one sequence."""
    powers = [[math.exp(scale * x) for x in row] for row in _product(q, _transposed(k))]
    return [[power / math.fsum(row) for power in row] for row in powers]


def _functional_gradient(weights: Matrix, v: Matrix, d_out: Matrix) -> Matrix:
    """Return g of one head of one sequence, by the full Jacobian of the softmax."""
    pulls = _product(d_out, _transposed(v))
    return [
        [math.fsum(row[l] * ((l == j) - row[j]) * pull[l] for l in range(len(row))) for j in range(len(row))]
        for row, pull in zip(weights, pulls, strict=True)
    ]


def _product(a: Matrix, b: Matrix) -> Matrix:
    return [[math.fsum(row[k] * b[k][j] for k in range(len(b))) for j in range(len(b[0]))] for row in a]


def _transposed(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def _added(a: Matrix, b: Matrix) -> Matrix:
    return [[x + z for x, z in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def _eigen(a: Matrix) -> tuple[list[float], Matrix]:
    """Return the eigenvalues of a symmetric matrix, the smallest first, and its eigenvectors as columns."""
    n = len(a)
    a, vectors = [[*row] for row in a], [[float(i == j) for j in range(n)] for i in range(n)]
    for _ in range(SWEEPS):
        for i in range(n):
            for j in range(i + 1, n):
                angle = 0.5 * math.atan2(2.0 * a[i][j], a[j][j] - a[i][i])
                turn = _rotation(angle)
                _turn_columns(a, i, j, turn)
                a = _transposed(a)
                _turn_columns(a, i, j, turn)
                _turn_columns(vectors, i, j, turn)
    order = sorted(range(n), key=lambda i: a[i][i])
    return [a[i][i] for i in order], [[row[i] for i in order] for row in vectors]


def _singular(a: Matrix) -> tuple[Matrix, list[float], Matrix]:
    """Return (u, s, v) with a = u diag(s) v^T, the largest first; columns of u where s is 0 complete the others."""
    n = len(a)
    u, v = [[*row] for row in a], [[float(i == j) for j in range(len(a[0]))] for i in range(len(a[0]))]
    for _ in range(SWEEPS):
        for i in range(len(v)):
            for j in range(i + 1, len(v)):
                # The rotation after which columns i and j are at right angles.
                square_i, square_j, both = (
                    math.fsum(row[x] * row[z] for row in u) for x, z in ((i, i), (j, j), (i, j))
                )
                turn = _rotation(0.5 * math.atan2(2.0 * both, square_j - square_i))
                _turn_columns(u, i, j, turn)
                _turn_columns(v, i, j, turn)
    sizes = [math.sqrt(math.fsum(row[j] ** 2 for row in u)) for j in range(len(v))]
    order = sorted(range(len(v)), key=lambda j: -sizes[j])
    least = 1e-12 * sizes[order[0]]
    columns: Matrix = []
    for j in order:
        column = [row[j] / sizes[j] for row in u] if sizes[j] > least else _another(columns, n)
        columns.append(column)
    return _transposed(columns), [sizes[j] for j in order], [[row[j] for j in order] for row in v]


def _another(columns: Matrix, n: int) -> list[float]:
    """Return a unit vector at right angles to all columns."""
    best = max(
        (_without(columns, [float(i == k) for i in range(n)]) for k in range(n)),
        key=lambda x: math.fsum(a * a for a in x),
    )
    size = math.sqrt(math.fsum(a * a for a in best))
    return [a / size for a in best]


def _without(columns: Matrix, x: list[float]) -> list[float]:
    for column in columns:
        along = math.fsum(map(float.__mul__, column, x))
        x = [a - along * c for a, c in zip(x, column, strict=True)]
    return x


def _rotation(angle: float) -> tuple[float, float]:
    return math.cos(angle), math.sin(angle)


def _turn_columns(a: Matrix, i: int, j: int, turn: tuple[float, float]) -> None:
    cosine, sine = turn
    for row in a:
        row[i], row[j] = cosine * row[i] - sine * row[j], sine * row[i] + cosine * row[j]


def _outside(a: Matrix) -> Matrix:
    """Return the projector 1 - A (A^T A)^-1 A^T on what is at right angles to the columns of A, by Gram and Schmidt."""
    columns: Matrix = []
    for column in _transposed(a):
        rest = _without(columns, _without(columns, column))
        size = math.sqrt(math.fsum(x * x for x in rest))
        columns.append([x / size for x in rest])
    n = len(a)
    return [[float(i == j) - math.fsum(c[i] * c[j] for c in columns) for j in range(n)] for i in range(n)]


def _between(a: Matrix, n: Matrix) -> Matrix:
    """Return D with A D A = N: two systems of equations, A X = N and A D^T = X^T."""
    return _transposed(_solved(a, _transposed(_solved(a, n))))


def _solved(a: Matrix, b: Matrix) -> Matrix:
    """Return X with A X = B, by Gaussian elimination with pivots."""
    n = len(a)
    rows = [[*left, *right] for left, right in zip(a, b, strict=True)]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(n):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [x - factor * z for x, z in zip(rows[i], rows[k], strict=True)]
    return [[x / row[k] for x in row[n:]] for k, row in enumerate(rows)]
