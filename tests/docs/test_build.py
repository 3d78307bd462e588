"""The built pages: every equation has its anchor, links lead somewhere, and nothing is fetched from the network."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import refattn as ra
from refattn import equations
from refattn.mechanisms import registry
from refattn.verify.traced import Place, file_of, places_in
from tools import chromium

for _package in ("sphinx", "myst_parser", "furo", "bs4"):
    pytest.importorskip(_package, reason='the pages are built with pip install -e ".[docs]"')

from docs.extension.narrow import with_breaks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` does: a warning is an error. REFATTN_PAGES names where it has done so."""
    if "REFATTN_PAGES" in os.environ:
        return ROOT / os.environ["REFATTN_PAGES"]
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", out / "doctrees", ROOT / "docs", out]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Any]:
    """Every page by its path."""
    from bs4 import BeautifulSoup

    files = sorted(site.rglob("*.html"))
    return {path.relative_to(site).as_posix(): BeautifulSoup(path.read_text(), "html.parser") for path in files}


def anchor(id: str) -> str:
    return id.lower().replace(".", "-")


def home_of(place: Place) -> str:
    """The mechanism whose room an equation stands in: growing attention has those of softmax attention."""
    return place.file.split("/")[2]


def defined(name: str) -> dict[str, Place]:
    """The equations of a definition, in the order of its docstring and its lines."""
    module = ra.mechanism(name).definition
    assert module is not None
    return places_in(module)


