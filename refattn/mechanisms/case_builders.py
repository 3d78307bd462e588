"""Designed calls of a core that maps q, k and v: shapes by a letter each, and a mask where there is one.

Exact cases are made of small whole numbers and powers of two, whose scores, weights and outputs every storage type
holds: q is 16 or -16 throughout, and keys are 0 but for their first number, so that a score is one product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from refattn.mechanisms.case_features import features
from refattn.mechanisms.record import Case, Input


def qkv(
    name: str,
    kind: str,
    purpose: str,
    *,
    b: int = 2,
    h: int = 4,
    g: int | None = None,
    n_q: int = 37,
    n_k: int | None = None,
    d: int = 16,
    e: int | None = None,
    logits: float = 1.0,
    values: float = 1.0,
    slack: str = "",
    **options: Any,
) -> Case:
    """Return a case: q (b, h, n_q, d) of the size `logits`, k (b, g, n_k, d), v (b, g, n_k, e) of the size `values`.

    g is h, n_k is n_q and e is d where they are not given. Options that are designed arrays are inputs.
    """
    g, n_k, e = h if g is None else g, n_q if n_k is None else n_k, d if e is None else e
    inputs = {
        "q": Input((b, h, n_q, d), "normal", {"scale": logits}),
        "k": Input((b, g, n_k, d)),
        "v": Input((b, g, n_k, e), "normal", {} if values == 1.0 else {"scale": values}),
    }
    return _case(name, kind, purpose, inputs, options, slack=slack)


def _case(name: str, kind: str, purpose: str, inputs: dict[str, Input], options: dict[str, Any], **others: Any) -> Case:
    """Return a case whose options that are designed arrays, such as a mask, are inputs."""
    arrays = {n: x for n, x in options.items() if isinstance(x, Input)}
    plain = {n: x for n, x in options.items() if n not in arrays}
    return Case(name, kind, {**inputs, **arrays}, plain, purpose, **others)


def repeated(case: Case, period: int) -> Case:
    """Return the case with keys of which only so many differ: every score has its ties, the largest too."""
    k = case.inputs["k"]
    return replace(case, inputs={**case.inputs, "k": Input(k.shape, "repeated", {"period": period})})


def long_tail(case: Case, every: int) -> Case:
    """Return the case with scores that are about 4.5 larger for every so many-th key, starting with the first.

    With 1 key in 100 the others weigh little each, and together as much.
    """
    q, k = case.inputs["q"], case.inputs["k"]
    tail = {
        "q": Input(q.shape, "shifted", {"scale": 0.25, "shift": 1.0}),
        "k": Input(k.shape, "shifted", {"scale": 1.0, "shift": round(36.0 / q.shape[3] ** 0.5) / 8.0, "every": every}),
    }
    return replace(case, inputs={**case.inputs, **tail})


EVERY = ("float64", "float32", "float16", "bfloat16")
SHORT = ("float16", "bfloat16")
"""The types that hide what float32 rounds on the way: a logarithm of 2, a weight that is taken from it again."""


def one_hot(
    name: str,
    kind: str,
    purpose: str,
    *,
    b: int = 1,
    h: int = 4,
    g: int = 2,
    n_q: int = 11,
    n_k: int = 13,
    d: int = 16,
    **options: Any,
) -> Case:
    """Return an exact case: each query gives one key, the first or last that it may attend, all of its weight.

    The scores of neighbours differ by 128 (with the scale 1/4), and exp(-128) is 0 in float32 and lost in float64. The
    output is a value, a power of two, which a weight and a sum that err alike give as well; the gradient of v is a sum
    of small whole numbers, unless the weights were taken from an lse that was rounded.
    """
    inputs = {
        "q": Input((b, h, n_q, d), "powers", {"low": 4, "high": 4}),
        "k": Input((b, g, n_k, d), "ranks", {"step": 32, "ties": 1}),
        "v": Input((b, g, n_k, d), "powers", {"low": 0, "high": 3}),
    }
    return _case(name, kind, purpose, inputs, options, exact={"out": EVERY, "d_v": SHORT})


def equal_scores(
    name: str,
    kind: str,
    purpose: str,
    *,
    ties: int,
    h: int = 4,
    g: int = 2,
    n: int = 16,
    d: int = 16,
    **options: Any,
) -> Case:
    """Return an exact case where `ties` neighbouring keys have equal scores: all n, or pairs of which one wins.

    As many as share the weight have to be a power of two: of a pair that may be one or two. Values are positive, so
    that no sum is near 0, and what float32 rounds on the way is lost in a shorter type.
    """
    inputs = {
        "q": Input((1, h, n, d), "powers", {"low": 4, "high": 4}),
        "k": Input((1, g, n, d), "ranks", {"step": 32 if ties < n else 0.25, "ties": ties}),
        "v": Input((1, g, n, d), "integers", {"low": 1, "high": 8}),
    }
    return _case(name, kind, purpose, inputs, options, exact={"out": SHORT, "d_v": SHORT})


def bias(*shape: int, scale: float = 1.0, hidden: float = 0.0) -> Input:
    """Return a bias of normal numbers, -inf for about so many pairs."""
    return Input(shape, "biased", {"scale": scale, "hidden": hidden} if hidden else {"scale": scale})


def alibi(*shape: int, offset: int, **numbers: float) -> Input:
    """Return the biases of ALiBi (b, h, i, j), for queries that stand at i + offset."""
    return Input(shape, "alibi", {"offset": offset, **numbers})


def listed(*numbers: float, shape: tuple[int, ...] | None = None) -> Input:
    """Return these numbers, in order and over again."""
    return Input(shape or (len(numbers),), "list", {str(n): x for n, x in enumerate(numbers)})


def counts(*numbers: int) -> Input:
    """Return whole numbers, one for each batch element."""
    return Input((len(numbers),), "counts", {str(n): x for n, x in enumerate(numbers)})


def dropout(*shape: int, p: float) -> Input:
    """Return what weights are multiplied by in dropout of rate p, of which 1/(1-p) should be a power of two."""
    return Input(shape, "dropout", {"p": p})


def mask(*shape: int, keep: float = 0.7) -> Input:
    """Return a mask of which about so many pairs may attend."""
    return Input(shape, "mask", {"keep": keep})


USUAL = (
    qkv("tiny", "plain", "small enough to read", b=1, h=2, n_q=4, d=2),
    qkv("causal-fewer", "causal", "fewer queries than keys", b=1, n_q=11, n_k=19, causal=True),
    qkv("mask", "masked", "one mask for each head", b=1, n_q=13, mask=mask(4, 13, 13)),
    qkv("grouped", "grouped", "two query heads share one key/value head", b=1, g=2, n_q=11),
)
"""What every map of q, k and v with masks, causality and shared heads is called with."""


def with_usual(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return the cases, and "tiny" and those of `USUAL` whose name none of them has, nor all of their features."""
    names, known = {case.name for case in cases}, [features(case) for case in cases]
    new = (one for one in USUAL if one.name == "tiny" or not any(features(one) <= has for has in known))
    return (*cases, *(one for one in new if one.name not in names))
