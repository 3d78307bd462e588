"""Designed calls of the core: together they exercise every option, and each could expose some plausible error.

Sizes are small, because the definition solves a system for each query. A jitter is given wherever there is an operator,
so that a case means the same in every dtype; and the perturbation is psi = pi + epsilon phi but where another one is
the point, because the inverse of psi = phi + epsilon pi is often far away or ambiguous.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.case_builders import long_tail, one_hot
from refattn.mechanisms.record import Case, Input


def case(
    name: str,
    kind: str,
    purpose: str,
    *,
    b: int = 2,
    h: int = 2,
    g: int | None = None,
    n_q: int = 7,
    n_k: int | None = None,
    d: int = 6,
    size: float = 1.0,
    mask: Input | None = None,
    **options: Any,
) -> Case:
    g, n_k = h if g is None else g, n_q if n_k is None else n_k
    inputs = {
        "q": Input((b, h, n_q, d), "normal", {"scale": size}),
        "k": Input((b, g, n_k, d)),
        "v": Input((b, g, n_k, d)),
    }
    if mask is not None:
        inputs["mask"] = mask
    given = {"perturbation": "identity", "jitter": 1e-2} | options
    return Case(name, kind, inputs, given, purpose)


SMALL: dict[str, Any] = {"b": 1, "h": 1, "n_q": 2, "n_k": 3, "d": 2}
"""Sizes at which the loops find a limited operator, by descent, in a short time."""


def _mask(*shape: int, keep: float = 0.7) -> Input:
    return Input(shape, "mask", {"keep": keep})


CASES = (
    case("tiny", "plain", "small enough to read", b=1, n_q=4, d=2),
    case("plain", "plain", "one transition", h=4, n_q=53, n_k=11),
    case("attention", "plain", "one update is plain attention", updates=1),
    case(
        "four",
        "plain",
        "three transitions, strongly perturbed",
        h=4,
        n_q=41,
        n_k=7,
        updates=4,
        perturbation="identity(epsilon=0.4)",
        fit="stein(ridge=0.3)",
    ),
    case("causal", "causal", "the future is hidden", causal=True, updates=3),
    case("causal-tail", "causal", "bottom-right: the last query sees all", n_q=5, n_k=9, causal=True),
    case("causal-top-left", "causal", "query i sees keys 0 to i", n_q=5, n_k=9, causal="top_left"),
    case("causal-head", "causal", "more queries than keys: the first rows are empty", n_q=9, n_k=5, causal=True),
    case("mask-full", "masked", "one mask for each pair", mask=_mask(2, 2, 7, 7), updates=3),
    case("mask-keys", "masked", "padded keys", mask=_mask(2, 1, 1, 7)),
    case("mask-causal", "masked", "both masks at once", mask=_mask(7, 7), causal=True),
    case("empty-rows", "masked", "most rows may attend nothing", mask=_mask(2, 2, 7, 7, keep=0.1)),
    case(
        "empty-full",
        "masked",
        "the same, on all functions",
        b=1,
        h=1,
        mask=_mask(1, 1, 7, 7, keep=0.1),
        space="full",
    ),
    case(
        "empty-augmented",
        "masked",
        "and with coordinates",
        b=1,
        h=1,
        mask=_mask(1, 1, 7, 7, keep=0.1),
        space="augmented",
    ),
    case(
        "grouped",
        "grouped",
        "two query heads share one key/value head",
        h=4,
        g=2,
        kernel="rbf(bandwidth=1.2, weight=2.0)",
    ),
    case("few-keys", "size", "more transitions than keys", n_k=2, updates=4, jitter=3.0),
    case("one-key", "size", "the space has one dimension", n_q=5, n_k=1, updates=3),
    case("one-query", "size", "decoding: one query", n_q=1, n_k=9, causal=True),
    case("no-key", "size", "nothing to attend", n_q=5, n_k=0),
    case("no-query", "size", "nothing asked", n_q=0, n_k=5),
    case("separable", "fit", "the error in the norm of the kernel's space", fit="separable", updates=3, causal=True),
    case("full", "space", "the operator acts on all functions", space="full", updates=3),
    case("augment", "space", "coordinates are observables", space="augmented", updates=3, mask=_mask(7, 7)),
    case(
        "norm",
        "fit",
        "an operator that cannot be longer",
        **SMALL,
        updates=3,
        fit="separable(ridge=0.5, norm=0.35)",
    ),
    case("toward-identity", "fit", "the ridge draws to the identity", fit="stein(tau=1.0)", updates=3),
    case(
        "mean",
        "fit",
        "the error's mean; the last transition",
        fit="stein(scale='mean', window=1)",
        updates=3,
        causal=True,
    ),
    case("linear", "kernel", "x . y alone", kernel="linear", n_k=11, jitter=0.1),
    case("polynomial", "kernel", "a cube", kernel="polynomial(weight=0.3, degree=3, constant=0.5)", space="augmented"),
    case("matern32", "kernel", "once differentiable", kernel="matern32"),
    case("matern52", "kernel", "twice differentiable; its softmax", kernel="matern52", similarity="kernel", updates=3),
    case(
        "own",
        "kernel",
        "1 / (1 + |x - y|^2 / 2), of a user's, and an operator of one mode",
        **SMALL,
        updates=3,
        kernel="rational",
        fit="separable(ridge=0.5, rank=1)",
    ),
    case("shift", "perturbation", "psi = phi + epsilon pi", perturbation="shift(epsilon=2.0)", fit="stein(ridge=0.5)"),
    case("pencil", "perturbation", "psi = mix pi + epsilon phi", perturbation="pencil(epsilon=0.3, mix=0.7)"),
    case(
        "single",
        "perturbation",
        "one query: what 2 % of the gradients of epsilon and mix are shows in bfloat16",
        b=1,
        h=1,
        n_q=1,
        n_k=7,
        perturbation="pencil(epsilon=0.4, mix=0.4)",
    ),
    long_tail(case("long-tail", "tail", "one key of much weight, 20 of little", b=1, h=1, n_k=21), 21),
    # One update has no operator: from the second on a system is solved, and nothing is exact.
    one_hot("exact", "exact", "each query takes one value", mask=_mask(1, 1, 11, 13), causal=True, updates=1),
)
