"""Koopman attention: a query attends several times, and a map that is fitted to its moves so far takes it further.

In softmax attention a query moves once, to q', the mean of the values that it attends. Here it is updated several
times, and its points x_0 = q, x_1, x_2, ... are a path. Update m, counted from 0, attends from x_m, which gives q'. In
update 0 that is all: x_1 = q'. A later one also fits a map to the m moves so far, from x_l to x_(l+1), and goes one
move further than attention does: x_(m+1) is about map(q'). Why the map is applied at q' and not at x_m, the paper does
not say; at x_m, only update 0 would read values. With one update this is softmax attention.

Why one would want it: the paper puts it in the place of a layer's MLP, whose learned weights all queries share. Here
each query has a map of its own, made of how it moved among these keys and values. The paper has no experiment.

A map of points need not be linear, but what it does to functions is linear: f(x) becomes f(map(x)), so that a sum
becomes a sum. That is the map's Koopman operator. So a linear operator K on functions is fitted, by least squares. It
is wanted for the function id(x) = x: if K is the operator of a map, (K id)(x) = map(x).

q, k and v are points of one space with d coordinates, and id is d functions, one for each coordinate. All formulas are
of one query. l and r count its moves, j the keys, and o functions, of which each key has one:

    kernel(x, y) = x . y + exp(-|x - y|^2 / (2 d)),        g_o(x) = kernel(k_o, x).

The kernel says how alike two points are: x . y how far they point the same way, exp(...) how near they are; 2 d is
there because squared distances grow with d. The first term makes linear functions, as id is, the second makes others.
K reads the values of a function f at the keys, and answers with a sum of functions kappa_l, one for each move:

    (K f)(x) = sum_lj kappa_l(x) A_lj f(k_j),        kappa(x) = N g(x).

kappa_l(x) says how alike x and x_l are, as kernel(x_l, x) does. But it is a sum of the g_o, so that what K answers is
of the kind that K is fitted on, and K can act on it again. KOOP.11 to KOOP.15 apply K to psi = id + epsilon K id; why,
is said below. The first word on the right is the name in the code.

    [KOOP.1]  G_jo = kernel(k_j, k_o) + 2 jitter I_jo       gram: the functions at the keys; kernel(x, x) = 2 if |x| = 1
    [KOOP.2]  s_j = x_m . k_j / sqrt(d)                     scores
    [KOOP.3]  w_j = exp(s_j) / sum exp(s)                   weights; the sum is over all keys
    [KOOP.4]  q' = sum_j w_j v_j                            attended; update 0 ends here
    [KOOP.5]  B_lo = g_o(x_l)                               start: the functions before each move
    [KOOP.6]  Y_lo = g_o(x_(l+1))                           end: the functions after each move
    [KOOP.7]  N = B G^-1                                    dual: kappa(x) = N g(x)
    [KOOP.8]  Z = N B^T                                     inner: Z_lr = kappa_l(x_r), the same as Z_rl
    [KOOP.9]  A with Z A G + ridge A = Y                    fitted: the coefficients of K
    [KOOP.10]  D = A k                                      once: (K id)(x) = D^T kappa(x), since id(k_j) = k_j
    [KOOP.11]  R = A B^T                                    again: (K K id)(x) = (R D)^T kappa(x)
    [KOOP.12]  H = D + epsilon R D                          both: (K psi)(x) = H^T kappa(x)
    [KOOP.13]  c = N g(q')                                  place: kappa(q')
    [KOOP.14]  t = H^T c                                    target: (K psi)(q')
    [KOOP.15]  x_(m+1) = x with x + epsilon D^T N g(x) = t    following: where psi(x) = t

N, R: up to the jitter, kappa_l is the sum of the g_o that is kernel(x_l, x) at every key x, as N G = B. So kappa(k_j)
is column j of B. Reading K id there, K answers kappa^T A (D^T B)^T = kappa^T R D. The jitter is for keys that repeat;
float32 needs a larger one, such as 1e-4.

A: at x_r, the start of move r, K g_o is (Z A G)_ro, since g_o(k_j) = G_jo. It should be Y_ro. Few moves leave much of
K open. The ridge, in units of kernel squared, prefers a small K: A makes |Z A G - Y|^2 + ridge |K|^2 the least, as its
slope 2 Z (Z A G + ridge A - Y) G is 0. If G_jo is the inner product of g_j and g_o, Z_lr is that of kappa_l and
kappa_r, and |K|^2 = sum_lo A_lo (Z A G)_lo is the sum of squares of K's matrix in an orthonormal basis. No operator on
sums of the g_o does better (Khosravi). K sees id only at the keys, as the sum of the g_o that is id there. So
(K id)(x_r) is that sum at x_(r+1), about x_(r+1) itself; the linear term of the kernel is there for this.

psi: K answers with functions, but the query needs a point. (K id)(q') is one, and epsilon = 0 takes it. The paper puts
some psi that has an inverse in the place of id, and takes the x with psi(x) = (K psi)(q'). If K is the operator of a
map, that is psi(map(q')), and x = map(q') for every psi. Which psi, the paper leaves open. With id + epsilon K id it is
x + epsilon (K id)(x) = (K id)(q') + epsilon (K K id)(q'): x should be one move from q', and one move from x should be
two moves from q'. A fitted K may not allow both, and epsilon is the weight of the second. If it is small, epsilon K id
changes by less than x does, and there is one such x. That is not checked: if it is large, Newton's method may fail, and
x and its gradients are wrong.

The next point is a sum of keys, along at most as many directions as there are moves: D has a row for each. Values
decide it only through the path and q'. A large ridge pulls it to 0. The paper takes ridge and epsilon at random, most
of them near 0.

Backwards, dKOOP.n is the gradient with respect to the value of KOOP.n, and dKOOP.q that of q. Each line differentiates
the forward line that is quoted above it. With the Jacobian J of psi at x_(m+1),

    [dKOOP.14]  dt = J^-T dx_(m+1)      if t moves by e, or psi by -e, x_(m+1) moves by J^-1 e

Axes: b batch, h head, i query, j key, o function, l move, d width. If the future is hidden, query i is this map of
q[:, :, i:i+1], k[:, :, :i+1] and v[:, :, :i+1]. Source: G. Nan Tie 2024, Koopman attention; M. Khosravi 2023,
Representer theorem for learning Koopman operators, arXiv:2208.01681 (the fit). See docs/deviations.md.
"""

