"""Koopman attention: a query moves several times, and a matrix that is fitted to its moves predicts one move more.

Softmax attention moves a query q once, to a mean of values. Here a query goes along a path of points, x_0 = q, x_1, ...
Update m (0, 1, ...) makes x_(m+1) from x_m. It attends from x_m, as softmax attention does; the mean of the values is a
point, called attended. Update 0 ends there: x_1 = attended. A later update knows m moves, x_l to x_(l+1) for l < m. It
fits a map to them and applies it to attended, as a layer applies its MLP to what attention returns: where would a query
that moves like this go from there? That is x_(m+1), but for a correction (KOOP.15). The last point is the output. By
default there are two updates: one map, fitted to one move. Nothing is causal. Values are points, too, of width d.

Lists. A matrix that acts on coordinates can make linear moves only. So a point x is also described by its list g(x) of
n numbers: number j, g_j(x), says how alike x and key j are. The list is not linear in x, so a matrix that acts on
lists, koopman, can make moves that are not linear in x. Points and lists are rows; k, n x d, has all keys:

    kernel(x, y) = x . y + exp(-|x - y|^2 / (2 d))          large if x and y have one direction, or are near
    g_j(x) = kernel(x, k_j)                                 x . k_j is linear in x, exp(...) is not
    g(x_l) koopman = g(x_(l+1))                             for all moves so far, as nearly as the fit can (KOOP.9)

This is extended dynamic mode decomposition (EDMD) with a kernel. Let next(x) be the point that x moves to. Its Koopman
operator K turns a function f into K f, with (K f)(x) = f(next(x)). K is linear in f, whatever next is. If each K g_j is
a weighted sum of the g_o, a matrix gives the list of next(x), (K g_j)(x) = (g(x) koopman)_j; if not, an approximation.

Mixtures. A row c of n weights is a mixture of the keys: its point is c k, its list c gram, the same sum of the keys'
lists (row j of gram, KOOP.1; not g(c k), as g is not linear). The mixture of x is the c with x's list, g(x) gram^-1. If
f = sum_o a_o g_o, then f(x) = sum_o g_o(x) a_o = c gram a^T = sum_j c_j f(k_j), but for jitter. f(x) = x is no such
sum, as exp(...) is in every g_o and does not cancel: c k is not quite x (nearly, if x is near keys).

The paper (N. Tie 2024) replaces a layer's MLP, whose weights all queries share, by a map for each query. It has the
path, the lists, the operator, KOOP.15 with an open function psi, and no experiment (ours: docs/experiments/koopman.md).
We chose x_1 = attended, exp, the fit (after M. Khosravi 2023), psi and defaults. Formulas are of one query in update m.

    [KOOP.1]  gram_jo = kernel(k_j, k_o) + 2 jitter I_jo    n x n: a jitter for each term of kernel
    [KOOP.2]  scores_j = x_m . k_j / sqrt(d)
    [KOOP.3]  weights_j = exp(scores_j) / sum_o exp(scores_o)
    [KOOP.4]  attended = sum_j weights_j v_j
    [KOOP.5]  start_l = g(x_l)                              m x n: a row for each move, the list before it
    [KOOP.6]  end_l = g(x_(l+1))                            m x n: the list after it
    [KOOP.7]  mixtures = start gram^-1                      m x n: row l is the mixture of x_l

The fit finds transfer, which turns the list of x into the mixture c of next(x). As f(next(x)) is about sum_o c_o
f(k_o), the fitted K is K f = sum_jo g_j transfer_jo f(k_o). m moves do not determine n x n numbers, so a ridge keeps K
small (kernel ridge regression). |K| is its Hilbert-Schmidt norm in the kernel's space of functions (RKHS), where <g_o,
f> = f(k_o), so that <g_j, g_o> = gram_jo, but for jitter. K is the sum of transfer_jo times the map f -> g_j <g_o, f>.
As <y z^T, u w^T> = (y . u) (z . w) of matrices, maps jo and pr have the inner product gram_jp gram_or. Their sum:

    |start transfer gram - end|^2 + ridge |K|^2         is minimised; |K|^2 = sum_jo transfer_jo (gram transfer gram)_jo
    start^T (start transfer gram - end) gram + ridge gram transfer gram = 0      half of the gradient

With transfer = mixtures^T fit, a row of fit for each move, KOOP.9 solves it (representer theorem): as start mixtures^T
is overlap and gram mixtures^T is start^T, the left side is start^T (overlap fit gram - end + ridge fit) gram.

    [KOOP.8]  overlap = mixtures start^T                    m x m, symmetric: start gram^-1 start^T
    [KOOP.9]  fit: overlap fit gram + ridge fit = end       m x n: solve for fit (a generalised Sylvester equation)
    [KOOP.10]  transfer = mixtures^T fit                    n x n: list of x in, mixture of next(x) out
    [KOOP.11]  koopman = transfer gram                      n x n: list of x in, list of next(x) out
    [KOOP.12]  one_move = transfer k                        n x d: list of x in, point next(x) out

The next point. K acts on each coordinate of a map psi of points. For a true K (K psi)(attended) is psi(next(attended)).
So next(attended) is the x with psi(x) = (K psi)(attended), if psi has an inverse. The paper takes this x with the
fitted K, for which each psi gives another x, and leaves psi open. For psi = id, id(x) = x, it is (K id)(attended) =
g(attended) one_move. Our psi = id + epsilon K id counts two moves: (K id)(k_j) is row j of gram one_move, so (K K
id)(x) is g(x) transfer gram one_move = g(x) koopman one_move. KOOP.15 is (following - g(attended) one_move) + epsilon
(g(following) one_move - g(attended) koopman one_move) = 0: is following one move on?

    [KOOP.13]  both_moves = one_move + epsilon koopman one_move      g(x) both_moves is (K psi)(x)
    [KOOP.14]  target = g(attended) both_moves
    [KOOP.15]  following: following + epsilon g(following) one_move = target        solve for following, x_(m+1)

Backward. d_end is the gradient of the loss with respect to end: a small end' changes the loss by <d_end, end'>, the sum
of all products. dKOOP.4 is that of the value of KOOP.4, dKOOP.q that of the input q. A product A = B C gives d_B = d_A
C^T and d_C = B^T d_A. A solve, such as KOOP.9, differentiated: the first line below. dKOOP.6 makes the second true:

    overlap fit' gram + ridge fit' = end' - overlap' fit gram - overlap fit gram' - ridge' fit
    <d_fit, fit'> = <overlap d_end gram + ridge d_end, fit'> = <d_end, overlap fit' gram + ridge fit'>

as overlap and gram are symmetric. By the first line this is <d_end, end' - overlap' fit gram - ...>, so d_overlap is
-d_end (fit gram)^T, and so on. KOOP.7 (mixtures gram = start) and KOOP.15 go the same way: by following' the left side
of KOOP.15 changes by following' J^T, where J_ca is the derivative of its number c by number a of following (dKOOP.14).
A list g(x) adds sum_j d_g_j(x) slope(x, k_j) to d_x, d_g_j(x) slope(k_j, x) to d_k_j; but none to d_following: J counts
it. sum_x is over x_0 to x_m, attended, following; sum_m over updates (0: no lists), and but for dKOOP.q over queries.

    slope(x, y) = y - (x - y) exp(-|x - y|^2 / (2 d)) / d      the derivative of kernel(x, y) with respect to x
    d_g(x_l) = d_start_l + d_end_(l-1)                      x_l starts move l, ends move l - 1; 0 if there is none
    d_g(attended) = d_target both_moves^T,      d_g(following) = -epsilon d_target one_move^T
    key_j = 2 sum_o d_gram_jo slope(k_j, k_o) + sum_mx d_g_j(x) slope(k_j, x)      2: k_j is in row and column j
    parts = transfer^T d_koopman - fit^T overlap d_end - mixtures^T d_mixtures gram^-1      of KOOP.11, 9 and 7

    [dKOOP.15]  d_following = d_x_(m+1)                     from later updates, by the next line; d_out if it is last
    [dKOOP.q]  d_x_l = sum_j d_scores_lj k_j / sqrt(d) + sum_mj d_g_j(x_l) slope(x_l, k_j)      d_q is d_x_0
    [dKOOP.14]  d_target = d_following J^-1                 J = I + epsilon sum_j one_move_j^T slope(following, k_j)
    [dKOOP.13]  d_both_moves = g(attended)^T d_target
    [dKOOP.12]  d_one_move = d_both_moves + epsilon koopman^T d_both_moves - epsilon g(following)^T d_target
    [dKOOP.11]  d_koopman = epsilon d_both_moves one_move^T
    [dKOOP.10]  d_transfer = d_one_move k^T + d_koopman gram
    [dKOOP.9]  d_fit = mixtures d_transfer
    [dKOOP.6]  d_end: overlap d_end gram + ridge d_end = d_fit      solve for d_end, as KOOP.9 for fit
    [dKOOP.8]  d_overlap = -d_end gram fit^T
    [dKOOP.7]  d_mixtures = fit d_transfer^T + d_overlap start      of KOOP.10, of KOOP.8
    [dKOOP.5]  d_start = d_mixtures gram^-1 + d_overlap^T mixtures      of KOOP.7, of KOOP.8
    [dKOOP.4]  d_attended = sum_j d_g_j(attended) slope(attended, k_j)      d_following in update 0
    [dKOOP.3]  d_weights_j = d_attended . v_j
    [dKOOP.2]  d_scores_j = weights_j (d_weights_j - sum_o weights_o d_weights_o)
    [dKOOP.1]  d_gram = sum_m (parts + parts^T) / 2         gram' is symmetric: only this part matters
    [dKOOP.v]  d_v_j = sum_m weights_j d_attended
    [dKOOP.k]  d_k_j = key_j + sum_m (d_scores_j x_m / sqrt(d) + (transfer^T d_one_move)_j)
    [dKOOP.ridge]  d_ridge = -sum_m <d_end, fit>            both numbers sum over b, h, too
    [dKOOP.epsilon]  d_epsilon = sum_m d_target . (g(attended) koopman one_move - g(following) one_move)

Axes: b batch, h head, i query, j and o key, l move, d width. Below, the value of each key on a circle is the next key:
x_0 is (4, 0), x_1 about (0, 4). mixtures is 1 at x_0, fit 1/17 = 1 / kernel(x_0, x_0) at x_1: -x_0 goes to -16/17 x_1:

    >>> import numpy as np, refattn as ra
    >>> k = 4.0 * np.asarray([[[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]]])
    >>> ra.koopman.forward(k[:, :, :1], k, np.roll(k, -1, axis=2))[0].round(1)[..., 1].tolist()
    [[[-3.8]]]
"""

