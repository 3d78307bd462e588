"""The directive ``claims``: what the sources of every mechanism claim, from their records."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from importlib.resources import files

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from docs.extension.docstrings import markdown
from refattn.mechanisms import registry
from refattn.mechanisms.record import Claim


class Lists(SphinxDirective):
    """``claims``: a section for each mechanism with what its sources claim and what is found, and one of our rows."""

    def run(self) -> list[nodes.Node]:
        for name in registry.list_mechanisms():
            self.env.note_dependency(str(files(registry.room(name)) / "testing" / "claims.toml"))
        made = self.parse_text_to_nodes("\n".join(sections()), allow_section_headings=True)
        for listed in (each for node in made for each in node.findall(nodes.bullet_list)):
            listed["classes"].append("claims")
        return made


def sections() -> Iterator[str]:
    """Yield the sections as Markdown."""
    for mechanism in map(registry.mechanism, registry.list_mechanisms()):
        yield from (f"## {mechanism.title}", "")
        for claim in (each for each in mechanism.claims if not each.ours):
            yield from ("- " + textwrap.indent("\n\n".join(lines(claim)), "  ").strip(), "")
    yield from ("## Rows that are ours", "")
    yield from ("What no source of the mechanism says. The reason stands in each row.", "")
    for claim in (each for name in registry.list_mechanisms() for each in registry.mechanism(name).claims if each.ours):
        yield from ("- " + textwrap.indent("\n\n".join(lines(claim)), "  ").strip(), "")


def lines(claim: Claim) -> tuple[str, ...]:
    """Return a claim and what is found of it as paragraphs of Markdown."""
    as_said = claim.holds.startswith("as said")
    return (
        f"**{markdown(claim.claim)}** ({markdown(claim.source)}{'; ours: ' * bool(claim.ours)}{markdown(claim.ours)})",
        f"{'Holds' if as_said else '**What holds**'}: {markdown(claim.holds)}",
        f"Shown by `{claim.shown}`",
        f"Held by {', '.join(f'`{test}`' for test in claim.tests)}",
    )
