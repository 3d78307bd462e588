"""How work and memory grow with the number of tokens, counted: docs/counts.md states what is tested here.

Counts at n, 2n, 3n, ... that are values of a polynomial have differences that end: the k-th are constant and the next
ones 0. So growth of degree k is read off exactly, with its leading coefficient, and no clock is asked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import refattn as ra
from refattn import philox
from refattn.instruments.counting import Count, Tally, counting
from refattn.mechanisms.context import Context

PAGE = Path(__file__).resolve().parents[2] / "docs" / "counts.md"

WIDTHS = (4, 8)
CHUNK, STEPS = 256, 2
"""Tokens of a chunk at these widths; steps of the flow."""


@dataclass(frozen=True)
class Stated:
    """What the page says of an implementation: leading terms in n tokens of width d, in float64, one head.

    Attributes
    ----------
    n
        The smallest number of tokens: counts are taken at its multiples.
    forward, backward
        Operations of matrix products: a factor, as an expression, and the power of n.
    others
        The power of n of all other operations and of the bytes written.
    memory
        The power of n of the memory that exists at once.
    largest
        Elements of the largest array, as an expression in n, d: at most.
    """

    implementation: str
    n: int
    forward: tuple[str, int]
    backward: tuple[str, int]
    others: int
    memory: int
    largest: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.implementation + "".join(
            f", {value}" if value is not True else f", {key}" for key, value in self.shown
        )

    @property
    def shown(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self.options.items() if key in ("causal", "coupling")]

    def row(self) -> str:
        """The row of the table."""
        cells = [term(*self.forward), term(*self.backward), *(power(p) for p in (self.others, self.memory))]
        return f"| {' | '.join([self.name, *cells, self.largest.replace('*', ' ')])} |"


def power(degree: int) -> str:
    return "n" if degree == 1 else f"n^{degree}"


def term(factor: str, degree: int) -> str:
    return f"{f'({factor})' if '+' in factor else factor} {power(degree)}".replace("*", " ")


CAUSAL = {"causal": True}
FLOW: dict[str, Any] = {"state": "feature", "steps": STEPS}
IMPLEMENTATIONS = [
    Stated("softmax.dense", 32, ("4*d", 2), ("8*d", 2), 2, 2, "n*n"),
    Stated("softmax.tiled", 512, ("4*d+2", 2), ("10*d+4", 2), 2, 1, "512*128"),
    Stated("softmax.tiled", 256, ("2*d+1", 2), ("5*d+2", 2), 2, 1, "256*256", CAUSAL),
    Stated("higher_order.dense", 32, ("4*d", 2), ("8*d", 2), 2, 2, "n*n"),
    Stated("higher_order.tiled", 512, ("4*d+2", 2), ("10*d+4", 2), 2, 1, "512*128"),
    Stated("higher_order.tiled", 256, ("2*d+1", 2), ("5*d+2", 2), 2, 1, "256*256", CAUSAL),
    Stated("higher_order.linear", 512, ("4*f*(d+1)", 1), ("8*f*(d+1)", 1), 1, 1, "n*(d+1)"),
    Stated("higher_order.chunked", 256, ("4*f*(d+1)+c*(4*d+2)", 1), ("10*f*(d+1)+c*(10*d+4)", 1), 1, 1, "c*c", CAUSAL),
    Stated("higher_order.recurrent", 48, ("4*f*(d+1)", 1), ("10*f*(d+1)", 1), 1, 1, "n*(d+1)", CAUSAL),
    Stated("sympformer.dense", 32, ("4*d", 2), ("8*d", 2), 2, 2, "n*n"),
    Stated("sympformer.tiled", 512, ("6*d", 2), ("14*d", 2), 2, 1, "256*n"),
    Stated("sympformer.tiled", 512, ("2*d", 2), ("5*d", 2), 2, 1, "256*n", CAUSAL),
    Stated("graph_energy.dense", 192, ("2*d", 2), ("4*d", 2), 2, 2, "d*n*n", FLOW | {"coupling": "sin"}),
    Stated("graph_energy.products", 288, ("2*d+4*s*d", 2), ("4*d+8*s*d", 2), 2, 2, "n*n", FLOW | {"coupling": "sin"}),
    Stated("graph_energy.tiled", 384, ("2*d", 2), ("4*d", 2), 2, 2, "n*n", FLOW | {"coupling": "tanh", "steps": 1}),
    Stated("koopman.dense", 13, ("4/3", 4), ("4/3", 4), 3, 3, "n*n*n"),
    Stated("koopman.shared", 8, ("15", 3), ("22", 3), 2, 2, "n*n"),
    Stated("growing.dense", 32, ("4*d", 2), ("8*d", 2), 2, 2, "n*n"),
    Stated("growing.tiled", 512, ("4*d+2", 2), ("10*d+4", 2), 2, 1, "512*128"),
    Stated("delta.recurrent", 16, ("2*d^2", 1), ("8*d^2", 1), 1, 1, "n*d"),
    Stated("delta.chunked", 64, ("4*d^2+192*d", 1), ("8*d^2+320*d", 1), 1, 1, "32*n"),
]

STREAMS = {
    "softmax": ("n", "n"),
    "higher_order": ("constant", "constant"),
    "sympformer": ("n", "n"),
    "graph_energy": ("n", "n"),
    "koopman": ("n^3", "n^2"),
    "growing": ("n", "n"),
    "delta": ("constant", "constant"),
}
"""Operations of one more token after n others, and the memory that it takes beside the cache."""


@functools.cache
def tallies(stated: str, width: int) -> tuple[list[Tally], list[Tally]]:
    """Return what an implementation counts forward and backward, at the multiples of its smallest number of tokens."""
    this = next(one for one in IMPLEMENTATIONS if one.name == stated)
    points = max(this.forward[1] + 2, 4) if width == WIDTHS[0] else this.forward[1] + 1
    found = [counted(this.implementation, this.n * m, width, this.options) for m in range(2, points + 2)]
    return [forward for forward, _ in found], [backward for _, backward in found]


def counted(implementation: str, n: int, width: int, options: dict[str, Any]) -> tuple[Tally, Tally]:
    """Return what one call of a core counts, forward and backward."""
    name, _, chosen = implementation.partition(".")
    core = ra.mechanism(name).core
    assert core is not None
    with counting() as count:
        q, k, v, d_out = (draw(count, purpose, n, width) for purpose in ("q", "k", "v", "d_out"))
        forward = count.start()
        _, saved = core.forward(q, k, v, implementation=chosen, **options)
        backward = count.start()
        core.backward(saved, d_out)
    return forward, backward


def draw(count: Count, purpose: str, n: int, width: int) -> Any:
    """Return small numbers, for which every solver takes the same number of steps at all n."""
    return count.array(0.02 * philox.normal((1, 1, n, width), seed=0, purpose=f"complexity.{purpose}"))


def differences(values: Sequence[Any], order: int) -> list[Any]:
    for _ in range(order):
        values = [b - a for a, b in zip(values, values[1:], strict=False)]
    return list(values)


def evaluated(expression: str, n: int, width: int) -> Fraction:
    """The value of an expression of the table."""
    letters = {"n": n, "d": width, "f": math.comb(width + 1, 2), "c": CHUNK, "s": STEPS, "F": Fraction}
    return Fraction(eval(expression.replace("^", "**").replace("/", "*F(1)/"), letters))


ALL = pytest.mark.parametrize("stated", [pytest.param(one, id=one.name) for one in IMPLEMENTATIONS])


@ALL
@pytest.mark.parametrize("width", [WIDTHS[0], pytest.param(WIDTHS[1], marks=pytest.mark.slow)])
def test_products_grow_as_stated(stated: Stated, width: int) -> None:
    for (factor, degree), found in zip((stated.forward, stated.backward), tallies(stated.name, width), strict=True):
        values = [tally.products for tally in found]
        assert not any(differences(values, degree + 1))
        leading = differences(values, degree)[0] / (math.factorial(degree) * stated.n**degree)
        assert leading == evaluated(factor, stated.n, width), f"{float(leading)} n^{degree}"


@ALL
def test_the_rest_grows_as_stated(stated: Stated) -> None:
    for found in tallies(stated.name, WIDTHS[0]):
        for values in ([tally.others for tally in found], [tally.written for tally in found]):
            leading, *rest = differences(values, stated.others)
            assert leading > 0
            # Tiles of softmax attention decide row by row whether they need a running maximum.
            assert abs(differences(values, stated.others + 1)[0]) <= 5e-3 * values[-1], values


@ALL
def test_memory_grows_as_stated(stated: Stated) -> None:
    for found in tallies(stated.name, WIDTHS[0]):
        n = stated.n * (len(found) + 1)
        peaks = [tally.peak for tally in found][-stated.memory - 2 :]  # one tile is less than several
        assert abs(differences(peaks, stated.memory + 1)[0]) <= 1e-2 * peaks[-1], peaks
        assert differences(peaks, stated.memory)[0] > 0
        assert found[-1].largest() <= evaluated(stated.largest, n, WIDTHS[0]), found[-1].largest()
        if stated.memory == 1:
            assert found[-1].largest() < n * n / 2
            assert not [shape for shape in found[-1].shapes if sum(size >= n for size in shape) > 1]


def test_the_page_states_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [stated.row() for stated in IMPLEMENTATIONS if stated.row() not in page] == []
    for name, (products, cache) in STREAMS.items():
        assert f"| {name} | {products} | {cache} |" in page


def test_every_form_is_stated() -> None:
    implementations = {
        f"{name}.{implementation}"
        for name in ra.list_mechanisms()
        for implementation in ra.mechanism(name).implementations
    }
    assert {stated.implementation for stated in IMPLEMENTATIONS} == implementations
    assert set(STREAMS) == {name for name in ra.list_mechanisms() if ra.mechanism(name).stream is not None}


# --- one more token


def decoded(name: str, n: int) -> Tally:
    """Return what a token after n others counts, in a block of width 16 with two heads."""
    record = ra.mechanism(name)
    stream = record.stream
    assert stream is not None
    given = {"width": 16, "heads": 2, "layer": 0, "layers": 1}
    known = {field.name for field in dataclasses.fields(record.block.Config)}
    with counting() as count:
        x, new = (count.array(0.1 * philox.normal((1, m, 16), seed=0, purpose=f"complexity.{m}")) for m in (n, 1))
        config = record.block.Config(**{key: value for key, value in given.items() if key in known})
        params, context = record.block.init(config, seed=0, like=x), Context(causal="causal" in record.context_fields)
        before, after = (record.block.start(params, some, context) for some in (x, new))
        _, cache = stream.prefill(params, stream.start(params, 1), before, context)
        tally = count.start()
        stream.step(params, cache, after, context)
    return tally


@pytest.mark.parametrize("name", STREAMS)
def test_a_token_costs_what_is_stated(name: str) -> None:
    degree = {"constant": 0, "n": 1, "n^3": 3}[STREAMS[name][0]]
    tallies = [decoded(name, 64 * m) for m in ((1, 2, 3) if degree < 2 else (1, 2))]
    for what in ("products", "others", "written", "peak"):
        values = [getattr(tally, what) for tally in tallies]
        if degree < 2:
            assert values[0] > 0 and not any(differences(values, degree + 1)), what
            assert degree == 0 or differences(values, 1)[0] > 0
    if degree == 3:  # beside n^3 there is n^2
        assert 4 < tallies[1].products / tallies[0].products < 8
