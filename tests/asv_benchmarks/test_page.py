"""The page on the newest commit, from results that are made here."""

from __future__ import annotations

import re

import pytest

from asv_benchmarks import page as pages
from asv_benchmarks.changes import Series
from asv_benchmarks.suite import Benchmark

NUMPY = ("softmax.tiled", 64, 64, "float32", "numpy")
TIME = Benchmark("core.Core.time_forward", NUMPY, "time")
RATE = Benchmark("language.Train.track_tokens", ("softmax", "numpy"), "rate")
SHARE = Benchmark("accuracy.Share.track_largest", ("koopman.shared", "outputs", "float32", "numpy"), "share")
WORK = Benchmark("work.Work.track_held", ("softmax.tiled", 64, 64, "numpy"), "work")
MACHINE = Benchmark("start.Machine.time_numpy", ("exp",), "time")
COMMITS = tuple(f"{n:040x}" for n in range(1, 9))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of eight commits, the second of which is a release: the newest is slower, trains faster, and holds more."""
    pytest.importorskip("asv")
    answers = {"show": "<a fix>", "tag": "v1", "rev-list": COMMITS[1], "config": "git@example.org:a/refattn.git"}
    answers["rev-parse"] = "f" * 40

    def git(*arguments: str) -> str:
        return str(int(arguments[-1], 16)) if "--format=%ct" in arguments else answers[arguments[0]]

    monkeypatch.setattr(pages, "git", git)
    made = [
        Series(TIME, COMMITS, (1e-3,) * 4 + (1.5e-3,) * 4),
        Series(RATE, COMMITS[1:], (1e4,) * 4 + (3e4,) * 3),
        Series(SHARE, COMMITS, (0.3,) * 8),
        Series(WORK, COMMITS, (100.0,) * 7 + (101.0,)),
        Series(MACHINE, COMMITS, (1e-4,) * 8),
    ]
    return pages.page({("other", "p"): [Series(TIME, COMMITS[:1], (1.0,))], ("mine", "python3.11.json"): made})


def test_what_got_worse_comes_first(shown: str) -> None:
    assert "beside <a href='https://example.org/a/refattn/commit/" + COMMITS[1] in shown, "the last release"
    assert "8 commits on mine, python3.11" in shown and "&lt;a fix&gt;" in shown and "<a fix>" not in shown
    assert "<h2>2 worse, 1 better, of 4 compared</h2>" in shown
    worse = shown[shown.index("compared</h2>") : shown.index("<h2>Mechanisms")]
    assert re.findall(r"class='(?:worse|better)'>([^<]+)<", worse) == ["more work", "slower", "higher rate"], (
        "what is counted first"
    )
    assert "1 ms" in worse and "1.5 ms" in worse and "1.50" in worse
    assert "start.Machine" not in shown


def test_a_page_that_is_not_about_head_says_so(shown: str) -> None:
    assert f"HEAD, <a href='https://example.org/a/refattn/commit/{'f' * 40}'><code>ffffffff" in shown


def test_each_mechanism_has_its_curves(shown: str) -> None:
    table = shown[shown.index("<h2>Mechanisms") : shown.index("steps in the history")]
    softmax = next(row for row in table.split("<tr>") if row.startswith("<th>softmax"))
    assert "<td class='n worse'>0.71</td>" in softmax and "<td class='n worse'>1.01</td>" in softmax
    assert softmax.count("<polyline") == 2 and "<circle class='worse'" in softmax
    assert "<td class='n '>0.3</td>" in next(row for row in table.split("<tr>") if row.startswith("<th>koopman"))


def test_what_fails_and_commits_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest commit is the last of the series, though git knows no date of it; what fails there comes first."""
    pytest.importorskip("asv")
    monkeypatch.setattr(pages, "git", lambda *arguments: "")
    made = [Series(TIME, COMMITS[:2], (1e-3,) * 2, COMMITS[2]), Series(WORK, COMMITS[:3], (1.0, 1.0, 2.0))]
    text = pages.page({("m", "p"): made})
    assert f"<h1>refattn <a href='#{COMMITS[2][:8]}'>" in text and "1970" not in text and "not recorded" not in text
    assert "<h2>1 fail, 1 worse, 0 better, of 1 compared</h2><ul><li class='worse'>fails: " in text
