"""One call from Python: `ra.verify` and `ra.assert_close`, and reports that show themselves."""

from __future__ import annotations

import inspect
import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.golden.inputs import make
from refattn.verify import check, in_python, locate, probe_conventions, run, verify
from refattn.verify.outcome import CheckReport, Report, Row

CASES = ("plain", "causal-tail")


def attend(q: Any, k: Any, v: Any, *, causal: Any = False) -> Any:
    """Right but for the alignment of the mask."""
    return ra.softmax.forward(q, k, v, causal="top_left" if causal else False)[0]


@pytest.fixture(scope="module")
def wrong() -> Report:
    return ra.verify("softmax", attend, cases=CASES)


def test_a_name_or_a_record_and_the_call_is_the_function() -> None:
    for mechanism in ("softmax", ra.mechanism("softmax")):
        report = ra.verify(mechanism, attend, cases=["plain"], dtypes=["float32", "float16"])
        assert report.passed and report and [one.dtype for one in report.outcomes] == ["float32", "float16"]
        report.raise_if_failed()
    assert inspect.signature(ra.verify) == inspect.signature(in_python.verify)
    with pytest.raises(ValueError, match=r"mechanism: got 'softmx' \(did you mean softmax\?\), needs one of softmax"):
        ra.verify("softmx", attend)
    with pytest.raises(ValueError, match=r"case: got 'causl' \(did you mean causal\?\)"):
        ra.verify("softmax", attend, cases=["causl"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dtypes": "float32"}, "dtypes: got 'float32', needs a list of names"),
        ({"cases": "plain"}, "cases: got 'plain', needs a list of names"),
        ({"kernel": 3}, "kernel: got int, needs a function, an object with forward, or a text such as"),
        ({"kernel": "mine.py"}, "kernel: got 'mine.py', needs MODULE_OR_FILE:FUNCTION"),
        ({"kernel": "none.py:attend"}, "kernel: there is no file none.py"),
        ({"kernel": "operator:matmull"}, "kernel operator:matmull: operator has no 'matmull' (did you mean matmul?)"),
        ({"dtypes": ["float23"]}, "dtype: got 'float23', needs one of float64"),
    ],
)
def test_what_cannot_be_verified_is_told_in_a_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(told)) as raised:
        ra.verify("softmax", **{"kernel": attend, "cases": ["plain"], **given})
    assert len(str(raised.value).splitlines()) == 1


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nsys.modules['torch'] = None\nimport torch\n")
    with pytest.raises(ValueError, match=r'kernel .*: cannot import .*torch.*: pip install "refattn\[torch\]"$'):
        ra.verify("softmax", f"{tmp_path}/mine.py:attend")


def test_attributes_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    source = """
class Odd:
    @property
    def framework(self):
        raise OSError("no driver")
    def forward(self, q, k, v):
        return q
"""
    (tmp_path / "mine.py").write_text(source)
    space: dict[str, Any] = {}
    exec(source, space)
    for kernel in (space["Odd"](), f"{tmp_path}/mine.py:Odd"):
        with pytest.raises(ValueError, match="^kernel: reading its attributes raised OSError: no driver$"):
            ra.verify("softmax", kernel, cases=["tiny"])


def test_arrays_of_several_types_are_refused() -> None:
    q, k, v = np.ones((3, 1, 1, 4, 2), np.float32)
    with pytest.raises(TypeError, match="k: got dtype float64, needs float32, as q has"):
        ra.assert_close("softmax", q, k.astype(np.float64), v, v)
    with pytest.raises(ValueError, match=r"q: got \(1, 4, 2\), needs an array \(batch, heads, tokens, width\)"):
        ra.assert_close("softmax", q[0], k, v, v)


def test_a_factor_near_one_is_told_with_its_digits() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 16, 8)).astype(np.float32)
    out = ra.softmax.forward(q, k, v)[0] * np.float32(1.00001)
    with pytest.raises(AssertionError, match=r"scaled by (1\.000010|0\.99999)\d*: "):
        ra.assert_close("softmax", q, k, v, out)


