"""Power attention, of three files and a state.

`definition` is the paper, `loops` says it again, `chunked` computes it with a state, `rounding` has what that rounds
beside the definition, `wrong` has wrong kernels.
"""

from refattn.args import Real, Whole
from refattn.mechanisms.case_builders import mask, qkv
from refattn.mechanisms.simple import mechanism

from . import chunked, definition, loops, rounding, wrong

record = mechanism(
    "Power attention",
    "C. Gelada et al. 2025, Scaling Context Requires Rethinking Attention (arXiv:2507.04239)",
    definition,
    loops,
    options={"scale": Real(0.0, above=True), "p": Whole(2)},
    more={"chunked": chunked},
    wrong=wrong.of,
    further_rounding_scales=rounding.FURTHER,
    cases=(
        qkv("tiny", "plain", "small enough to read", b=1, h=2, n_q=4, d=2),
        qkv("plain", "plain", "moderate scores", d=4),
        qkv("fourth", "plain", "another power", d=4, p=4),
        qkv("scale", "plain", "a scale that is no power of two, which changes nothing", d=4, scale=0.3),
        qkv("causal", "causal", "the future is hidden; three chunks", causal=True, d=4),
        qkv("causal-fourth", "causal", "chunks of another power", causal=True, d=3, p=4),
        qkv("mask", "masked", "one mask for each head", mask=mask(4, 37, 37)),
        qkv("grouped", "grouped", "two query heads share one key/value head", h=6, g=3, causal=True, d=4),
        qkv("unequal", "unequal", "lengths and widths differ", n_q=19, n_k=53, d=12, e=20),
    ),
    configs=({"p": 4},),
    properties=(
        "permutation",
        "query_permutation",
        "linear_in_v",
        "constant_value",
        "padding",
        "empty",
        "causal",
        "truncation",
        "causal_mask",
        "independent",
        "repeatable",
    ),
)

forward, backward = record.core.forward, record.core.backward
