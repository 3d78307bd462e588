"""One page for whoever maintains refattn: the newest commit beside the last release, what got worse first.

It is one file with no script: curves are drawn here, as SVG.
"""

from __future__ import annotations

import datetime
import graphlib
import html
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from asv_benchmarks.changes import Change, Series, calibrated, changes, paces, worst_first
from asv_benchmarks.judge import WORSE, Verdict, apart, number, times
from asv_benchmarks.machine import git
from asv_benchmarks.suite import MACHINE, Benchmark, param_names
from asv_benchmarks.touched import mechanism_of
from refattn.mechanisms.registry import list_mechanisms

COLUMNS = {
    "instructions": ("instructions",),
    "counted work": ("work",),
    "share of the allowed error": ("share",),
    "time": ("time", "rate"),
    "memory": ("memory",),
}
"""What each column of the table of mechanisms is made of, by kinds of benchmarks: what is counted comes first.

Rates count by their reciprocals.
"""

STYLE = """
:root { color-scheme: light dark; --worse: #b3261e; --better: #1a7f37; --line: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8884; vertical-align: middle; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-size: .9em; overflow-wrap: anywhere; } a code { white-space: nowrap; }
.worse { color: var(--worse); font-weight: 600; } .better { color: var(--better); font-weight: 600; }
svg { vertical-align: middle; } polyline { fill: none; stroke: currentColor; stroke-width: 1.5; }
circle { fill: currentColor; } circle.worse { fill: var(--worse); } circle.better { fill: var(--better); }
summary { cursor: pointer; font-weight: 600; }
"""


@dataclass(frozen=True)
class Shown:
    """A series with what is known of it: its steps, and its newest number beside the one of the base."""

    series: Series
    steps: list[Change]
    verdict: Verdict | None

    @property
    def mechanism(self) -> str:
        """The mechanism that it is of, or ""."""
        return mechanism_of(self.series.benchmark)


def page(found: Mapping[tuple[str, str], Sequence[Series]]) -> str:
    """Return the page, of the machine with the newest commit among those with two or more.

    Parameters
    ----------
    found
        Series by machine and interpreter, as `asv_benchmarks.archive.series` returns them.
    """
    orders = {key: _in_order(series) for key, series in found.items()}
    every = {commit for order in orders.values() for commit in order}
    dates = {commit: int(git("show", "-s", "--format=%ct", commit) or 0) for commit in every}

    def newest(key: tuple[str, str]) -> int:
        return max(dates[commit] for commit in orders[key])

    place = max(found, key=lambda key: (len(orders[key]) > 1, newest(key)))
    raw, commits = found[place], orders[place]
    base, head = released(commits) or commits[-2 if len(commits) > 1 else -1], commits[-1]
    shown = [_shown(one, base, head) for one in calibrated(raw) if not one.benchmark.name.startswith(MACHINE)]
    paced, here = paces(raw), git("rev-parse", "HEAD")
    machine = f"NumPy alone took {times('time', paced.get(head, 1.0) / paced.get(base, 1.0))} of its time"
    parts = [
        f"<h1>refattn {_link(head)}</h1>",
        f"<p class='worse'>HEAD, {_link(here)}, is not recorded: this page is about {_link(head)}.</p>"
        if here not in ("", head)
        else "",
        f"<p>beside {_link(base)}, {_what(base)}; {len(commits)} commits on {html.escape(place[0])}, "
        f"{html.escape(place[1].removesuffix('.json'))}. On the machine itself {machine}. "
        "<a href='index.html'>Every curve</a> is on asv's pages, which need a server.</p>",
        *_differences(shown),
        *_mechanisms(shown, commits),
        *_steps(shown),
        *_every(shown, commits),
        *_list(commits, dates),
    ]
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>refattn {head[:8]}</title>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def released(commits: Sequence[str]) -> str | None:
    """Return the last of the commits but the newest that is a release, by git's tags, if there is one."""
    tags = {git("rev-list", "-n1", tag) for tag in git("tag", "--list", "v*").split()}
    return next((commit for commit in reversed(commits[:-1]) if commit in tags), None)


def _in_order(series: Sequence[Series]) -> list[str]:
    """Return the commits of all series, the oldest first; each series has its own in that order."""
    before: dict[str, set[str]] = {}
    for one in sorted(series, key=lambda one: -len(one.commits)):
        commits = [*one.commits, *([one.fails] if one.fails else [])]
        for n, commit in enumerate(commits):
            before.setdefault(commit, set()).update(commits[max(n - 1, 0) : n])
    return list(graphlib.TopologicalSorter(before).static_order())


