"""The built pages: every equation has its anchor, links lead somewhere, and nothing is fetched from the network."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import refattn as ra
from refattn import equations
from refattn.verify.traced import Place, places

for _package in ("sphinx", "myst_parser", "furo", "bs4"):
    pytest.importorskip(_package, reason='the pages are built with pip install -e ".[docs]"')

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


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_equation_has_an_anchor_and_no_anchor_is_left_over(pages: dict[str, Any], name: str) -> None:
    record = ra.mechanism(name)
    page = pages[f"mechanisms/{name}.html"]
    shown = [term["id"] for term in page.select("dt.equation")]
    own = {id for id, place in places(record).items() if home_of(place) == name}
    grown = [id for module in record.beside for id in equations.declared(module)]
    assert shown == [anchor(id) for id in (*record.equations, *grown) if id in own or id in grown]
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_an_equation_stands_beside_its_code(pages: dict[str, Any], name: str) -> None:
    page = pages[f"mechanisms/{name}.html"]
    by_id = {tag["id"]: tag for each in (page, pages[f"mechanisms/{name}/code.html"]) for tag in each.find_all(id=True)}
    linked = {tag["href"] for tag in page.find_all("a", href=True)}
    record = ra.mechanism(name)
    for id, place in places(dataclasses.replace(record, tagged=(*record.tagged, *record.beside))).items():
        if home_of(place) != name:
            assert f"{home_of(place)}.html#{anchor(id)}" in linked
            continue
        term = by_id[anchor(id)]
        formula, _, note = re.sub(r" {2,}", "\0", place.formula).partition("\0")
        assert term.get_text().split()[0] == id and term.find("math")["alttext"] == formula
        assert " ".join(note.replace("`", "").split()) in " ".join(term.get_text().split())
        about = term.find_next("dd")
        assert about.find("pre").get_text().strip() == place.code.strip()
        assert place.axes is None or f"({', '.join(place.axes)})" in about.get_text()
        assert f"{id} in " in about.find("summary").get_text() and about.select("details > pre")[0].get_text()
        link = about.find("a", string=f"{Path(place.file).name}:{place.line}")
        # The anchor stands at the beginning of its line of the file, before the line's number.
        text = ""
        for part in by_id[link["href"].removeprefix(f"{name}/code.html#")].next_siblings:
            text += part.get_text()
            if "\n" in text:
                break
        number, *line = text.split("\n")[0].split(maxsplit=1)
        assert int(number) == place.line and line[0].startswith(place.code.splitlines()[0])


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_page_has_what_the_record_has(pages: dict[str, Any], name: str) -> None:
    record = ra.mechanism(name)
    text = "".join(pages[f"mechanisms/{name}{part}.html"].get_text() for part in ("", "/calls", "/judged", "/code"))
    for word in (
        record.title,
        record.source,
        *record.forms,
        *record.laws,
        *record.wrong,
    ):
        assert word in text
    for case in record.cases:
        assert case.name in text
    assert pages["mechanisms/index.html"].find("a", string=record.title)
    linked = {a["href"] for a in pages["mechanisms/index.html"].find_all("a")}
    assert {f"{home_of(place)}.html#{anchor(id)}" for id, place in places(record).items()} <= linked


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_page_is_read_from_the_idea_on(pages: dict[str, Any], name: str) -> None:
    page = pages[f"mechanisms/{name}.html"]
    titles = [title.find(string=True) for title in page.select("h2")]
    first = ["The idea", "Symbols", "Step by step", "Equations"]
    assert titles[:4] == first and titles[-1] == "To look up" and {*titles[4:-1]} <= {"More pictures"}
    assert len(page.select("article p")[0].get_text()) > 40
    assert [len(figure.select("figcaption")) for figure in page.select("figure")][:1] == [1]
    calls = [tag.get_text() for tag in pages[f"mechanisms/{name}/calls.html"].select("dt.sig > .descname")]
    assert calls[:2] == ["forward", "backward"]


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
    text = " ".join(pages["verifying.html"].get_text().split())
    assert f"of {facts['mutants'].value} wrong kernels of softmax attention" in text
    table = pages["facts.html"].get_text()
    for id, fact in facts.items():
        assert id in table and fact.command in table
