"""What pages of mechanisms and rows of the claims say in numbers is what the code has, or what its numbers give.

What experiments say is held by tests/experiments, what a command measures by docs/facts.toml, and other numbers of rows
by the tests that measure them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.delta import core as delta
from refattn.mechanisms.delta.testing.cases import RULES
from refattn.mechanisms.graph_energy import definition as graph_energy
from refattn.mechanisms.growing.growth.options import Options
from refattn.mechanisms.higher_order.options import NORMALISERS
from refattn.mechanisms.koopman import core as koopman
from refattn.mechanisms.koopman import definition
from refattn.mechanisms.koopman.layer import draws
from refattn.mechanisms.option_kinds import choose
from refattn.mechanisms.sympformer import mlp, presets
from refattn.mechanisms.sympformer.forces import softmax
from refattn.mechanisms.sympformer.integrators import damping, one_call
from tests.rows import holds

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "mechanisms"
WORDS = "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()

USUAL = {name: ra.mechanism(name).defaults for name in ra.list_mechanisms()}
GROWTH, GRAPH, ALPHA = Options(), USUAL["graph_energy"], USUAL["higher_order"]["alpha"]
STEP = Fraction(GRAPH["step"]).limit_denominator(100)
LEFT = math.ceil(100 * float(1 - STEP) ** GRAPH["steps"])
UPDATES = USUAL["koopman"]["updates"]
BLOCKS = {name: ra.mechanism(name).block.Config for name in ("koopman", "sympformer")}
MERCAT = ra.mechanism("higher_order").presets["mercat2020"]["block"]
DIVIDED: Any = choose("normaliser", MERCAT["normaliser"], NORMALISERS)
TAU = inspect.signature(graph_energy.forward).parameters["tau"].default
JITTER = {**koopman.JITTER, "blocks": BLOCKS["koopman"](width=4, heads=2).jitter}
LAW = draws.law_of(ra.mechanism("koopman").presets["tie2024"]["block"]["draws"])


def power(x: Any) -> str:
    """A power of ten: 1e-8."""
    return np.format_float_scientific(x, trim="-", exp_digits=1)


PAGES = [
    ("higher_order", f"with {{m}}`alpha = {ALPHA:g}` and {{m}}`d = 16`, at most {Fraction(4) / Fraction(ALPHA)}"),
    (
        "higher_order",
        f"order {MERCAT['order']}, alpha {MERCAT['alpha']:g}, and {DIVIDED.delta:g} subtracted from every",
    ),
    ("higher_order", f"The preset keeps that sum {power(DIVIDED.eps)} away from 0"),
    ("graph_energy", f"For differences up to 1 it is within {math.ceil(100 * (1 - math.sin(1)))} % of the difference"),
    ("graph_energy", f"The default step is half of that bound: {STEP} for {{m}}`mu = kappa = 1`"),
    ("graph_energy", f"at most {{m}}`1 - step mu`: after {GRAPH['steps']} steps at most {LEFT} percent is left"),
    ("graph_energy", f"starts at 1/2, and the default {TAU} drops those"),
    ("growing", f"is more than {100 * GROWTH.share:g} % of {{m}}`|H|^2`"),
    ("growing", f"One step adds at most {GROWTH.most} columns"),
    ("koopman", f"{{m}}`kernel(x, x) = {definition.kernel(np.eye(2), np.eye(2))[0, 0]:g}` for {{m}}`|x| = 1`"),
    ("koopman", f"The preset has {WORDS[UPDATES]}: with three and four the text is"),
    ("koopman", f"An update has at most {LAW.candidates} draws"),
    ("sympformer", f"The {WORDS[len(presets.VARIANTS)]} variants of the authors' program"),
    ("sympformer", f"and the {WORDS[2 * len(presets.METHODS)]} methods of their later manuscript"),
    ("sympformer", f"and {{m}}`t = {BLOCKS['sympformer'](width=4, heads=2).start_time:g}`. Each later one"),
    ("delta", f"and with a momentum, it gives {WORDS[len(RULES)]} published rules"),
    ("delta/reference", f"one recurrence with {WORDS[len(RULES)]} published rules"),
    ("delta/reference", f"takes the chunked one from {delta.RECURRENT_UP_TO + 1} tokens on"),
    ("delta/reference", f"fewer than {delta.SMALL:,} numbers it does so only from {delta.SMALL_UP_TO + 1} tokens on"),
]


@pytest.mark.parametrize(("page", "said"), PAGES)
def test_pages_have_the_numbers_of_the_code(page: str, said: str) -> None:
    assert said in " ".join((FOLDER / f"{page}.md").read_text(encoding="utf-8").split())


def test_what_follows_from_these_numbers() -> None:
    """The bound of the step is 2 / (mu + 2 kappa); and the choices of the paper that the pages tell in words."""
    assert STEP * (GRAPH["mu"] + 2.0 * GRAPH["kappa"]) == 1.0
    assert BLOCKS["koopman"](width=4, heads=2).updates == UPDATES
    assert LAW.candidates == koopman.CANDIDATES


FLOAT32 = math.log(np.finfo(np.float32).max)
"""The largest number whose exponential is one of float32."""

ROWS = [
    ("higher_order", "rows divide by the variance", f"{power(USUAL['higher_order']['norm_eps'])} beside a biased"),
    ("sympformer", "exponentials are clipped at 60", f"overflows in float32 from {math.floor(FLOAT32 / 2)} on"),
    ("sympformer", "the number of a layer is its time", "time begins at 1 here"),
    ("koopman", "psi is drawn until it is invertible", f"up to {koopman.CANDIDATES} candidates are tried in order"),
    ("koopman", "ridge and epsilon come from a law", f"Beta(1, {draws.Beta().b:g})"),
    (
        "koopman",
        "Gram matrices are shifted",
        ", ".join(f"{power(x)} in {where}" for where, x in sorted(JITTER.items(), key=lambda one: one[1])),
    ),
]


@pytest.mark.parametrize(("mechanism", "claim", "said"), ROWS)
def test_rows_have_the_numbers_of_the_code(mechanism: str, claim: str, said: str) -> None:
    assert said in holds(mechanism, claim)


KINDS: dict[str, Any] = {
    "softmax": softmax.Softmax(),
    "presymplectic Euler": one_call.PresymplecticEuler(),
    "log and linear": damping.LogLin(),
    "attention's velocity": mlp.AttentionVelocity(),
}
"""Defaults that a page tells in words."""


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_options_have_the_defaults_of_the_code(name: str) -> None:
    known = dict(USUAL[name])
    others: dict[str, Any] = {"growing": Options, "sympformer": BLOCKS["sympformer"]}
    owned = {field.name: field.default for field in dataclasses.fields(others[name])} if name in others else {}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", (FOLDER / f"{name}.md").read_text(), re.MULTILINE)
    seen = set()
    for named, told in rows:
        options, values = re.findall(r"\w+", named), [KINDS[told]] if told in KINDS else []
        for text in re.findall(r"`([^`]*)`", told):
            top, _, bottom = text.partition("/")
            values.append(float(Fraction(int(top), int(bottom))) if bottom else ast.literal_eval(text))
        for option, value in zip(options, values * len(options) if len(values) == 1 else values, strict=False):
            if option in ("vocabulary", "context"):
                continue  # of the tables, whose default is that there are none
            assert (owned[option] if option in owned else known[option]) == value, option
            seen.add(option)
    assert len(seen) >= 0.6 * len(known) and seen


def counted(page: str) -> list[tuple[str, ...]]:
    """Return the rows that the page of the claims counts, by mechanism."""
    return re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)


def counts() -> list[tuple[str, ...]]:
    """Return how many rows of sources hold as said, do not, and need more words, and how many are ours."""
    wanted = []
    for name in ra.list_mechanisms():
        rows = ra.mechanism(name).claims
        kinds = Counter(re.split(r"\W", claim.holds)[0] for claim in rows if not claim.ours)
        whole, ours = kinds.total(), sum(bool(claim.ours) for claim in rows)
        wanted.append((name, *map(str, (kinds["as"], kinds["no"], whole - kinds["as"] - kinds["no"], ours))))
    return wanted


def test_the_page_of_the_claims_counts_what_holds() -> None:
    assert counted((ROOT / "docs" / "claims.md").read_text(encoding="utf-8")) == counts()
