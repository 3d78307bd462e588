"""The page for a browser: what it shows, that it asks nobody for anything, and that a real browser shows it."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify.diagnose.suspects import locate
from refattn.verify.outcome import Outcome, Report
from refattn.verify.report import example, sections, tables
from refattn.verify.report.page import COLUMNS, page, row_shares
from refattn.verify.run import verify
from refattn.verify.shrink import least
from tools import chromium

RECORD = ra.mechanism("softmax")
FEW_NAMES = ("tiny", "causal-tail", "mask-keys", "softcap")
FEW = replace(RECORD, cases=tuple(RECORD.case(name) for name in FEW_NAMES), kernel_sizes=())


class Kernel:
    """Wrong in d_k throughout, in two rows of one head of `out`, and not finite in another."""

    def forward(self, q: Any, k: Any, v: Any, *, mask: Any = None, **options: Any) -> Any:
        if mask is not None:
            return ra.Decline("no <masks> & such")
        out, self.saved = ra.softmax.forward(q, k, v, **options)
        out = np.array(out)
        if "softcap" in options:
            out[0, 1, 5:7] *= np.float32(1.001)
            out[1, 2, 9, 0] = np.nan
        return out

    def backward(self, d_out: Any) -> Any:
        found = ra.softmax.backward(self.saved, d_out)
        return found | {"k": found["k"] * np.float32(1.01)}


@pytest.fixture(scope="module")
def report() -> Report:
    return replace(verify(FEW, Kernel(), label="a<b>.py:it", dtypes=["float32"], grad=True), smallest=("x = 1 < 2",))


@pytest.fixture(scope="module")
def file(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page(locate(FEW, report), FEW, "1.2.3"), encoding="utf-8")
    return file


class Tags(HTMLParser):
    """The tags of a page, which have to match, and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_says_what_the_report_says(file: Path, report: Report) -> None:
    text = file.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    for words in ("d_k", "float32 d_k, case", "Suspects", "softmax: disagrees: 3 cases run"):
        assert words in text
    for outcome in report.outcomes:
        for verdict in outcome.verdicts:
            if not verdict.agrees:
                assert f"is {verdict.got}, needs {verdict.expected}" in text
    assert "<td>refattn</td><td>1.2.3</td>" in text and "<td>numpy</td>" in text


def test_the_smallest_case_is_shown_as_numbers_and_as_a_program_of_numpy() -> None:
    def attend(q: Any, k: Any, v: Any, *, causal: Any = False) -> Any:
        return np.asarray(ra.softmax.forward(q, k, v)[0])

    one = replace(RECORD, cases=(RECORD.case("causal"),), kernel_sizes=())
    found = verify(one, attend, label="no such file.py:attend", dtypes=["float32"])
    pair = least(one, attend, found)
    assert pair is not None
    numbers, lines = example.rows(pair[1]), example.program(*pair, found.kernel)
    assert len(lines) <= 10 and not any("refattn" in line for line in lines)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec("\n".join(lines), {"attend": attend})
    apart = [float(row[3]) for row in numbers]
    assert any(abs(float(said.getvalue()) - one) <= 1e-6 for one in apart if one != 0.0)
    text = page(replace(found, least=pair, smallest=("x",)), one, "1")
    assert "Without refattn:" in text and f"<td>{numbers[0][1]}</td>" in text
    assert "least" not in found.to_json()


ADAPTERS = {
    "numpy": """
import numpy as np
def attend(q, k, v, *, causal=False):
    p = np.exp(q @ k.swapaxes(2, 3))
    return p / p.sum(-1, keepdims=True) @ v
""",
    "torch": """
import torch
def attend(q, k, v, *, causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q.to("cpu"), k, v, scale=1.0)
attend.framework = "torch"
""",
    "torch, a class": """
import torch
class Attend:
    framework, device = "torch", "cpu"
    def forward(self, q, k, v, **options):
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0), None
""",
    "jax": """
import jax.numpy as jnp
def attend(q, k, v, *, causal=False):
    p = jnp.exp(q @ k.swapaxes(2, 3))
    return (p / p.sum(-1, keepdims=True) @ v).astype(q.dtype)
attend.framework = "jax"
""",
}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_program_runs_for_an_adapter_of_any_library(name: str, dtype: str, tmp_path: Path) -> None:
    library = name.partition(",")[0]
    pytest.importorskip(library)
    if name == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    (tmp_path / "theirs.py").write_text(ADAPTERS[name])
    kernel = f"{tmp_path}/theirs.py:{'Attend' if 'class' in name else 'attend'}"
    report = ra.verify("softmax", kernel, cases=["tiny"], dtypes=[dtype])
    assert report.least is not None and report.framework == ("" if name == "numpy" else library)
    lines = example.program(*report.least, report.kernel, report.framework, report.device)
    assert lines and not any("refattn" in line for line in lines)
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True)
    verdict = example.wrong(report.least[1])
    assert verdict is not None and verdict.error is not None
    assert abs(float(found.stdout)) == pytest.approx(verdict.error, rel=0.02), found.stderr


