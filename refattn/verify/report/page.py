"""The report of a verification as one page for a browser: it holds everything itself and asks nobody for anything."""

from __future__ import annotations

import html
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import round_to
from refattn.mechanisms.record import Mechanism
from refattn.messages import shown
from refattn.verify.outcome import LONGEST, Outcome, Report, Result, Truth, Verdict, share_text
from refattn.verify.report import diagnosis, example, suspects
from refattn.verify.report.sections import LEGEND, call_of, closing, counts, declines, far, heading
from refattn.verify.report.texts import cases_text
from refattn.verify.tolerance.budget import finite, has_rows, ratio, rounded, rows
from refattn.verify.tolerance.compare import row_limits

MAPS = 12
"""Heat maps are drawn of the tensors that used most of the allowed error."""

EACH = 2
"""Heat maps of one tensor in one type, where it disagrees in many cases."""

COLUMNS = 256
"""Longer rows are drawn in as many parts, each by its largest share."""

MOST = 1e9
"""Larger shares tell nothing more."""

_TOP = """.agrees { color: #17692f } .disagrees { color: #b3140c } .declined { color: #7a5b00 }
.verdict { font-size: 1.05rem; font-weight: 600 }
.box { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; border: 2px solid #b3140c;
  border-radius: 6px; padding: .7rem 1rem }
.box dt { font-weight: 600 } .box dd { margin: 0; overflow-wrap: anywhere }"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top }}
th {{ border-bottom: 1px solid #999 }} code, pre, .n {{ font: 13px/1.4 ui-monospace, monospace }}
pre {{ background: #f4f4f4; padding: .7rem; overflow-x: auto }}
figure {{ display: inline-block; margin: .5rem 1.5rem .5rem 0 }} figcaption {{ font-size: 13px }}
{top}
.wide, figure {{ max-width: 100%; overflow-x: auto }} h1, p {{ overflow-wrap: anywhere }}
@media (max-width: 30rem) {{ .box {{ grid-template-columns: 1fr }} body {{ margin: .5rem auto; padding: 0 .5rem }}
  td, th {{ padding-right: .4rem }} figure {{ margin-right: 0 }} }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #ddd }} pre {{ background: #22252b }}
  svg {{ background: #f4f4f4 }} a {{ color: #8ab4f8 }} .agrees {{ color: #6fce8c }} .disagrees {{ color: #ff8a80 }}
  .declined {{ color: #e0c060 }} }}
</style></head><body>
{body}
</body></html>
"""


def escape(text: str) -> str:
    """Return text of foreign code as HTML."""
    return html.escape(shown(text, LONGEST))


def page(report: Report, mechanism: Mechanism, producer: str, instead: Sequence[Outcome] = ()) -> str:
    """Return the page: the verdict, what fails as numbers, budget bars, heat maps, all cases, and versions.

    `producer` is the version of refattn; `instead` are outcomes of smaller cases in place of long ones, whose results
    are not kept.
    """
    title = f"{report.kernel} against {mechanism.title.lower()}"
    parts = _top(report, mechanism, "h1")
    suspect_lines = suspects.lines(report.suspects) if report.suspects else ()
    parts += _section("Suspects", verbatim(" " * columns + text for columns, text in suspect_lines))
    parts += _smallest(report)
    parts += _section("Used share of the allowed error", _bars(report))
    parts += ["".join(f"<p>{escape(line)}</p>" for line in LEGEND)]
    rows = "".join(f"<p>{escape(line)}</p>" for line in far(report, mechanism))
    parts += _section("Agrees though early digits differ", rows)
    parts += _section("Where the errors are", _maps(replace(report, outcomes=(*report.outcomes, *instead))))
    parts += _section("Cases and types", _grid(report))
    title_of_failed = f"Failed: {len(report.failed)} of {cases_text(report.counts()['all']['run'])} run"
    parts += _section(title_of_failed, _failures(report.failed, mechanism))
    for heading_of, section in (("Declined", declines(report)), ("Cases", counts(report))):
        parts += _section(heading_of, _table(section.header, section.rows) if section else "")
    parts += _section("Versions", _table(("program", "version"), _versions(producer)))
    return _PAGE.format(title=escape(title), top=_TOP, body="\n".join(parts))


