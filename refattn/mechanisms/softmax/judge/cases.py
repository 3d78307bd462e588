"""Designed calls of the core: together they exercise every option, and each could expose some plausible error.

Logits are kept where errors show: q and k of unit variance give scores of about unit size, and "peaked" ones are four
times as large. Lengths are no multiples of 8, and no two axes of a case have the same size unless they must.
"""

from __future__ import annotations

from refattn.mechanisms.calls import equal_scores, long_tail, one_hot, repeated
from refattn.mechanisms.calls import mask as _mask
from refattn.mechanisms.calls import qkv as _case

CASES = (
    _case("tiny", "plain", "small enough to read", b=1, h=2, n_q=4, d=2),
    _case("plain", "plain", "moderate logits"),
    _case("peaked", "plain", "weights near 0 and 1", logits=4.0),
    _case("long", "plain", "several tiles", b=1, h=2, n_q=300, d=24),
    _case("scale", "plain", "a scale that is no power of two", scale=0.3),
    _case("causal", "causal", "the future is hidden", causal=True),
    _case("causal-long", "causal", "tiles on, before and after the diagonal", b=1, h=2, n_q=300, causal=True),
    _case("causal-tail", "causal", "bottom-right: the last query sees all", n_q=13, n_k=37, causal=True),
    _case("causal-top-left", "causal", "query i sees keys 0 to i", n_q=13, n_k=37, causal="top_left"),
    _case("causal-head", "causal", "more queries than keys: the first rows are empty", n_q=37, n_k=13, causal=True),
    _case("mask-full", "masked", "one mask for each pair", mask=_mask(2, 4, 37, 37)),
    _case("mask-keys", "masked", "padded keys", mask=_mask(2, 1, 1, 37)),
    _case("mask-heads", "masked", "one mask for each head", mask=_mask(4, 37, 37)),
    _case("mask-causal", "masked", "both masks at once", mask=_mask(37, 37), causal=True),
    _case("grouped", "grouped", "two query heads share one key/value head", h=6, g=3),
    _case("grouped-one", "grouped", "all query heads share one", h=5, g=1, causal=True),
    _case("unequal", "unequal", "lengths and widths differ", n_q=19, n_k=53, d=12, e=20),
    _case("narrow", "unequal", "width 1, values wider", d=1, e=3),
    _case("empty-rows", "empty-row", "most rows may attend nothing", mask=_mask(2, 4, 37, 37, keep=0.02)),
    _case("one-key", "size", "a softmax of one score is 1", n_q=11, n_k=1),
    _case("one-query", "size", "decoding: one query", n_q=1, n_k=37, causal=True),
    _case("no-key", "size", "nothing to attend", n_q=11, n_k=0),
    _case("no-query", "size", "nothing asked", n_q=0, n_k=11),
    _case("softcap", "softcap", "soft-cap bends the scores", logits=4.0, softcap=5.0),
    _case("softcap-mask", "softcap", "soft-cap before the mask", mask=_mask(37, 37), softcap=2.0),
    repeated(_case("ties", "ties", "every score three times, the largest too", b=1, n_q=11, n_k=21), 7),
    long_tail(_case("long-tail", "tail", "3 keys of much weight, 300 of little", b=1, h=1, n_q=19, n_k=303), 101),
    _case("huge-scores", "extreme", "scores up to 10^4, the output moderate", b=1, n_q=11, n_k=21, logits=2048.0),
    _case("tiny-values", "extreme", "an output near the smallest normal float16", b=1, n_k=21, values=2.0**-12),
    one_hot("exact", "exact", "each query takes one value", mask=_mask(1, 1, 11, 13), causal=True),
    equal_scores("exact-pairs", "exact", "two keys share the weight, or one has it", ties=2, mask=_mask(16, 16)),
    equal_scores("exact-mean", "exact", "16 keys share the weight", ties=16),
)
