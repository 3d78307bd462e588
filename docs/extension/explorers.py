"""The pages that step through a run of each mechanism: made when the documentation is built, and shown in it."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import refattn
from docs.extension import values
from refattn.backends import get
from refattn.explorer.page import page
from refattn.mechanisms import registry
from refattn.verify import traced

HIGH = "56rem"


def write(folder: Path) -> None:
    """Write the page of every mechanism, but for those that are newer than all files that they are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(refattn.__file__).parent
    own = [Path(__file__), Path(values.__file__)]
    files = [*own, *(path for path in root.rglob("*") if path.suffix in (".py", ".js", ".css", ".html"))]
    newest = max(path.stat().st_mtime for path in files)
    for name in registry.list_mechanisms():
        file = folder / f"{name}.html"
        if not file.exists() or file.stat().st_mtime < newest:
            mechanism = registry.mechanism(name)
            run = values.reader_run(mechanism)
            file.write_text(page(mechanism, run, traced.record(mechanism, run, get("numpy"))), encoding="utf-8")


class Explorer(SphinxDirective):
    """``explorer MECHANISM``: its page, in a frame, and the command that makes such a page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        address = f"../_static/explorer/{name}.html"
        title = f"A run of {registry.mechanism(name).title.lower()}, step by step"
        style = f"width:100%;height:{HIGH};border:0"
        frame = f'<iframe src="{address}" title="{title}" loading="lazy" style="{style}"></iframe>'
        alone = f'<p><a href="{address}">The same on a page of its own</a>; '
        command = f"<code>refattn trace {name} --html FILE</code> makes it</p>"
        return [nodes.raw("", frame + alone + command, format="html")]
