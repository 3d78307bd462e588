"""Designed calls in the sizes that kernels have: each rule over several chunks of 64 tokens, with what meets there.

They stand beside the cases that are small enough for golden vectors, and `refattn verify` runs both. States are wide
along one axis at a time, so that they stay small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from refattn.mechanisms.case_builders import EVERY
from refattn.mechanisms.delta.testing.cases import RULES, case, uniform
from refattn.mechanisms.delta.testing.meetings import MEETINGS
from refattn.mechanisms.record import Case

_LONG: dict[str, Any] = {"h": 1, "n": 130, "d": 8, "e": 4}
_CARRIED: dict[str, Any] = {"b": 2, "h": 2, "f": 1, "g": 1, "n": 67, "d": 8, "e": 12, "state": True}
_PACKED: dict[str, Any] = {"h": 2, "f": 2, "g": 4, "n": 69, "d": 6, "e": 4, "state": True, "lengths": [66, 0, 3]}
_STRONG: dict[str, Any] = {"h": 1, "n": 67, "d": 8, "e": 4, "log_decay": uniform(-5.0, -4.0)}
_ONE: dict[str, Any] = {"b": 2, "h": 2, "f": 2, "g": 4, "n": 1, "d": 128, "e": 6, "state": True}
_FEW: dict[str, Any] = {"b": 2, "h": 1, "f": 1, "g": 2, "n": 7, "d": 72, "e": 6, "keep": 0.7}


def _of(rule: str) -> tuple[Case, ...]:
    """Return the cases that every rule has."""
    return (
        case(f"carried-{rule}", "long", "a state that comes in, and two chunks", rule, **_CARRIED),
        case(f"packed-{rule}", "packed", "sequences of two chunks, of none and of a part", rule, **_PACKED),
        case(f"one-{rule}", "size", "decoding: wide, one token, a state for each of several", rule, **_ONE, scale=0.1),
        case(f"few-{rule}", "size", "wide, a few tokens, some of them padding", rule, **_FEW, qk_norm=True, scale=0.3),
    )


def _cancelling(rule: str) -> Case:
    """Return an exact case in which v - S k is 1/2048 of v: 4098 is no number of bfloat16 or float16, 4096 is.

    The second key holds -4096, so that a query of both keys reads 4096, 0, 2 and 1. If a prediction of 4098 is rounded
    before it is taken from v = 4096, the last one is 2.
    """
    keys, values, betas = (0, 1, 0, 0), (4096.0, -4096.0, 4128.0, 4096.0), (1.0, 1.0, 0.0625, 0.5)
    both = (1.0, 1.0, *(0.0,) * 62)
    given: dict[str, Any] = {
        "q": (((both,) * 4,) * 2,),
        "k": ((tuple(tuple(float(at == key) for at in range(64)) for key in keys),) * 2,),
        "v": ((tuple((value,) * 64 for value in values),) * 2,),
        "beta": ((betas,) * 2,),
    }
    purpose = "a prediction that cancels the value it is taken from, and must not be rounded before"
    sizes: dict[str, Any] = {"h": 2, "n": 4, "d": 64, "e": 64}
    found = case(f"cancels-{rule}", "exact", purpose, rule, **sizes, log_decay=uniform(0.0, 0.0), scale=1.0)
    return replace(found, given=given, exact={"out": EVERY})


KERNEL_SIZES = (
    _cancelling("gated-delta"),
    *(
        case(f"chunks-{rule}", "long", "three chunks: what one leaves the next begins with", rule, **_LONG)
        for rule in ("linear", "gated-head", "gated-channel", "delta", "momentum")  # of others there are long ones
    ),
    *(each for rule in RULES for each in _of(rule)),
    case("wide-128", "size", "a width of 128, two chunks", "kda", h=2, n=66, d=128, e=2),
    case("wide-values", "size", "values of 128, two chunks", h=1, n=66, d=2, e=128),
    case("wide-256", "size", "a width of 256, two chunks", h=1, n=66, d=256, e=2, state=True),
    case("square-64", "size", "keys and values of 64, two chunks", h=1, n=66, d=64, e=64, state=True),
    case(
        "square-128",
        "size",
        "keys and values of 128, a few tokens",
        "kda",
        h=2,
        f=2,
        g=2,
        n=5,
        d=128,
        e=128,
        state=True,
    ),
    case(
        "long-weak",
        "long",
        "a state that lasts over three chunks of one sequence, and a short one behind",
        "gated-head",
        h=1,
        f=1,
        g=2,
        n=133,
        d=8,
        e=12,
        state=True,
        lengths=[131, 2],
        log_decay=uniform(-0.01, 0.0),
    ),
    case("long-strong", "long", "decays that products over a chunk do not survive", "kda", **_STRONG),
    case(
        "long-masked",
        "long",
        "three chunks of padding, queries and keys of length 1, and a state that lasts",
        "kda",
        b=2,
        h=2,
        f=1,
        g=2,
        n=131,
        d=8,
        e=12,
        keep=0.6,
        qk_norm=True,
        scale=0.3,
        state=True,
        log_decay=uniform(-0.02, 0.0),
    ),
    case(
        "long-packed",
        "packed",
        "a sequence of three chunks behind a short one, padding in both; two queries share each of two states",
        h=4,
        f=2,
        g=2,
        n=136,
        d=66,
        e=2,
        lengths=[3, 133],
        keep=0.6,
        qk_norm=True,
        scale=0.3,
    ),
    case(
        "one-packed", "packed", "one token of one sequence", h=2, f=1, g=1, n=1, d=8, e=12, lengths=[0, 1], state=True
    ),
    case(
        "few-packed",
        "packed",
        "sequences of one token each, two queries for each state",
        h=4,
        f=1,
        g=2,
        n=3,
        d=8,
        e=12,
        lengths=[1, 1, 1],
        state=True,
    ),
    case(
        "one-masked",
        "masked",
        "the token is padding, or is not",
        b=4,
        h=1,
        n=1,
        d=66,
        e=68,
        keep=0.5,
        qk_norm=True,
        state=True,
    ),
    *MEETINGS,
)