import math
from typing import Any

# namespace(x): the library of x; eye_like(n, x): like x; transpose: last two axes; paper_alone: allows no other option
from refattn.ops.plain import paper_alone, softmax, softmax_backward
from refattn.xp import Array, eye_like, namespace, transpose


@paper_alone
def forward(
    q: Array, k: Array, v: Array, *, updates: int = 2, ridge: float = 0.1, epsilon: float = 0.1, jitter: float = 1e-8
) -> tuple[Array, tuple[Any, ...]]:
    """Return the last point (b, h, i, d) for q (b, h, i, d), k and v (b, h, j, d), and what `backward` reads."""
    xp, root = namespace(q, k, v), math.sqrt(q.shape[3])
    gram = kernel(k, k) + 2.0 * jitter * eye_like(k.shape[2], k)  # (b, h, j, o) [KOOP.1]
    fixed = (k[:, :, None, :, :], gram[:, :, None, :, :], ridge, epsilon)  # (b, h, 1, j, d), (b, h, 1, j, o), -, -
    path, tape = [q], []
    for update in range(updates):
        scores = path[-1] @ transpose(k) / root  # (b, h, i, j) [KOOP.2]
        weights = softmax(scores)  # (b, h, i, j) [KOOP.3]
        attended = weights @ v  # (b, h, i, d) [KOOP.4]
        points = xp.stack([*path, attended], axis=3)  # (b, h, i, l + 2, d)
        following, kept = predict(points, *fixed) if update > 0 else (attended, None)  # (b, h, i, d), -
        path.append(following)
        tape.append((weights, kept))
    return path[-1], (k, v, gram, fixed, path, tape)


