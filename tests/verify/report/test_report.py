"""Reports as text: what stands in them, and that they can be read at every width."""

from __future__ import annotations

import math
from typing import Any

import pytest

import refattn as ra
from refattn.verify.outcome import CheckReport, Outcome, Report, Row, Verdict
from refattn.verify.report import tables

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


def test_the_parts_of_a_report() -> None:
    lines = shown(*MIXED)
    assert lines[0] == "kernel.py:attend against softmax attention: outputs"
    rows = [line.split() for line in lines]
    header = ["dtype", "tensor", "cases", "share", "by", "case", "index", "got", "expected", "error", "verdict"]
    start = rows.index(header)
    assert rows[start + 2 : start + 7] == [
        ["float32", "out", "2", "1.56", "row", "peaked", "[0,1,19,10]", "0.207519531", "0.210693359", "1", "disagree"],
        ["float32", "lse", "0", "not", "given"],
        ["float16", "out", "1", "0.80", "row", "tiny", "[0,1,19,10]", "0.207519531", "0.210693359", "agrees"],
        ["float16", "lse", "0", "not", "given"],
        ["bfloat16", "0", "declined"],
    ]
    failed = lines.index("Failed (2 of 4 cases run)")
    assert lines[failed + 1 : failed + 7] == [
        "  float32 peaked (plain: weights near 0 and 1)",
        "      q (2, 4, 37, 16), k (2, 4, 37, 16), v (2, 4, 37, 16)",
        "      out 1.56 row [0,1,19,10] got 0.207519531 expected 0.210693359",
        "  float32 grouped (grouped: two query heads share one key/value head)",
        "      q (2, 6, 37, 16), k (2, 3, 37, 16), v (2, 3, 37, 16)",
        "      raised ValueError: no groups",
    ]
    declined = lines.index("Declined (6 of 10 cases)")
    assert rows[declined + 3] == ["4", "no", "bfloat16", "bfloat16:", "tiny,", "peaked", "and", "2", "more"]
    assert rows[declined + 4] == ["2", "no", "soft-cap", "float32:", "softcap,", "softcap-mask"]
    counts = rows.index(["class", "run", "agreed", "failed", "declined"])
    assert rows[counts + 2 : counts + 6] == [
        ["plain", "3", "2", "1", "2"],
        ["grouped", "1", "0", "1", "1"],
        ["softcap", "0", "0", "0", "3"],
        ["all", "4", "2", "2", "6"],
    ]
    assert failed < declined < counts < len(lines) - 1
    assert lines[-1] == (
        "softmax: disagrees: 4 cases run, 6 declined, 2 failed; "
        "worst use of the allowed error 1.56 (float32 out, case peaked)"
    )


def test_what_did_not_happen_is_left_out() -> None:
    text = "\n".join(shown(outcome("agrees", verdict(0.5), verdict(0.1, "lse"))))
    for words in ("Failed", "Declined (", "not given"):
        assert words not in text


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
    ("outcomes", "line"),
    [
        ([], "softmax: nothing was run: there was no case"),
        ([outcome("declined", detail="no")], "softmax: nothing was run: its case was declined"),
        (
            [outcome("agrees", verdict(0.125))],
            "softmax: agrees: 1 case run, 0 declined, 0 failed; "
            "worst use of the allowed error 0.12 (float32 out, case plain)",
        ),
        (
            [outcome("raises", detail="raised ValueError: no")],
            "softmax: raises: 1 case run, 0 declined, 1 failed; no tensor could be judged",
        ),
        (
            [outcome("disagrees", verdict(math.inf, statistic="shape", index=(), got="(1,)", expected="(2,)"))],
            "softmax: disagrees: 1 case run, 0 declined, 1 failed; worst: wrong shape (float32 out, case plain)",
        ),
        (
            [outcome("raises", verdict(0.5), detail="returned no d_q")],
            "softmax: raises: 1 case run, 0 declined, 1 failed; "
            "worst use of the allowed error 0.50 (float32 out, case plain)",
        ),
        (
            [outcome("disagrees", verdict(math.nan)), outcome("disagrees", verdict(9.0))],
            "softmax: disagrees: 2 cases run, 0 declined, 2 failed; "
            "worst use of the allowed error inf (float32 out, case plain)",
        ),
    ],
)
def test_the_last_line_says_the_verdict(outcomes: list[Outcome], line: str) -> None:
    assert shown(*outcomes)[-1] == line


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.00"), (0.999, "1.00"), (1.0, "1.00"), (1.0001, "1.01"), (1.56, "1.56"), (12345.0, ">1000")],
)
def test_a_share_above_the_limit_never_looks_like_the_limit(share: float, text: str) -> None:
    status = "agrees" if share <= 1.0 else "disagrees"
    assert f"allowed error {text} " in shown(outcome(status, verdict(share)))[-1]


def test_the_rung_that_failed_is_told_with_what_it_saw() -> None:
    shape = verdict(math.inf, statistic="shape", index=(), got="(2, 3)", expected="(2, 4)")
    nan = verdict(math.inf, "d_q", "non-finite", got="nan")
    lines = shown(outcome("disagrees", shape, nan), grad=True)
    assert [line.split() for line in lines if line.startswith("      ")][1:] == [
        ["out", "inf", "shape", "got", "(2,", "3)", "expected", "(2,", "4)"],
        ["d_q", "inf", "non-finite", "[0,1,19,10]", "got", "nan", "expected", "0.210693359"],
    ]


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


def test_checks() -> None:
    rows = (
        Row("implementations", "dense, float64", "agrees", 0.25, "tiny: out (row)"),
        Row("properties", "causal", "disagrees", math.inf, "raised ValueError: no"),
        Row("gradients", "core, autograd", "not run", None, "torch is not installed: pip install refattn[torch]"),
    )
    lines = tables.checked(CheckReport("softmax", "numpy", False, rows)).splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == ["implementations", "properties", "gradients"]
    assert "0.25" in lines[2] and "inf" in lines[3] and "pip install refattn[torch]" in lines[4]
    assert lines[-1] == (
        "softmax on numpy: disagrees: 1 checks agree, 1 disagree, 1 not run; "
        "worst use of the allowed error inf (properties: causal) (a sample; --full runs all)"
    )
    whole = tables.checked(CheckReport("softmax", "numpy", False, rows, full=True), table=False).splitlines()
    assert len(whole) == 1 and whole[0].endswith("inf (properties: causal)")
    (last,) = tables.checked(CheckReport("softmax", "cupy", False, rows[2:])).splitlines()[-1:]
    assert last == "softmax on cupy: nothing was run: 0 checks agree, 0 disagree, 1 not run"


def test_backends() -> None:
    rows = [
        {"name": "numpy", "available": True, "why_unavailable": None, "version": "2.4", "devices": ("cpu",)}
        | {"float64": True, "note": "fast"},
        {"name": "cupy", "available": False, "why_unavailable": "not installed", "version": None, "devices": ()}
        | {"float64": False, "note": ""},
    ]
    lines = [line.split() for line in tables.backends(rows).splitlines()]
    assert lines[0] == ["name", "available", "version", "devices", "float64", "note"]
    assert lines[2:] == [["numpy", "yes", "2.4", "cpu", "yes", "fast"], ["cupy", "no", "not", "installed"]]


def test_mechanisms() -> None:
    lines = tables.mechanisms([SOFTMAX]).splitlines()
    assert lines[0].split() == ["name", "title", "implementations", "source"]
    assert lines[2].startswith("softmax") and SOFTMAX.source in lines[2]
