"""How the force is judged: designed calls, those in which options meet sizes, and wrong readings; `claims.toml`.

Together the designed calls exercise every option, and each could expose some plausible error. Scores of about unit size
give z of about unit size, and then kinetic and potential terms are of one size too. With large scores no gradient fits
float16: that is for the tests. Lengths are no multiples of 8.

A wrong reading is what an implementation computes that follows another convention. Each has the signature of the core
without `implementation` and returns (out, log_z). Verification has to tell them from the core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from refattn.mechanisms.case_builders import SHORT, long_tail
from refattn.mechanisms.record import Case, Input
from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.dense import counts
from refattn.mechanisms.wrong import Changed, conventions, of_group_gradients, of_masks, recomputed
from refattn.xp import Array, namespace


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

_PAIRS = "pairs"
_GROUPED: dict[str, Any] = {"h": 4, "g": 2, "d": 8, "e": 12, "scale": 0.3}

KERNEL_SIZES = (
    case("one-grouped", _PAIRS, "a token alone, values wider, in heads that share one", n=1, **_GROUPED),
    case("few-grouped", _PAIRS, "a few tokens, values wider, in heads that share one", n=6, causal=True, **_GROUPED),
    case("long-grouped", _PAIRS, "strips, values wider, in heads that share one", n=131, causal=True, **_GROUPED),
)


Wrong = Callable[..., tuple[Array, Array]]


def _core(q: Array, k: Array, v: Array, kinetic: Array | None = None, **options: Any) -> tuple[Array, Array]:
    out, saved = core.forward(q, k, v, kinetic=kinetic, **options)
    return out, saved.log_z


_changed = partial(Changed, _core)


def _recomputed(id: str, value: Callable[[dict[str, Any], dict[str, Any]], Array]) -> Wrong:
    """Return the force with another value of one equation."""
    return recomputed(_core, {id: value})


def _log_z(top: float, counted: str) -> Callable[[dict[str, Any], dict[str, Any]], Array]:
    """Return log z with a factor of the largest score, and z divided by the "prefix", "all" tokens or "one"."""

    def value(seen: dict[str, Any], given: dict[str, Any]) -> Array:
        xp, total = namespace(seen["SYMP.total"]), seen["SYMP.total"]
        tokens = total.shape[2]
        offset = 0 if given.get("causal") and counted == "prefix" else None
        number = counts(offset, (0, tokens), 1 if counted == "one" else tokens, total)
        return top * seen["SYMP.largest"] + xp.log(total / number)

    return value


def _factor(own: float, other: float, potential: float) -> Callable[[dict[str, Any], dict[str, Any]], Array]:
    """Return the weights of the push with factors of u_i and u_j, and what is added to their sum."""

    def value(seen: dict[str, Any], given: dict[str, Any]) -> Array:
        push = seen["SYMP.10"]
        brackets = own * push + other * namespace(push).matrix_transpose(push) + potential
        return 0.5 * seen["SYMP.6"] * brackets

    return value


READINGS: dict[str, Wrong] = {
    "the future pushes": _changed(lambda given: {"causal": False}),
    "kinetic terms left out": _changed(lambda given: {"kinetic": None}),
    "scores without a scale": _changed(lambda given: {"scale": 1.0} if given.get("scale") is None else {}),
    **of_masks(_core, "interleaved groups"),
    "a potential that repels": _recomputed("SYMP.11", _factor(1.0, 1.0, -2.0)),
    "a potential of half the size": _recomputed("SYMP.11", _factor(1.0, 1.0, 1.0)),
    "only the token's own kinetic term": _recomputed("SYMP.11", _factor(1.0, 0.0, 2.0)),
    "only the others' kinetic terms": _recomputed("SYMP.11", _factor(0.0, 1.0, 2.0)),
    "kinetic terms over z": _recomputed(  # not over its square
        "SYMP.10", lambda seen, given: seen["SYMP.10"] * namespace(seen["SYMP.7"]).exp(seen["SYMP.7"])
    ),
    "z is a mean over all tokens": _recomputed("SYMP.7", _log_z(1.0, "all")),
    "z is a sum": _recomputed("SYMP.7", _log_z(1.0, "one")),
    "the largest score is lost": _recomputed("SYMP.7", _log_z(0.0, "prefix")),  # it is not added again to log z
    "the output of an attention": _recomputed(  # without z
        "SYMP.12", lambda seen, given: seen["SYMP.12"] * namespace(seen["SYMP.7"]).exp(-seen["SYMP.7"])
    ),
}

WRONG = {
    **conventions(READINGS, ("log_z",)),
    **of_group_gradients(core),
}
