"""What may be chosen: the numbers of the core, checked once, and how far they let the scores reach.

The normaliser policies say what the row sum z becomes before it divides (HOL.8):

- exact: z, and 1 where z is exactly 0, which it is where a query may attend nothing;
- add: z + eps;
- clamp: max(z, eps);
- signed: z, moved away from 0 to +-eps where it is nearer: sgn(z) max(|z|, eps), with sgn(0) = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.arguments import check_is, check_number
from refattn.ops.masks import Causal

EPS = {"exact": 0.0, "add": 1e-6, "clamp": 1e-5, "signed": 1e-6}
"""Normaliser policies with their default eps."""

DELTAS = (0.0, 0.5, 1.0)
DENOMINATORS = ("matched", "plain")


@dataclass(frozen=True)
class Options:
    """The static choices of the core; see `refattn.mechanisms.higher_order.core.forward`."""

    order: int
    alpha: float
    delta: float
    policy: str
    eps: float
    layer_norm: bool
    norm_eps: float
    denominator: str

    def scale(self, width: int) -> float:
        """Return c = 1 / (alpha sqrt(d)), the factor of the scores."""
        return 1.0 / (self.alpha * math.sqrt(width))


def check_options(
    *,
    order: Any,
    alpha: Any,
    delta: Any,
    policy: Any,
    layer_norm: Any,
    eps: Any,
    norm_eps: Any,
    denominator: Any,
) -> Options:
    """Return the choices; raise where one is of a wrong type or value, or two exclude each other."""
    if isinstance(order, bool) or not isinstance(order, int) or order < 0:
        raise ValueError(f"order: got {order!r}, needs a whole number of at least 0")
    if isinstance(delta, bool) or delta not in DELTAS:
        raise ValueError(f"delta: got {delta!r}, needs 0, 1/2 or 1")
    if order == 0 and delta == 1:
        raise ValueError("delta: got 1 with order=0, needs 0 or 1/2: T_0 - 1 is 0 for every key")
    if policy not in EPS:
        raise ValueError(f"policy: got {policy!r}, needs one of {', '.join(EPS)}")
    if policy == "exact" and eps is not None:
        raise ValueError(f'eps: got {eps} with policy="exact", which has none; needs one of {", ".join([*EPS][1:])}')
    if denominator not in DENOMINATORS:
        raise ValueError(f"denominator: got {denominator!r}, needs one of {', '.join(DENOMINATORS)}")
    check_is("layer_norm", layer_norm, bool)
    number = EPS[policy] if eps is None else _number("eps", eps, positive=True)
    return Options(
        order=order,
        alpha=_number("alpha", alpha, positive=True),
        delta=float(delta),
        policy=policy,
        eps=number,
        layer_norm=layer_norm,
        norm_eps=_number("norm_eps", norm_eps, positive=norm_eps != 0),
        denominator=denominator,
    )


def check_sign(options: Options, causal: Causal) -> None:
    """Raise where the first causal rows would be divided by sums of no certain sign."""
    if causal is not False and options.delta == 1.0 and options.policy != "signed" and options.denominator != "plain":
        raise ValueError(
            f'policy: got {options.policy!r} with delta=1 and causal={causal!r}, needs "signed": without its 1 a '
            "weight may be negative, and the sum over the few keys of an early row is nearly as often below 0 as "
            "above, or close to it; delta=1/2, which leaves all weights of order 2 at least 0, and "
            'denominator="plain" need no such policy'
        )


def _number(name: str, value: Any, *, positive: bool) -> float:
    """Return a finite number; arrays are no static choice."""
    found = check_number(name, value, positive=positive)
    if not isinstance(found, float):
        raise TypeError(f"{name}: got an array, needs a number")
    return found
