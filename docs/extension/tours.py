"""Tours of all mechanisms, and their small living pictures: made when the documentation is built, and shown in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import refattn
from refattn.backends import get
from refattn.explorer import page
from refattn.explorer.tour import build
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify import traced

HOME = Path(__file__).parent
HIGH = {"tour": "58rem", "gallery": "54rem"}


def write(folder: Path) -> None:
    """Write the tour of every mechanism and the gallery, but for pages that are newer than all they are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(refattn.__file__).parent
    suffixes = {".py", ".js", ".css", ".html", ".json"}
    files = [HOME / "tours.py", HOME / "gallery.html", *(path for path in root.rglob("*") if path.suffix in suffixes)]
    newest = max(path.stat().st_mtime for path in files)
    names = registry.list_mechanisms()
    for name in [*names, "index"]:
        file = folder / f"{name}.html"
        if not file.exists() or file.stat().st_mtime < newest:
            file.write_text(gallery(names) if name == "index" else tour(name), encoding="utf-8")


def tour(name: str) -> str:
    """Return the tour of a mechanism, or a table of what a reader sees first if its room has no tour."""
    mechanism = registry.mechanism(name)
    if build.has_tour(mechanism):
        return build.page(mechanism, command=f"refattn trace {name} --html FILE")
    run = reader_run(mechanism)
    return page.page(mechanism, run, traced.record(mechanism, run, get("numpy")))


def reader_run(mechanism: Mechanism) -> traced.Run:
    """Return what a reader sees first of a mechanism: its definition, or a step of its block if it has none."""
    if mechanism.example is not None:
        return traced.example_run(mechanism, "float64", get("numpy"))
    if mechanism.core is not None:
        return traced.read_run(mechanism, traced.first_case(mechanism), "float64", get("numpy"))
    return traced.block_run(mechanism, "float64", get("numpy"))


def gallery(names: Sequence[str]) -> str:
    """Return the page of small pictures: of each tour its picture, which moves, and its sentence."""
    toured = [mechanism for mechanism in map(registry.mechanism, names) if build.has_tour(mechanism)]
    shown = "".join(
        f'<a href="../../mechanisms/{one.name}.html" target="_top" data-name="{one.name}"><svg role="img"></svg>'
        f"<strong>{escape(one.title)}</strong> <span></span></a>\n"
        for one in toured
    )
    made = ",\n".join(f'"{one.name}": new Numbers({_drawn(one)}, {build.function(one)})' for one in toured)
    filled = {
        "css": build.colours(),
        "drawing": build.drawing(),
        "pictures": shown,
        "js": build.shared_script(),
        "tours": made,
    }
    template = (HOME / "gallery.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], template)


def _drawn(mechanism: Mechanism) -> str:
    """Return what a picture needs of the data of a tour."""
    data = json.loads(build.data(mechanism))
    return json.dumps({name: x for name, x in data.items() if name not in ("python", "equations", "formulas")})


class Tour(SphinxDirective):
    """``tour MECHANISM``: its tour, in a frame, and the command that makes such a page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        address, title = f"../_static/tours/{name}.html", f"A tour of {registry.mechanism(name).title.lower()}"
        alone = f'<p><a href="{address}">The same on a page of its own</a>; '
        command = f"<code>refattn trace {name} --html FILE</code> makes it</p>"
        return [nodes.raw("", _frame(address, title, HIGH["tour"]) + alone + command, format="html")]


class Tours(SphinxDirective):
    """``tours``: a small living picture of each mechanism, with a sentence."""

    def run(self) -> list[nodes.Node]:
        frame = _frame("_static/tours/index.html", "What each mechanism does, as a small picture", HIGH["gallery"])
        return [nodes.raw("", frame, format="html")]


def _frame(address: str, title: str, height: str) -> str:
    style = f"width:100%;height:{height};border:0"
    return f'<iframe src="{address}" title="{escape(title)}" loading="lazy" style="{style}"></iframe>'