def general(name: str) -> list[tuple[str, ModuleType]]:
    """The equations that a room's general code declares, and where: of all modules but the definition and the judge."""
    room = registry.room(name)
    found = [importlib.import_module(each.name) for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
    modules = [
        module
        for module in found
        if module is not ra.mechanism(name).definition and not {"testing", "loops"} & {*module.__name__.split(".")}
    ]
    return [(id, module) for module in modules for id in equations.declared(module)]


def line_of(page: Any, href: str) -> str:
    """The line of a listed file that an address leads to: its anchor stands before the line's number."""
    text = ""
    for part in page.find(id=href.partition("#")[2]).next_siblings:
        text += part.get_text()
        if "\n" in text:
            break
    return text.split("\n")[0]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_equation_has_an_anchor_and_no_anchor_is_left_over(pages: dict[str, Any], name: str) -> None:
    page, below = pages[f"mechanisms/{name}.html"], pages[f"mechanisms/{name}/reference.html"]
    shown, listed = ([term["id"] for term in each.select("dt.equation")] for each in (page, below))
    assert sorted(shown) == sorted(anchor(id) for id in defined(name))
    assert sorted(listed) == sorted(anchor(id) for id, _ in general(name))
    assert len(set(shown)) == len(shown) and len(set(listed)) == len(listed)
    record = ra.mechanism(name)
    ids = [id for module in (*record.equation_modules, *record.extra_modules) for id in equations.declared(module)]
    assert {anchor(id) for id in ids if f".{name}." in home(record, id)} <= {*listed}


def home(record: Any, id: str) -> str:
    """The name of the module that declares an equation of the general code."""
    return next(m.__name__ for m in (*record.equation_modules, *record.extra_modules) if id in equations.declared(m))


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_an_equation_of_the_definition_stands_above_its_lines(pages: dict[str, Any], name: str) -> None:
    page, code = pages[f"mechanisms/{name}.html"], pages[f"mechanisms/{name}/reference.html"]
    for id, place in defined(name).items():
        term = page.find(id=anchor(id))
        assert term.get_text().split()[0] == id
        if not place.formula.startswith("forward: "):  # the quote stands in the listing
            formula, note = noted(place.formula)
            assert term.find("math")["alttext"] == formula
            assert " ".join(note.replace("`", "").split()) in " ".join(term.get_text().split())
        about = term.find_next("dd")
        link = about.find("a", string=f"line {place.line}")
        number, line = line_of(code, link["href"]).split(maxsplit=1)
        assert int(number) == place.line and line.startswith(place.code.splitlines()[0])
        listings = takewhile(lambda each: each.name == "div", term.find_parent("dl").find_next_siblings())
        shown = {number: text for each in listings for number, text in numbered(each)}
        assert shown[place.line].startswith(place.code.splitlines()[0])


def noted(formula: str) -> tuple[str, str]:
    """A formula, and the remark that follows two or more spaces."""
    return tuple((*re.split(r" {2,}", formula, maxsplit=1), ""))[:2]  # type: ignore[return-value]


def numbered(listing: Any) -> Iterator[tuple[int, str]]:
    """The lines of a listing, each with its number."""
    for number in listing.select("span.linenos"):
        text = "".join(takewhile(lambda part: "\n" not in part, (each.get_text() for each in number.next_siblings)))
        yield int(number.get_text()), text.strip()


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_the_lines_of_a_page_are_those_of_the_definition(pages: dict[str, Any], name: str) -> None:
    module = ra.mechanism(name).definition
    assert module is not None
    source = inspect.getsource(module).splitlines()
    shown = set()
    for listing in pages[f"mechanisms/{name}.html"].select("div.highlight-python"):
        for number, text in numbered(listing):
            assert text == source[number - 1].strip()
            assert number not in shown, "no line is shown twice"
            shown.add(number)
    functions = [
        each for _, each in inspect.getmembers(module, inspect.isfunction) if each.__module__ == module.__name__
    ]
    wanted = {n for each in functions for n in lines_of(inspect.unwrap(each))}
    assert wanted <= shown


def lines_of(function: Any) -> Iterator[int]:
    """The numbers of a function's lines that say something, without its decorators."""
    lines, first = inspect.getsourcelines(function)
    start = next(n for n, line in enumerate(lines) if line.startswith("def "))
    yield from (first + n for n, line in enumerate(lines) if n >= start and line.strip())


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_an_equation_of_the_general_code_stands_beside_its_line(pages: dict[str, Any], name: str) -> None:
    page, code = (pages[f"mechanisms/{name}/reference.html"],) * 2
    record = ra.mechanism(name)
    computing = (*record.equation_modules, *record.extra_modules)
    linked = {tag["href"] for tag in page.find_all("a", href=True)}
    for module in computing:
        if f".{name}." not in module.__name__:
            assert {f"../{home_of(place)}.html#{anchor(id)}" for id, place in places_in(module).items()} <= {
                link.replace("/reference", "") for link in linked
            }
    lines: dict[
        str, list[tuple[str, int]]
    ] = {}  # all that compute an equation: of exclusive branches each may be the one that ran
    for module in computing:
        for tag in equations.tags(module):
            lines.setdefault(tag.id, []).append((file_of(module), tag.line))
    for id, module in general(name):
        term = page.find(id=anchor(id))
        formula, note = noted(equations.declared(module)[id])
        assert term.get_text().split()[0] == id and term.find("math")["alttext"] == formula
        assert " ".join(note.replace("`", "").split()) in " ".join(term.get_text().split())
        about = term.find_next("dd")
        link = about.find("a", string=re.compile(r"\w+\.py:\d+"))
        number, line = line_of(code, link["href"]).split(maxsplit=1)
        assert link.get_text().endswith(f":{number}")
        if module not in computing:  # an option, whose object computes it: the link leads to its docstring
            assert line.startswith(f"[{id}]")
            continue
        assert (int(number), link.get_text().partition(":")[0]) in [(n, Path(file).name) for file, n in lines[id]]
        shown = about.find("pre").get_text().strip()
        assert line.startswith(shown.splitlines()[0])


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_page_has_what_the_record_has(pages: dict[str, Any], name: str) -> None:
    record = ra.mechanism(name)
    parts = ("", "/reference")
    text = "".join(pages[f"mechanisms/{name}{part}.html"].get_text() for part in parts)
    for word in (
        record.title,
        record.source,
        *record.implementations,
        *record.properties,
        *record.wrong,
    ):
        assert word in text
    for case in record.cases:
        assert case.name in text
    assert pages["mechanisms/index.html"].find("a", string=record.title)
    linked = {a["href"] for a in pages["mechanisms/index.html"].find_all("a")}
    assert {f"{name}.html#{anchor(id)}" for id in defined(name)} <= linked
    others = {anchor(id) for id, _ in general(name)} - {anchor(id) for id in defined(name)}
    assert {f"{name}/reference.html#{each}" for each in others} <= linked


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_option_of_the_core_is_told(pages: dict[str, Any], name: str) -> None:
    section = pages[f"mechanisms/{name}.html"].find(id="options")
    told = {code.get_text() for code in section.select("td:first-child code, p code")}
    assert {*ra.mechanism(name).defaults} <= told
    for row in section.select("tbody tr"):
        assert len(row.select("td")[-1].get_text().split()) >= 5


def test_links_lead_somewhere(pages: dict[str, Any], site: Path) -> None:
    known = {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in pages.items()}
    for name, page in pages.items():
        known[name] |= {tag["name"] for tag in page.find_all("a", attrs={"name": True})}
    wrong, seen = [], 0
    for name, page in pages.items():
        for link in page.find_all("a", href=True):
            target, part = urldefrag(unquote(link["href"]))
            if re.match(r"[a-z]+:", target):
                continue
            seen += 1
            path = (site / name).parent / target if target else site / name
            if not path.resolve().exists():
                wrong.append(f"{name}: {link['href']}")
            elif part and (where := path.resolve().relative_to(site).as_posix()) in known and part not in known[where]:
                wrong.append(f"{name}: {link['href']}")
    assert seen > 100 and wrong == []


def test_the_front_page_has_a_tour_that_is_loaded_when_it_is_seen(pages: dict[str, Any], site: Path) -> None:
    frame = pages["index.html"].find("iframe", {"class": "wide"})
    assert (frame["loading"], frame["title"]) == ("lazy", "A tour of softmax attention")
    assert (site / frame["src"]).exists() and frame.find_next("a")["href"] == frame["src"]


def test_nothing_comes_from_the_network(pages: dict[str, Any], site: Path) -> None:
    found = []
    for name, page in pages.items():
        for tag in page.find_all(["script", "img", "iframe", "source"], src=True):
            found.append((name, tag["src"]))
        for tag in page.find_all("link", href=True):
            found.append((name, tag["href"]))
    for path in site.rglob("*.css"):
        found += [(path.name, url) for url in re.findall(r"(?:@import\s*|url\()['\"]?([^'\")]+)", path.read_text())]
    assert found and [each for each in found if re.match(r"(?:https?:)?//", each[1])] == []


def test_figures_are_filled_in(pages: dict[str, Any]) -> None:
    from tools.facts import load

    facts = load()
    text = " ".join(pages["verifying/report.html"].get_text().split())
    assert f"of {facts['mutants'].value} wrong kernels of softmax attention" in text
    table = pages["checking.html"].get_text()
    for id, fact in facts.items():
        assert id in table and fact.command in table


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("linear attention", "mechanisms/delta"),
        ("linear attention", "mechanisms/higher_order"),
        ("KV cache", "blocks"),
        ("gated delta net", "mechanisms/delta"),
        ("ring attention", "backends"),
        ("EDMD", "mechanisms/koopman"),
        ("Triton", "verifying/triton"),
        ("pytest", "verifying/pytest"),
    ],
)
def test_the_search_finds_the_words_of_the_field(words: str, page: str, site: Path) -> None:
    """A page is found that has all words, each by its stem, in its text or in a title."""
    from sphinx.search.en import SearchEnglish

    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index, stem = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")")), SearchEnglish({}).stem
    found = {*range(len(index["docnames"]))}
    for word in words.lower().split():
        places = [index[part].get(stem(word), []) for part in ("terms", "titleterms")]
        found &= {n for each in places for n in (each if isinstance(each, list) else [each])}
    assert page in {index["docnames"][n] for n in found}


