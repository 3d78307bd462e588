"""Modern Hopfield attention, of three files.

`definition` is the paper, `loops` says it again, `wrong` has wrong kernels, `tour` shows it.
"""

from refattn.args import Real, Whole
from refattn.mechanisms.case_builders import mask, qkv
from refattn.mechanisms.simple import mechanism

from . import definition, loops, wrong

record = mechanism(
    "Modern Hopfield attention",
    "H. Ramsauer et al. 2021, Hopfield Networks is All You Need (arXiv:2008.02217)",
    definition,
    loops,
    options={"beta": Real(0.0, above=True), "updates": Whole()},
    differentiable=("beta",),
    wrong=wrong.of,
    cases=(
        qkv("tiny", "plain", "small enough to read", b=1, h=2, n_q=4, d=2),
        qkv("plain", "plain", "moderate scores"),
        qkv("no-update", "plain", "softmax attention", updates=0),
        qkv("one-update", "plain", "the update alone, once", updates=1),
        qkv("five-updates", "plain", "errors that add up", updates=5),
        qkv("sharp", "sharp", "a large beta: the nearest key alone", beta=2.0),
        qkv("flat", "plain", "a beta that is no power of two", beta=0.3),
        qkv("fixed-point", "fixed", "the gradient of the fixed point alone", beta=0.05, updates=24, fixed_point=True),
        qkv("causal", "causal", "the future is hidden in every update", causal=True),
        qkv("mask", "masked", "one mask for each head", mask=mask(4, 37, 37)),
        qkv("grouped", "grouped", "two query heads share one key/value head", h=6, g=3),
        qkv("unequal", "unequal", "lengths and widths differ", n_q=19, n_k=53, d=12, e=20),
    ),
    configs=({"updates": 3, "beta": 0.5},),
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
