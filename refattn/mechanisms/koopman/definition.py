"""Koopman attention: a query that attends again and again leaves a path, and goes where its path leads.

A query attends, and moves to the mean of the values that it reads. It does so again, and leaves a path x_0 = q, x_1,
x_2, ... Think of a map that makes these moves, x_(l+1) = map(x_l). Nobody knows it, and it is not linear. But what it
does to functions is linear: it turns f(x) into f(map(x)), and sums into sums. That is the map's Koopman operator K. A
linear operator can be fitted to the moves so far by least squares, and then tells where the query goes next. Every
query has a path and a K of its own; the equations are those of one query. The name in the code stands on the right.

    [KOOP.1]  G_jo = kernel(k_j, k_o) + 2 jitter I_jo       gram
    [KOOP.2]  s_j = x . k_j / sqrt(d)                       scores, of the newest point x
    [KOOP.3]  w_j = exp(s_j) / sum_o exp(s_o)               weights
    [KOOP.4]  q' = sum_j w_j v_j                            attended; in the first update also the next point, x_1 = q'
    [KOOP.5]  B_lo = g_o(x_l)                               start: the functions before each move
    [KOOP.6]  Y_lo = g_o(x_(l+1))                           end: and after it
    [KOOP.7]  N = B G^-1                                    dual: kappa(x) = N g(x)
    [KOOP.8]  Z = N B^T                                     inner: Z_lm = kappa_l(x_m)
    [KOOP.9]  A with Z A G + ridge A = Y                    fitted: what K is made of
    [KOOP.10]  D = A k                                      once: (K id)(x) = D^T kappa(x)
    [KOOP.11]  R = A B^T                                    again: (K K id)(x) = (R D)^T kappa(x)
    [KOOP.12]  H = D + epsilon R D                          both: (K psi)(x) = H^T kappa(x)
    [KOOP.13]  c = N g(q')                                  place: kappa(q')
    [KOOP.14]  t = H^T c                                    target: (K psi)(q')
    [KOOP.15]  x with x + epsilon D^T N g(x) = t            following: the next point, psi(x) = t

The functions are g_o(x) = kernel(k_o, x), one for each key, and sums of them. The kernel is

    kernel(x, y) = x . y + exp(-|x - y|^2 / (2 d)).

Its first term makes linear functions of x. They are there for the function id(x) = x, the one that K is wanted for: if
K is the operator of a map, (K id)(x) = map(x). The second term makes functions that are not linear.

The operator reads the values of a function f at the keys, and answers with a function kappa_l for each move l:

    (K f)(x) = sum_lj kappa_l(x) A_lj f(k_j),        kappa(x) = N g(x).

kappa_l(x) says how near x is to the start of move l. It would be kernel(x_l, x), but K has to answer with sums of the
g_o. Of these sums kappa_l is the one that agrees with kernel(x_l, x) at every key x, because N G = B. (If keys repeat,
G has no inverse without the jitter, which is in units of kernel(x, x) = 2 for |x| = 1.) A is fitted to the moves. The
values of f = g_o at the keys are f(k_j) = G_jo, so that at the start x_m of a move K g_o is (Z A G)_mo, Z being
symmetric. It should be what g_o is at the end, Y_mo. A makes |Z A G - Y|^2 + ridge |K|^2 the least. A few moves leave
much of K open, and the ridge takes a small K, in the norm |K|^2 = sum_lo A_lo (Z A G)_lo that the kernel gives to
operators. The slope of all this, 2 Z (Z A G + ridge A - Y) G, is 0 by KOOP.9. For D, f = id has the values f(k_j) =
k_j. For R, f = K id has the values D^T kappa(k_j), and kappa(k_j) is column j of B.

K answers with functions, and the query needs a point. That could be (K id)(q'). The paper takes psi = id + epsilon K id
in place of id, and goes to the x with psi(x) = (K psi)(q'), that is x + epsilon (K id)(x) = (K id)(q') + epsilon
(K K id)(q'): x should be where K takes q', and K should take x to where it takes q' if it is applied twice. If K is the
operator of a map, both hold at once. A fitted K has to weigh them, and epsilon is the weight of the second. It is
small, so that epsilon (K id)(x) changes by less than x does. Then psi is one to one, and there is one such x.

Backwards, J is the Jacobian of psi at the next point x, u = N g(x), du = -epsilon D dt, slope(x, y) is the gradient of
kernel(x, y) with respect to x, and <X, Y> the sum of all X_lo Y_lo. Sums are over queries and updates.

    [dKOOP.15]  dx = do for the last point, for an earlier one what all later updates give it, see dKOOP.q
    [dKOOP.14]  dt = J^-T dx
    [dKOOP.13]  dc = H dt
    [dKOOP.12]  dH = c dt^T
    [dKOOP.11]  dR = epsilon dH D^T
    [dKOOP.10]  dD = dH + epsilon R^T dH - epsilon u dt^T
    [dKOOP.9]  dA = dD k^T + dR B
    [dKOOP.6]  dY with Z dY G + ridge dY = dA               a symmetric linear equation is its own adjoint
    [dKOOP.8]  dZ = -dY G A^T
    [dKOOP.7]  dN = dZ B + dc g(q')^T + du g(x)^T
    [dKOOP.5]  dB = dR^T A + dZ^T N + dN G^-1
    [dKOOP.4]  dq' = sum_o (N^T dc)_o slope(q', k_o)        in the first update dq' = dx, of x_1
    [dKOOP.3]  dw_j = dq' . v_j
    [dKOOP.2]  ds_j = w_j (dw_j - sum_o w_o dw_o)
    [dKOOP.1]  dG = -sum (A^T Z dY + N^T dN G^-1)
    [dKOOP.q]  dq = sum_j ds_j k_j / sqrt(d) + sum dB_0o slope(q, k_o)      a later x_l: dB_lo + dY_(l-1)o
    [dKOOP.k]  dk_j = sum (ds_j x / sqrt(d) + (A^T dD)_j + sum_y dg_j(y) slope(k_j, y))
    [dKOOP.v]  dv_j = sum w_j dq'
    [dKOOP.ridge]  dridge = -sum <dY, A>
    [dKOOP.epsilon]  depsilon = sum (<dH, R D> - <u dt^T, D>)

In dk, y are all points at which functions are taken, with dg(x_l) = dB_l, dg(x_(l+1)) = dY_l, dg(q') = N^T dc and
dg(x) = N^T du, and for G the keys, with dg_j(k_o) = (dG + dG^T)_jo.

Axes: b batch, h head, i query, j key, o function (of one key), l move, d width of q, k and v, which are all places.
Source: N. Tie 2024, Koopman attention; the fit is that of M. Khosravi 2023, Representer theorem for learning Koopman
operators, arXiv:2208.01681. If the future is hidden, query i is this map of q[:, :, i:i+1], k[:, :, :i+1] and
v[:, :, :i+1].
"""

