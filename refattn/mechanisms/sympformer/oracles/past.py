"""What a call of the oracle knows of tokens that came before, and what it leaves behind for those that come later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from refattn import equations
from refattn.mechanisms.sympformer import core, dense
from refattn.mechanisms.sympformer.oracles.mixing import mix_state
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Past:
    """What one call of the oracle keeps: of softmax attention every token, of linear attention sums over them.

    The sums are by name: "force", over p_j^T a_j, "velocity", over y_j^T p_j, where `mixing` has S, and of moments.
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
    """The past of one step of a block: `calls` of the oracle in their order, and `after`, what they leave behind."""

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
