"""The directive ``source``: a whole file, with numbered lines that can be linked to."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from refattn.verify.traced import file_of


def anchor_of_line(module: ModuleType, line: int) -> str:
    """Return the anchor of a line of a file that is shown on the same page."""
    return f"{_prefix(module)}-{line}"


def _prefix(module: ModuleType) -> str:
    return file_of(module).rpartition("/")[2].removesuffix(".py")


class Source(SphinxDirective):
    """``source MODULE``: its file."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        self.env.note_dependency(module.__file__ or "")
        text = inspect.getsource(module)
        # What Sphinx does not know it hands on to the formatter of Pygments, which can make anchors.
        anchors = {"lineanchors": _prefix(module), "anchorlinenos": True}
        return [nodes.literal_block(text, text, language="python", linenos=True, highlight_args=anchors)]