import math
from typing import Any

# namespace(x): the library of x; eye_like(n, x): like x; transpose: last two axes; paper_alone: refuses other options
from refattn.ops.plain import paper_alone, softmax, softmax_backward
from refattn.xp import Array, eye_like, namespace, transpose


@paper_alone
def forward(
    q: Array, k: Array, v: Array, *, updates: int = 2, ridge: float = 0.1, epsilon: float = 0.1, jitter: float = 1e-8
) -> tuple[Array, tuple[Any, ...]]:
    """Return the last point (b, h, i, d) for q (b, h, i, d), k and v (b, h, j, d), and what `backward` reads."""
    xp, root = namespace(q, k, v), math.sqrt(q.shape[3])
    gram = kernel(k, k) + 2.0 * jitter * eye_like(k.shape[2], k)  # (b, h, o, o) [KOOP.1]
    path, tape = [q], []
    for update in range(updates):
        scores = path[-1] @ transpose(k) / root  # (b, h, i, j) [KOOP.2]
        weights = softmax(scores)  # (b, h, i, j) [KOOP.3]
        attended = weights @ v  # (b, h, i, d) [KOOP.4]
        following, kept = attended, None  # (b, h, i, d), -: update 0 has no moves to fit
        if update > 0:
            following, kept = predict(xp.stack([*path, attended], axis=3), k, gram, ridge, epsilon)  # (b, h, i, d), -
        path.append(following)
        tape.append((weights, kept))
    return path[-1], (k, v, gram, ridge, epsilon, path, tape)


