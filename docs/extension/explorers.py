"""The pages that step through a run of each mechanism: made when the documentation is built, and shown in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import refattn
from refattn.backends import get
from refattn.explorer.page import page
from refattn.explorer.pictures import drawn
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify import traced

HIGH = "56rem"


def write(folder: Path) -> None:
    """Write the page of every mechanism, but for those that are newer than all of refattn's files and this one."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(refattn.__file__).parent
    files = [Path(__file__), *(path for path in root.rglob("*") if path.suffix in (".py", ".js", ".css", ".html"))]
    newest = max(path.stat().st_mtime for path in files)
    for name in registry.list_mechanisms():
        file = folder / f"{name}.html"
        if not file.exists() or file.stat().st_mtime < newest:
            mechanism = registry.mechanism(name)
            run = runs(mechanism)[part_of(mechanism)]()
            file.write_text(page(mechanism, run, traced.record(mechanism, run, get("numpy"))), encoding="utf-8")


def runs(mechanism: Mechanism) -> dict[str, Callable[[], traced.Run]]:
    """Return what can be stepped through: the core on its case tiny, where there is one, and a step of the block."""
    made: dict[str, Callable[[], traced.Run]] = {}
    if mechanism.core is not None:
        made["core"] = lambda: traced.core_run(mechanism, "tiny", "float64", get("numpy"))
    made["block"] = lambda: traced.block_run(mechanism, "float64", get("numpy"))
    return made


@functools.cache
def part_of(mechanism: Mechanism) -> str:
    """Return which of them draws most of the mechanism's pictures; the core, where both draw as many."""
    found = {
        part: drawn(mechanism, traced.record(mechanism, run(), get("numpy"))) for part, run in runs(mechanism).items()
    }
    return max(found, key=lambda part: len(found[part]))


class Explorer(SphinxDirective):
    """``explorer MECHANISM``: its page, in a frame."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        address = f"../_static/explorer/{self.arguments[0]}.html"
        title = f"A run of {registry.mechanism(self.arguments[0]).title.lower()}, step by step"
        style = f"width:100%;height:{HIGH};border:0"
        frame = f'<iframe src="{address}" title="{title}" loading="lazy" style="{style}"></iframe>'
        alone = f'<p><a href="{address}">The same on a page of its own</a></p>'
        return [nodes.raw("", frame + alone, format="html")]
