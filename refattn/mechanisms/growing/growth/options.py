"""How a block grows: the choices of a growth step, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import Maybe, One, Real, Whole, check_all

PRESERVING = ("gradmax", "zero", "net2wider")
MODES = ("replace", "additive", *PRESERVING)
METHODS = ("optimal", "optimal_als", "frobenius", "report")
METRICS = ("kron", "exact", "mean")
SINGULAR = ("ridge", "drop")
SCALES = ("frozen", "rescale")


@dataclass(frozen=True)
class Options:
    """How a block grows.

    Attributes
    ----------
    mode
        "replace", "additive", or one that keeps the function: "gradmax", "zero", "net2wider".
    method
        The truncation of "replace": "optimal", "optimal_als", "frobenius", or "report", which does what the report
        prints: X^+ B X^+^T of each sequence, frobenius, the sign of ascent, a step of 1, no scale. The metric and the
        damping then change nothing.
    metric
        "kron", "exact" or "mean".
    center_keys
        Whether what a softmax does not see costs nothing.
    singular
        "ridge" or "drop": what becomes of directions that no token had.
    damping
        What is added to the Kronecker metric, in units of its mean eigenvalue.
    scale
        "frozen": the scale stays what it is; "rescale": it becomes 1 / sqrt(new width), and the weights make up for it.
    align
        Whether the new columns are turned to the old ones.
    uneven
        Whether heads get unequal numbers of columns: as many for all together, where they gain most.
    keep_ties
        Whether one gets more columns than it asks for where the last one's singular value is that of the next: which of
        them it would have got is a matter of rounding.
    largest
        The width of a head that is not exceeded; None: that of the augmented tokens.
    most
        How many columns of a head one step adds at most.
    share, trust
        What a column has to be worth: the part of the squares of the hidden gradient that it follows, and what of that
        other sequences have to confirm (see `bottleneck.select_columns`).
    gain
        The least gain at the first amplitude, as a part of the loss.
    amplitude, decrease, factor, evaluations
        Of the search for the amplitude: the first one, the part of the slope by which the loss has to fall, the factor
        from one amplitude to the next, and the most evaluations of the loss.
    seed
        Of random columns.
    """

    mode: str = "replace"
    method: str = "optimal"
    metric: str = "kron"
    center_keys: bool = False
    singular: str = "ridge"
    damping: float = 0.01
    scale: str = "frozen"
    align: bool = True
    uneven: bool = False
    keep_ties: bool = False
    largest: int | None = None
    most: int = 4
    share: float = 0.02
    trust: float = 0.5
    gain: float = 1e-3
    amplitude: float = 0.5
    decrease: float = 1e-4
    factor: float = 0.5
    evaluations: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        check_all(self, mode=One(MODES), method=One(METHODS), metric=One(METRICS), singular=One(SINGULAR))
        check_all(self, scale=One(SCALES), center_keys=bool, align=bool, uneven=bool, keep_ties=bool)
        if self.uneven and self.scale == "rescale":
            raise ValueError("scale: got 'rescale' with uneven heads, needs frozen: one scale is that of all heads")
        check_all(self, largest=Maybe(Whole(1)), most=Whole(), evaluations=Whole(1), seed=Whole(0, 2**64 - 1))
        check_all(self, **dict.fromkeys(("share", "trust", "gain", "decrease", "damping"), Real(0.0)))
        check_all(self, amplitude=Real(0.0, above=True), factor=Real(0.0, 1.0, above=True, below=True))

    @property
    def keeps(self) -> bool:
        """Whether the statistics need their sequences."""
        return self.metric != "kron" or (self.mode == "replace" and self.method in ("optimal_als", "report"))

    @property
    def searches(self) -> bool:
        """Whether there is an amplitude to search for."""
        return self.mode == "additive" or (self.mode == "replace" and self.method != "report")
