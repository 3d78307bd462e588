"""SympFormer: attention is a force between tokens, and a layer is one step of a motion with momenta and friction.

In a usual residual block attention moves a token, as a force moves a body in a thick liquid: without force it rests.
Here a token x_i also has a momentum p_i (rows of m numbers), and a layer hands both to the next. A layer does three
things. Kick: attention, a force, changes the momentum. Damp: friction shrinks it. Drift: the new momentum moves the
token. (Symplectic Euler drifts so, too; with friction it is called presymplectic. But see point 3.) With friction 3 / t
such a motion gets low in a convex potential sooner than one along the force (Nesterov).

From the paper (V. Stein, W. Li, G. Steidl 2026, SympFormer: Accelerated attention blocks via Inertial Dynamics on
Density Manifolds, arXiv:2603.16535): the energy, the motion, the layer but for point 2 (v2 in docs/deviations.md).

From an energy to a force. Let s_ij = s_ji be how well tokens i and j match, a function of x_i and x_j, and B (m x m),
which turns momenta into velocities, be symmetric and positive definite. A token that matches many has a large mass z_i.
The energy H (a Hamiltonian) is kinetic energy e_i / (2 z_i) plus a potential -z_i / 2, which is low if tokens match:

    z_i = 1/n sum_j exp(s_ij)                           and e_i = p_i B . p_i
    H = sum_i (e_i / (2 z_i) - z_i / 2)
    dx_i/dt = dH/dp_i = p_i B / z_i                     the velocity: momentum over mass
    dp_i/dt = -dH/dx_i - alpha p_i                      the force, and the friction alpha = c_log / t + c_lin

Without friction H stays; friction lowers it unless all p are 0: dH/dt = -alpha sum_i e_i / z_i. The force is -dH/dx_i;
x_i is in H only through the masses. The derivative of H with respect to z_i is -(u_i + 1) / 2 with u_i = e_i / z_i^2
(for B = I the squared speed). Write s_ij = s(x_i, x_j), and D_ij for its derivative by the first token. By its second
token x_i, s(x_j, x_i) has D_ij, too. x_i is first in all s_ij of z_i, and second in s_ji of every z_j, z_i included:

    -dH/dx_i = sum_l (u_l + 1) / 2 dz_l/dx_i
             = 1/(2n) sum_j exp(s_ij) ((u_i + 1) + (u_j + 1)) D_ij      u_i + 1: x_i as first; u_j + 1: as second
    (F)      = z_i sum_j w_ij (1 + (u_i + u_j) / 2) D_ij                w_ij = exp(s_ij) / (n z_i): softmax attention

For tokens at rest (p = 0) all u are 0, and the force is z_i times softmax attention with values D_ij. The velocity
divides by the mass z_i, which cancels. So with B = I a first layer, p = 0, moves tokens in the direction of attention.

From the force to a layer. The layer takes five liberties, so H only motivates its form and need not fall:
1. It learns the parts: s of queries and keys, and v_j w_o in place of D_ij. (For s_ij = x_i S . x_j with a symmetric S,
D_ij = x_j S is a linear map of token j alone.) q, k and v are made of normalised tokens y_i. As queries are no keys, s
is not symmetric. B is any matrix w_b: it need not be symmetric or positive definite, so u_i may even be negative.
2. It is causal: sums, also in z_i, run over the tokens 0 to i, n_i of them. For a symmetric s -dH/dx_i would then be

    1/2 sum_(j <= i) exp(s_ij) (u_i + 1) D_ij / n_i + 1/2 sum_(j >= i) exp(s_ji) (u_j + 1) D_ij / n_j

But token i may not know tokens j > i. If only j = i were left of the second sum, speeds u_j of tokens j < i would not
count, and at rest exp(s_ij) would count half, but exp(s_ii), in both sums, fully. The layer takes (F) instead, with n_i
for n and j <= i. That is the gradient of no H: i feels x_j, j < i does not feel x_i; second derivatives are symmetric.
3. It is explicit. The force depends on p: symplectic Euler would take it at the new p', and solve an equation for p'.
The kick takes u_i of the old p instead, and friction acts after it, on both. The drift, as in symplectic Euler, takes
the new p', and z_i of the old x.
4. It has two step lengths: force and friction act on the momentum for the time h_y, and the momentum moves the token
for the time h_x. The next layer begins at t + h_x (the authors' choice, though friction acts until t + h_y).
5. It normalises the p' that goes on. Else p might feed on itself: the force grows with the square of p. But for eps,
norm(p') is the same for every damping: friction only shortens the drift of its own layer, by exp(-damping), which nears
exp(-c_lin h_y) as t grows. And the potential is not convex. So Nesterov's result is only a motive.

    [SYMP.1]  y_i = gain norm(x_i)                      norm(x) = (x - mean(x)) / sqrt(var(x) + eps)
    [SYMP.2]  q_i = y_i w_q                             the query: what token i looks for
    [SYMP.3]  k_j = y_j w_k                             the key: what token j is found by
    [SYMP.4]  v_j = y_j w_v                             the value: where token j pushes others, and itself
    [SYMP.5]  s_ij = q_i . k_j / sqrt(m)                -inf if j > i
    [SYMP.6]  w_ij = exp(s_ij) / sum_l exp(s_il)        softmax attention
    [SYMP.7]  log z_i = log(sum_j exp(s_ij) / n_i)      z_i: the mass; a log, as d log z_i / d s_ij is w_ij
    [SYMP.8]  b_i = p_i w_b                             the direction in which p_i moves token i
    [SYMP.9]  e_i = b_i . p_i                           2 z_i times the kinetic energy
    [SYMP.10]  u_i = e_i / z_i^2
    [SYMP.11]  a_ij = w_ij (1 + (u_i + u_j) / 2)        how strongly token j pushes token i
    [SYMP.12]  o_i = z_i sum_j a_ij v_j
    [SYMP.13]  force_i = o_i w_o                        in place of -dH/dx_i
    [SYMP.14]  kicked_i = p_i + h_y force_i             kick: the force acts for the time h_y
    [SYMP.15]  damping = c_log log(1 + h_y / t) + c_lin h_y      the integral of alpha from t to t + h_y
    [SYMP.16]  p'_i = exp(-damping) kicked_i            damp: solves dp/dt = -alpha p
    [SYMP.17]  velocity_i = p'_i w_b / z_i              the new p', the z_i of the old x
    [SYMP.18]  x'_i = x_i + h_x velocity_i              drift: the token moves for the time h_x
    [SYMP.19]  P_i = gain_p norm(p'_i)                  the momentum of the next layer

norm is LayerNorm without gain, which multiplies element by element: mean and var are over the m numbers of x, var with
1/m, eps = 1e-5. The first layer gets p = 0 and t = 1. The caller learns h_x, h_y, c_log and c_lin as log(1 + exp(raw)).
They begin at 0.3, 0.3, 3 (Nesterov's 3 / t) and 0.0001; w_b begins as I, gain and gain_p as 1. Then |P_i|^2 is about m.
From layer 2 on the factor in SYMP.11 is about 1 + m/2 (1/z_i^2 + 1/z_j^2): such a kick can outweigh the p that came in.

Backward: dx'_i and dP_i come in. From here on d before a symbol means the gradient of a loss with respect to it;
dSYMP.4 is that of the value of SYMP.4, dSYMP.x of the input x. All sums that leave no token index are over the batch,
too. The next layer begins at t + h_x: the caller adds that layer's dt to dh_x and dt. For rows Y_i = X_i W, dX_i = dY_i
W^T and dW = sum_i X_i^T dY_i. For c = norm(x) and r = 1 / sqrt(var(x) + eps), a small change f of x changes r by -r^2
mean(c f) and c by r (f - mean(f) - c mean(c f)). It is a symmetric map, so a gradient g of c goes back by it:

    back(x, g) = r (g - mean(g) - c mean(c g))

    [dSYMP.gain_p]  dgain_p = sum_i norm(p'_i) dP_i     of two rows, element by element
    [dSYMP.17]  dvelocity_i = h_x dx'_i
    [dSYMP.h_x]  dh_x = sum_i velocity_i . dx'_i
    [dSYMP.16]  dp'_i = back(p'_i, gain_p dP_i) + dvelocity_i w_b^T / z_i
    [dSYMP.14]  dkicked_i = exp(-damping) dp'_i
    [dSYMP.15]  ddamping = -sum_i p'_i . dp'_i
    [dSYMP.c_log]  dc_log = ddamping log(1 + h_y / t)
    [dSYMP.c_lin]  dc_lin = ddamping h_y
    [dSYMP.t]  dt = -ddamping c_log h_y / (t (t + h_y))      log(1 + h_y / t) is log(t + h_y) - log t
    [dSYMP.13]  dforce_i = h_y dkicked_i
    [dSYMP.h_y]  dh_y = sum_i force_i . dkicked_i + ddamping (c_log / (t + h_y) + c_lin)      of kick and damping
    [dSYMP.12]  do_i = dforce_i w_o^T
    [dSYMP.w_o]  dw_o = sum_i o_i^T dforce_i
    [dSYMP.4]  dv_j = sum_i a_ij z_i do_i
    [dSYMP.11]  da_ij = z_i do_i . v_j
    [dSYMP.6]  dw_ij = da_ij (1 + (u_i + u_j) / 2)
    [dSYMP.10]  du_i = 1/2 sum_j (da_ij w_ij + da_ji w_ji)    i is pushed in a_ij, and pushes in a_ji
    [dSYMP.9]  de_i = du_i / z_i^2
    [dSYMP.8]  db_i = de_i p_i
    [dSYMP.p]  dp_i = dkicked_i + de_i b_i + db_i w_b^T    p is in kicked, in e = b . p, and in b
    [dSYMP.w_b]  dw_b = sum_i (p_i^T db_i + p'_i^T dvelocity_i / z_i)
    [dSYMP.7]  dlog_z_i = do_i . o_i - dvelocity_i . velocity_i - 2 du_i u_i      o has z, velocity 1/z, u 1/z^2
    [dSYMP.5]  ds_ij = w_ij (dw_ij - sum_l w_il dw_il + dlog_z_i)    of the softmax and of log z_i
    [dSYMP.2]  dq_i = sum_j ds_ij k_j / sqrt(m)
    [dSYMP.3]  dk_j = sum_i ds_ij q_i / sqrt(m)
    [dSYMP.w_q]  dw_q = sum_i y_i^T dq_i
    [dSYMP.w_k]  dw_k = sum_j y_j^T dk_j
    [dSYMP.w_v]  dw_v = sum_j y_j^T dv_j
    [dSYMP.1]  dy_i = dq_i w_q^T + dk_i w_k^T + dv_i w_v^T
    [dSYMP.gain]  dgain = sum_i norm(x_i) dy_i
    [dSYMP.x]  dx_i = dx'_i + back(x_i, gain dy_i)

Axes: b batch (b_i is a vector), i token that is pushed, j token that pushes, m width. One head, no MLP. The example:
one token, no friction (t may stay), force in layer 1 alone. It moves on in layer 2, faster: p' 0.5 becomes P 1:

    >>> import numpy as np; from refattn.mechanisms.sympformer.definition import forward
    >>> x, p, one, I = np.asarray([[[1.0, -1.0]]]), np.zeros((1, 1, 2)), np.ones(1), np.eye(2)
    >>> weights = {"gain": np.ones(2), "gain_p": np.ones(2), "w_q": 0.0 * I, "w_k": 0.0 * I, "w_v": I, "w_b": I}
    >>> numbers = {"h_x": 0.5 * one, "h_y": 0.5 * one, "c_log": 0.0 * one, "c_lin": 0.0 * one}
    >>> for w_o in (I, 0.0 * I):
    ...     (x, p), _ = forward(x, p, one, w_o=w_o, **weights, **numbers); print(x.round(2).tolist())
    [[[1.25, -1.25]]]
    [[[1.75, -1.75]]]
"""

