"""Every measured number of the pages of mechanisms and of the deviations stands in a sentence that is held.

Measured is what has decimals, is a percentage, or is above 9, outside of code, formulas and years: the others are those
of formulas, whose derivation stands beside them. `HELD` has the sentences, made from the code where that is cheap, and
with the test that computes them otherwise. And numbers and verdicts of all pages are changed, to see a test notice.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from docs.experiments import koopman as koopman_runs
from refattn.mechanisms import precision
from refattn.mechanisms.delta import core as delta
from refattn.mechanisms.koopman import core as koopman
from refattn.mechanisms.koopman.layer import draws
from refattn.mechanisms.koopman.options import own_kernel
from refattn.train import optimiser
from tests.docs import test_said
from tests.docs.test_said import GROWTH, JITTER, power
from tests.experiments import test_pages as experiments
from tests.experiments.test_pages import NUMBER, VERDICT, read_by_a_reader

DOCS = Path(__file__).parents[2] / "docs"

SOURCE = "the source, whose version or place it is"
AUTHORS = "tests/mechanisms/sympformer/test_authors.py"
DEVIATIONS = "tests/mechanisms/sympformer/test_deviations.py"
TAKEN_OFF = "tests/experiments/test_growing.py, from stored results"
NUMBERS = r"\d+(?:\.\d+)?"
INVERTED = "tests/mechanisms/koopman/test_deviations.py"
TIE = draws.law_of(ra.mechanism("koopman").presets["tie2024"]["block"]["draws"])
BLOCK = ra.mechanism("sympformer").block.Config(width=4, heads=2)
RATE = koopman_runs.SMALLER["text"][1].learning_rate
FLOAT32 = math.log(np.finfo(np.float32).max)
IN_BLOCKS = [f"{power(JITTER[name])} in {name}" for name in ("float64", "float32", "blocks")]


def folded(s: float) -> float:
    """Return T_2(-s) / T_2(s) of the polynomial of order 2."""
    return (1.0 - s + s * s / 2.0) / (1.0 + s + s * s / 2.0)


HELD: dict[str, list[tuple[str, Any]]] = {
    "deviations": [
        *(
            (sentence, SOURCE)
            for sentence in (
                "a finite stand-in such as -65504 or the lowest float",
                "| JAX 0.10, `jax.nn.dot_product_attention` |",
                "| JAX 0.10, the same |",
                "| JAX 0.10, `local_window_size` |",
                "| ONNX, `Attention` (opset 23) |",
                "| ONNX, `Attention` (opset 25) |",
                "| ONNX Runtime 1.32, float64 `Attention` |",
                "| ONNX Runtime 1.32, `Attention` |",
                "| ONNX Runtime 1.32, masked scores (mode 2) |",
                "-inf in opset 25 |",
                "| ONNX Runtime 1.32, `GroupQueryAttention` |",
                "| onnx 1.23, its reference implementation |",
                "| PyTorch FlexAttention 2.13 |",
                "| MomentumDeltaNet, its chunks | logarithms of beta + 1e-6, and",
                "Mechanisms in Transformers, Medium, 21 August 2023)",
                "its part 2 (Medium, 22 August 2023)",
                "| the report, remark 2.1 |",
                "at dd97cac) | shifts Z by 1e-8 and the denominators by 1e-12 |",
            )
        ),
        (
            f"T_2(-s) / T_2(s) is {folded(1.4):.2f} at s = 1.4, where the exponential's ratio is {math.exp(-2.8):.2f}, "
            f"and {folded(8 / 3):.2f} at the largest score of width 64 with alpha = 3, where that is "
            f"{math.exp(-16 / 3):.3f} |",
            True,
        ),
        (
            "fails in up to 4 % of calls with random numbers and two updates, and in 60 % with four (two heads, 8",
            INVERTED,
        ),
        (f"key masks in all, causality; {power(test_said.USUAL['higher_order']['norm_eps'])} beside a biased", True),
        (
            "of 300 calls with random numbers and four updates none failed at epsilon = 0.1, and one at 1.",
            INVERTED,
        ),
        (f"again until psi is inverted, at most {TIE.candidates} times for an update", True),
        (f"| up to {koopman.CANDIDATES} candidates are drawn", True),
        (f"checked on {own_kernel.POINTS} points to be symmetric", True),
        (f"in units of the kernel's weight + 1: {', '.join(IN_BLOCKS)};", JITTER["float64"] < JITTER["float32"]),
        (f"damped, by {GROWTH.damping:g} of its mean eigenvalue", True),
        ("where the corrected step takes off 0.46 of it", TAKEN_OFF),
        ("with the same weights and steps of 0.3:", AUTHORS),
        ("W_V A^-1, whose norm exceeds 1000 at the start", DEVIATIONS),
        ("e^s of scores clipped at 60, and 1e-8 added to z^2", DEVIATIONS),
        (
            f"(in float32 log z of {math.floor(FLOAT32)}, or below -{math.floor(FLOAT32 / 2) - 1} for tokens that",
            True,
        ),
        ("0.3 % apart at t = 1, 9 % at 1.7, 40 % at 3.", AUTHORS),
        ("9 % apart at t = 1, 125 % at 1.3;", AUTHORS),
        ("3 % apart at t = 1, less later;", AUTHORS),
        ("<BP, P>: 10 % apart where B is about twice the identity", AUTHORS),
        ("119 % apart in a first layer, 36 % in the next.", AUTHORS),
        ("clipped at 12 in their runs. e^-12 of the momentum is left, and of the kick e^-12 or 1/12 |", AUTHORS),
        ('`damping="loglin(clip=12)"` and a state with t = 1e-9 do theirs', AUTHORS),
        ("| gamma + 1e-6 | gamma: one that is larger by 1e-6 does theirs |", AUTHORS),
        ("by limit / (norm + 1e-6), as PyTorch does", "+ 1e-6" in inspect.getsource(optimiser)),
    ],
    "mechanisms/delta": [
        ("| `chunk` | `32` |", inspect.signature(delta.forward).parameters["chunk"].default == 32),
        (
            "| `qk_norm`, `norm_eps` | `False`, `1e-6` |",
            inspect.signature(delta.forward).parameters["norm_eps"].default == 1e-6,
        ),
    ],
    "mechanisms/delta/reference": [
        ("But for 64 equal keys its terms", max(math.comb(64, n) for n in range(65)) > 1e18),
        ("Published code takes differences of cumulative sums of logarithms, and adds 1e-6 to beta", SOURCE),
    ],
    "mechanisms/graph_energy": [],
    "mechanisms/growing": [],
    "mechanisms/higher_order": [],
    "mechanisms/koopman": [
        ("For 100 draws that it needed it drew", "tests/experiments/test_pages.py"),
        (
            "of random calls of the sizes 0.1 to 10 with two to four updates",
            "tests/mechanisms/koopman/test_precision.py",
        ),
        (f"is above {power(precision.BOUND['float64'])} for arguments in float64, or", True),
        (
            "in float64, or 1e-2 for others, a `PrecisionWarning` says so",
            precision.BOUND["float32"] == 1e-2,
        ),
        ("in step 33, because 64 draws for an update were not enough.", "tests/experiments/test_pages.py"),
        (
            "it failed in 60 % of 300 calls with random numbers (two heads, 8 tokens, width 4), psi = pi + epsilon phi",
            INVERTED,
        ),
        ("IEEE Transactions on Automatic Control 68(5), 2995-3010, 2023)", SOURCE),
        (f"after {koopman_runs.SMALLER['text'][1].steps} steps at 3e-3, all of them clipped", RATE == 3e-3),
    ],
    "mechanisms/sympformer": [],
    "mechanisms/sympformer/reference": [
        ('`integrator="strang(xi=0.5, angle=1.0)"`', "tests/mechanisms/sympformer"),
        (
            "`--set scalar_rate=100 --set decayed=embeddings`",
            ra.mechanism("sympformer").presets["presymp"]["scalar_rate"] == 100.0,
        ),
        ("""`integrator="lie_trotter(connection='r2', strength=1.0)"`""", "tests/mechanisms/sympformer"),
    ],
    "mechanisms/softmax": [],
}
"""By page: sentences, each with what is true of it, or the test or the source that has it."""


def sentences(page: str) -> list[str]:
    """Return all that a page has to say."""
    said = [sentence for sentence, _ in HELD.get(page, [])]
    name = page.removeprefix("mechanisms/")
    said += [sentence for where, sentence in test_said.PAGES if where == name]
    return [*said, *experiments.of_redrawn()] if name == "koopman" else said


def options(page: str) -> list[str]:
    """Return the rows of options, whose defaults tests/docs/test_said.py compares with those of the code."""
    return re.findall(r"(?m)^\| `\w+`(?:, `\w+`)* \| [^|]+ \|", page)


def measured(text: str) -> list[re.Match[str]]:
    """Return the measured numbers of a page as a reader reads it."""
    shown = re.sub(r"{(?:m|id|general|tour)}`[^`]*`|arXiv:[\d.]+", lambda match: "." * len(match[0]), text)
    found = []
    for match in NUMBER.finditer(shown):
        share = re.match(r" (?:%|percent)", shown[match.end() :])
        if share or re.search(r"[.e]", match[0]) or len(match[0].strip("+-,")) > 1:
            found.append(match)
    return found


def wrong_on(page: str, text: str, rows: tuple[str, ...]) -> list[str]:
    """Return what is wrong with a page: sentences that it lacks, and measured numbers that nothing holds.

    `rows` are its rows of options as they were when their defaults were compared.
    """
    read = read_by_a_reader(text)
    known = [read_by_a_reader(each) for each in (*sentences(page), *rows)]
    wrong = [f"not on the page: {each}" for each in known if each not in read]
    held = [match.span() for each in known for match in re.finditer(re.escape(each), read)]
    for match in measured(read):
        if not any(start <= match.start() and match.end() <= end for start, end in held):
            wrong.append(f"in no sentence that is held: {read[max(0, match.start() - 60) : match.end() + 30]}")
    return wrong


@functools.cache
def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def pages() -> list[str]:
    mechanisms = [path.relative_to(DOCS).with_suffix("").as_posix() for path in (DOCS / "mechanisms").rglob("*.md")]
    written = [page for page in mechanisms if page.rpartition("/")[2] in ("calls", "judged", "code")]
    return ["deviations", *sorted(set(mechanisms) - set(written))]


@pytest.mark.parametrize("page", pages())
def test_measured_numbers_are_held(page: str) -> None:
    assert wrong_on(page, text_of(page), tuple(options(text_of(page)))) == []


def test_what_holds_a_sentence_has_its_numbers() -> None:
    for page, said in HELD.items():
        for sentence, reason in said:
            if not isinstance(reason, str):
                assert reason, (page, sentence)
            elif reason not in (SOURCE, TAKEN_OFF):
                place = DOCS.parent / reason
                files = [place] if place.is_file() else [*place.glob("*.py")]
                text = "".join(file.read_text(encoding="utf-8") for file in files)
                lacking = [
                    x
                    for x in re.findall(NUMBERS, sentence)
                    if not {x, str(float(x) / 100)} & {*re.findall(NUMBERS, text)}
                ]
                assert files and lacking == [], (page, sentence)


OPPOSITES = {
    **{"ahead": "behind", "behind": "ahead", "better": "worse", "worse": "better", "best": "worst", "worst": "best"},
    **{"gain": "lose", "gains": "loses", "gained": "lost", "lose": "gain", "loses": "gains", "wins": "loses"},
    **{"help": "harm", "helps": "harms", "fail": "succeed", "fails": "succeeds", "level": "far", "never": "always"},
}
CHANGED = [*(f"experiments/{name}" for name in experiments.PAGES if name != "presets"), "presets", "claims", *pages()]


def units(page: str) -> list[tuple[int, int, str]]:
    """Return what may be changed on a page: places of numbers and verdicts in its file."""
    text = text_of(page)
    hidden = r"(?ms)^```.*?^```$|(?<=\])\([^)]*\)|^\d+\. |\b(?:19|20)[12]\d\b|arXiv:[\d.]+"
    shown = re.sub(hidden, lambda match: re.sub(r"[^\n]", ".", match[0]), text)
    shown = re.sub(r"{(?:m|id|general|tour)}`[^`]*`", lambda match: re.sub(r"[^\n]", ".", match[0]), shown)
    if not page.startswith(("experiments", "presets")):
        return [(match.start(), match.end(), "number") for match in measured(shown)]
    asked = [match.span() for match in re.finditer(r"[^.?!:|]*\?", shown)]
    known = [(match.start(), match.end(), "number") for match in NUMBER.finditer(shown)]
    for match in VERDICT.finditer(shown):
        if not any(start <= match.start() < end for start, end in asked):
            known.append((match.start(), match.end(), "verdict"))
    return known


def changed(page: str, unit: tuple[int, int, str], draw: np.random.Generator) -> str:
    """Return the text of a page with one digit another, or one verdict the opposite."""
    text, (start, end, kind) = text_of(page), unit
    if kind == "verdict":
        return text[:start] + OPPOSITES[text[start:end]] + text[end:]
    digits = [n for n in range(start, end) if text[n].isdigit()]
    at = int(draw.choice(digits))
    return text[:at] + str((int(text[at]) + int(draw.integers(1, 10))) % 10) + text[at + 1 :]


def noticed(page: str, text: str) -> bool:
    """Tell whether the tests of a page find something wrong with a text of it."""
    name = page.rpartition("/")[2]
    if page == "claims":
        return test_said.counted(text) != test_said.counts()
    if page == "presets" or page.startswith("experiments"):
        return bool(experiments.wrong_on(name, text))
    return bool(wrong_on(page, text, tuple(options(text_of(page)))))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_changed_numbers_and_verdicts_are_noticed(seed: int) -> None:
    """Thirty for each seed: a page is drawn, then one of its numbers and verdicts, as likely as any other of it."""
    draw = np.random.default_rng(seed)
    own = {page: found for page in CHANGED if (found := units(page))}
    unseen = []
    for _ in range(30):
        page = list(own)[int(draw.integers(len(own)))]
        unit = own[page][int(draw.integers(len(own[page])))]
        text = changed(page, unit, draw)
        if not noticed(page, text):
            unseen.append(f"{page}: {text[max(0, unit[0] - 60) : unit[1] + 40]!r}")
    assert unseen == []
