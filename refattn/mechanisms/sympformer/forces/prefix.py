"""What a call of a force knows of tokens that came before, and sums over prefixes.

Mixing over a prefix without a softmax is the one product of linear attention, and its adjoint:

    o_i = sum_{j <= i} <a_i, b_j> c_j                   or over j >= i, or over all j

Its gradients are products of the same kind: da mixes (do, c, b), and over the other side, db mixes (c, do, a) and dc
mixes (b, a, do). The Gram form makes all pairs; the state form keeps S = sum_j b_j^T c_j and goes through the tokens in
chunks, within which it makes the pairs: time linear in the tokens, o_i = a_i S.

Axes: b batch, or b and h batch and head, i token, m width; `side` is 1 for j <= i, -1 for j >= i, 0 for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from refattn import equations
from refattn.mechanisms.sympformer import core, dense
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Past:
    """What one call of a force saves: of softmax attention every token, of linear attention sums over them.

    The sums are by name: "force", over p_j^T a_j, "velocity", over y_j^T p_j, the S of this file, and of moments.
    How many tokens there were says the length of `k`, and beside the sums `count`: a tree of arrays holds all that
    there is to know.
    """

    k: Array | None = None  # (b, h, j, d), h = 1 but for baselines
    v: Array | None = None  # (b, h, j, d), or of width 0 where no force is asked for
    push: Array | None = None  # (b, h, j, 1): u
    sums: Mapping[str, Array] = field(default_factory=dict)
    count: Array | None = None  # (1,): how many tokens

    def tokens(self) -> int | Array:
        """Return how many tokens there were."""
        if self.count is not None:
            return self.count
        assert self.k is not None
        return int(self.k.shape[2])


class Prefix:
    """The past of one step of a block: `calls` of the force in their order, and `after`, what they leave behind."""

    def __init__(self, calls: tuple[Past, ...]) -> None:
        self.calls = calls
        self.after: list[Past] = []

    def tokens(self) -> int | Array:
        """Return how many tokens came before."""
        return self.calls[0].tokens()

    def attend(self, q: Array, k: Array, v: Array, kinetic: Array | None, scale: float) -> tuple[Array, Array]:
        """Return (out, log_z) of new tokens (b, h, n, d) with a softmax, and leave them behind."""
        xp, past, b, n = namespace(q), self.calls[len(self.after)], q.shape[0], q.shape[2]
        assert past.k is not None and past.push is not None
        keys, values = self.with_past(k, v)
        if count := past.k.shape[2]:
            energy = zeros((b, q.shape[1], n, 1), q) if kinetic is None else kinetic
            own = equations.active(dense)
            out, log_z, saved = own.forward(q, keys, values, energy, offset=count, scale=scale, before=past.push)
            push = xp.concat([past.push, saved.push], axis=2)
        else:
            # The first tokens may be many: memory stays linear in their number.
            out, found = core.forward(q, k, v, kinetic=kinetic, causal=True, scale=scale)
            log_z, push = found.log_z, xp.reshape(found.inner.push, (b, q.shape[1], n, 1))
        self.after[-1] = replace(self.after[-1], push=push)
        return out, log_z

    def with_past(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Return the keys and values of the past and of new tokens (b, h, n, d) at rest, and leave them behind."""
        xp, past = namespace(k), self.calls[len(self.after)]
        assert past.k is not None and past.v is not None and past.push is not None
        keys, values = xp.concat([past.k, k], axis=2), xp.concat([past.v, v], axis=2)
        push = xp.concat([past.push, zeros((*k.shape[:3], 1), k)], axis=2)
        self.after.append(Past(keys, values, push))
        return keys, values

    def begin(self, tokens: int, like: Array) -> Array:
        """Begin a call of linear attention with some new tokens; return how many came before, as a float."""
        past = self.calls[len(self.after)]
        assert past.count is not None
        self.after.append(replace(past, count=past.count + tokens))
        return namespace(like).astype(past.count, like.dtype)

    def add_up(self, name: str, pairs: Array) -> Array:
        """Return the sums of pairs (b, h, n, d, e) up to each new token, and leave the last ones behind."""
        found = self.after[-1].sums[name][:, :, None, ...] + namespace(pairs).cumulative_sum(pairs, axis=2)
        self._leave(name, found[:, :, -1, ...])
        return found

    def mix(self, name: str, a: Array, b: Array, c: Array) -> Array:
        """Return sum_j <a_i, b_j> c_j of the "force" or the "velocity" of new tokens, and leave the sum behind."""
        before = self.after[-1].sums[name]
        self._leave(name, before + namespace(b).matrix_transpose(b) @ c)
        return mix_state(a, b, c, 1, before)

    def _leave(self, name: str, total: Array) -> None:
        self.after[-1] = replace(self.after[-1], sums={**self.after[-1].sums, name: total})


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