import math

# namespace(x): the library of x; arange(0, n, x): like x; transpose: last two axes; paper_alone: allows no other option
from refattn.ops.plain import normalise, normalise_backward, paper_alone, softmax, softmax_backward
from refattn.xp import Array, arange, namespace, transpose, zeros


@paper_alone
def forward(
    x: Array,
    p: Array,
    t: Array,
    *,
    gain: Array,
    w_q: Array,
    w_k: Array,
    w_v: Array,
    w_o: Array,
    w_b: Array,
    gain_p: Array,
    h_x: Array,
    h_y: Array,
    c_log: Array,
    c_lin: Array,
) -> tuple[tuple[Array, Array], tuple[tuple[Array, ...], ...]]:
    """Return x' and P, as x and p (b, i, m), and what `backward` reads; gains (m), each w (m, m), numbers and t (1)."""
    xp, n, root = namespace(x), x.shape[1], math.sqrt(x.shape[2])
    normed_x, rate_x = normalise(x)  # (b, i, m), (b, i, 1): 1 / standard deviation
    y = gain * normed_x  # (b, i, m) [SYMP.1]
    q = y @ w_q  # (b, i, m) [SYMP.2]
    k = y @ w_k  # (b, j, m) [SYMP.3]
    v = y @ w_v  # (b, j, m) [SYMP.4]
    seen = xp.tril(zeros((n, n), x) == 0.0)  # (i, j): of all true, those with j <= i
    scores = xp.where(seen, q @ transpose(k) / root, -math.inf)  # (b, i, j) [SYMP.5]
    weights = softmax(scores)  # (b, i, j) [SYMP.6]
    count = xp.astype(arange(1, n + 1, x), x.dtype)[:, None]  # (i, 1): n_i
    top = xp.max(scores, axis=-1, keepdims=True)  # (b, i, 1): as in softmax, and no log of 0
    log_mass = top + xp.log(xp.sum(xp.exp(scores - top), axis=-1, keepdims=True) / count)  # (b, i, 1) [SYMP.7]
    mass = xp.exp(log_mass)  # (b, i, 1): z_i
    heading = p @ w_b  # (b, i, m) [SYMP.8]
    square = xp.vecdot(heading, p)[..., None]  # (b, i, 1) [SYMP.9]
    motion = square / mass / mass  # (b, i, 1) [SYMP.10]: mass * mass may underflow, and then 0 / 0 if p = 0
    factor = 1.0 + (motion + transpose(motion)) / 2.0  # (b, i, j)
    pairs = weights * factor  # (b, i, j) [SYMP.11]
    out = mass * (pairs @ v)  # (b, i, m) [SYMP.12]
    force = out @ w_o  # (b, i, m) [SYMP.13]
    kicked = p + h_y * force  # (b, i, m) [SYMP.14]
    damping = c_log * xp.log1p(h_y / t) + c_lin * h_y  # (1) [SYMP.15]
    damped = xp.exp(-damping) * kicked  # (b, i, m) [SYMP.16]
    velocity = damped @ w_b / mass  # (b, i, m) [SYMP.17]
    moved = x + h_x * velocity  # (b, i, m) [SYMP.18]
    normed_p, rate_p = normalise(damped)  # (b, i, m), (b, i, 1)
    momentum = gain_p * normed_p  # (b, i, m) [SYMP.19]
    tokens = (p, normed_x, rate_x, y, q, k, v)
    forces = (weights, mass, heading, motion, factor, pairs, out, force)
    steps = (damping, damped, velocity, normed_p, rate_p)
    matrices = (gain, w_q, w_k, w_v, w_o, w_b, gain_p)
    return (moved, momentum), (tokens, forces, steps, matrices, (t, h_x, h_y, c_log, c_lin))