def _shown(one: Series, base: str, head: str) -> Shown:
    values = dict(zip(one.commits, one.values, strict=True))
    both = base in values and head in values
    return Shown(one, changes(one), apart(one.benchmark, [values[base]], [values[head]]) if both else None)


def _differences(shown: Sequence[Shown]) -> Iterable[str]:
    found = [one.verdict for one in shown if one.verdict and one.verdict.word]
    counted = [kind for kinds in list(COLUMNS.values())[:3] for kind in kinds]
    found.sort(key=lambda one: (one.word not in WORSE, one.benchmark.kind not in counted, -_size(one)))
    worse = sum(verdict.word in WORSE for verdict in found)
    compared = sum(one.verdict is not None for one in shown)
    failing = [one.series.benchmark for one in shown if one.series.fails]
    told = f"{len(failing)} fail, " if failing else ""
    yield f"<h2>{told}{worse} worse, {len(found) - worse} better, of {compared} compared</h2>"
    if failing:
        rows = "".join(f"<li class='worse'>fails: {_curve(benchmark)}</li>" for benchmark in failing)
        yield f"<ul>{rows}</ul>"
    if found:
        yield "<table><tr><th></th><th>benchmark</th><th>before</th><th>now</th><th>now / before</th></tr>"
        for verdict in found:
            kind, ratio = verdict.benchmark.kind, verdict.ratio[1] if verdict.ratio else 1.0
            yield (
                f"<tr><td class='{_class(verdict.word)}'>{verdict.word}</td><td>{_curve(verdict.benchmark)}</td>"
                f"<td class='n'>{number(kind, verdict.base)}</td><td class='n'>{number(kind, verdict.head)}</td>"
                f"<td class='n'>{times(kind, ratio)}</td></tr>"
            )
        yield "</table>"


def _size(verdict: Verdict) -> float:
    ratio = verdict.ratio[1] if verdict.ratio else 1.0
    return abs(math.log(ratio)) if 0.0 < ratio < math.inf else math.inf


def _mechanisms(shown: Sequence[Shown], commits: Sequence[str]) -> Iterable[str]:
    columns = [name for name, kinds in COLUMNS.items() if any(one.series.benchmark.kind in kinds for one in shown)]
    yield "<h2>Mechanisms</h2><p>The geometric mean of all numbers now, as a share of those before; of shares of the "
    yield "allowed error the largest now. A curve is over all commits.</p>"
    yield f"<table><tr><th></th>{''.join(f'<th colspan=2>{name}</th>' for name in columns)}</tr>"
    for mechanism in list_mechanisms():
        yield f"<tr><th>{mechanism}</th>"
        for name in columns:
            mine = [one for one in shown if one.mechanism == mechanism and one.series.benchmark.kind in COLUMNS[name]]
            yield _cell(mine, commits)
        yield "</tr>"
    yield "</table>"


def _cell(mine: Sequence[Shown], commits: Sequence[str]) -> str:
    """Return the two cells of a mechanism in one column."""
    head = [one for one in mine if one.series.commits[-1] == commits[-1]]
    if not head:
        return "<td colspan=2>-</td>"
    ratios = [(one, one.verdict.ratio[1]) for one in head if one.verdict and one.verdict.ratio]
    costs = [ratio ** _sign(one) for one, ratio in ratios if 0.0 < ratio < math.inf]
    ratio = statistics.geometric_mean(costs) if costs else None
    words = {one.verdict.word for one in head if one.verdict and one.verdict.word}
    look = "worse" if words & WORSE else "better" if words else ""
    if head[0].series.benchmark.kind == "share":
        text = number("share", max(one.series.values[-1] for one in head))
    else:
        text = times(head[0].series.benchmark.kind, ratio) if ratio else "new"
    steps = {step.commit: step for one in mine for step in one.steps}
    return f"<td class='n {look}'>{text}</td><td>{_svg(_index(mine, commits), commits, steps)}</td>"


def _sign(one: Shown) -> int:
    return -1 if one.series.benchmark.kind == "rate" else 1


def _index(mine: Sequence[Shown], commits: Sequence[str]) -> dict[str, float]:
    """Return by commit the geometric mean of all series, each as a share of its newest value."""
    found: dict[str, list[float]] = {}
    for one in mine:
        for commit, value in zip(one.series.commits, one.series.values, strict=True):
            if value > 0.0 and one.series.values[-1] > 0.0:
                found.setdefault(commit, []).append((value / one.series.values[-1]) ** _sign(one))
    return {commit: statistics.geometric_mean(found[commit]) for commit in commits if commit in found}


