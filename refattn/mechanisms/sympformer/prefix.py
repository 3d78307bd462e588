"""What a call of the oracle knows of tokens that came before, and what it leaves behind for those that come later."""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn import equations
from refattn.mechanisms.sympformer import core, dense
from refattn.mechanisms.sympformer.mixing import mix_state
from refattn.xp import Array, namespace, raised, zeros


@dataclass(frozen=True)
class Past:
    """What one call of the oracle keeps: of softmax attention every token, of linear attention two sums.

    The sums are those over j of p_j^T a_j and of y_j^T p_j, where `mixing` has S.
    """

    k: Array | None = None  # (b, h, j, d), h = 1 but for baselines
    v: Array | None = None  # (b, h, j, d), or of width 0 where no force is asked for
    push: Array | None = None  # (b, h, j, 1): u
    force: Array | None = None  # (b, m, m)
    velocity: Array | None = None  # (b, m, m)


class Prefix:
    """The past of one step of a block: `calls` of the oracle in their order, and `after`, what they leave behind."""

    def __init__(self, calls: tuple[Past, ...], count: int) -> None:
        self.calls, self.count = calls, count
        self.after: list[Past] = []

    def begin(self) -> Past:
        """Begin a call of the oracle; return what it knows."""
        past = self.calls[len(self.after)]
        self.after.append(past)
        return past

    def attend(self, q: Array, k: Array, v: Array, kinetic: Array | None, scale: float) -> tuple[Array, Array]:
        """Return (out, log_z) of new tokens (b, h, n, d) with a softmax, and leave them behind."""
        xp, past = namespace(q), self.begin()
        like, b, n = raised(q), q.shape[0], q.shape[2]
        keys, values = (xp.concat([old, raised(new)], axis=2) for old, new in ((past.k, k), (past.v, v)))
        if self.count:
            energy = zeros((b, q.shape[1], n, 1), like) if kinetic is None else raised(kinetic)
            own = equations.active(dense)
            out, log_z, saved = own.forward(
                like, keys, values, energy, offset=self.count, scale=scale, before=past.push
            )
            push = xp.concat([past.push, saved.push], axis=2)
        else:
            # The first tokens may be many: memory stays linear in their number.
            out, found = core.forward(q, k, v, kinetic, causal=True, scale=scale)
            log_z, push = found.log_z, xp.reshape(found.inner.push, (b, q.shape[1], n, 1))
        self.after[-1] = Past(keys, values, push)
        return xp.astype(out, q.dtype, copy=False), xp.astype(log_z, q.dtype, copy=False)

    def mix(self, what: str, a: Array, b: Array, c: Array) -> Array:
        """Return sum_j <a_i, b_j> c_j of the "force" or the "velocity" of new tokens, and leave the sum behind."""
        before = getattr(self.after[-1], what)
        state = before + namespace(b).matrix_transpose(b) @ c
        self.after[-1] = replace(self.after[-1], **{what: state})
        return mix_state(a, b, c, 1, before)