def backward(saved: tuple[tuple[Array, ...], ...], d_moved: Array, d_momentum: Array) -> dict[str, Array]:
    """Return the gradients of all inputs, given those of x' and P."""
    tokens, forces, steps, (gain, w_q, w_k, w_v, w_o, w_b, gain_p), (t, h_x, h_y, c_log, c_lin) = saved
    (p, normed_x, rate_x, y, q, k, v), (damping, damped, velocity, normed_p, rate_p) = tokens, steps
    weights, mass, heading, motion, factor, pairs, out, force = forces
    xp, root = namespace(p), math.sqrt(p.shape[2])
    # forward: momentum = gain_p * norm(damped)
    d_gain_p = xp.sum(d_momentum * normed_p, axis=(0, 1))  # (m) [dSYMP.gain_p]
    d_normed = normalise_backward(normed_p, rate_p, d_momentum * gain_p)  # (b, i, m): of damped
    # forward: moved = x + h_x * velocity
    d_velocity = h_x * d_moved  # (b, i, m) [dSYMP.17]
    d_h_x = inner(d_moved, velocity)  # (1) [dSYMP.h_x]
    # forward: velocity = damped @ w_b / mass
    d_drift = d_velocity / mass  # (b, i, m): of damped @ w_b
    d_damped = d_normed + d_drift @ transpose(w_b)  # (b, i, m) [dSYMP.16]
    # forward: damped = exp(-damping) * kicked
    d_kicked = xp.exp(-damping) * d_damped  # (b, i, m) [dSYMP.14]
    d_damping = -inner(d_damped, damped)  # (1) [dSYMP.15]
    # forward: damping = c_log * log(1 + h_y / t) + c_lin * h_y
    d_c_log = d_damping * xp.log1p(h_y / t)  # (1) [dSYMP.c_log]
    d_c_lin = d_damping * h_y  # (1) [dSYMP.c_lin]
    d_t = -d_damping * c_log * h_y / (t * (t + h_y))  # (1) [dSYMP.t]
    # forward: kicked = p + h_y * force
    d_force = h_y * d_kicked  # (b, i, m) [dSYMP.13]
    d_h_y = inner(d_kicked, force) + d_damping * (c_log / (t + h_y) + c_lin)  # (1) [dSYMP.h_y]: also of damping
    # forward: force = out @ w_o
    d_out = d_force @ transpose(w_o)  # (b, i, m) [dSYMP.12]
    d_w_o = over_tokens(out, d_force)  # (m, m) [dSYMP.w_o]
    # forward: out = mass * (pairs @ v)
    d_sum = mass * d_out  # (b, i, m): of pairs @ v
    d_v = transpose(pairs) @ d_sum  # (b, j, m) [dSYMP.4]
    d_pairs = d_sum @ transpose(v)  # (b, i, j) [dSYMP.11]
    # forward: pairs = weights * factor; factor = 1 + (motion_i + motion_j) / 2
    d_weights = d_pairs * factor  # (b, i, j) [dSYMP.6]
    d_factor = d_pairs * weights  # (b, i, j)
    d_motion = xp.sum(d_factor + transpose(d_factor), axis=-1, keepdims=True) / 2.0  # (b, i, 1) [dSYMP.10]
    # forward: motion = square / mass / mass; square = heading . p; heading = p @ w_b
    d_square = d_motion / mass / mass  # (b, i, 1) [dSYMP.9]
    d_heading = d_square * p  # (b, i, m) [dSYMP.8]
    d_p = d_kicked + d_square * heading + d_heading @ transpose(w_b)  # (b, i, m) [dSYMP.p]
    d_w_b = over_tokens(p, d_heading) + over_tokens(damped, d_drift)  # (m, m) [dSYMP.w_b]: also of the velocity
    # forward: mass = exp(log_mass), a factor of out, of motion as mass^-2, of velocity as mass^-1
    of_out, of_velocity = xp.vecdot(d_out, out), xp.vecdot(d_velocity, velocity)  # (b, i), (b, i)
    d_log_mass = (of_out - of_velocity)[..., None] - 2.0 * d_motion * motion  # (b, i, 1) [dSYMP.7]
    # forward: weights = softmax(scores); log_mass = log(sum(exp(scores)) / count), whose derivative is weights
    d_scores = softmax_backward(weights, d_weights) + weights * d_log_mass  # (b, i, j) [dSYMP.5]
    # forward: scores = q @ k^T / root, and -inf if j > i, where weights and so d_scores are 0
    d_q = d_scores @ k / root  # (b, i, m) [dSYMP.2]
    d_k = transpose(d_scores) @ q / root  # (b, j, m) [dSYMP.3]
    # forward: q = y @ w_q; k = y @ w_k; v = y @ w_v
    d_w_q = over_tokens(y, d_q)  # (m, m) [dSYMP.w_q]
    d_w_k = over_tokens(y, d_k)  # (m, m) [dSYMP.w_k]
    d_w_v = over_tokens(y, d_v)  # (m, m) [dSYMP.w_v]
    d_y = d_q @ transpose(w_q) + d_k @ transpose(w_k) + d_v @ transpose(w_v)  # (b, i, m) [dSYMP.1]
    # forward: y = gain * norm(x); moved = x + h_x * velocity
    d_gain = xp.sum(d_y * normed_x, axis=(0, 1))  # (m) [dSYMP.gain]
    d_x = d_moved + normalise_backward(normed_x, rate_x, d_y * gain)  # (b, i, m) [dSYMP.x]
    d_matrices = {"w_q": d_w_q, "w_k": d_w_k, "w_v": d_w_v, "w_o": d_w_o, "w_b": d_w_b}
    d_numbers = {"t": d_t, "h_x": d_h_x, "h_y": d_h_y, "c_log": d_c_log, "c_lin": d_c_lin}
    return {"x": d_x, "p": d_p, "gain": d_gain, "gain_p": d_gain_p, **d_matrices, **d_numbers}


def over_tokens(x: Array, d_y: Array) -> Array:
    """Return the gradient of w (m, m) in y = x @ w for x and d_y (b, i, m)."""
    return namespace(x).sum(transpose(x) @ d_y, axis=0)


def inner(a: Array, b: Array) -> Array:
    """Return the sum of all a * b (1): if c = number * b and a is dc, this is dnumber."""
    return namespace(a).reshape(namespace(a).sum(a * b), (1,))
