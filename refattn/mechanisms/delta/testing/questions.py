"""What implementations of the recurrences are asked, to tell which conventions they follow: a small call each.

A call has no more than its question needs, so that one wrong convention does not hide the answer to another question.
States that come in are the identity, which is its own transpose, but where the layout is asked for.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.record import Case, Input, Question

SIZES = {"b": 1, "h": 1, "f": 1, "g": 1, "n": 3, "d": 8, "e": 8}

IDENTITY = Input((1, 1, 8, 8), "units", {"period": 8, "step": 1})
SMALL = Input((1, 1, 1, 8), "list", {"0": 2.0**-12})  # of about the length sqrt(eps)
DECAY = Input((1, 1, 3), "uniform", {"low": -1.5, "high": -0.25})
BETA = Input((1, 1, 3), "uniform", {"low": 0.4, "high": 0.6})
CHANNELS = Input((1, 1, 3, 8), "uniform", {"low": -1.0, "high": 0.0})
LARGE = Input((1, 1, 3, 8), "normal", {"scale": 4.0})
EIGHT = {name: Input((1, 1, 8), "uniform", x.numbers) for name, x in (("beta", BETA), ("log_decay", DECAY))}
STEP = Input((1, 1, 3), "uniform", {"low": 1.25, "high": 1.75})
TWO = Input((1, 1, 2, 8, 8), "units", {"period": 8, "step": 1})


def _call(name: str, purpose: str, **given: Any) -> Case:
    """Return a call of sizes and arrays that are given; keys have about length 1, and values are large."""
    sizes = SIZES | {letter: given.pop(letter) for letter in SIZES if letter in given}
    arrays = {
        name: Input(tuple(sizes[a] for a in axes), "normal", {"scale": scale})
        for name, axes, scale in (("q", "bhnd", 1.0), ("k", "bfnd", 8**-0.5), ("v", "bgne", 4.0))
    }
    arrays |= {n: x for n, x in given.items() if isinstance(x, Input)}
    options = {n: x for n, x in given.items() if not isinstance(x, Input)}
    return Case(name, "question", arrays, options, purpose)


QUESTIONS = (
    Question(
        "order",
        "decay, predict, write, read",
        _call("order", "gated delta", beta=BETA, log_decay=DECAY),
        {
            "predict, write, decay, read": "write, then decay",
            "predict, decay, write, read": "prediction before the decay",
            "read, decay, predict, write": "read before the token",
            "decay, read, predict, write": "read before the write",
        },
    ),
    Question(
        "write",
        "beta (v - p)",
        _call("write", "delta", beta=BETA),
        {
            "v - beta p": "beta on the prediction alone",
            "beta v - p": "beta on the value alone",
            "beta (v - beta p)": "beta in the keys, read and written",
            "beta (p - v)": "error of the other sign",
            "with sigmoid(beta) for beta": "beta through a sigmoid again",
            "with beta / 2 for beta": "half of beta",
        },
    ),
    Question(
        "decay",
        "exp(log_decay)",
        _call("decay", "gated by head", q=LARGE, log_decay=DECAY, state=IDENTITY),
        {
            "2^log_decay": "gate to base 2",
            "log_decay itself": "gate not exponentiated",
            "exp(log_decay) of the token before": "gate one token late",
            "exp(log_decay), but for the first token, which keeps the state": "first token does not decay",
        },
    ),
    Question(
        "channels of the decay",
        "those of keys",
        _call("channels", "gated by channel", log_decay=CHANNELS, state=IDENTITY),
        {"those of values": "decay on the axis of values"},
    ),
    Question(
        "scale",
        "1/sqrt(d)",
        _call("scale", "linear", n=1, e=16),
        {
            "1: left out": "scale left out",
            "1/d: applied twice": "scale applied twice",
            "1/sqrt(width of v)": "scale of the values' width",
        },
    ),
    Question(
        "scale and norm",
        "the scale is of what is read",
        _call("scaled keys", "delta with normalised keys", beta=BETA, qk_norm=True),
        {"keys are scaled, too": "scale on keys too"},
    ),
    Question(
        "norm",
        "x / sqrt(sum x^2 + eps)",
        _call("norm", "linear with normalised keys", n=1, q=SMALL, k=SMALL, qk_norm=True),
        {"x / max(norm, eps)": "norm_eps as the least norm", "x / sqrt(sum x^2 + d eps)": "norm_eps on the mean"},
    ),
    Question(
        "what is normalised",
        "queries and keys",
        _call("normalised", "linear with normalised keys", k=Input((1, 1, 3, 8)), qk_norm=True),
        {"queries": "queries alone normalised", "keys": "keys alone normalised"},
    ),
    Question(
        "state in",
        "(keys, values)",
        _call("state in", "linear", n=1, state=Input((1, 1, 8, 8))),
        {"ignored": "state in ignored", "(values, keys)": "state in transposed"},
    ),
    Question(
        "state out",
        "(keys, values)",
        _call("state out", "linear"),
        {"(values, keys)": "state out transposed"},
        ("state",),
    ),
    Question(
        "query heads", "neighbours share", _call("query heads", "linear", h=4, g=2, f=2), {"tiled": "queries tiled"}
    ),
    Question("key heads", "neighbours share", _call("key heads", "linear", h=4, g=4, f=2), {"tiled": "keys tiled"}),
    Question(
        "padding",
        "changes nothing",
        _call("padding", "gated delta", n=8, **EIGHT, key_mask=Input((1, 8), "mask", {"keep": 0.5})),
        {"writes values of 0, and decays": "mask of values alone", "decays": "masked tokens decay"},
    ),
    Question(
        "momentum",
        "M = mu M + k u^T, S = a S + beta M",
        _call("momentum", "momentum delta", beta=BETA, log_momentum=DECAY, step=STEP, state=TWO),
        {
            "S = a S + beta (mu M + k u^T) with M that has k u^T already": "momentum of Nesterov",
            "M = mu (M + k u^T)": "momentum damps the new write",
            "S = a S + beta M with M of the token before": "momentum of the token before",
            "M = mu M + (1 - mu) k u^T": "momentum as an average",
            "S = a S + step beta M": "step on the state",
            "-M comes in and goes out": "momentum of the other sign",
        },
    ),
)
"""By what is asked: the answer of this library, the call, and the other answers with the convention that gives each."""
