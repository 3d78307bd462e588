"""What becomes of small scores: y (GE.9), or for "proximal" x' of every step (GE.8).

::

    [GE.hard]  y = x if x >= tau, else 0                    the scores that are kept stay as they are
    [GE.soft]  y = x - tau if x > tau, else 0               without a jump: tau has a gradient
    [GE.proximal]  x' = z - h tau if z > h tau, else 0      z is where the step ends; then y = x

With `signed` |x| is compared with tau, and the sign of x stays. Backwards::

    [dGE.hard]  dx = dy if x >= tau, else 0                 the jump has no part in it; "straight through" dx = dy
    [dGE.soft]  dx = dy if x > tau, else 0,  dtau = -sum dx sign(x)
    [dGE.proximal]  dz = dx' if x' != 0, else 0,  dtau += -h sum dz sign(x'),  dh += -tau sum dz sign(x')

Without `signed` sign(x) is 1 in dGE.soft.

What a row gets whose scores are all below the threshold: its weights p (GE.12) where it reads no token.

::

    [GE.best]  p_ij = 1 at the largest rank, else 0         as "argmax": something is attended, and nothing is divided
    [GE.usual]  p_ij = a_ij                                 as "dense": softmax attention
    [GE.nothing]  p_ij = 0                                  as "zero"; "error" raises

Backwards da_ij += dp_ij for "dense"; the others are constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.args import check, check_choice
from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.options.integrator import Integrator, Rate, RateBackward, Stage, Step, Sums
from refattn.mechanisms.graph_energy.options.state import State
from refattn.ops.activations import soft_threshold
from refattn.ops.masks import largest_of_rows
from refattn.xp import Array, concrete, namespace, zeros


class Emptied:
    """What an emptied row gets: here nothing, the token reads 0."""

    def forward(self, threshold: Any, state: Any, attention: Any, x: Array, allowed: Array | None) -> Array:
        """Return p (b, h, i, j)."""
        return zeros(attention.shape, x)

    def backward(self, filled: Array, d_weights: Array) -> Array | None:
        """Return what p adds to the gradient of attention."""
        return None


class Best(Emptied):
    """All weight on the token with the largest rank; a row that may attend nothing gets 0."""

    def forward(self, threshold: Any, state: Any, attention: Any, x: Array, allowed: Array | None) -> Array:
        """Return p (b, h, i, j)."""
        return largest_of_rows(threshold.rank(state, attention, x), allowed)


class Usual(Emptied):
    """Its attention."""

    def forward(self, threshold: Any, state: Any, attention: Any, x: Array, allowed: Array | None) -> Array:
        """Return p (b, h, i, j)."""
        found: Array = attention
        return found

    def backward(self, filled: Array, d_weights: Array) -> Array | None:
        """Return what p adds to the gradient of attention."""
        found: Array = namespace(filled).where(filled, 0.0, d_weights)
        return found


EMPTIED: dict[str, Emptied] = {"argmax": Best(), "dense": Usual(), "zero": Emptied(), "error": Emptied()}


@dataclass(frozen=True)
class Threshold:
    """What becomes of small scores.

    Attributes
    ----------
    tau
        At least 0: a number, or an array (h,). None means 0.4 in state "token", a quarter of the mean weight in "query"
        and 0 in "feature".
    signed
        Whether |x| is compared with tau; None means only in state "feature".
    empty
        What becomes of a row whose scores are all below tau. "argmax": all weight on the token with the largest
        a_ij x_j, to which no gradient goes but that of its value; "dense": its attention; "zero": nothing; "error": a
        FloatingPointError.
    """

    tau: Number | None = None
    signed: bool | None = None
    empty: str = "argmax"

    def __post_init__(self) -> None:
        if self.signed is not None:
            check("signed", self.signed, bool)
        check_choice("empty", self.empty, EMPTIED)

    def forward(self, x: Array, tau: Number) -> Array:
        """Return y."""
        raise NotImplementedError

    def backward(self, x: Array, tau: Number, d_kept: Array) -> tuple[Array, Array]:
        """Return the gradient of x for that of y, and the terms of that of tau."""
        raise NotImplementedError

    def positive(self, x: Array, kept: Array) -> Array:
        """Return what is above 0 where phi(y) = max(y, 0) passes a gradient."""
        return kept

    def around(self, step: Integrator, tau: Number) -> Any:
        """Return what takes a step: an integrator, and what this does after it."""
        return step

    def rank(self, state: State, attention: Any, x: Array) -> Array:
        """Return by what the best token of an emptied row is found."""
        return state.rank(attention, x)

    @property
    def passes_dropped(self) -> bool:
        """Whether scores that became 0 get a gradient."""
        return False

    @property
    def emptied(self) -> Emptied:
        """What an emptied row gets."""
        return EMPTIED[self.empty]

    def size(self, x: Array) -> Array:
        """Return what is compared with tau."""
        return namespace(x).abs(x) if self.signed else x

    def check_filled(self, filled: Array) -> None:
        """Raise FloatingPointError where a row (b, h, i, 1) has been emptied, and name the first."""
        xp = namespace(filled)
        if concrete(xp.all(filled)) is not False:
            return
        first = int(xp.argmin(xp.astype(xp.reshape(filled, (-1,)), xp.int8)))
        _, heads, queries, _ = filled.shape
        place = f"batch {first // (heads * queries)}, head {first // queries % heads}, token {first % queries}"
        needs = 'lower tau, or choose empty="argmax", "dense" or "zero"'
        raise FloatingPointError(f"{place}: no score is above tau; {needs}")


@dataclass(frozen=True)
class Hard(Threshold):
    """A score below tau becomes 0.

    Attributes
    ----------
    straight_through
        Whether the gradient passes the threshold by.
    """

    straight_through: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("straight_through", self.straight_through, bool)

    def forward(self, x: Array, tau: Number) -> Array:
        """Return y; NaN stays."""
        return namespace(x).where(self.size(x) < tau, 0.0, x)

    def backward(self, x: Array, tau: Number, d_kept: Array) -> tuple[Array, Array]:
        """Return the gradient of x, and 0 for tau."""
        nothing = zeros(d_kept.shape, d_kept)
        if self.straight_through:
            return d_kept, nothing
        return namespace(x).where(self.size(x) < tau, 0.0, d_kept), nothing

    def positive(self, x: Array, kept: Array) -> Array:
        """Return y, or x if the gradient passes the threshold by."""
        return x if self.straight_through else kept

    @property
    def passes_dropped(self) -> bool:
        """Whether the gradient passes the threshold by."""
        return self.straight_through


class Soft(Threshold):
    """tau is subtracted, down to 0."""

    def forward(self, x: Array, tau: Number) -> Array:
        """Return y."""
        return soft_threshold(x, tau, signed=bool(self.signed))

    def backward(self, x: Array, tau: Number, d_kept: Array) -> tuple[Array, Array]:
        """Return the gradient of x, and the terms of that of tau."""
        xp = namespace(x)
        d_x = xp.where(self.size(x) <= tau, 0.0, d_kept)
        return d_x, -d_x * xp.sign(x) if self.signed else -d_x


class Proximal(Threshold):
    """The step times tau is subtracted after every step of Euler: E + tau sum pi |x| falls, pi that of `.system`."""

    def forward(self, x: Array, tau: Number) -> Array:
        """Return x: it has been shrunk."""
        return x

    def backward(self, x: Array, tau: Number, d_kept: Array) -> tuple[Array, Array]:
        """Return the gradient of x, and 0 for tau."""
        return d_kept, zeros(d_kept.shape, d_kept)

    def around(self, step: Integrator, tau: Number) -> Any:
        """Return a step after which scores are shrunk."""
        return Shrinking(step, tau, self.signed)

    def rank(self, state: State, attention: Any, x: Array) -> Array:
        """Return attention: every x of an emptied row is 0."""
        return attention


@dataclass(frozen=True)
class Shrinking:
    """A step of another kind, after which h tau is taken off."""

    inside: Integrator
    tau: Number
    signed: bool | None

    def forward(self, rate: Rate, x: Array, h: Number) -> tuple[Array, tuple[Stage, ...]]:
        """Return x' and the stages."""
        there, stages = self.inside.forward(rate, x, h)
        return soft_threshold(there, h * self.tau, signed=bool(self.signed)), stages

    def backward(self, rate_backward: RateBackward, step: Step, h: Number, d_after: Array, sums: Sums) -> Array:
        """Return the gradient of x for that of x'; those of tau and of the step are added to `sums`."""
        assert step.after is not None
        xp = namespace(d_after)
        # forward: x' = sign(there) (|there| - h tau) where that is positive
        d_there = xp.where(step.after == 0.0, 0.0, d_after)
        pushed = d_there * xp.sign(step.after)
        sums.add("tau", -(h * pushed))
        sums.add("step", -(self.tau * step.factor * pushed))
        return self.inside.backward(rate_backward, step, h, d_there, sums)


THRESHOLDS: dict[str, type[Threshold]] = {"hard": Hard, "soft": Soft, "proximal": Proximal}
