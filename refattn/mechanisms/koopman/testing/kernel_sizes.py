"""Designed calls in which options meet sizes and each other: every pair that the designed cases leave out.

They stand beside the cases of golden vectors, and `refattn verify` runs both.
"""

from __future__ import annotations

from refattn.mechanisms.case_builders import mask
from refattn.mechanisms.koopman.testing.cases import case

_KIND = "pairs"

KERNEL_SIZES = (
    case(
        "one-padded",
        _KIND,
        "decoding over padded keys, two heads on one operator",
        h=4,
        g=2,
        n_q=1,
        n_k=9,
        mask=mask(2, 1, 1, 9),
        fit="separable(ridge=0.3)",
        updates=3,
    ),
    case(
        "one-full",
        _KIND,
        "decoding in another space, of another kernel",
        n_q=1,
        n_k=9,
        kernel="matern32",
        space="full",
        similarity="kernel",
    ),
    case(
        "padded-causal",
        _KIND,
        "another softmax, of some keys of the past, and two heads on one operator",
        h=4,
        g=2,
        n_q=5,
        n_k=9,
        mask=mask(2, 1, 5, 9, keep=0.8),
        causal=True,
        kernel="matern52",
        similarity="kernel",
        fit="separable(ridge=0.3)",
    ),
    case(
        "full-causal",
        _KIND,
        "another space for each query, and two heads on one operator",
        h=4,
        g=2,
        n_q=5,
        n_k=9,
        causal=True,
        space="full",
        fit="stein(ridge=0.3)",
    ),
)