def test_all_cases_are_those_of_the_command() -> None:
    def declines(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.Decline("nothing yet")

    whole = ra.mechanism("softmax")
    record = replace(whole, cases=(whole.case("tiny"), whole.case("causal")), kernel_sizes=whole.kernel_sizes[:1])
    report = ra.verify(record, declines)
    assert [one.case for one in report.outcomes] == [case.name for case in (*record.cases, *record.kernel_sizes)]
    assert not report and not report.passed
    with pytest.raises(AssertionError, match="softmax: nothing was run: all .* cases were declined"):
        report.raise_if_failed()


def test_a_text_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef attend(q, k, v):\n    os._exit(3)\n")
    report = ra.verify("softmax", f"{tmp_path}/mine.py:attend", cases=["tiny"])
    assert not report and "raises" in repr(report) and "\nerror" in repr(report)


def test_a_report_shows_the_diagnosis(wrong: Report) -> None:
    text = repr(wrong)
    assert len(text.splitlines()) <= 12 and len(text) < 1500
    assert text.startswith("attend against softmax attention: outputs\n")
    assert "top-left causality: explains everything" in text and "softmax: disagrees: 2 cases run" in text
    with pytest.raises(AssertionError) as raised:
        wrong.raise_if_failed()
    assert str(raised.value) == text and not wrong
    assert wrong.suspects is not None and "1. top-left causality" in repr(wrong.suspects)
    assert "1. top-left causality" in wrong.suspects._repr_html_() and wrong.suspects._repr_html_().startswith("<pre")
    html = wrong._repr_html_()
    assert html.count("<div") == html.count("</div") == 1 and "top-left causality" in html and "<html" not in html
    # Its rules are for its own part of a notebook.
    rules = re.findall(r"([^{}]+){", html.partition("<style>")[2].partition("</style>")[0])
    assert rules and all(rule.strip().startswith(".refattn ") for rule in rules)


def test_a_report_without_suspects_says_how_to_ask_for_them() -> None:
    record = replace(ra.mechanism("softmax"), cases=(ra.mechanism("softmax").case("tiny"),), kernel_sizes=())
    ask = "\nwhich error it is: refattn.verify.locate(record, report)"
    report = verify(record, lambda q, k, v: ra.softmax.forward(q, k, v, scale=1.0)[0], dtypes=["float32"])
    assert repr(report).endswith(ask)
    assert "which error it is" not in repr(locate(record, report))
    shorter = verify(record, lambda q, k, v: ra.softmax.forward(q, k, v)[0][..., :1], dtypes=["float32"])
    assert repr(shorter).endswith(ask) and locate(record, shorter).suspects is None
    assert "which error it is" not in repr(locate(record, shorter))  # nothing was found: it is not asked for again
    right = verify(record, lambda q, k, v: ra.softmax.forward(q, k, v)[0], dtypes=["float32"])
    assert "which error it is" not in repr(right)


def test_a_report_of_many_cases_that_agree_is_short() -> None:
    report = ra.verify("softmax", lambda q, k, v: ra.softmax.forward(q, k, v)[0], cases=["tiny", "plain", "scale"])
    assert report and len(repr(report).splitlines()) <= 3
    rows = (Row("laws", "causal", "disagrees", 12.5, "row 3 feels key 4"), Row("laws", "mask", "agrees", 0.1, ""))
    checks = CheckReport("softmax", "numpy", False, rows)
    assert repr(checks).startswith("laws: causal: row 3 feels key 4\nsoftmax on numpy: disagrees: 1 checks agree")
    assert not checks and CheckReport("softmax", "numpy", False, rows[1:]).passed


def test_what_a_call_saved_shows_its_shapes() -> None:
    _, saved = ra.softmax.forward(*np.zeros((3, 1, 2, 4, 3)))
    assert "<tr><td>lse</td><td>float64(1, 2, 4)</td></tr>" in saved._repr_html_()


def test_a_record_and_its_claims_show_themselves() -> None:
    record = ra.mechanism("softmax")
    text, table = repr(record), record._repr_html_()
    assert len(text.splitlines()) <= 10 and "\noptions          mask, causal=False, window" in text
    assert (
        "<td>options</td><td>mask, causal=False, window" in table and "dense, tiled" in text and "87 designed" in text
    )
    claims = record.claims
    assert repr(claims).splitlines()[:2] == [
        f"{len(claims)} claims",
        f"- {claims[0].claim}: as said ({claims[0].source})",
    ]
    assert f"<td>{claims[0].claim}</td>" in claims._repr_html_() and claims._repr_html_().count("<tr>") == 1 + len(
        claims
    )


def test_a_report_becomes_files(wrong: Report, tmp_path: Path) -> None:
    page = wrong.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page and "The smallest case found" in page
    data = wrong.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(data)) and "record" not in data
    suite = ElementTree.fromstring(wrong.to_junit(tmp_path / "report.xml"))
    assert suite.find("testsuite").get("failures") == "1"  # type: ignore[union-attr]
    assert (tmp_path / "report.xml").is_file()


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "cupy"])
def test_ones_own_arrays_of_any_library(library: str) -> None:
    backend = backends.get(library)
    if why := backend.why_unavailable():
        pytest.skip(why)
    host = np.random.default_rng(0).standard_normal((4, 1, 2, 12, 8)).astype(np.float32)
    q, k, v, d_out = (backend.from_numpy(x) for x in host)
    out, saved = ra.softmax.forward(q, k, v, causal=True, implementation="tiled")
    gradients = ra.softmax.backward(saved, d_out)
    report = ra.assert_close("softmax", q, k, v, out, gradients, d_out=d_out, causal=True)
    assert report and {one.tensor for one in report.outcomes[0].verdicts} == {"out", "d_q", "d_k", "d_v"}
    assert ra.assert_close("softmax", q, k, v, (out, saved.lse), causal=True)
    mask = backend.from_numpy(np.tril(np.ones((1, 1, 12, 12), bool)))
    assert ra.assert_close("softmax", q, k, v, out, mask=mask)
    with pytest.raises(AssertionError, match=r"of the allowed error: out\[0,"):
        ra.assert_close("softmax", q, k, v, out)