def top(report: Report, mechanism: Mechanism) -> str:
    """Return the top of the page as a part of another one, a notebook's: the verdict and the diagnosis."""
    style = "\n".join(f".refattn {rule}" for rule in re.findall(r"\.[^{]+{[^}]*}", _TOP))
    body = "".join(_top(report, mechanism, "h4"))
    return f'<div class="refattn"><style>{style}</style>{body}</div>'


def _top(report: Report, mechanism: Mechanism, tag: str) -> list[str]:
    status = {0: "agrees", 1: "disagrees", 3: "declined"}[report.exit_code]
    title = f"<{tag}>{escape(heading(report, mechanism))}</{tag}>"
    interpreted = [f"<p>{escape(report.interpreted)}</p>"] if report.interpreted else []
    return [title, f'<p class="verdict {status}">{escape(closing(report))}</p>', *interpreted, *_box(report, mechanism)]


def _smallest(report: Report) -> list[str]:
    """Return the smallest case that fails: as numbers, as a program of NumPy, and as one that judges it."""
    parts: list[str] = []
    if report.least:
        case, outcome = report.least
        about = f"{outcome.dtype}: {call_of(case)}"
        if numbers := example.rows(outcome):
            verdict = example.wrong(outcome)
            header = (verdict.tensor if verdict else "", "got", "expected", "difference")
            parts += [f"<p>{escape(about)}</p>", _table(header, numbers)]
        if lines := example.program(case, outcome, report.kernel, report.framework, report.device):
            parts += ["<p>Without refattn:</p>", verbatim(lines)]
    if report.smallest:
        parts += ["<p>With the verdict:</p>" if parts else "", verbatim(report.smallest)]
    return _section("The smallest case found that fails", "".join(parts))


def _grid(report: Report) -> str:
    """Return a table of all cases by type: the largest used share, or what became of a case."""
    dtypes = list(dict.fromkeys(outcome.dtype for outcome in report.outcomes))
    cells: dict[str, dict[str, Outcome]] = {}
    for outcome in report.outcomes:
        cells.setdefault(outcome.case, {})[outcome.dtype] = outcome

    def cell(outcome: Outcome | None) -> str:
        if outcome is None:
            return "<td></td>"
        shares = [math.inf if math.isnan(one.share) else one.share for one in outcome.verdicts]
        told = share_text(max(shares)) if shares and outcome.status != "declined" else outcome.status
        word = {"raises": "disagrees", "not finished": "declined"}.get(outcome.status, outcome.status)
        return f'<td class="{word}">{escape(told)}</td>'

    rows = "".join(
        f"<tr><td>{escape(case)}</td>{''.join(cell(found.get(dtype)) for dtype in dtypes)}</tr>"
        for case, found in cells.items()
    )
    header = "".join(f"<th>{escape(text)}</th>" for text in ("case", *dtypes))
    table = f'<div class="wide"><table class="n"><tr>{header}</tr>{rows}</table></div>'
    told = f"{len(cells)} cases in {', '.join(dtypes)}: the largest used share of the allowed error"
    return f"<details><summary>{escape(told)}</summary>{table}</details>" if cells else ""


def _box(report: Report, mechanism: Mechanism) -> list[str]:
    """Return the diagnosis in a box; nothing where nothing fails."""
    rows = [f"<dt>{escape(word)}</dt><dd>{_linked(text)}</dd>" for word, text in diagnosis.lines(report, mechanism)]
    return [f'<dl class="box">{"".join(rows)}</dl>'] if rows else []


def _linked(text: str) -> str:
    """Return a line as HTML; an address becomes a link that nothing is fetched from until it is followed."""
    plain = escape(text)
    return f'<a href="{plain}" rel="noreferrer">{plain}</a>' if text.startswith("https://") else plain