def test_numbers_that_agree_far_apart_are_told_with_what_rounding_does() -> None:
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if options:
            return ra.Decline("no options")
        scores = q @ k.swapaxes(2, 3) * np.float32(q.shape[3] ** -0.5)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v

    softmax = ra.mechanism("softmax")
    chosen = [case for case in (*softmax.cases, *softmax.kernel_sizes) if case.name in ("plain", "low")]
    record = softmax.changed(cases=tuple(chosen), kernel_sizes=())
    found = verify(record, attend, dtypes=["float32"])
    (line,) = sections.far(found, record)
    told = re.fullmatch(
        r"float32 out\[.*\], case low: got (\S+), needs (\S+); rounding moves a correct kernel by up to (\S+) here "
        r"\(all scores below -5e4\)",
        line,
    )
    assert told, line
    got, needs, allowed = map(float, told.groups())
    assert found.passed and 1e-4 < abs(got - needs) < allowed < 1.0
    assert line in unescape(page(found, record, "1.2.3")) and line in " ".join(tables.verified(found, record).split())


def test_it_asks_nobody_for_anything(file: Path) -> None:
    text, tags = file.read_text(encoding="utf-8"), Tags()
    tags.feed(text)
    assert "script" not in {tag for tag, _ in tags.seen} and "http:" not in text and "https:" not in text
    assert not re.search(r"url\(|@import", text)
    linked = [a.get(name) for _, a in tags.seen for name in ("src", "href") if name in a]
    assert linked == ["data:,"]


def test_heat_maps_show_where(report: Report) -> None:
    outcome = next(outcome for outcome in report.outcomes if outcome.case == "softcap")
    assert outcome.seen is not None
    heat = row_shares(*outcome.seen)
    assert set(heat) == {"out", "d_q", "d_k", "d_v"} and heat["out"].shape == (8, 37)
    wrong = np.argwhere(~(heat["out"] <= 1.0)).tolist()
    assert wrong == [[1, 5], [1, 6], [6, 9]] and np.isinf(heat["out"][6, 9])
    assert (heat["d_k"] > 1.0).mean() > 0.9 and (heat["d_v"] <= 1.0).all()


def test_values_of_equations_have_maps_too() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        out = np.asarray(ra.softmax.forward(q, k, v)[0])
        return {"out": out, "SM.1": q @ k.swapaxes(2, 3) * np.float32(1.01 * q.shape[3] ** -0.5)}

    case = RECORD.case("unequal")  # fewer queries than keys
    one = replace(RECORD, cases=(case,), kernel_sizes=())
    found = verify(one, attend, dtypes=["float32"])
    assert found.outcomes[0].seen is not None and "float32 SM.1, case unequal" in page(found, one, "1")
    b, h, queries, _ = case.inputs["q"].shape
    assert row_shares(*found.outcomes[0].seen)["SM.1"].shape == (b * h, queries)


def test_long_rows_are_drawn_in_parts_and_nothing_is_lost() -> None:
    case = replace(
        RECORD.case("plain"),
        inputs={n: replace(x, shape=(1, 1, 700, 2)) for n, x in RECORD.case("plain").inputs.items()},
    )
    one = replace(RECORD, cases=(case,))

    def attend(q: Any, k: Any, v: Any) -> Any:
        out = np.array(ra.softmax.forward(q, k, v)[0])
        out[:, :, 691] *= np.float32(1.01)
        return out

    text = page(verify(one, attend, dtypes=["float32"]), one, "")
    assert text.count("<title>[0, ") == COLUMNS
    (wrong,) = re.findall(r'fill="hsl\((?:\d+) 85%[^>]*><title>\[0, (\d+)\]', text)
    assert 688 <= int(wrong) <= 691