def predict(points: Array, k: Array, gram: Array, ridge: float, epsilon: float) -> tuple[Array, tuple[Array, ...]]:
    """Return what follows the points (b, h, i, l + 2, d) of a path and attended, and what `backward` reads."""
    xp, keys, grams = namespace(k), k[:, :, None, :, :], gram[:, :, None, :, :]  # -, (b, h, 1, j, d), (b, h, 1, o, o)
    functions = kernel(points, keys)  # (b, h, i, l + 2, o): g at the points
    start = functions[..., :-2, :]  # (b, h, i, l, o) [KOOP.5]
    end = functions[..., 1:-1, :]  # (b, h, i, l, o) [KOOP.6]
    dual = over(start, grams)  # (b, h, i, l, o) [KOOP.7]
    inner = dual @ transpose(start)  # (b, h, i, l, l) [KOOP.8]
    fitted = sylvester(inner, grams, ridge, end)  # (b, h, i, l, o) [KOOP.9]
    once = fitted @ keys  # (b, h, i, l, d) [KOOP.10]
    again = fitted @ transpose(start)  # (b, h, i, l, l) [KOOP.11]
    both = once + epsilon * again @ once  # (b, h, i, l, d) [KOOP.12]
    at_attended = functions[..., -1:, :]  # (b, h, i, 1, o): g(q')
    place = (at_attended @ transpose(dual))[..., 0, :]  # (b, h, i, l) [KOOP.13]
    target = (place[..., None, :] @ both)[..., 0, :]  # (b, h, i, d) [KOOP.14]
    mapping = transpose(once) @ dual  # (b, h, i, d, o): D^T N
    x = at_attended @ transpose(mapping)  # (b, h, i, 1, d): (K id)(q'), where Newton's method begins
    for _ in range(20):  # far more steps than it needs, as there is no test of when to stop
        missing = target[..., None, :] - x - epsilon * kernel(x, keys) @ transpose(mapping)  # (b, h, i, 1, d)
        slopes = eye_like(k.shape[3], k) + kernel_backward(x, keys, epsilon * mapping)  # (b, h, i, d, d): J, but at x
        x = x + transpose(xp.linalg.solve(slopes, transpose(missing)))  # (b, h, i, 1, d)
    following = x[..., 0, :]  # (b, h, i, d) [KOOP.15]
    points = xp.concat([points, x], axis=3)  # (b, h, i, l + 3, d): where functions were taken
    return following, (keys, grams, points, start, dual, inner, fitted, once, again, both, at_attended, place, mapping)


