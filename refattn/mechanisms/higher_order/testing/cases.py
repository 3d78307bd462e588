"""Designed calls of the core: together they exercise every option, and each could expose some plausible error.

Layer normalisation takes the size of queries and keys away; what bends the scores is alpha, which is 1 or less where
the polynomial's orders have to be told apart. Lengths are no multiples of 8, and no two axes of a case have the same
size unless they must.
"""

from __future__ import annotations

from refattn.mechanisms.case_builders import equal_scores, mask, repeated
from refattn.mechanisms.case_builders import qkv as _case

CASES = (
    _case("tiny", "plain", "small enough to read", b=1, h=2, n_q=4, d=4),
    _case("plain", "plain", "the paper's order 2, alpha 3"),
    _case("sharp", "plain", "alpha 1: scores up to sqrt(d)", alpha=1.0),
    _case("long", "plain", "several chunks", b=1, h=2, n_q=300, d=24),
    _case("small-inputs", "plain", "so small that the 1e-5 beside the variance shows", logits=2.0**-7),
    _case("causal", "causal", "the future is hidden", causal=True),
    _case("causal-long", "causal", "chunks on and before the diagonal", b=1, h=2, n_q=300, causal=True),
    _case("causal-tail", "causal", "bottom-right: the last query sees all", n_q=13, n_k=37, causal=True),
    _case("causal-top-left", "causal", "query i sees keys 0 to i", n_q=13, n_k=37, causal="top_left"),
    _case("causal-head", "causal", "more queries than keys: the first rows are empty", n_q=37, n_k=13, causal=True),
    _case("mask-keys", "masked", "padded keys", key_mask=mask(2, 37, keep=0.7)),
    _case("mask-causal", "masked", "padding and causality at once", key_mask=mask(2, 37, keep=0.7), causal=True),
    _case("mask-heads", "masked", "one mask for each head", g=2, mask=mask(4, 37, 37)),
    _case(
        "mask-both",
        "masked",
        "any mask, padding and causality",
        key_mask=mask(2, 37, keep=0.7),
        mask=mask(37, 37),
        causal=True,
    ),
    _case(
        "mask-most",
        "masked",
        "few keys are left, and no key for the first rows",
        b=3,
        key_mask=mask(3, 37, keep=0.2),
        causal=True,
    ),
    _case("grouped", "grouped", "two query heads share one key/value head", h=6, g=3),
    _case("grouped-one", "grouped", "all query heads share one", h=5, g=1, causal=True),
    _case("unequal", "unequal", "lengths and widths differ", n_q=19, n_k=53, d=20, e=12),
    _case("narrow", "unequal", "width 3, values wider", d=3, e=5),
    _case("one-key", "size", "one value, made smaller by eps", n_q=11, n_k=1, normaliser="add(eps=0.25)"),
    _case("one-query", "size", "decoding: one query", n_q=1, n_k=37, causal=True),
    _case("no-key", "size", "nothing to attend", n_q=11, n_k=0),
    _case("no-query", "size", "nothing asked", n_q=0, n_k=11),
    _case("order-0", "order", "the mean of all values", order=0),
    _case("order-1", "order", "linear attention", order=1, d=8),
    _case("order-3", "order", "the cube, with its third of a half", order=3, d=6, alpha=2.0, causal=True),
    _case("order-4", "order", "positive again", order=4, d=5, alpha=0.7, key_mask=mask(2, 37, keep=0.8)),
    _case("order-8", "order", "eight powers", order=8, d=4, alpha=1.0, causal=True),
    _case("half", "subtracted", "delta 1/2: weights (1 + s)^2 / 2", normaliser="exact(delta=0.5)", causal=True),
    _case(
        "one",
        "subtracted",
        "delta 1, the author's: weights of both signs",
        n_k=300,
        normaliser="exact(delta=1.0)",
        alpha=2.0,
    ),
    _case("one-signed", "subtracted", "both signs", normaliser="signed(delta=1.0, eps=2.0)", alpha=1.0, causal=True),
    _case(
        "one-plain",
        "subtracted",
        "1 is left in the denominator",
        normaliser="exact(delta=1.0, plain=True)",
        causal=True,
    ),
    _case("quarter", "subtracted", "any number may be", normaliser="signed(delta=0.25)", alpha=2.0, causal=True),
    _case("add", "normaliser", "an eps that shows", normaliser="add(eps=0.5)", causal=True),
    _case("clamp", "normaliser", "sums below eps are replaced", normaliser="clamp(eps=9.0)", causal=True),
    _case("given", "unnormalised", "queries and keys as they come", layer_norm=False, d=9),
    _case(
        "given-causal",
        "unnormalised",
        "the same, causal",
        layer_norm=False,
        d=9,
        causal=True,
        key_mask=mask(2, 37, keep=0.8),
    ),
    repeated(_case("ties", "ties", "every score three times, the largest too", b=1, n_q=11, n_k=21), 7),
    # Layer normalisation is never exact; without it scores of 2 and -2 weigh 5 and 1.
    equal_scores("exact", "exact", "16 keys share the weight", ties=16, layer_norm=False, alpha=0.5),
)