def predict(points: Array, keys: Array, gram: Array, ridge: float, epsilon: float) -> tuple[Array, tuple[Array, ...]]:
    """Return what follows the points (b, h, i, l + 2, d), x_0 ... x_m and attended, and what its backward reads."""
    xp, lists = namespace(points), kernel(points, keys)  # -, (b, h, i, l + 2, j)
    start, end = lists[..., :-2, :], lists[..., 1:-1, :]  # (b, h, i, l, j) [KOOP.5], (b, h, i, l, j) [KOOP.6]
    mixtures = over(start, gram)  # (b, h, i, l, j) [KOOP.7]
    overlap = mixtures @ transpose(start)  # (b, h, i, l, l) [KOOP.8]
    fit = sylvester(overlap, gram, ridge, end)  # (b, h, i, l, j) [KOOP.9]
    transfer = transpose(mixtures) @ fit  # (b, h, i, j, o) [KOOP.10]
    koopman, one_move = transfer @ gram, transfer @ keys  # (b, h, i, j, o) [KOOP.11], (b, h, i, j, d) [KOOP.12]
    both_moves = one_move + epsilon * koopman @ one_move  # (b, h, i, j, d) [KOOP.13]
    g_attended = lists[..., -1:, :]  # (b, h, i, 1, j)
    target = (g_attended @ both_moves)[..., 0, :]  # (b, h, i, d) [KOOP.14]
    x = g_attended @ one_move  # (b, h, i, 1, d): (K id)(attended), where Newton's method begins
    for _ in range(20):  # far more steps than it needs, as no test ends it; if epsilon is large it may fail unnoticed
        missing = target[..., None, :] - x - epsilon * kernel(x, keys) @ one_move  # (b, h, i, 1, d)
        J = eye_like(x.shape[-1], x) + kernel_backward(x, keys, epsilon * transpose(one_move))  # (b, h, i, d, d)
        x = x + transpose(xp.linalg.solve(J, transpose(missing)))  # (b, h, i, 1, d)
    following = x[..., 0, :]  # (b, h, i, d) [KOOP.15]
    return following, (points, x, start, g_attended, mixtures, overlap, fit, transfer, koopman, one_move, both_moves)


