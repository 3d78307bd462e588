"""Published figures on the pages: the role ``fact`` and the directive ``facts``, from docs/facts.toml."""

from __future__ import annotations

from docutils import nodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

from tools.facts import FILE, load


class Role(SphinxRole):
    """``{fact}`ID` ``: the value of a figure."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        self.env.note_dependency(str(FILE))
        found = load()
        if self.text not in found:
            message = self.inliner.reporter.error(f"fact: got {self.text!r}, needs one of {', '.join(found)}")
            return [], [message]
        return [nodes.Text(found[self.text].value)], []


class Table(SphinxDirective):
    """``facts``: the table of all figures."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(FILE))
        lines = ["| figure | value | what | command | date |", "| --- | --- | --- | --- | --- |"]
        for id, fact in load().items():
            lines.append(f"| `{id}` | {fact.value} | {fact.about} | `{fact.command}` | {fact.date} |")
        return self.parse_text_to_nodes("\n".join(lines))
