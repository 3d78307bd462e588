"""Designed calls of the core: together they exercise every option, and each could expose some plausible error.

Logits are kept where errors show: q and k of unit variance give scores of about unit size, and "peaked" ones are four
times as large. Lengths are no multiples of 8, and no two axes of a case have the same size unless they must.
"""

from __future__ import annotations

from functools import partial

from refattn.mechanisms.case_builders import (
    alibi,
    bias,
    counts,
    dropout,
    equal_scores,
    listed,
    long_tail,
    one_hot,
    qkv,
    repeated,
)
from refattn.mechanisms.case_builders import mask as _mask
from refattn.mechanisms.record import Input

_case = partial(qkv, h=3)

GROWN = {"d": 6, "e": 8, "scale": 0.5**0.5}
"""The scale of width 2 with queries and keys of width 6."""

CASES = (
    _case("tiny", "plain", "small enough to read", b=1, h=2, n_q=4, d=2),
    _case("plain", "plain", "moderate logits", e=12),
    _case("peaked", "plain", "weights near 0 and 1", logits=4.0),
    _case("grown", "grown", "the scale of width 2 with queries and keys of width 6", **GROWN),
    _case("grown-causal", "grown", "the same, causal", causal=True, **GROWN),
    _case("causal", "causal", "the future is hidden", causal=True),
    _case("causal-long", "causal", "tiles on, before and after the diagonal", b=1, h=1, n_q=300, d=8, causal=True),
    _case("causal-tail", "causal", "bottom-right: the last query sees all", n_q=13, n_k=37, causal=True),
    _case("causal-top-left", "causal", "query i sees keys 0 to i", n_q=13, n_k=37, causal="top_left"),
    _case("causal-head", "causal", "more queries than keys: the first rows are empty", n_q=37, n_k=13, causal=True),
    _case("mask-full", "masked", "one mask for each pair", mask=_mask(2, 3, 37, 37)),
    _case("mask-keys", "masked", "padded keys", mask=_mask(2, 1, 1, 37)),
    _case("mask-causal", "masked", "both masks at once", mask=_mask(37, 37), causal=True),
    _case("empty-rows", "empty-row", "most rows may attend nothing", mask=_mask(2, 3, 37, 37, keep=0.02)),
    _case("grouped", "grouped", "two query heads share one key/value head", h=6, g=3),
    _case("narrow", "unequal", "width 1, values wider", d=1, e=3),
    _case("two-keys", "size", "the smallest softmax that has a gradient", n_q=11, n_k=2),
    _case("one-query", "size", "decoding: one query", n_q=1, n_k=37, causal=True),
    _case("no-key", "size", "nothing to attend", n_q=11, n_k=0),
    _case("softcap", "softcap", "soft-cap bends the scores", logits=4.0, softcap=5.0),
    _case("softcap-mask", "softcap", "soft-cap before the mask", mask=_mask(37, 37), softcap=2.0),
    _case(
        "grown-all",
        "combined",
        "a bias, a sink and dropout, with a scale of another width",
        **GROWN,
        bias=bias(3, 37, 37),
        sink=Input((3,)),
        keep=dropout(2, 3, 37, 37, p=0.5),
    ),
    _case(
        "grown-window",
        "combined",
        "windows, some of them empty, hidden keys and a sink of each query head",
        h=6,
        g=3,
        n_q=19,
        n_k=13,
        logits=2.0,
        softcap=3.0,
        causal=True,
        window=(4, None),
        offset=counts(-5, 6),
        bias=bias(2, 1, 19, 13, hidden=0.3),
        sink=Input((6,)),
    ),
    _case(
        "grown-lengths",
        "combined",
        "sequences of their own lengths, windows on both sides, two sinks a head",
        b=4,
        n_q=19,
        n_k=37,
        causal=True,
        window=(9, None),
        q_lengths=counts(19, 7, 0, 1),
        k_lengths=counts(20, 37, 9, 0),
        sink=Input((3, 2)),
    ),
    _case(
        "grown-distances",
        "combined",
        "slopes by head beside a soft-cap, and a bound as large as the number of keys",
        b=1,
        h=4,
        n_q=37,
        n_k=11,
        logits=2.0,
        softcap=2.0,
        window=(None, 11),
        bias=alibi(1, 4, 37, 11, offset=-26),
    ),
    _case("window-head", "window", "more queries than keys: half of the rows are empty", n_q=37, n_k=13, window=(2, 5)),
    repeated(_case("ties", "ties", "every score three times, the largest too", b=1, n_q=11, n_k=21), 7),
    long_tail(_case("long-tail", "tail", "3 keys of much weight, 300 of little", b=1, h=1, n_q=19, n_k=303), 101),
    one_hot("exact", "exact", "each query takes one value", mask=_mask(1, 1, 11, 13), causal=True),
    equal_scores("exact-pairs", "exact", "two keys share the weight, or one has it", ties=2, mask=_mask(16, 16)),
    equal_scores(
        "exact-sink", "exact", "a sink equal to 16 scores", ties=16, scale=0.0, sink=listed(0.0, shape=(4, 16))
    ),
)