def backward(saved: tuple[Any, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, ridge and epsilon for d_out, that of the last point."""
    k, v, gram, fixed, path, tape = saved
    xp, root = namespace(d_out), math.sqrt(k.shape[3])
    d_path = [*(xp.zeros_like(x) for x in path[:-1]), d_out]  # each (b, h, i, d): more from every later update
    k_sum, v_sum, gram_sum = xp.zeros_like(k), xp.zeros_like(v), xp.zeros_like(gram)  # of all updates
    ridge_sum = epsilon_sum = 0.0 * xp.sum(d_out)  # ()
    for update, (weights, kept) in reversed([*enumerate(tape)]):  # -, (b, h, i, j), -
        d_following = d_path[update + 1]  # (b, h, i, d) [dKOOP.15]
        if update > 0:
            # forward: following = predict([*path, attended], keys, gram, ridge, epsilon)
            d_points, d_keys, d_grams, d_ridges, d_epsilons = predict_backward(kept, fixed, d_following)
            d_path[: update + 1] = [d_path[m] + d_points[..., m, :] for m in range(update + 1)]
            k_sum, gram_sum = k_sum + xp.sum(d_keys, axis=2), gram_sum + xp.sum(d_grams, axis=2)  # of all queries
            ridge_sum, epsilon_sum = ridge_sum + d_ridges, epsilon_sum + d_epsilons  # (), ()
        d_attended = d_points[..., -1, :] if update > 0 else d_following  # (b, h, i, d) [dKOOP.4]
        # forward: attended = weights @ v
        d_weights = d_attended @ transpose(v)  # (b, h, i, j) [dKOOP.3]
        v_sum = v_sum + transpose(weights) @ d_attended  # (b, h, j, d)
        # forward: weights = softmax(scores); scores = path[-1] @ k^T / root
        d_scores = softmax_backward(weights, d_weights)  # (b, h, i, j) [dKOOP.2]
        d_path[update] = d_path[update] + d_scores @ k / root  # (b, h, i, d)
        k_sum = k_sum + transpose(d_scores) @ path[update] / root  # (b, h, j, d)
    # forward: gram = kernel(k, k) + 2 jitter I
    d_gram = (gram_sum + transpose(gram_sum)) / 2.0  # (b, h, j, o) [dKOOP.1]
    d_k = k_sum + 2.0 * kernel_backward(k, k, d_gram)  # (b, h, j, d) [dKOOP.k]
    d_q, d_v = d_path[0], v_sum  # (b, h, i, d) [dKOOP.q], (b, h, j, d) [dKOOP.v]
    d_ridge, d_epsilon = ridge_sum, epsilon_sum  # () [dKOOP.ridge], () [dKOOP.epsilon]
    return {"q": d_q, "k": d_k, "v": d_v, "ridge": d_ridge, "epsilon": d_epsilon}


def predict_backward(kept: tuple[Array, ...], fixed: tuple[Any, ...], d_following: Array) -> tuple[Array, ...]:
    """Return the gradients of what `predict` takes; those of keys (b, h, i, j, d) and gram not yet summed."""
    keys, gram, ridge, epsilon = fixed
    points, x, start, g_attended, mixtures, overlap, fit, transfer, koopman, one_move, both_moves = kept
    xp, g_following = namespace(x), kernel(x, keys)  # -, (b, h, i, 1, j)
    # forward: x + epsilon * g_following @ one_move = target; following = x[..., 0, :]
    J = eye_like(x.shape[-1], x) + kernel_backward(x, keys, epsilon * transpose(one_move))  # (b, h, i, d, d)
    d_target = xp.linalg.solve(transpose(J), d_following[..., None])[..., 0]  # (b, h, i, d) [dKOOP.14]
    d_row = d_target[..., None, :]  # (b, h, i, 1, d)
    # forward: target = g_attended @ both_moves
    d_both_moves = transpose(g_attended) @ d_row  # (b, h, i, j, d) [dKOOP.13]
    d_g_attended, z = d_row @ transpose(both_moves), xp.zeros_like(g_attended)  # (b, h, i, 1, j), (b, h, i, 1, j)
    # forward: both_moves = one_move + epsilon * koopman @ one_move; x + epsilon * g_following @ one_move = target
    of_product = transpose(koopman) @ d_both_moves - transpose(g_following) @ d_row  # of epsilon * one_move
    d_one_move = d_both_moves + epsilon * of_product  # (b, h, i, j, d) [dKOOP.12]
    d_epsilon = xp.sum(d_row * (g_attended @ (koopman @ one_move) - g_following @ one_move))  # ()
    d_koopman = epsilon * d_both_moves @ transpose(one_move)  # (b, h, i, j, o) [dKOOP.11]
    # forward: one_move = transfer @ keys; koopman = transfer @ gram; transfer = mixtures^T @ fit
    d_transfer = d_one_move @ transpose(keys) + d_koopman @ gram  # (b, h, i, j, o) [dKOOP.10]
    d_fit = mixtures @ d_transfer  # (b, h, i, l, j) [dKOOP.9]
    # forward: overlap @ fit @ gram + ridge * fit = end
    d_end = sylvester(overlap, gram, ridge, d_fit)  # (b, h, i, l, j) [dKOOP.6]
    d_overlap, d_ridge = -d_end @ gram @ transpose(fit), -xp.sum(d_end * fit)  # (b, h, i, l, l) [dKOOP.8], ()
    # forward: transfer = mixtures^T @ fit; overlap = mixtures @ start^T; mixtures = start @ gram^-1
    d_mixtures = fit @ transpose(d_transfer) + d_overlap @ start  # (b, h, i, l, j) [dKOOP.7]
    d_solved = over(d_mixtures, gram)  # (b, h, i, l, j): d_mixtures @ gram^-1
    d_start = d_solved + transpose(d_overlap) @ mixtures  # (b, h, i, l, j) [dKOOP.5]
    # forward: koopman = transfer @ gram; overlap @ fit @ gram + ridge * fit = end; mixtures @ gram = start
    of_fit = transpose(fit) @ overlap @ d_end + transpose(mixtures) @ d_solved  # (b, h, i, j, o)
    d_gram = transpose(transfer) @ d_koopman - of_fit  # (b, h, i, j, o): of this query
    # forward: start = lists[..., :-2, :]; end = lists[..., 1:-1, :]; g_attended = lists[..., -1:, :]
    d_lists = xp.concat([d_start, z, d_g_attended], axis=3) + xp.concat([z, d_end, z], axis=3)  # (b, h, i, l + 2, j)
    # forward: lists = kernel(points, keys); g_following = kernel(x, keys); one_move = transfer @ keys
    d_points = kernel_backward(points, keys, d_lists)  # (b, h, i, l + 2, d)
    of_lists = kernel_backward(keys, points, transpose(d_lists)) + transpose(transfer) @ d_one_move  # (b, h, i, j, d)
    d_keys = of_lists + kernel_backward(keys, x, -epsilon * one_move @ transpose(d_row))  # (b, h, i, j, d)
    return d_points, d_keys, d_gram, d_ridge, d_epsilon


def kernel(x: Array, y: Array) -> Array:
    """Return kernel(x, y) (..., p, q) of points (..., p, d) and (..., q, d)."""
    xp, apart = namespace(x), x[..., :, None, :] - y[..., None, :, :]  # -, (..., p, q, d)
    return x @ transpose(y) + xp.exp(-xp.sum(apart * apart, axis=-1) / (2.0 * x.shape[-1]))


def kernel_backward(x: Array, y: Array, d_values: Array) -> Array:
    """Return the gradient of x (..., p, d) for d_values (..., p, q), that of kernel(x, y); one x may serve all p."""
    xp, apart = namespace(x), x[..., :, None, :] - y[..., None, :, :]  # -, (..., p, q, d)
    near = xp.exp(-xp.sum(apart * apart, axis=-1, keepdims=True) / (2.0 * x.shape[-1]))  # (..., p, q, 1)
    slopes = y[..., None, :, :] - apart * near / x.shape[-1]  # (..., p, q, d): slope(x, y)
    return xp.sum(d_values[..., None] * slopes, axis=-2)


def over(x: Array, gram: Array) -> Array:
    """Return x gram^-1 (b, h, i, l, j) for a symmetric gram (b, h, 1, j, o): one system for the rows of all queries."""
    rows = namespace(x).reshape(x, (*x.shape[:2], 1, -1, x.shape[-1]))  # (b, h, 1, i*l, j)
    return namespace(x).reshape(transpose(namespace(x).linalg.solve(gram, transpose(rows))), x.shape)


def sylvester(overlap: Array, gram: Array, ridge: float, right: Array) -> Array:
    """Return the u with overlap u gram + ridge u = right; to_a^T right to_b = (a_l b_j + ridge) (to_a^T u to_b)_lj."""
    a, to_a = namespace(gram).linalg.eigh(overlap)  # (b, h, i, l), (b, h, i, l, l)
    b, to_b = namespace(gram).linalg.eigh(gram)  # (b, h, 1, j), (b, h, 1, j, j)
    return to_a @ (transpose(to_a) @ right @ to_b / (a[..., :, None] * b[..., None, :] + ridge)) @ transpose(to_b)