import math
from typing import Any

from refattn.ops.plain import paper_alone, softmax, softmax_backward
from refattn.xp import Array, eye_like, namespace, transpose


@paper_alone
def forward(
    q: Array, k: Array, v: Array, *, updates: int = 2, ridge: float = 0.1, epsilon: float = 0.1, jitter: float = 1e-8
) -> tuple[Array, tuple[Any, ...]]:
    """Return the last point (b, h, i, d) for q (b, h, i, d), k and v (b, h, j, d), and what `backward` reads."""
    gram = kernel(k, k)[0] + 2.0 * jitter * eye_like(k.shape[2], k)  # (b, h, o, o) [KOOP.1]
    path, tape = [q], []
    for update in range(updates):
        scores = path[-1] @ transpose(k) / math.sqrt(q.shape[3])  # (b, h, i, j) [KOOP.2]
        weights = softmax(scores)  # (b, h, i, j) [KOOP.3]
        attended = weights @ v  # (b, h, i, d) [KOOP.4]
        following, kept = attended, None  # before the first move there is nothing to fit
        if update > 0:
            following, kept = predict(path, attended, k, gram, ridge, epsilon)  # (b, h, i, d), -
        path.append(following)
        tape.append((weights, kept))
    return path[-1], (k, v, gram, ridge, epsilon, path, tape)


