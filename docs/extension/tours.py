"""Tours of all mechanisms, and their small living pictures: made when the documentation is built, and shown in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst.directives import flag
from sphinx.util.docutils import SphinxDirective

import refattn
from refattn.explorer.tour import build
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism

HOME = Path(__file__).parent
HIGH = {"tour": "58rem", "wide": "46rem", "gallery": "54rem"}


def write(folder: Path) -> None:
    """Write the tour of every mechanism and the gallery, but for pages that are newer than all they are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(refattn.__file__).parent
    suffixes = {".py", ".js", ".css", ".html", ".json"}
    files = [HOME / "tours.py", HOME / "gallery.html", *(path for path in root.rglob("*") if path.suffix in suffixes)]
    newest = max(path.stat().st_mtime for path in files)
    toured = [one for one in map(registry.mechanism, registry.list_mechanisms()) if build.has_tour(one)]
    for name, mechanism in [*((one.name, one) for one in toured), ("index", None)]:
        file = folder / f"{name}.html"
        if not file.exists() or file.stat().st_mtime < newest:
            command = f"refattn trace {name} --html FILE"
            text = gallery(toured) if mechanism is None else build.page(mechanism, command=command)
            file.write_text(text, encoding="utf-8")


def gallery(toured: Sequence[Mechanism]) -> str:
    """Return the page of small pictures: of each tour its picture, which moves, and its sentence."""
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
    """``tour MECHANISM``: its tour, if it has one, in a frame, and the command that makes such a page.

    With the option ``wide`` the frame is lower, and is not there on a phone, where the link leads to the tour.
    """

    required_arguments = 1
    option_spec = {"wide": flag}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        name, wide = self.arguments[0], "wide" in self.options
        if not build.has_tour(registry.mechanism(name)):
            return []
        address = f"{'../' * self.env.docname.count('/')}_static/tours/{name}.html"
        title = f"A tour of {registry.mechanism(name).title.lower()}"
        frame = _frame(address, title, HIGH["wide" if wide else "tour"], "wide" if wide else "")
        alone = f'<p><a href="{address}">{title if wide else "The same"} on a page of its own</a>; '
        command = f"<code>refattn trace {name} --html FILE</code> makes it</p>"
        return [nodes.raw("", frame + alone + command, format="html")]


class Tours(SphinxDirective):
    """``tours``: a small living picture of each mechanism, with a sentence."""

    def run(self) -> list[nodes.Node]:
        frame = _frame("_static/tours/index.html", "What each mechanism does, as a small picture", HIGH["gallery"])
        return [nodes.raw("", frame, format="html")]


def _frame(address: str, title: str, height: str, look: str = "") -> str:
    style = f"width:100%;height:{height};border:0"
    return f'<iframe src="{address}" title="{escape(title)}" loading="lazy" class="{look}" style="{style}"></iframe>'