PHONE = """(() => {
  const found = { width: document.documentElement.scrollWidth, words: [], cut: [] };
  const texts = document.createTreeWalker(document.querySelector("article") || document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let text; (text = texts.nextNode()); ) {
    if (text.parentElement.closest("pre, script, style, svg, math, a[href^=http]")) continue;
    for (const word of text.data.matchAll(/[A-Za-z0-9]+/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter((box) => box.width);
      if (new Set(boxes.map((box) => Math.round(box.top))).size > 1) found.words.push(word[0]);
    }
  }
  for (const one of document.querySelectorAll("article pre, article table")) {
    const moves = (box) => ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    let box = one;
    while (box.tagName != "ARTICLE" && !moves(box)) box = box.parentElement;
    const still = box.tagName == "ARTICLE" && one.scrollWidth > box.clientWidth + 1;
    if (still || box.getBoundingClientRect().right > innerWidth + 1) found.cut.push(one.textContent.slice(0, 60));
  }
  return found;
})()"""
"""What is wider than the screen, which words are broken, and which listings and tables are cut and cannot be moved."""


def test_a_page_can_be_read_on_a_telephone(site: Path, pages: dict[str, Any], tmp_path: Path) -> None:
    if chromium.path() is None:
        pytest.skip("needs a browser: apt-get install chromium")
    wrong = {}
    with chromium.browser(tmp_path) as browser:
        for name in pages:
            tab = browser.open((site / name).resolve().as_uri(), width=390, height=844, touch=True)
            found = tab.evaluate(PHONE)
            tab.call("Page.close")
            if found != {"width": 390, "words": [], "cut": []}:
                wrong[name] = found
    assert wrong == {}


def test_signatures_have_types_without_their_modules(pages: dict[str, Any]) -> None:
    signatures = [each.get_text() for each in pages["api.html"].select("dt.sig")]
    assert signatures and [each for each in signatures if "~" in each or "<" in each] == []


def test_long_names_alone_break_between_their_words() -> None:
    long, short = "tests/a_file.py::test_x[b, c=&#x27;&lt;]", "log_decay"
    html = '<code><span class="pre">{}</span></code><em>{}</em>'
    assert with_breaks(html.format(short, short)) == html.format(short, short)
    name = "tests/<wbr>a_<wbr>file.<wbr>py::<wbr>test_<wbr>x[<wbr>b, c=&#x27;&lt;]"
    assert with_breaks(html.format(long, long)) == f'<code><span class="pre long">{name}</span></code><em>{name}</em>'