def test_torch_in_bfloat16_with_autograd() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    d_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    assert ra.assert_close("softmax", q, k, v, out, gradients, d_out=d_out).outcomes[0].dtype == "bfloat16"
    with pytest.raises(AssertionError, match="d_q wrong; out, d_k, d_v right"):
        ra.assert_close("softmax", q, k, v, out, (1.1 * gradients[0], *gradients[1:]), d_out=d_out)


def close(**options: Any) -> Callable[..., Report]:
    """Judge what the reference gives with other options than were asked for."""
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 2, 24, 16)).astype(np.float32)
    k, v = k[:, :, :17], v[:, :, :17]
    out, _ = ra.softmax.forward(q, k, v, **options)
    return lambda **asked: ra.assert_close("softmax", q, k, v, out, **asked)


@pytest.mark.parametrize(
    ("given", "asked", "reading"),
    [
        ({"causal": "top_left"}, {"causal": True}, "top-left causality: explains everything"),
        ({"scale": 1.0}, {}, "scale left out"),
        ({}, {"causal": True}, "explains everything"),
    ],
)
def test_the_message_has_the_reading_that_explains_it(given: Any, asked: Any, reading: str) -> None:
    with pytest.raises(AssertionError) as raised:
        close(**given)(**asked)
    text = str(raised.value)
    assert reading in text and len(text.splitlines()) <= 12 and "your result against softmax attention" in text


def test_a_precision_that_explains_it_is_told_and_may_be_declared() -> None:
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 2, 24, 16)).astype(np.float32)
    short = [(x.view(np.uint32) // 65536 * 65536).view(np.float32) for x in (q, k, v)]
    out, _ = ra.softmax.forward(*short)
    with pytest.raises(AssertionError, match="precision .*float32 agrees if"):
        ra.assert_close("softmax", q, k, v, out)
    names = [f"{name}=bfloat16" for name in ("q", "k", "v")]
    assert ra.assert_close("softmax", short[0], short[1], short[2], out, rounding=names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": [1.0]}, "q: got list, needs an array"),
        ({"v": np.ones((1, 2, 3), np.float32)}, r"v: got \(1, 2, 3\), needs an array \(batch, heads, "),
        ({"causl": True}, r"got causl \(did you mean causal\?\), needs arguments of the core"),
        ({"gradients": {}}, "d_out: got None beside gradients, needs both or neither"),
        ({"q": np.ones((1, 1, 2, 2), np.int64)}, "q: got dtype int64, needs one of float64"),
    ],
)
def test_what_is_no_call_is_told(change: dict[str, Any], message: str) -> None:
    x = np.ones((1, 1, 2, 2), np.float32)
    given: dict[str, Any] = {"q": x, "k": x, "v": x, "out": x, **change}
    with pytest.raises((TypeError, ValueError), match=message):
        ra.assert_close("softmax", **given)
    with pytest.raises(AssertionError, match=r"error +returned no output"):
        ra.assert_close("softmax", x, x, x, None)


MASKED: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("out", lambda out: np.ma.array(out, mask=True), lambda d: d),
    ("out", lambda out: np.ma.array(out), lambda d: d),
    ("out", lambda out: (np.ma.array(out, mask=True),), lambda d: d),
    ("out", lambda out: {"out": np.ma.array(out, mask=True)}, lambda d: d),
    ("d_k", lambda out: out, lambda d: d | {"k": np.ma.array(d["k"], mask=True)}),
]


