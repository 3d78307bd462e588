"""Designed calls of the core: together they exercise every option, and each could expose some plausible error.

Queries and keys of unit variance give scores of about unit size, so that the scores of tokens are spread around 1/2 and
a threshold of 0.4 drops some. Lengths are no multiples of 8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from refattn.mechanisms.case_builders import one_hot, repeated
from refattn.mechanisms.record import Case, Input


def case(
    name: str,
    group: str,
    purpose: str,
    /,
    *,
    b: int = 2,
    h: int = 4,
    g: int | None = None,
    n: int = 21,
    rows: int | None = None,
    d: int = 16,
    e: int | None = None,
    logits: float = 1.0,
    mask: Input | None = None,
    bias: Input | None = None,
    start: Input | None = None,
    **options: Any,
) -> Case:
    g, e = h if g is None else g, d if e is None else e
    inputs = {"q": Input((b, h, rows or n, d), "normal", {"scale": logits})}
    inputs |= {"k": Input((b, g, n, d)), "v": Input((b, g, n, e))}
    inputs |= {name: x for name, x in (("mask", mask), ("bias", bias), ("start", start)) if x is not None}
    return Case(name, group, inputs, options, purpose)


def _mask(*shape: int, keep: float = 0.7) -> Input:
    return Input(shape, "mask", {"keep": keep})


COEFFICIENTS, A = (-0.3346099853515625, 2.1985321044921875, -1.3866119384765625), (0.5, 1.0, -0.5)

CUBES, EMPTY = "polynomial(coefficients=%s)", "hard(tau=0.55, empty='%s')"

FEW, FEW_EACH, RARE = _mask(21, 21, keep=0.2), _mask(2, 4, 21, 21, keep=0.2), _mask(2, 4, 21, 21, keep=0.03)

NEAR = Input((9, 9), "band", {"before": 2, "after": 2})

SHORT: dict[str, Any] = {"b": 1, "h": 2, "n": 11, "d": 8}
CROSS: dict[str, Any] = {"n": 13, "rows": 7, "start": Input((13,)), "mask": _mask(1, 1, 7, 13, keep=0.3)}
STRONG: dict[str, Any] = {"kappa": 4.0, "mu": 0.5, "step": 0.1}
WEAK: dict[str, Any] = {"kappa": 2.0, "mu": 0.5, "step": 0.1}
FEW_STEPS: dict[str, Any] = {"mu": 0.5, "kappa": 2.0, "step": 0.1}
SOFT: dict[str, Any] = {"threshold": "soft(tau=0.05)", "step": 0.1}
SOFT_SIGNED: dict[str, Any] = {"threshold": "soft(tau=0.3)", "steps": 4}

PER_QUERY = "a distribution for each query"
CROSS_PURPOSE = "queries attend other tokens, some of which none may attend"
POLYNOMIAL_PURPOSE = "few terms, so that an error of the coefficients' gradient is no rounding"

CASES = (
    case("tiny", "plain", "small enough to read", b=1, h=2, n=4, d=2, steps=2),
    case("plain", "plain", "all defaults"),
    case("long", "plain", "many tokens, whose scores are drawn together", b=1, h=2, n=131, d=24),
    case("peaked", "plain", "attention near 0 and 1", logits=4.0),
    case("causal", "causal", "the future is hidden", causal=True),
    case("mask-full", "masked", "one mask for each pair", mask=_mask(2, 4, 21, 21)),
    case("mask-causal", "masked", "both masks at once", mask=_mask(21, 21), causal=True),
    case("window", "masked", "a graph of what is near", b=1, h=1, n=9, d=4, e=3, mask=NEAR, steps=3),
    case("grouped", "grouped", "two query heads share one key/value head", h=6, g=3, e=12),
    case("grouped-one", "grouped", "all query heads share one", h=5, g=1, causal=True),
    case("empty-rows", "empty-row", "most rows may attend nothing", mask=RARE),
    case("emptied", "emptied", "rows that the threshold empties", threshold="hard(tau=0.55)", mask=FEW_EACH),
    case("emptied-dense", "emptied", "they keep their attention", threshold=EMPTY % "dense", mask=FEW),
    case("emptied-zero", "emptied", "they become 0", threshold=EMPTY % "zero", mask=FEW),
    case("bias", "plain", "scores of heads have a bias", bias=Input((4, 21, 21))),
    case("soft", "threshold", "tau is subtracted", threshold="soft(tau=0.3)", step=0.25),
    case("proximal", "threshold", "tau is subtracted after every step", threshold="proximal(tau=0.3)", n=11),
    case("cross", "cross", CROSS_PURPOSE, graph="kernel(over='keys')", **CROSS),
    case("cross-query", "cross", PER_QUERY, n=11, rows=5, state="query", graph="min(over='keys')"),
    case("mean", "graph", "symmetric, with large degrees", graph="mean", step=0.1),
    case("min", "graph", "symmetric, with small degrees", graph="min"),
    case("directed", "graph", "no symmetry at all", graph="none", mu=0.5, kappa=2.0, step=0.2),
    case("heun", "integrator", "two stages", integrator="heun", steps=4, mu=1.5, kappa=3.0, step=0.3),
    case("rk4", "integrator", "four stages", integrator="rk4", steps=3, step=0.4, kappa=2.0, mu=0.5),
    case("tanh", "coupling", "another coupling", coupling="tanh", **STRONG),
    case("identity", "coupling", "diffusion", coupling="identity", **STRONG),
    case("arctan", "coupling", "another coupling", coupling="arctan", **STRONG),
    case("sinh", "coupling", "another coupling", coupling="sinh", **STRONG),
    case("cubic", "coupling", "another coupling", coupling="cubic", **STRONG),
    case("polynomial", "coupling", "coefficients of both signs", coupling=CUBES % (COEFFICIENTS,), **WEAK),
    case("polynomial-few", "coupling", POLYNOMIAL_PURPOSE, b=1, h=1, n=9, d=8, e=2, coupling=CUBES % (A,), **FEW_STEPS),
    case("consensus", "intrinsic", "nothing but coupling", intrinsic="none", step=0.5, steps=6),
    case("wells", "intrinsic", "two wells", intrinsic="double_well", kappa=0.3, mu=0.8, step=0.05),
    case("query", "query", PER_QUERY, state="query", n=13),
    case("query-causal", "query", "on the graph of the past", state="query", n=13, causal=True, step=0.1),
    case("query-mask", "query", "nodes that a query does not see", state="query", n=13, mask=_mask(13, 13)),
    case("query-mean", "query", "symmetric by the mean", state="query", n=11, graph="mean", **SOFT),
    case("feature", "feature", "values flow", **SHORT, state="feature"),
    case(
        "feature-causal", "feature", "values flow from the past", **SHORT, state="feature", causal=True, coupling="sin"
    ),
    case("feature-soft", "feature", "of both signs", **SHORT, state="feature", mask=_mask(11, 11), **SOFT_SIGNED),
    case("scale", "plain", "a scale that is no power of two", scale=0.3),
    case("one-token", "size", "a node without an edge", n=1),
    case("no-step", "size", "scores stay where they start", steps=0),
    case("no-token", "size", "nothing there", n=0),
    repeated(case("ties", "ties", "every score three times, the largest too", b=1, h=2), 7),
    # All scores start at 1, where they are at rest: the flow moves none.
    replace(
        exact := one_hot(
            "exact", "exact", "each query takes one value", n_q=11, n_k=11, causal=True, mask=_mask(11, 11)
        ),
        inputs={**exact.inputs, "start": Input((11,), "integers", {"low": 1, "high": 1})},
    ),
)
