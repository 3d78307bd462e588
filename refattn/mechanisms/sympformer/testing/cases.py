"""Designed calls of the core: together they exercise every option, and each could expose some plausible error.

Scores of about unit size give z of about unit size, and then kinetic and potential terms are of one size too. With
large scores no gradient fits float16: that is for the tests. Lengths are no multiples of 8.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.case_builders import SHORT, long_tail
from refattn.mechanisms.record import Case, Input


def case(
    name: str,
    kind: str,
    purpose: str,
    *,
    b: int = 2,
    h: int = 3,
    g: int | None = None,
    n: int = 29,
    d: int = 16,
    e: int | None = None,
    logits: float = 1.0,
    kinetic: float | None = 1.0,
    **options: Any,
) -> Case:
    g, e = h if g is None else g, d if e is None else e
    inputs = {
        "q": Input((b, h, n, d), "normal", {"scale": logits}),
        "k": Input((b, g, n, d)),
        "v": Input((b, g, n, e)),
    }
    if kinetic is not None:
        inputs["kinetic"] = Input((b, h, n, 1), "normal", {"scale": kinetic})
    return Case(name, kind, inputs, options, purpose)


def _exact(name: str, kind: str, purpose: str) -> Case:
    """Return a case whose output is a sum of small whole numbers over 32. With other scores z is no whole number."""
    inputs = {
        "q": Input((1, 4, 16, 16), "powers", {"low": 4, "high": 4}),
        "k": Input((1, 2, 16, 16), "integers", {"low": 0, "high": 0}),
        "v": Input((1, 2, 16, 16), "integers", {"low": 1, "high": 2}),
        "kinetic": Input((1, 4, 16, 1), "integers", {"low": 1, "high": 2}),
    }
    return Case(name, kind, inputs, {}, purpose, {"out": SHORT})


CASES = (
    case("tiny", "causal", "small enough to read", b=1, h=1, n=4, d=2, causal=True),
    case("causal", "causal", "moderate scores", causal=True),
    case("causal-long", "causal", "several strips", b=1, h=1, n=280, d=12, causal=True),
    case("causal-top-left", "causal", "the same as the other alignment", n=13, causal="top_left"),
    case("all", "not causal", "every token pushes every other one"),
    case("all-long", "not causal", "several strips", b=1, h=1, n=280, d=12),
    case("scale", "scale", "a scale that is no power of two", scale=0.3, causal=True),
    case("rest", "rest", "no kinetic terms", kinetic=None, causal=True),
    case("fast", "fast", "kinetic terms far above the potential", kinetic=30.0, causal=True),
    case("grouped", "grouped", "two query heads share one key/value head", h=4, g=2, e=20, causal=True),
    case("wide", "unequal", "one head, values wider", h=1, d=40, e=48, causal=True),
    case("narrow", "unequal", "width 1", d=1, e=3),
    case("one-token", "size", "a token alone", n=1, causal=True),
    long_tail(case("long-tail", "tail", "one token of much weight, 100 of little", b=1, h=1, n=101), 101),
    _exact("exact", "exact", "scores of 0, so that z is 1 and kinetic terms are whole numbers"),
)