def test_the_diagnosis_is_the_first_thing_with_the_conventions_that_differ() -> None:
    top_left = RECORD.wrong["top-left causality"]
    found = verify(FEW, lambda q, k, v, **options: top_left(q, k, v, **options), label="mine", dtypes=["float32"])
    text = page(locate(FEW, found), FEW, "")
    box = text[text.index('<dl class="box">') : text.index("</dl>")]
    for words in (
        "1 of 4 cases fail",
        "causal mask: top-left; needs bottom-right",
        "top-left causality: explains everything",
    ):
        assert words in box
    assert text.index("<dl") < text.index("<h2>")
    right = verify(FEW, lambda q, k, v, **options: ra.softmax.forward(q, k, v, **options)[0], dtypes=["float32"])
    assert "<dl" not in page(right, FEW, "")


def test_a_report_without_numbers_is_a_page_too() -> None:
    nothing = Report("softmax", "it", False, ())
    assert "nothing was run" in page(nothing, FEW, "")
    odd = Outcome("gone", "plain", "float32", "raises", "raised <b>")
    assert "raised &lt;b&gt;" in page(Report("softmax", "it", False, (odd,)), FEW, "")
    report = verify(FEW, lambda q, k, v, **options: q[..., :-1], dtypes=["float32"])
    assert "shape" in page(report, FEW, "")


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refattn.mechanisms.softmax.record", FEW)
    (tmp_path / "kernel.py").write_text("def attend(q, k, v, **options):\n    return q * 2\n")
    kernel = f"{tmp_path / 'kernel.py'}:attend"
    arguments = ["verify", "softmax", "--impl", kernel, *"--in-process --dtype float32 --html".split()]
    found = CliRunner().invoke(cli, [*arguments, str(tmp_path / "out.html")])
    assert found.exit_code == 1 and "verify_case" in (tmp_path / "out.html").read_text()
    assert found.stdout.endswith(f"\nwrote {tmp_path / 'out.html'}\n")
    found = CliRunner().invoke(cli, [*arguments, str(tmp_path / "missing" / "out.html")])
    assert found.exit_code == 2 and "--html: got" in found.stderr


@pytest.fixture
def browser(tmp_path: Path) -> list[str]:
    """The command of a browser without a window."""
    if (path := chromium.path()) is None:
        pytest.skip("there is no browser: apt-get install chromium")
    return [path, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]


@pytest.mark.slow
def test_a_browser_shows_it(file: Path, tmp_path: Path, browser: list[str]) -> None:
    picture = tmp_path / "page.png"
    call = [*browser, "--enable-logging=stderr", "--window-size=1150,1400"]
    seen = subprocess.run([*call, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in seen.stderr
    assert "float32 d_k, case" in seen.stdout and "<svg" in seen.stdout and "rect" in seen.stdout
    subprocess.run([*call, f"--screenshot={picture}", file.as_uri()], capture_output=True, timeout=120, check=True)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("wide", [360, 800])
def test_nothing_is_cut_off_at_the_width_of_a_phone(file: Path, tmp_path: Path, browser: list[str], wide: int) -> None:
    frame = tmp_path / "frame.html"
    inner = escape(file.read_text(encoding="utf-8"))
    frame.write_text(f"""<iframe width="{wide}" height="900" srcdoc="{inner}"></iframe><script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement
  const scrolls = x => x && x !== root && (getComputedStyle(x).overflowX === "auto" || scrolls(x.parentElement))
  const out = [...page.querySelectorAll("*")].filter(x => x.getBoundingClientRect().right > {wide} && !scrolls(x))
  document.title = `[${{root.scrollWidth}}] ${{out.map(x => x.tagName)}}`
}}
</script>""")
    call = [*browser, "--dump-dom", frame.as_uri()]
    seen = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True).stdout
    (width, out) = re.findall(r"<title>\[(\d+)\] ?(.*?)</title>", seen)[0]
    assert int(width) <= wide and not out
