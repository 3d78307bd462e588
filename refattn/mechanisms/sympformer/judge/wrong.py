"""Plausible wrong readings of the force: what an implementation computes that follows another convention.

Each has the signature of the core without `form` and returns (out, log_z). Verification has to tell them from the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.dense import BOUND, counts
from refattn.mechanisms.wrong import conventions, of_group_gradients, of_masks
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import allowed_pairs
from refattn.xp import Array, max_last, namespace

Wrong = Callable[..., tuple[Array, Array]]


def _core(q: Array, k: Array, v: Array, kinetic: Array | None = None, **options: Any) -> tuple[Array, Array]:
    out, saved = core.forward(q, k, v, kinetic=kinetic, **options)
    return out, saved.log_z


@dataclass(frozen=True)
class _Reading:
    """The force with some of its conventions changed.

    Attributes
    ----------
    own, other
        Factors of u_i and u_j.
    potential
        What is added to their sum.
    power
        Of z in u.
    counted
        What z is divided by: "prefix", "all" tokens, or "one".
    shifted
        Whether the largest score of a row is subtracted for good.
    normalised
        Whether the output is that of an attention, without z.
    """

    own: float = 1.0
    other: float = 1.0
    potential: float = 2.0
    power: float = 2.0
    counted: str = "prefix"
    shifted: bool = False
    normalised: bool = False

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        kinetic: Array | None = None,
        *,
        causal: Any = False,
        scale: float | None = None,
    ) -> tuple[Array, Array]:
        xp, (_, h, n, d) = namespace(q), q.shape
        offset = 0 if causal else None
        factor = 1.0 / math.sqrt(d) if scale is None else scale
        scores = q @ xp.matrix_transpose(repeat_heads(k, h)) * factor
        allowed = allowed_pairs(None, offset, n, n, q)
        masked = scores if allowed is None else xp.where(allowed, scores, -math.inf)
        top = max_last(masked)
        exponentials = xp.exp(masked - top)
        total = xp.sum(exponentials, axis=-1, keepdims=True)
        number = counts(offset if self.counted == "prefix" else None, (0, n), 1 if self.counted == "one" else n, q)
        log_z = xp.clip((0.0 * top if self.shifted else top) + xp.log(total / number), -BOUND, BOUND)
        push = (0.0 * top if kinetic is None else kinetic) * xp.exp(-self.power * log_z)
        brackets = self.own * push + self.other * xp.matrix_transpose(push) + self.potential
        out = 0.5 * (exponentials * brackets / total) @ repeat_heads(v, h)
        return out if self.normalised else xp.exp(log_z) * out, log_z[..., 0]


def future(
    q: Array, k: Array, v: Array, kinetic: Array | None = None, *, causal: Any = False, **options: Any
) -> tuple[Array, Array]:
    """Let every token push every other one, whatever was asked."""
    return _core(q, k, v, kinetic, causal=False, **options)


def at_rest(q: Array, k: Array, v: Array, kinetic: Array | None = None, **options: Any) -> tuple[Array, Array]:
    """Leave the kinetic terms out."""
    return _core(q, k, v, None, **options)


def scale_of_one(
    q: Array, k: Array, v: Array, kinetic: Array | None = None, *, scale: float | None = None, **options: Any
) -> tuple[Array, Array]:
    """Take the scores as they are where no scale is given."""
    return _core(q, k, v, kinetic, scale=1.0 if scale is None else scale, **options)


READINGS: dict[str, Wrong] = {
    "the future pushes": future,
    "kinetic terms left out": at_rest,
    "scores without a scale": scale_of_one,
    **of_masks(_core, "interleaved groups"),
    "a potential that repels": _Reading(potential=-2.0),
    "a potential of half the size": _Reading(potential=1.0),
    "only the token's own kinetic term": _Reading(other=0.0),
    "only the others' kinetic terms": _Reading(own=0.0),
    "kinetic terms over z": _Reading(power=1.0),
    "z is a mean over all tokens": _Reading(counted="all"),
    "z is a sum": _Reading(counted="one"),
    "the largest score is lost": _Reading(shifted=True),
    "the output of an attention": _Reading(normalised=True),
}

WRONG = {
    **conventions(READINGS, ("log_z",)),
    **of_group_gradients(core),
}