@pytest.mark.parametrize(("name", "of_out", "of_gradients"), MASKED)
def test_what_a_mask_hides_is_not_judged(name: str, of_out: Any, of_gradients: Any) -> None:
    q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 1, 2, 5, 4)).astype(np.float32)
    out, saved = ra.softmax.forward(q, k, v)
    gradients = ra.softmax.backward(saved, d_out)
    assert ra.assert_close("softmax", q, k, v, out, gradients, d_out=d_out)
    with pytest.raises(AssertionError, match=f"{name}: got MaskedArray, needs a plain array"):
        ra.assert_close("softmax", q, k, v, of_out(out), of_gradients(gradients), d_out=d_out)

    def hidden(q: Any, k: Any, v: Any) -> Any:
        return np.ma.array(ra.softmax.forward(q, k, v)[0], mask=True)

    assert ra.verify("softmax", hidden, cases=["tiny"]).outcomes[0].status == "raises"


def test_a_result_without_a_number_is_no_agreement() -> None:
    q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 1, 2, 5, 4)).astype(np.float32)
    nothing = np.full_like(q, np.nan)
    for given in ((nothing, k, v, nothing), (q, k, nothing, nothing)):
        with pytest.raises(ValueError, match=r"^out: got NaN alone, as the reference has it, needs at least one"):
            ra.assert_close("softmax", *given)
    for at in (slice(0), slice(1)):  # no query, and one of them
        given = (q[:, :, at], k, v, ra.softmax.forward(q, k, v)[0][:, :, at])
        if at.stop:
            assert ra.assert_close("softmax", *given)
        else:
            with pytest.raises(ValueError, match=r"^out: got no element, as the reference has it, needs at least one"):
                ra.assert_close("softmax", *given)
    out = ra.softmax.forward(q, k, v)[0]
    with pytest.raises(ValueError, match=r"^gradients: got NaN alone"):
        ra.assert_close("softmax", q, k, v, out, (nothing, nothing, nothing), d_out=nothing)
    hidden = {"mask": np.zeros((5, 5), bool)}  # all numbers are 0, and were compared
    assert ra.assert_close("softmax", q, k, v, 0.0 * out, **hidden)
    with pytest.raises(AssertionError):
        ra.assert_close("softmax", q, k, v, nothing)


def test_arguments_in_another_order_are_told_the_right_one() -> None:
    x, kernel = np.ones((1, 1, 2, 2), np.float32), cast(Any, attend)
    softmax, needs = ra.mechanism("softmax"), "needs a name such as 'softmax' or a record, as in"
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: ra.verify(kernel, "softmax"), f"got function, {needs} verify(mechanism, kernel)"),
        (lambda: ra.verify(kernel, softmax), f"got function, {needs} verify(mechanism, kernel)"),
        (lambda: ra.assert_close(x, x, x, x, softmax), f"got ndarray, {needs} assert_close(mechanism, q, k, v, out)"),  # type: ignore[arg-type]
        (lambda: ra.explore(x, x, x, "softmax"), f"got ndarray, {needs} explore(mechanism, q, k, v)"),  # type: ignore[arg-type]
        (lambda: probe_conventions("softmax", kernel), f"got function, {needs} probe_conventions(kernel, mechanism)"),
        (lambda: run.verify(kernel, softmax), "got function, needs a Mechanism of refattn.mechanisms.record"),
        (lambda: check("softmax"), "got 'softmax', needs a Mechanism of refattn.mechanisms.record"),  # type: ignore[arg-type]
    ]
    for call, message in calls:
        with pytest.raises(TypeError, match=rf"^mechanism: {re.escape(message)}$"):
            call()


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_what_a_forward_saves_is_shown_without_its_numbers(name: str) -> None:
    record = ra.mechanism(name)
    case = record.case("tiny")
    _, saved = record.core.forward(**make(name, case, "float32"), **case.options)  # type: ignore[union-attr]
    text = repr(saved)
    assert (
        re.match(r"Saved\(\s*implementation='", text)
        and "float32(" in text
        and "array(" not in text
        and len(text) < 900
    )


def test_a_call_on_ones_own_arrays_is_a_page_to_step_through(tmp_path: Path) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 4, 2)).astype(np.float32)
    page = ra.explore("softmax", q, k, v, causal=True)
    for words in ("SM.4", "dSM.4", "step by step", "token 3"):
        assert words in page.html
    assert "case your arrays" in ra.explore("softmax", q, k, v, scale=0.3).html  # no tour has it: a table of values
    cell = page._repr_html_()
    assert cell.startswith("<iframe ") and "<script" not in cell and unescape(cell).count(page.html) == 1
    page.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html and len(repr(page)) < 100
    with pytest.raises(ValueError, match=r"got causl \(did you mean causal\?\)"):
        ra.explore("softmax", q, k, v, causl=True)
    with pytest.raises(ValueError, match="needs one with at most .* for a page"):
        ra.explore("softmax", *np.ones((3, 1, 8, 256, 8)))


def test_the_tutorial_in_a_notebook_runs() -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "docs" / "tutorials" / "6_in_a_notebook.py"))
