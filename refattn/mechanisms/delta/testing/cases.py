"""Designed calls of the core: together they exercise every rule and option, and each could expose a plausible error.

Keys are near length 1, and what a token writes stays bounded. Lengths are no multiples of a chunk; two cases are longer
than kernels' chunks of 64 and 128, where errors between chunks show.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from refattn.mechanisms.case_builders import EVERY
from refattn.mechanisms.record import Case, Input

HEAD, CHANNEL = "bgn", "bgnd"

RULES: dict[str, dict[str, str]] = {
    "linear": {},
    "gated-head": {"log_decay": HEAD},
    "gated-channel": {"log_decay": CHANNEL},
    "delta": {"beta": HEAD},
    "gated-delta": {"beta": HEAD, "log_decay": HEAD},
    "kda": {"beta": HEAD, "log_decay": CHANNEL},
    "momentum": {"beta": HEAD, "log_decay": HEAD, "log_momentum": HEAD, "step": HEAD},
}
"""The gates that a rule has, with their axes."""

GATES = {
    "beta": {"low": 0.05, "high": 0.95},
    "log_decay": {"low": -0.5, "high": 0.0},
    "log_momentum": {"low": -1.5, "high": -0.05},
    "step": {"low": 0.25, "high": 1.5},
}


def case(
    name: str,
    kind: str,
    purpose: str,
    rule: str = "gated-delta",
    *,
    b: int = 1,
    h: int = 2,
    f: int = 0,
    g: int = 0,
    n: int = 21,
    d: int = 16,
    e: int = 12,
    size: float = 1.0,
    state: bool = False,
    keep: float | None = None,
    keys: Input | None = None,
    **given: Any,
) -> Case:
    """Return a case: f and g are h where they are not given; `size` is that of q and k; inputs in `given` are gates."""
    sizes = {"b": b, "h": h, "f": f or h, "g": g or f or h, "n": n, "d": d, "e": e}

    def shape(axes: str) -> tuple[int, ...]:
        return tuple(sizes[a] for a in axes)

    k = Input(shape("bfnd"), "normal", {"scale": size * 2.0 ** -round(math.log2(max(d, 1)) / 2.0)}, "bfnd")
    inputs = {
        "q": Input(shape("bhnd"), "normal", {"scale": size}, "bhnd"),
        "k": k if keys is None else replace(keys, shape=k.shape, axes=k.axes),
        "v": Input(shape("bgne"), axes="bgne"),
    }
    for gate, axes in RULES[rule].items():
        own = given.pop(gate, Input((), "uniform", GATES[gate]))
        inputs[gate] = replace(own, shape=shape(axes), axes=axes)
    if state:
        first = len(given["lengths"]) if "lengths" in given else b
        two = (2,) if rule == "momentum" else ()
        axes = ("." if "lengths" in given else "b") + "g" + "." * len(two) + "de"
        inputs["state"] = Input((first, sizes["g"], *two, d, e), axes=axes)
    if keep is not None:
        inputs["key_mask"] = Input((b, n), "mask", {"keep": keep}, "bn")
    return Case(name, kind, inputs, given, purpose)


def uniform(low: float, high: float) -> Input:
    """Return a gate uniform in a range; its shape is filled in."""
    return Input((), "uniform", {"low": low, "high": high})


def whole(low: int, high: int) -> Input:
    """Return a gate of whole numbers; its shape is filled in."""
    return Input((), "integers", {"low": low, "high": high})


def _burst(value: float, at: int) -> Input:
    return Input((), "burst", {"low": -0.1, "value": value, "at": at})


_LONG: dict[str, Any] = {"h": 1, "d": 8, "e": 6}
_ONE = uniform(1.0, 1.0)
_STRONG = uniform(-5.0, -4.0)
_RESETS = Input((), "resets", {"low": -0.5, "every": 6})
_FORGETS = Input((), "resets", {"low": -1.0, "every": 1})
_SPARSE, _CYCLE = (Input((), "units", {"step": step, "period": period}) for step, period in ((3, 24), (1, 8)))
_FAINT: dict[str, Any] = {"beta": uniform(1e-6, 1e-6), "state": True, "n": 13}
_SLOW: dict[str, Any] = {"log_momentum": uniform(-0.06, -0.04), "beta": uniform(0.05, 0.2)}


def _exact(name: str, purpose: str, **given: Any) -> Case:
    """Return a case of unit vectors as keys and small whole numbers: every honest order gives the same numbers."""
    keys = Input((), "units", {"step": 5, "period": 16})
    plain = case(name, "exact", purpose, "delta", n=11, d=16, e=8, beta=whole(0, 2), keys=keys, scale=0.25, **given)
    small = {"q": ("integers", -2, 2), "v": ("integers", 1, 8)}
    inputs = {
        each: replace(plain.inputs[each], design=design, numbers={"low": low, "high": high})
        for each, (design, low, high) in small.items()
    }
    return replace(plain, inputs={**plain.inputs, **inputs}, exact={"out": EVERY, "state": EVERY})


CASES = (
    case("tiny", "plain", "small enough to read", h=1, n=3, d=2, e=2),
    case("linear", "plain", "nothing is predicted, nothing decays", "linear"),
    case("gated-head", "plain", "a decay of heads alone", "gated-head"),
    case("gated-channel", "plain", "a decay of channels alone", "gated-channel"),
    case("delta", "plain", "the error is written", "delta"),
    case("gated-delta", "plain", "decay, then predict, then write, then read", b=2),
    case("kda", "plain", "a decay of channels, of the key's axis", "kda"),
    case("momentum", "plain", "the write moves on", "momentum"),
    case("long-150", "long", "errors between chunks of 32 and 64", "kda", n=150, **_LONG),
    case("long-300", "long", "errors between chunks of 128", n=300, **_LONG),
    *(
        case(f"state-{rule}", "state", "a state comes in, and decays before the first token", rule, state=True, n=13)
        for rule in RULES
    ),
    case("weak", "decay", "hardly any decay", log_decay=uniform(-0.001, 0.0)),
    case("strong", "decay", "a decay that products of cumulative decays do not survive", log_decay=_STRONG),
    case("strong-channels", "decay", "the same by channel", "kda", log_decay=_STRONG, n=37),
    case("burst", "decay", "one strong decay between weak ones", "kda", log_decay=_burst(-300.0, 7)),
    case("reset", "decay", "new sequences by a decay to 0", "kda", log_decay=_RESETS),
    case("swelling", "decay", "a state that grows", log_decay=uniform(0.0, 0.05)),
    case("repeated", "keys", "three keys again and again", keys=Input((), "repeated", {"scale": 0.25, "period": 3})),
    case("aligned", "keys", "keys with a common part", keys=Input((), "shifted", {"scale": 0.125, "shift": 0.21875})),
    case("one-key", "keys", "one key alone", "delta", keys=Input((), "units", {"step": 0, "period": 1}), n=37),
    case("beta-whole", "beta", "write nothing, all, or twice as much", "delta", beta=whole(0, 2), qk_norm=True),
    case("beta-two", "beta", "reflections: beta up to 2", beta=uniform(0.0, 2.0), qk_norm=True),
    case("converged", "beta", "what is written is known already", "delta", n=80, beta=_ONE, keys=_CYCLE, **_LONG),
    case("norm", "norm", "queries and keys of length 1", "kda", qk_norm=True),
    case("norm-small", "norm", "so small that norm_eps shows", qk_norm=True, size=2.0**-8, n=13),
    case("norm-zero", "norm", "keys of 0 stay 0", qk_norm=True, keys=_SPARSE, n=13),
    case("grouped-queries", "grouped", "two query heads read one state", h=4, f=2, g=2),
    case("one-kv", "grouped", "all query heads read one state", "kda", h=4, f=1, g=1, n=13),
    case("grouped-values", "grouped", "a key head serves two states", h=4, f=2, g=4, n=13),
    case("both", "grouped", "fewer queries than states, fewer keys than both", h=2, f=1, g=4, n=13),
    case("one-query-head", "grouped", "one query and one key for two states", "kda", h=1, f=1, g=2, n=13),
    case("mask-some", "masked", "padding between tokens", b=2, keep=0.6, state=True),
    case("mask-most", "masked", "hardly a token", "kda", b=2, keep=0.15, n=13, state=True),
    case("mask-momentum", "masked", "the momentum waits, too", "momentum", b=2, keep=0.6, state=True),
    case("mask-all", "masked", "no token at all", keep=0.0, n=11, state=True),
    case("lengths", "packed", "sequences side by side, one of them empty", "kda", n=14, state=True, lengths=[5, 0, 9]),
    case("lengths-momentum", "packed", "the same with a momentum", "momentum", n=14, state=True, lengths=[9, 0, 5]),
    case("square", "state", "a state whose axes could be taken for each other", "kda", d=8, e=8, state=True, n=13),
    case("unequal", "size", "values wider than keys", d=5, e=7),
    case("width-one", "size", "keys of one number", "kda", d=1, e=3, n=11),
    case("one-token", "size", "decoding: one token and a state", n=1, state=True),
    case("no-token", "size", "the state passes", n=0, state=True),
    case("scale", "scale", "a scale of the caller's own", scale=0.75, n=13),
    case("mu-none", "momentum", "a momentum that is forgotten at once", "momentum", log_momentum=_FORGETS),
    case("mu-high", "momentum", "a momentum that lasts", "momentum", **_SLOW),
    case("step-two", "momentum", "steps of 2", "momentum", step=uniform(2.0, 2.0), beta=uniform(0.05, 0.3), n=13),
    case("beta-faint", "momentum", "a beta whose logarithm would need an eps", "momentum", **_FAINT),
    _exact("exact", "whole numbers throughout: a state that is rounded once more shows"),
)
