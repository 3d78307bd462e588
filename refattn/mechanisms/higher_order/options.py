"""What may be chosen: the numbers of the core, with their defaults and their checks, and what divides.

HOL.divisor makes a divisor of the sum z of the weights of a query, by one of four normalisers::

    exact   z, and 1 where it is 0, which it is where a query may attend nothing
    add     z + eps
    clamp   max(z, eps)
    signed  z, moved away from 0 to +-eps where it is nearer: sgn(z) max(|z|, eps), sgn(0) = 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import Any, TypeVar

from refattn.args import ROUNDS, check, check_arrays, check_number, check_whole
from refattn.mechanisms.option_kinds import choose
from refattn.ops.masks import Causal
from refattn.xp import Array, concrete, is_array

T = TypeVar("T")


@dataclass(frozen=True)
class Normaliser:
    """What is subtracted from the weights, and what their sum becomes before it divides; see `NORMALISERS`.

    Attributes
    ----------
    delta
        What is subtracted from every weight. With 1/2 weights of order 2 are (1 + s)^2 / 2, and 0 at s = -1; with 1,
        the author's choice, they are of both signs, and so may be their sums. A 0-d array has a gradient.
    plain
        Whether the sum that divides is that of the weights with delta = 0, which is not the author's.
    """

    delta: float | Array = 0.0
    plain: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", check_number("delta", self.delta))
        check("plain", self.plain, bool)

    @property
    def counts(self) -> bool:
        """Whether the number of keys that a query may attend has to be known beside the sum of its weights."""
        return self.plain


@dataclass(frozen=True)
class Exact(Normaliser):
    """The sum as it is, and 1 where it is 0.

    With a delta other than 0 and 1/2 it may be 0 although there are keys, and is infinite there: see `dense`.
    """

    @property
    def counts(self) -> bool:
        """As for all, and to tell a sum from rounding errors."""
        return self.plain or is_array(self.delta) or self.delta not in (0.0, 0.5)


@dataclass(frozen=True)
class _WithEps(Normaliser):
    eps: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "eps", _number("eps", self.eps, positive=True))


@dataclass(frozen=True)
class Add(_WithEps):
    """The sum and a number above 0, eps."""

    eps: float = 1e-6


@dataclass(frozen=True)
class Clamp(_WithEps):
    """The sum, but at least a number above 0, eps."""

    eps: float = 1e-5


@dataclass(frozen=True)
class Signed(_WithEps):
    """The sum, moved away from 0 to a distance of at least eps."""

    eps: float = 1e-6


NORMALISERS: dict[str, type[Normaliser]] = {"exact": Exact, "add": Add, "clamp": Clamp, "signed": Signed}


@dataclass(frozen=True)
class Options:
    """The static choices of the core; what they mean stands in `refattn.mechanisms.higher_order.core.forward`."""

    order: int = 2
    alpha: float | Array = 3.0
    normaliser: Normaliser = "exact"  # type: ignore[assignment]  # text is read below
    layer_norm: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        order = check_whole("order", self.order, 0, ROUNDS)
        normaliser = choose("normaliser", self.normaliser, NORMALISERS)
        if order == 0 and not is_array(normaliser.delta) and normaliser.delta == 1.0:
            raise ValueError("normaliser: got delta=1 with order=0, needs delta 0 or 1/2: T_0 - 1 is 0 for every key")
        check("layer_norm", self.layer_norm, bool)
        checked = {"order": order, "normaliser": normaliser, "alpha": check_number("alpha", self.alpha, positive=True)}
        checked["norm_eps"] = eps = _number("norm_eps", self.norm_eps, positive=False)
        if eps < 0.0:
            raise ValueError(f"norm_eps: got {self.norm_eps}, needs a finite number of at least 0")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the choices among the arguments of a call."""
        return Options(**{field.name: given[field.name] for field in fields(Options) if field.name in given})

    def scale(self, width: int) -> float | Array:
        """Return c of HOL.3, the factor of the scores."""
        return 1.0 / (self.alpha * sqrt(width))

    @property
    def learned(self) -> tuple[str, ...]:
        """The numbers that are arrays, and so have gradients."""
        numbers = {"alpha": self.alpha, "delta": self.normaliser.delta}
        return tuple(name for name, number in numbers.items() if is_array(number))

    def like(self, x: Array) -> Options:
        """Return the same with its arrays in the dtype of an array; raise where they are of another library."""
        if not self.learned:
            return self
        numbers = {"alpha": self.alpha, "delta": self.normaliser.delta}
        for name in self.learned:
            xp = check_arrays(q=x, **{name: numbers[name]})
            numbers[name] = xp.astype(numbers[name], x.dtype)
        normaliser = replace(self.normaliser, delta=numbers["delta"])
        return Options(self.order, numbers["alpha"], normaliser, self.layer_norm, self.norm_eps)


def check_sign(options: Options, causal: Causal) -> None:
    """Raise where the first causal rows would be divided by sums of no certain sign."""
    normaliser = options.normaliser
    if causal is False or normaliser.plain or isinstance(normaliser, Signed):
        return
    if concrete(normaliser.delta <= 0.75) is False:  # nearer to 1 than to 1/2
        name, delta = type(normaliser).__name__.lower(), f"{float(normaliser.delta):g}"
        raise ValueError(
            f'normaliser: got {name!r} with delta={delta} and causal={causal!r}, needs "signed": '
            "without its 1 a weight may be negative, and the sum over the few keys of an early row is nearly as often "
            "below 0 as above, or close to it; delta=1/2, which leaves all weights of order 2 at least 0, and "
            "plain=True need no such normaliser"
        )


def _number(name: str, value: Any, *, positive: bool) -> float:
    """Return a finite number; arrays are no static choice."""
    found = check_number(name, value, positive=positive)
    if not isinstance(found, float):
        raise TypeError(f"{name}: got an array, needs a number")
    return found
