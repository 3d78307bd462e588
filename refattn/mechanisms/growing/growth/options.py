"""How a block grows: the choices of a growth step, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import check, check_number

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
        prints: frobenius, the sign of ascent, a step of 1, no scale.
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
        known = {"mode": MODES, "method": METHODS, "metric": METRICS, "singular": SINGULAR, "scale": SCALES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, needs one of {', '.join(values)}")
        for name in ("center_keys", "align", "uneven", "keep_ties"):
            check(name, getattr(self, name), bool)
        if self.uneven and self.scale == "rescale":
            raise ValueError("scale: got 'rescale' with uneven heads, needs frozen: one scale is that of all heads")
        for name, least in (("largest", 1), ("most", 0), ("evaluations", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is None and name == "largest":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, needs a whole number of at least {least}")
        for name in ("share", "trust", "gain", "decrease", "damping"):
            if not float(check_number(name, getattr(self, name))) >= 0.0:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, needs a number of at least 0")
        check_number("amplitude", self.amplitude, positive=True)
        if not 0.0 < float(check_number("factor", self.factor)) < 1.0:
            raise ValueError(f"factor: got {self.factor!r}, needs a number between 0 and 1")

    @property
    def keeps(self) -> bool:
        """Whether the statistics need their sequences."""
        return self.metric != "kron" or (self.mode == "replace" and self.method in ("optimal_als", "report"))

    @property
    def searches(self) -> bool:
        """Whether there is an amplitude to search for."""
        return self.mode == "additive" or (self.mode == "replace" and self.method != "report")