def _svg(values: Mapping[str, float], commits: Sequence[str], steps: Mapping[str, Change]) -> str:
    """Return a curve, at least a quarter of whose largest value is in sight, with circles at its steps and its end."""
    if not values:
        return ""
    wide, high, most = 110, 22, max(values.values())
    low, across = min(*values.values(), 0.75 * most), wide / max(1, len(commits) - 1)
    rise = high / (most - low or 1.0)
    points = {c: (3 + across * n, 3 + rise * (most - values[c])) for n, c in enumerate(commits) if c in values}
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points.values())
    marks = ""
    for commit, (x, y) in points.items():
        step = steps.get(commit)
        if step or commit == commits[-1]:
            look = _class(step.word) if step else ""
            told = f"{step.word} {times(step.benchmark.kind, step.factor)} since {commit[:8]}" if step else commit[:8]
            marks += f"<circle class='{look}' cx='{x:.1f}' cy='{y:.1f}' r='2.5'><title>{told}</title></circle>"
    size = f"width='{wide + 6}' height='{high + 6}'"
    return f"<svg {size} role='img' aria-label='curve'><polyline points='{line}'/>{marks}</svg>"


def _steps(shown: Sequence[Shown]) -> Iterable[str]:
    found = worst_first(step for one in shown for step in one.steps)
    yield f"<h2>{len(found)} steps in the history</h2><details><summary>All steps</summary><table><tr><th></th>"
    yield "<th>since</th><th>benchmark</th><th>factor</th></tr>"
    for step in found:
        factor = times(step.benchmark.kind, step.factor)
        yield (
            f"<tr><td class='{_class(step.word)}'>{step.word}</td><td>{_link(step.commit)}</td>"
            f"<td>{_curve(step.benchmark, step.commit)}</td><td class='n'>{factor}</td></tr>"
        )
    yield "</table></details>"


def _every(shown: Sequence[Shown], commits: Sequence[str]) -> Iterable[str]:
    yield "<h2>Every number</h2>"
    for mechanism in (*list_mechanisms(), ""):
        mine = [one for one in shown if one.mechanism == mechanism]
        if not mine:
            continue
        yield f"<details><summary>{mechanism or 'the whole'}: {len(mine)}</summary><table>"
        for one in mine:
            benchmark, values = one.series.benchmark, dict(zip(one.series.commits, one.series.values, strict=True))
            steps = {step.commit: step for step in one.steps}
            ratio = times(benchmark.kind, one.verdict.ratio[1]) if one.verdict and one.verdict.ratio else ""
            look = _class(one.verdict.word) if one.verdict and one.verdict.word else ""
            yield (
                f"<tr><td>{_curve(benchmark)}</td><td class='n'>{number(benchmark.kind, one.series.values[-1])}</td>"
                f"<td class='n {look}'>{ratio}</td><td>{_svg(values, commits, steps)}</td></tr>"
            )
        yield "</table></details>"


def _list(commits: Sequence[str], dates: Mapping[str, int]) -> Iterable[str]:
    yield "<h2>Commits</h2><table>"
    for commit in reversed(commits):
        made = datetime.datetime.fromtimestamp(dates[commit], datetime.UTC)
        date = made.strftime("%Y-%m-%d %H:%M") if dates[commit] else ""
        yield f"<tr id='{commit[:8]}'><td>{_link(commit)}</td><td class='n'>{date}</td><td>{_what(commit)}</td></tr>"
    yield "</table>"


def _link(commit: str) -> str:
    """Return a link to the commit where its repository has a page for it, and to the list on this page elsewhere."""
    remote = re.sub(r"^git@([^:]+):", r"https://\1/", git("config", "--get", "remote.origin.url")).removesuffix(".git")
    there = f"{remote}/commit/{commit}" if re.match(r"https://[^/@]+/", remote) else f"#{commit[:8]}"
    return f"<a href='{html.escape(there)}'><code>{commit[:8]}</code></a>"


def _what(commit: str) -> str:
    return html.escape(git("show", "-s", "--format=%s", commit) or "a commit that is not here")


def _curve(benchmark: Benchmark, commit: str = "") -> str:
    """Return a link to the curve on asv's pages, with the commit marked."""
    named = zip(param_names(benchmark.name), benchmark.params, strict=True)
    chosen = [f"p-{name}={quote(repr(value))}" for name, value in named] + [f"commits={commit[:8]}"] * bool(commit)
    there = html.escape(f"index.html#{benchmark.name}?{'&'.join(chosen)}")
    return f"<a href='{there}'><code>{html.escape(str(benchmark))}</code></a>"


def _class(word: str) -> str:
    return "worse" if word in WORSE else "better"