def backward(saved: tuple[Any, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, ridge and epsilon for d_out, that of the last point."""
    k, v, gram, ridge, epsilon, path, tape = saved
    xp, root, unit = namespace(d_out), math.sqrt(k.shape[3]), eye_like(k.shape[3], k)  # -, -, (d, d)
    d_path = [*(xp.zeros_like(x) for x in path[:-1]), d_out]  # each point gets more from every later update
    k_sum, v_sum, gram_sum = xp.zeros_like(k), xp.zeros_like(v), xp.zeros_like(gram)  # of all updates
    ridge_sum = epsilon_sum = 0.0 * xp.sum(d_out)  # ()
    for update in range(len(tape) - 1, -1, -1):
        weights, kept = tape[update]  # (b, h, i, j), -
        # forward: path.append(following)
        d_following = d_path[update + 1]  # (b, h, i, d) [dKOOP.15]
        if update > 0:
            keys, grams, points, start, dual, inner, fitted, once, again, both, at_attended, place, mapping = kept
            # forward: following + epsilon * at_following @ mapping^T = target
            at_following = kernel(points[..., -1:, :], keys)  # (b, h, i, 1, o): g(x_(m+1))
            slopes = unit + kernel_backward(points[..., -1:, :], keys, epsilon * mapping)  # (b, h, i, d, d): J
            d_target = xp.linalg.solve(transpose(slopes), d_following[..., None])[..., 0]  # (b, h, i, d) [dKOOP.14]
            d_row = d_target[..., None, :]  # (b, h, i, 1, d)
            d_change = -d_target[..., None] * at_following  # (b, h, i, d, o): of epsilon * mapping
            d_at_following = -epsilon * d_row @ mapping  # (b, h, i, 1, o)
            # forward: target = place @ both
            d_place = (d_row @ transpose(both))[..., 0, :]  # (b, h, i, l) [dKOOP.13]
            d_both = place[..., None] * d_row  # (b, h, i, l, d) [dKOOP.12]
            # forward: both = once + epsilon * again @ once; mapping = once^T @ dual
            d_again = epsilon * d_both @ transpose(once)  # (b, h, i, l, l) [dKOOP.11]
            of_once = transpose(again) @ d_both + dual @ transpose(d_change)  # (b, h, i, l, d)
            d_once = d_both + epsilon * of_once  # (b, h, i, l, d) [dKOOP.10]
            epsilon_sum = epsilon_sum + xp.sum(d_both * (again @ once)) + xp.sum(d_change * mapping)  # ()
            # forward: once = fitted @ keys; again = fitted @ start^T
            d_fitted = d_once @ transpose(keys) + d_again @ start  # (b, h, i, l, o) [dKOOP.9]
            # forward: inner @ fitted @ gram + ridge * fitted = end, which is symmetric and so its own adjoint
            d_end = sylvester(inner, grams, ridge, d_fitted)  # (b, h, i, l, o) [dKOOP.6]
            d_inner = -d_end @ grams @ transpose(fitted)  # (b, h, i, l, l) [dKOOP.8]
            ridge_sum = ridge_sum - xp.sum(d_end * fitted)  # ()
            # forward: inner = dual @ start^T; mapping = once^T @ dual; place = dual @ at_attended
            of_points = epsilon * once @ d_change + d_place[..., None] * at_attended  # (b, h, i, l, o)
            d_dual = d_inner @ start + of_points  # (b, h, i, l, o) [dKOOP.7]
            d_at_attended = d_place[..., None, :] @ dual  # (b, h, i, 1, o)
            # forward: dual = start @ gram^-1; again = fitted @ start^T; inner = dual @ start^T
            d_solved = over(d_dual, grams)  # (b, h, i, l, o): dN G^-1
            d_start = d_solved + transpose(d_again) @ fitted + transpose(d_inner) @ dual  # (b, h, i, l, o) [dKOOP.5]
            d_grams = -transpose(fitted) @ inner @ d_end - transpose(dual) @ d_solved  # (b, h, i, o, o)
            gram_sum = gram_sum + xp.sum(d_grams, axis=2)  # (b, h, o, o)
            # forward: once = fitted @ keys; functions = kernel(points, keys); start and end are functions on the path
            none = xp.zeros_like(d_at_attended)  # (b, h, i, 1, o)
            d_on_path = xp.concat([d_start, none], axis=3) + xp.concat([none, d_end], axis=3)  # (b, h, i, l + 1, o)
            d_functions = xp.concat([d_on_path, d_at_attended, d_at_following], axis=3)  # (b, h, i, l + 3, o)
            d_points = kernel_backward(points, keys, d_functions)  # (b, h, i, l + 3, d): the last has its part in J
            d_path[: update + 1] = [d_path[m] + d_points[..., m, :] for m in range(update + 1)]
            d_keys = kernel_backward(keys, points, transpose(d_functions))  # (b, h, i, j, d)
            k_sum = k_sum + xp.sum(d_keys + transpose(fitted) @ d_once, axis=2)  # (b, h, j, d)
        # forward: points = stack([*path, attended, following]); in update 0 following = attended
        d_attended = d_points[..., -2, :] if update > 0 else d_following  # (b, h, i, d) [dKOOP.4]
        # forward: attended = weights @ v
        d_weights = d_attended @ transpose(v)  # (b, h, i, j) [dKOOP.3]
        v_sum = v_sum + transpose(weights) @ d_attended  # (b, h, j, d)
        # forward: weights = softmax(scores); scores = path[-1] @ k^T / root
        d_scores = softmax_backward(weights, d_weights)  # (b, h, i, j) [dKOOP.2]
        d_path[update] = d_path[update] + d_scores @ k / root  # (b, h, i, d)
        k_sum = k_sum + transpose(d_scores) @ path[update] / root  # (b, h, j, d)
    # forward: gram = kernel(k, k) + 2 jitter I
    d_gram = gram_sum  # (b, h, o, o) [dKOOP.1]
    d_k = k_sum + kernel_backward(k, k, d_gram + transpose(d_gram))  # (b, h, j, d) [dKOOP.k]
    # forward: path = [q]; all updates read v, ridge and epsilon
    d_q, d_v = d_path[0], v_sum  # (b, h, i, d) [dKOOP.q], (b, h, j, d) [dKOOP.v]
    d_ridge, d_epsilon = ridge_sum, epsilon_sum  # () [dKOOP.ridge], () [dKOOP.epsilon]
    return {"q": d_q, "k": d_k, "v": d_v, "ridge": d_ridge, "epsilon": d_epsilon}


def kernel(x: Array, y: Array) -> Array:
    """Return kernel(x, y) (..., p, q) of points (..., p, d) and (..., q, d)."""
    xp, apart = namespace(x), x[..., :, None, :] - y[..., None, :, :]  # -, (..., p, q, d)
    return x @ transpose(y) + xp.exp(-xp.sum(apart * apart, axis=-1) / (2.0 * x.shape[-1]))


def kernel_backward(x: Array, y: Array, d_values: Array) -> Array:
    """Return the gradient of x (..., p, d) for that of kernel(x, y), d_values (..., p, q); one x may serve all p."""
    xp, apart = namespace(x), x[..., :, None, :] - y[..., None, :, :]  # -, (..., p, q, d)
    near = xp.exp(-xp.sum(apart * apart, axis=-1, keepdims=True) / (2.0 * x.shape[-1]))  # (..., p, q, 1)
    slopes = y[..., None, :, :] - apart * near / x.shape[-1]  # (..., p, q, d): of kernel(x, y) with respect to x
    return xp.sum(d_values[..., None] * slopes, axis=-2)


def over(x: Array, gram: Array) -> Array:
    """Return x gram^-1 (b, h, i, l, o) for a symmetric gram (b, h, 1, o, o): one system for the rows of all queries."""
    xp, (b, h, _, _, o) = namespace(x), x.shape
    rows = xp.reshape(x, (b, h, 1, -1, o))  # (b, h, 1, i*l, o)
    solved = transpose(xp.linalg.solve(gram, transpose(rows)))  # (b, h, 1, i*l, o)
    return xp.reshape(solved, x.shape)


def sylvester(z: Array, g: Array, ridge: float, y: Array) -> Array:
    """Return the A with z A g + ridge A = y, z and g symmetric: between their eigenvectors it is a division."""
    z_values, left = namespace(z).linalg.eigh(z)  # (b, h, i, l), (b, h, i, l, l)
    g_values, right = namespace(g).linalg.eigh(g)  # (b, h, 1, o), (b, h, 1, o, o)
    scales = z_values[..., :, None] * g_values[..., None, :] + ridge  # (b, h, i, l, o)
    return left @ (transpose(left) @ y @ right / scales) @ transpose(right)
