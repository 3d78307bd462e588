"""Reports as text: what stands in them, and that they can be read at every width."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import refattn as ra
from refattn.verify.outcome import CheckReport, Line, Outcome, Report, Row, Suspect, Verdict
from refattn.verify.report import tables
from refattn.verify.report.diagnosis import causes
from refattn.verify.report.page import page
from refattn.verify.report.suspects import told

SOFTMAX = ra.mechanism("softmax")


def verdict(share: float, tensor: str = "out", statistic: str = "row", **other: Any) -> Verdict:
    parts = {"index": (0, 1, 19, 10), "got": "0.207519531", "expected": "0.210693359"} | other
    return Verdict(tensor, share, statistic, **parts)


def outcome(
    status: str, *verdicts: Verdict, case: str = "plain", dtype: str = "float32", kind: str = "", detail: str = ""
) -> Outcome:
    return Outcome(case, kind or SOFTMAX.case(case).kind, dtype, status, detail, verdicts)


def shown(*outcomes: Outcome, grad: bool = False, **implementation: Any) -> list[str]:
    return tables.verified(
        Report("softmax", "kernel.py:attend", grad, outcomes), SOFTMAX, **implementation
    ).splitlines()


MIXED = (
    outcome("agrees", verdict(0.25), case="tiny"),
    outcome("disagrees", verdict(1.559), case="peaked"),
    outcome("raises", case="grouped", detail="raised ValueError: no groups"),
    outcome("declined", case="softcap", detail="no soft-cap"),
    outcome("declined", case="softcap-mask", detail="no soft-cap"),
    outcome("agrees", verdict(0.8), case="tiny", dtype="float16"),
    *(outcome("declined", case=case, dtype="bfloat16", detail="no bfloat16") for case in ("tiny", "peaked", "grouped")),
    outcome("declined", case="softcap", dtype="bfloat16", detail="no bfloat16"),
)


def test_gradients_that_were_asked_for_have_their_rows() -> None:
    tensors = ("out", "d_q", "d_k", "d_v", "d_scale")
    lines = shown(outcome("agrees", *(verdict(0.5, tensor) for tensor in tensors)), grad=True)
    assert lines[0].endswith("outputs and gradients")
    assert [line.split()[1] for line in lines if line.startswith("float32")] == ["out", "lse", *tensors[1:]]
    # Arrays beside q, k, v are asked for where a case that was run has them.
    given = [verdict(0.5, tensor) for tensor in tensors]
    lines = shown(outcome("agrees", *given), outcome("agrees", *given, case="bias"), grad=True)
    assert [line.split()[2:5] for line in lines if "d_bias" in line] == [["0", "not", "given"]]
    lines = shown(outcome("agrees", *given), outcome("declined", case="bias", detail="no bias"), grad=True)
    assert not any("d_bias" in line for line in lines)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.00"), (0.999, "1.00"), (1.0, "1.00"), (1.0001, "1.01"), (1.56, "1.56"), (12345.0, ">1000")],
)
def test_a_share_above_the_limit_never_looks_like_the_limit(share: float, text: str) -> None:
    status = "agrees" if share <= 1.0 else "disagrees"
    assert f"allowed error {text} " in shown(outcome(status, verdict(share)))[-1]


def characters(lines: list[str]) -> list[str]:
    """What is printed, however it is broken into lines: the rules and the comma of "got, expected" apart."""
    return sorted(character for line in lines for character in line if character not in " -,")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_report_says_as_much(width: int) -> None:
    long = [
        outcome(
            "disagrees",
            verdict(math.inf, tensor, "non-finite", index=(1, 3, 299, 15), got="-1.23456789e-05", expected="nan"),
            case="causal-top-left",
            dtype="bfloat16",
        )
        for tensor in ("out", "d_softcap")
    ]
    narrow, wide = (shown(*MIXED, *long, width=w) for w in (width, 200))
    assert max(map(len, narrow)) <= width
    assert characters(narrow) == characters(wide)


def test_plain_text_is_ascii_without_escape_codes_and_colour_only_adds_them() -> None:
    import re

    plain, coloured = "\n".join(shown(*MIXED)), "\n".join(shown(*MIXED, colour=True))
    assert plain.isascii() and plain.replace("\n", "").isprintable()
    assert "\x1b[31m" in coloured and "\x1b[32m" in coloured
    bare = re.sub("\x1b\\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


def test_text_of_foreign_code_cannot_steer_a_terminal_or_break_a_table() -> None:
    lines = shown(
        outcome("declined", detail="no\nway \x1b[2J [bold]here[/bold] :smile:"), outcome("raises", detail="raised \x07")
    )
    assert any("no way \\x1b[2J [bold]here[/bold] :smile:" in line for line in lines)
    assert "      raised \\x07" in lines


SHAPE = verdict(math.inf, statistic="shape", index=(), got="(2, 3)", expected="(2, 4)")

REPORTS: dict[str, tuple[Outcome, ...]] = {
    "every part": MIXED,
    "nothing but agreement": (outcome("agrees", verdict(0.5), verdict(0.1, "lse")),),
    "what the failed rung saw": (outcome("disagrees", SHAPE, verdict(math.inf, "d_q", "non-finite", got="nan")),),
    "no case": (),
    "one declined": (outcome("declined", detail="no <sizes> & such"),),
    "raised": (outcome("raises", detail="raised ValueError: no"),),
    "judged and raised": (outcome("raises", verdict(0.5), detail="returned no d_q"),),
    "a share that is no number": (outcome("disagrees", verdict(math.nan)), outcome("disagrees", verdict(9.0))),
}

ROWS = (
    Row("implementations", "dense, float64", "agrees", 0.25, "tiny: out (row)"),
    Row("properties", "causal", "disagrees", math.inf, "raised ValueError: no"),
    Row("gradients", "core, autograd", "not run", None, "torch is not installed: pip install refattn[torch]"),
)

BACKENDS: list[dict[str, Any]] = [
    {"name": "numpy", "available": True, "why_unavailable": None, "version": "2.4", "devices": ("cpu",)}
    | {"float64": True, "note": "fast"},
    {"name": "cupy", "available": False, "why_unavailable": "not installed", "version": None, "devices": ()}
    | {"float64": False, "note": ""},
]


def reported(name: str) -> Report:
    about: dict[str, Any] = {"seed": 3, "reference": True, "left_out": "it raises", "smallest": ("x = 1 < 2",)}
    about |= {"interpreted": "Triton <3.9>; not seen: races", "conventions": {"causal mask": "top-left"}}
    return Report("softmax", "a<b>.py:it", False, REPORTS[name], **(about if name == "every part" else {}))


def test_reports_as_text() -> None:
    parts = {name: tables.verified(reported(name), SOFTMAX) for name in REPORTS}
    parts["causes"] = tables.verified(reported("every part"), SOFTMAX, details=False)
    parts["checks"] = tables.checked(CheckReport("softmax", "numpy", False, ROWS))
    parts["all checks"] = tables.checked(CheckReport("softmax", "numpy", False, ROWS, full=True), table=False)
    parts["no check"] = tables.checked(CheckReport("softmax", "cupy", False, ROWS[2:]))
    parts["backends"] = tables.backends(BACKENDS)
    parts["mechanisms"] = tables.mechanisms([SOFTMAX])
    text = "\n".join(f"===== {name}\n{part}\n" for name, part in parts.items())
    assert text == Path(__file__).with_name("reports.txt").read_text(encoding="utf-8")


def test_a_report_as_a_page() -> None:
    text, _, _ = page(reported("every part"), SOFTMAX, "1.2.3").partition("<h2>Versions")
    assert text == Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def test_an_error_that_explains_less_than_three_quarters_is_a_place() -> None:
    line = Line("SM.3", "p_ij = exp(s_ij - m_i)", "dense.py:1", "p = xp.exp(s - m)")
    one = Suspect((line,), "scaled by 0.5", 3.0, 0.74, 0.8)
    assert told(one) == (
        "the place may be SM.3: one error there explains 74 % of the squared error, all that are known 80 %"
    )
    assert told(dataclasses.replace(one, explained=0.75)).startswith("SM.3: scaled by 0.5 explains 75 %")
    assert told(dataclasses.replace(one, share=0.5)).startswith("SM.3: scaled by 0.5: 0.50 of the allowed error")


def test_one_cause_with_other_numbers_in_each_case_is_a_line() -> None:
    details = [f"raised IndexError: load of element {1000 + n} beyond {n}.5 KiB" for n in range(22)]
    failed = [Outcome(f"case-{n}", "plain", "float32", "raises", text) for n, text in enumerate(details)]
    other = Outcome("other", "plain", "float32", "raises", "raised IndexError: of a head")
    line, last = causes([*failed, other])
    assert line.startswith(f"float32, 22 cases: {details[0]}: case-0, case-1") and last.endswith("of a head: other")
