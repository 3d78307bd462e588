"""What these pages need beyond Sphinx and MyST: the pages of mechanisms, their equations, and published figures."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from docs.extension import claims, docstrings, equations, facts, listing, narrow, notebooks, pages, tours

WORDS = 24
"""Letters of a cell from which on it is words."""


def drop_empty_globs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Leave pages that do not exist out of the contents on the first page: Sphinx warns of a glob without a match."""
    if docname == "index":
        lines = source[0].splitlines()
        source[0] = "\n".join(line for line in lines if "*" not in line or " " in line or _matches(app, line))


def link_papers(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links of the papers that a page names."""
    if Path(app.env.doc2path(docname)).suffix == ".md":
        source[0] = docstrings.linked(source[0])


def mark_words(app: Sphinx, doctree: nodes.document) -> None:
    """Mark the columns of tables that hold words, which the style sheet keeps from getting narrow."""
    for table in doctree.findall(nodes.table):
        for column in zip(*(row.children for row in table.findall(nodes.row)), strict=False):
            if max(len(entry.astext()) for entry in column) > WORDS:
                for entry in column:
                    entry["classes"].append("words")


def _matches(app: Sphinx, pattern: str) -> bool:
    return any(fnmatch(name, pattern) for name in app.project.docnames)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect everything; Sphinx calls it."""
    notebooks.install()
    app.connect("builder-inited", lambda app: pages.write(Path(app.srcdir) / "mechanisms"))
    app.connect("builder-inited", lambda app: tours.write(Path(app.srcdir) / "static" / "tours"))
    app.connect("source-read", drop_empty_globs)
    app.connect("source-read", link_papers)
    app.connect("doctree-read", mark_words)
    app.connect("html-page-context", narrow.break_names)
    app.connect("autodoc-process-docstring", docstrings.escape, priority=400)  # before napoleon makes markup of it
    app.connect("autodoc-process-signature", docstrings.plain_aliases)
    app.add_directive("equations", equations.Equations)
    app.add_directive("equation-map", equations.EquationMap)
    app.add_directive("source", listing.Source)
    app.add_directive("claims", claims.Lists)
    app.add_directive("facts", facts.Table)
    app.add_directive("derived", equations.Derived)
    app.add_directive("general", pages.directive(equations.sections))
    app.add_directive("mechanisms", pages.Index)
    app.add_directive("idea", pages.directive(pages.idea))
    app.add_directive("further", pages.directive(pages.further, pages.CAPTIONS))
    app.add_directive("lookup", pages.directive(pages.lookup))
    app.add_directive("tour", tours.Tour)
    app.add_directive("tours", tours.Tours)
    app.add_role("m", equations.Formula())
    app.add_role("id", equations.Id())
    app.add_role("general", equations.Id(equations.GENERAL))
    app.add_role("fact", facts.Role())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