def predict(
    path: list[Array], attended: Array, k: Array, gram: Array, ridge: float, epsilon: float
) -> tuple[Array, tuple[Array, ...]]:
    """Return the next point by the operator that is fitted to the path, and what its backward reads."""
    xp, keys, grams = namespace(k), k[:, :, None, :, :], gram[:, :, None, :, :]  # of all queries the same
    functions = kernel(xp.stack(path, axis=3), keys)[0]  # (b, h, i, l + 1, o): g at every point
    start = functions[..., :-1, :]  # (b, h, i, l, o) [KOOP.5]
    end = functions[..., 1:, :]  # (b, h, i, l, o) [KOOP.6]
    dual = transpose(xp.linalg.solve(grams, transpose(start)))  # (b, h, i, l, o) [KOOP.7]
    inner = dual @ transpose(start)  # (b, h, i, l, l) [KOOP.8]
    fitted = sylvester(inner, grams, ridge, end)  # (b, h, i, l, o) [KOOP.9]
    once = fitted @ keys  # (b, h, i, l, d) [KOOP.10]
    again = fitted @ transpose(start)  # (b, h, i, l, l) [KOOP.11]
    both = once + epsilon * again @ once  # (b, h, i, l, d) [KOOP.12]
    place = kappa(attended, keys, dual)  # (b, h, i, l) [KOOP.13]
    target = combined(place, both)  # (b, h, i, d) [KOOP.14]
    guess = combined(place, once)  # (b, h, i, d): (K id)(q')
    following = invert(target, guess, keys, dual, once, epsilon)  # (b, h, i, d) [KOOP.15]
    return following, (attended, start, dual, inner, fitted, once, again, both, place)


