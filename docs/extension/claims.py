"""The directive ``claims``: what the sources of every mechanism claim, from their records."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from docs.extension.docstrings import markdown
from refattn.mechanisms import registry


class Tables(SphinxDirective):
    """``claims``: a section with a table for each mechanism."""

    def run(self) -> list[nodes.Node]:
        for name in registry.list_mechanisms():
            self.env.note_dependency(str(files(registry.room(name)) / "judge" / "claims.toml"))
        return self.parse_text_to_nodes("\n".join(lines()), allow_section_headings=True)


def lines() -> Iterator[str]:
    """Yield the sections as Markdown."""
    for name in registry.list_mechanisms():
        yield from (f"## {registry.mechanism(name).title}", "")
        yield from ("| source | claim | holds | shown by | held by |", "| --- | --- | --- | --- | --- |")
        for claim in registry.mechanism(name).claims:
            words = (markdown(text) for text in (claim.source, claim.claim, claim.holds))
            tests = "<br>".join(f"`{test}`" for test in claim.tests)
            yield f"| {' | '.join(words)} | `{claim.shown}` | {tests} |"
        yield ""