def _section(title: str, body: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", body] if body else []


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f'<div class="wide"><table>{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table></div>'


def verbatim(lines: Iterable[str]) -> str:
    text = escape("\n".join(lines))
    return f"<pre>{text}</pre>" if text else ""


def _judged(report: Report) -> list[tuple[Outcome, Verdict]]:
    """Return all verdicts, the worst first."""
    pairs = [(outcome, verdict) for outcome in report.outcomes for verdict in outcome.verdicts]
    return sorted(pairs, key=lambda pair: -math.inf if math.isnan(pair[1].share) else -pair[1].share)


def _bars(report: Report) -> str:
    """Return a bar for each dtype and tensor, of the case that used most."""
    worst: dict[tuple[str, str], tuple[Outcome, Verdict]] = {}
    for outcome, verdict in _judged(report):
        worst.setdefault((outcome.dtype, verdict.tensor), (outcome, verdict))
    order = {dtype: n for n, dtype in enumerate(dict.fromkeys(outcome.dtype for outcome in report.outcomes))}
    tensors = {name: n for n, name in enumerate(dict.fromkeys(v.tensor for o in report.outcomes for v in o.verdicts))}
    lines, height = [], 22
    listed = sorted(worst.items(), key=lambda item: (order[item[0][0]], tensors[item[0][1]]))
    for n, ((dtype, tensor), (outcome, verdict)) in enumerate(listed):
        y, colour = n * height, "#3b7dbd" if verdict.agrees else "#c8321f"
        length = 200.0 * min(verdict.share, 2.0) if math.isfinite(verdict.share) else 400.0
        told = f"{share_text(verdict.share)}  {verdict.statistic}, case {outcome.case}"
        lines.append(
            f'<text x="0" y="{y + 15}">{escape(dtype)}</text><text x="80" y="{y + 15}">{escape(tensor)}</text>'
            f'<rect x="180" y="{y + 3}" width="{max(length, 1):.1f}" height="15" fill="{colour}"/>'
            f'<text x="592" y="{y + 15}">{escape(told)}</text>'
        )
    if not lines:
        return ""
    high = len(lines) * height
    limit = f'<line x1="380" x2="380" y1="0" y2="{high}" stroke="#222" stroke-dasharray="3 3"/>'
    limit += f'<text x="380" y="{high + 15}" text-anchor="middle">1, the limit</text>'
    drawn = f'<svg class="n" width="960" height="{high + 20}" role="img">{"".join(lines)}{limit}</svg>'
    return f'<div class="wide">{drawn}</div>'


def _maps(report: Report) -> str:
    """Return heat maps of the worst tensors, heads downwards and rows to the right."""
    figures: list[str] = []
    drawn: Counter[tuple[str, str]] = Counter()
    for outcome, verdict in _judged(report):
        key = (outcome.dtype, verdict.tensor)
        if outcome.seen is None or drawn[key] >= (1 if verdict.agrees else EACH) or len(figures) == MAPS:
            continue
        heat = row_shares(*outcome.seen)
        if verdict.tensor in heat:
            drawn[key] += 1
            about = f"{outcome.dtype} {verdict.tensor}, case {outcome.case}: {share_text(verdict.share)}"
            word = "agrees" if verdict.agrees else "disagrees"
            caption = f'<figcaption class="{word}">{escape(about)}</figcaption>'
            figures.append(f"<figure>{caption}{_map(heat[verdict.tensor])}</figure>")
    if not figures:
        return ""
    scale = (0.0, 0.25, 0.5, 1.0, 10.0, 1000.0, math.inf)
    legend = "".join(
        f'<rect x="{90 * n}" y="2" width="14" height="14" stroke="#999" fill="{_colour(share)}"/>'
        f'<text x="{90 * n + 20}" y="14">{f"{share:g}" if math.isfinite(share) else "not finite"}</text>'
        for n, share in enumerate(scale)
    )
    scaled = f'<div class="wide"><svg class="n" width="660" height="20" role="img">{legend}</svg></div>'
    text = "Used share of what a row is allowed; batch and heads downwards, rows to the right."
    return f"<p>{text}</p>{scaled}<div>{''.join(figures)}</div>"


def row_shares(truth: Truth, result: Result) -> dict[str, NDArray[Any]]:
    """Return for each tensor of the right shape the used share of what its rows are allowed: (batch and heads, rows).

    It is infinite where one of two numbers is finite and the other is not, otherwise `MOST` at most: where no error at
    all is allowed.
    """
    return {
        name: _shares(name, got, truth)
        for name, got in result.tensors.items()
        if name in truth.values and got.shape == truth.values[name].shape and got.size and got.ndim > 1
    }


@np.errstate(over="ignore", invalid="ignore")  # squares of a very wrong result
def _shares(name: str, got: NDArray[Any], truth: Truth) -> NDArray[Any]:
    target = rounded(truth, name)
    values = round_to(got.astype(np.float64), truth.stored[name])
    error, granted = rows(name, finite(values) - finite(target)), rows(name, truth.variance[name])
    shares = ratio(np.sqrt(np.mean(error**2, axis=-1)), np.sqrt(np.mean(granted, axis=-1)))
    shares = shares / row_limits(name, target, granted)
    odd = np.any(rows(name, np.isfinite(values) != np.isfinite(target)), axis=-1)
    lengths = target.shape[:-1] if has_rows(name, target) else target.shape
    return np.asarray(np.where(odd, np.inf, np.minimum(shares, MOST)), np.float32).reshape(-1, lengths[-1])


def _map(shares: NDArray[Any]) -> str:
    """Return a heat map as a drawing, with the share of a cell where the mouse points at it."""
    heads, count = shares.shape
    if count > COLUMNS:
        edges = np.linspace(0, count, COLUMNS, endpoint=False).astype(int)
        shares, step = np.maximum.reduceat(shares, edges, axis=1), count / COLUMNS
    else:
        step = 1.0
    wide, high = max(2.0, min(14.0, 420.0 / shares.shape[1])), max(4.0, min(14.0, 160.0 / heads))
    cells = "".join(
        f'<rect x="{j * wide:.2f}" y="{i * high:.2f}" width="{wide:.2f}" height="{high:.2f}" '
        f'fill="{_colour(float(share))}"><title>[{i}, {int(j * step)}] {share_text(float(share))}</title></rect>'
        for (i, j), share in np.ndenumerate(shares)
    )
    width, height = shares.shape[1] * wide, heads * high
    frame = f'<rect width="{width:.2f}" height="{height:.2f}" fill="none" stroke="#999"/>'
    return f'<svg width="{width + 1:.0f}" height="{height + 1:.0f}" role="img">{cells}{frame}</svg>'


def _colour(share: float) -> str:
    """White to blue within what is allowed, orange to dark red above it, black where no number helps."""
    if not math.isfinite(share):
        return "#000"
    if share <= 1.0:
        return f"hsl(210 60% {100.0 - 45.0 * share:.0f}%)"
    return f"hsl({max(0.0, 30.0 - 10.0 * math.log10(share)):.0f} 85% {max(25.0, 55.0 - 8.0 * math.log10(share)):.0f}%)"


def _failures(failed: Sequence[Outcome], mechanism: Mechanism) -> str:
    cases = {case.name: case for case in mechanism.cases}
    rows = []
    for outcome in failed:
        case = cases.get(outcome.case)
        about = f"{outcome.case} ({outcome.kind}{': ' + case.purpose if case and case.purpose else ''})"
        rows.append((outcome.dtype, about, call_of(case) if case else "", "; ".join(outcome.told())))
    return _table(("dtype", "case", "arguments", "what is wrong"), rows) if rows else ""


def _versions(producer: str) -> list[tuple[str, str]]:
    found = [("refattn", producer), ("python", platform.python_version())]
    found.append(("machine", f"{platform.system()} {platform.machine()}"))
    for name in ("numpy", "torch", "jax", "cupy", "onnxruntime"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found
