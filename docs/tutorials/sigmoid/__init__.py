"""Sigmoid attention, a mechanism that the library does not list: `definition` is the paper, `loops` says it again."""

from refattn.mechanisms.case_builders import mask, qkv
from refattn.mechanisms.simple import mechanism

from . import definition, loops

record = mechanism(
    "Sigmoid attention",
    "Ramapuram et al. 2024 (arXiv:2409.04431)",
    definition,
    loops,
    cases=(
        qkv("tiny", "plain", "small enough to read", b=1, h=2, n_q=4, d=2),
        qkv("plain", "plain", "moderate scores"),
        qkv("scale", "plain", "a scale that is no power of two", scale=0.3),
        qkv("causal", "causal", "the future is hidden", causal=True),
        qkv("mask", "masked", "one mask for each head", mask=mask(4, 37, 37)),
        qkv("grouped", "grouped", "two query heads share one key/value head", h=6, g=3),
        qkv("unequal", "unequal", "lengths and widths differ", n_q=19, n_k=53, d=12, e=20),
    ),
    properties=("permutation", "query_permutation", "linear_in_v", "padding", "causal", "independent", "repeatable"),
)
