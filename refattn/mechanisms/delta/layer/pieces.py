"""The pieces of a block beside its projections, each with its adjoint: short convolutions, activations, and gates.

Axes: b batch, n token, g state head, h query head, e width of a value; channels are all heads side by side.
"""

from __future__ import annotations

from refattn.xp import Array, namespace, zeros


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), from the exponential of -|x|, which does not overflow."""
    xp = namespace(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0.0, 1.0, small) / (1.0 + small)


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)); its derivative is the sigmoid."""
    return namespace(x).logaddexp(x, 0.0 * x)


def activated(x: Array, activation: str) -> Array:
    """Return x sigmoid(x) for "silu", sigmoid(x) for "sigmoid", x for "none"."""
    if activation == "none":
        return x
    gate = sigmoid(x)
    return gate if activation == "sigmoid" else x * gate


def activated_backward(x: Array, activation: str, d_y: Array) -> Array:
    """Return the gradient of x."""
    if activation == "none":
        return d_y
    gate = sigmoid(x)
    slope = gate * (1.0 - gate)
    return d_y * slope if activation == "sigmoid" else d_y * (gate + x * slope)


def convolved(y: Array, taps: Array, bias: Array | None, tail: Array) -> Array:
    """Return z_n = sum_t taps_t y_{n-w+1+t} + bias for y (b, n, channels); y before the first token is the tail."""
    xp, count, tokens = namespace(y), taps.shape[0], y.shape[1]
    extended = xp.concat([tail, y], axis=1)
    z = extended[:, :tokens, :] * taps[0, :]
    for t in range(1, count):
        z = z + extended[:, t : t + tokens, :] * taps[t, :]
    return z if bias is None else z + bias


def convolved_backward(y: Array, taps: Array, tail: Array, d_z: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of y, of the taps and of a bias."""
    xp, count, tokens = namespace(y), taps.shape[0], y.shape[1]
    extended = xp.concat([tail, y], axis=1)
    after = xp.concat([d_z, zeros((d_z.shape[0], count - 1, d_z.shape[2]), d_z)], axis=1)
    # forward: z = sum of extended[:, t : t + tokens] * taps[t]
    d_y = after[:, :tokens, :] * taps[count - 1, :]
    for t in range(1, count):
        d_y = d_y + after[:, t : t + tokens, :] * taps[count - 1 - t, :]
    d_taps = xp.stack([xp.sum(extended[:, t : t + tokens, :] * d_z, axis=(0, 1)) for t in range(count)], axis=0)
    return d_y, d_taps, xp.sum(d_z, axis=(0, 1))


def next_tail(y: Array, tail: Array) -> Array:
    """Return the last rows of what has been seen, as many as the tail has."""
    rows = tail.shape[1]
    return namespace(y).concat([tail, y], axis=1)[:, y.shape[1] : y.shape[1] + rows, :]
