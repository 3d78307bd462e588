"""Mixing over a prefix without a softmax: the one product of linear attention, and its adjoint.

    o_i = sum_{j <= i} <a_i, b_j> c_j                   or over j >= i, or over all j

Its gradients are products of the same kind: da mixes (do, c, b), and over the other side, db mixes (c, do, a) and dc
mixes (b, a, do). The Gram form makes all pairs; the state form keeps S = sum_j b_j^T c_j and goes through the tokens in
chunks, within which it makes the pairs: time linear in the tokens, o_i = a_i S.

Axes: b batch, or b and h batch and head, i token, m width; `side` is 1 for j <= i, -1 for j >= i, 0 for all.
"""

from __future__ import annotations

from refattn.xp import Array, namespace

CHUNK = 64


def mix_gram(a: Array, b: Array, c: Array, side: int) -> Array:
    """Return o (b, i, m) from all pairs."""
    xp = namespace(a)
    pairs = a @ xp.matrix_transpose(b)
    if side:
        pairs = xp.tril(pairs) if side > 0 else xp.triu(pairs)
    return pairs @ c


def mix_state(a: Array, b: Array, c: Array, side: int, before: Array | None = None) -> Array:
    """Return o (b, i, m) by a running sum of m x m numbers, which begins with `before`."""
    xp, n = namespace(a), a.shape[-2]
    if not side:
        return a @ (xp.matrix_transpose(b) @ c)
    state = xp.matrix_transpose(b[..., :0, :]) @ c[..., :0, :] if before is None else before
    found = []
    starts = list(range(0, n, CHUNK))
    for start in starts if side > 0 else reversed(starts):
        at = slice(start, min(start + CHUNK, n))
        found.append(a[..., at, :] @ state + mix_gram(a[..., at, :], b[..., at, :], c[..., at, :], side))
        state = state + xp.matrix_transpose(b[..., at, :]) @ c[..., at, :]
    return xp.concat(found if side > 0 else found[::-1], axis=-2)


IMPLEMENTATIONS = {"gram": mix_gram, "state": mix_state}


def mix(a: Array, b: Array, c: Array, side: int, implementation: str) -> Array:
    """Return o in an implementation; "auto" takes the one with fewer products."""
    if implementation == "auto":
        implementation = "gram" if a.shape[-2] <= 2 * a.shape[-1] else "state"
    return IMPLEMENTATIONS[implementation](a, b, c, side)


def mix_backward(
    a: Array, b: Array, c: Array, side: int, implementation: str, d_o: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of a, b and c."""
    # forward: o_i = sum_j <a_i, b_j> c_j
    d_a = mix(d_o, c, b, side, implementation)
    d_b = mix(c, d_o, a, -side, implementation)
    d_c = mix(b, a, d_o, -side, implementation)
    return d_a, d_b, d_c