def backward(saved: tuple[Any, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, ridge and epsilon for d_out, that of the last point."""
    k, v, gram, ridge, epsilon, path, tape = saved
    xp, root = namespace(d_out), math.sqrt(k.shape[3])
    d_path, none = [*(xp.zeros_like(x) for x in path[:-1]), d_out], 0.0 * xp.sum(d_out)  # what is summed begins at 0
    total = {"k": xp.zeros_like(k), "v": xp.zeros_like(v), "gram": xp.zeros_like(gram), "ridge": none, "epsilon": none}
    for update in range(len(tape) - 1, -1, -1):
        weights, kept = tape[update]  # (b, h, i, j), -
        d_following = d_path[update + 1]  # (b, h, i, d) [dKOOP.15]
        if kept is not None:
            # forward: following, kept = predict(path, attended, k, gram, ridge, epsilon)
            so_far = path[: update + 2]
            d_points, d_read, parts = predict_backward(kept, so_far, k, gram, ridge, epsilon, d_following)  # -
            total |= {name: total[name] + part for name, part in parts.items()}
            d_path[: update + 1] = [d_path[n] + d_points[..., n, :] for n in range(update + 1)]
        # forward: attended = weights @ v
        d_attended = d_following if kept is None else d_read  # (b, h, i, d) [dKOOP.4]
        d_weights = d_attended @ transpose(v)  # (b, h, i, j) [dKOOP.3]
        # forward: weights = softmax(scores); scores = x @ k^T / root
        d_scores = softmax_backward(weights, d_weights)  # (b, h, i, j) [dKOOP.2]
        d_path[update] = d_path[update] + d_scores @ k / root  # (b, h, i, d)
        total["k"] = total["k"] + transpose(d_scores) @ path[update] / root  # (b, h, j, d)
        total["v"] = total["v"] + transpose(weights) @ d_attended  # (b, h, j, d)
    # forward: gram = kernel(k, k) + 2 jitter I
    d_gram = total["gram"]  # (b, h, o, o) [dKOOP.1]
    d_q = d_path[0]  # (b, h, i, d) [dKOOP.q]
    d_k = total["k"] + kernel_backward(k, k, d_gram + transpose(d_gram))  # (b, h, j, d) [dKOOP.k]
    d_v = total["v"]  # (b, h, j, d) [dKOOP.v]
    d_ridge = total["ridge"]  # () [dKOOP.ridge]
    d_epsilon = total["epsilon"]  # () [dKOOP.epsilon]
    return {"q": d_q, "k": d_k, "v": d_v, "ridge": d_ridge, "epsilon": d_epsilon}


def predict_backward(
    kept: tuple[Array, ...], path: list[Array], k: Array, gram: Array, ridge: float, epsilon: float, d_following: Array
) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the path's points (b, h, i, l + 1, d), of attended, and of k, gram, ridge and epsilon."""
    attended, start, dual, inner, fitted, once, again, both, place = kept
    xp, keys, grams = namespace(k), k[:, :, None, :, :], gram[:, :, None, :, :]  # of all queries the same
    # forward: following + epsilon * combined(kappa(following, keys, dual), once) = target
    slopes = jacobian(path[-1], keys, dual, once, epsilon)  # (b, h, i, d, d)
    d_target = xp.linalg.solve(transpose(slopes), d_following[..., None])[..., 0]  # (b, h, i, d) [dKOOP.14]
    of_psi = kappa(path[-1], keys, dual)[..., None] * d_target[..., None, :]  # (b, h, i, l, d): u dt^T
    d_u = -epsilon * (once @ d_target[..., None])[..., 0]  # (b, h, i, l)
    # forward: target = combined(place, both)
    d_place = (both @ d_target[..., None])[..., 0]  # (b, h, i, l) [dKOOP.13]
    d_both = place[..., None] * d_target[..., None, :]  # (b, h, i, l, d) [dKOOP.12]
    # forward: both = once + epsilon * again @ once
    d_again = epsilon * d_both @ transpose(once)  # (b, h, i, l, l) [dKOOP.11]
    d_once = d_both + epsilon * (transpose(again) @ d_both - of_psi)  # (b, h, i, l, d) [dKOOP.10]
    d_epsilon = xp.sum(d_both * (again @ once)) - xp.sum(of_psi * once)  # ()
    # forward: once = fitted @ keys; again = fitted @ start^T
    d_fitted = d_once @ transpose(keys) + d_again @ start  # (b, h, i, l, o) [dKOOP.9]
    # forward: inner @ fitted @ gram + ridge * fitted = end
    d_end = sylvester(inner, grams, ridge, d_fitted)  # (b, h, i, l, o) [dKOOP.6]
    d_inner = -d_end @ grams @ transpose(fitted)  # (b, h, i, l, l) [dKOOP.8]
    d_ridge = -xp.sum(d_end * fitted)  # ()
    # forward: inner = dual @ start^T; place = dual @ g(attended); u = dual @ g(following)
    beside = xp.stack([attended, path[-1]], axis=3)  # (b, h, i, 2, d)
    d_beside = xp.stack([d_place, d_u], axis=3)  # (b, h, i, 2, l)
    d_dual = d_inner @ start + transpose(d_beside) @ kernel(beside, keys)[0]  # (b, h, i, l, o) [dKOOP.7]
    # forward: dual = start @ gram^-1
    through = transpose(xp.linalg.solve(grams, transpose(d_dual)))  # (b, h, i, l, o): dN G^-1
    d_start = transpose(d_again) @ fitted + transpose(d_inner) @ dual + through  # (b, h, i, l, o) [dKOOP.5]
    of_gram = -transpose(fitted) @ inner @ d_end - transpose(dual) @ through  # (b, h, i, o, o)
    # forward: start, end = g at the points but the last, and but the first
    none = xp.zeros_like(d_end[..., :1, :])  # (b, h, i, 1, o)
    d_path = xp.concat([d_start, none], axis=3) + xp.concat([none, d_end], axis=3)  # (b, h, i, l + 1, o)
    points = xp.concat([xp.stack(path[:-1], axis=3), beside], axis=3)  # (b, h, i, l + 3, d): where g was taken
    d_g = xp.concat([d_path, d_beside @ dual], axis=3)  # (b, h, i, l + 3, o)
    d_points = kernel_backward(points, keys, d_g)  # (b, h, i, l + 3, d): the last goes nowhere, J stands for it
    d_keys = kernel_backward(keys, points, transpose(d_g)) + transpose(fitted) @ d_once  # (b, h, i, j, d)
    parts = {"k": xp.sum(d_keys, axis=2), "gram": xp.sum(of_gram, axis=2), "ridge": d_ridge, "epsilon": d_epsilon}
    return d_points[..., :-2, :], d_points[..., -2, :], parts


def kernel(x: Array, y: Array) -> tuple[Array, Array]:
    """Return kernel(x, y) (..., p, q) of points (..., p, d) and (..., q, d), and its gradient for x (..., p, q, d)."""
    xp, apart = namespace(x), x[..., :, None, :] - y[..., None, :, :]  # -, (..., p, q, d)
    near = xp.exp(-xp.sum(apart * apart, axis=-1) / (2.0 * x.shape[-1]))  # (..., p, q)
    return x @ transpose(y) + near, y[..., None, :, :] - apart * near[..., None] / x.shape[-1]


def kernel_backward(x: Array, y: Array, d_values: Array) -> Array:
    """Return the gradient of x for that of kernel(x, y), d_values (..., p, q)."""
    return namespace(x).sum(d_values[..., None] * kernel(x, y)[1], axis=-2)


def kappa(x: Array, keys: Array, dual: Array) -> Array:
    """Return kappa(x) = N g(x), (b, h, i, l), at points (b, h, i, d)."""
    return (dual @ transpose(kernel(x[..., None, :], keys)[0]))[..., 0]


def combined(weights: Array, rows: Array) -> Array:
    """Return the sums of rows (b, h, i, l, d) with weights (b, h, i, l): (b, h, i, d)."""
    return (weights[..., None, :] @ rows)[..., 0, :]


def invert(target: Array, x: Array, keys: Array, dual: Array, once: Array, epsilon: float) -> Array:
    """Return the x with psi(x) = target, by Newton's method: from an x that is near each step doubles the digits."""
    for _ in range(20):
        missing = target - x - epsilon * combined(kappa(x, keys, dual), once)  # (b, h, i, d): target - psi(x)
        slopes = jacobian(x, keys, dual, once, epsilon)  # (b, h, i, d, d)
        x = x + namespace(x).linalg.solve(slopes, missing[..., None])[..., 0]  # (b, h, i, d)
    return x


def jacobian(x: Array, keys: Array, dual: Array, once: Array, epsilon: float) -> Array:
    """Return the derivative (b, h, i, d, d) of psi(x) = x + epsilon D^T N g(x)."""
    slopes = kernel(x[..., None, :], keys)[1][..., 0, :, :]  # (b, h, i, o, d)
    return eye_like(x.shape[3], x) + epsilon * transpose(once) @ dual @ slopes


def sylvester(z: Array, g: Array, ridge: float, y: Array) -> Array:
    """Return the A with z A g + ridge A = y: between the eigenvectors of z and g it is a division."""
    z_values, left = namespace(z).linalg.eigh(z)  # (b, h, i, l), (b, h, i, l, l)
    g_values, right = namespace(g).linalg.eigh(g)  # (b, h, 1, o), (b, h, 1, o, o)
    scales = z_values[..., :, None] * g_values[..., None, :] + ridge  # (b, h, i, l, o)
    return left @ (transpose(left) @ y @ right / scales) @ transpose(right)
