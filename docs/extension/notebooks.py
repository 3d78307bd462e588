"""Tutorials as notebooks: what only these pages typeset becomes code, which a notebook shows as it stands."""

from __future__ import annotations

import re
from typing import Any

from sphinx_gallery import notebook


def readable(text: str) -> str:
    """Return reStructuredText with formulas as code and links to pages as their files."""
    text = re.sub(r"^( {4,}):m:`([^`]*)`$", r"\1\2", text, flags=re.MULTILINE)  # on a line of its own: a block
    text = re.sub(r":m:`([^`]*)`", r"``\1``", text)
    return re.sub(r":doc:`/([^`]*)`", r"``docs/\1.md``", text)


def install() -> None:
    """Have sphinx-gallery read the text of a tutorial so when it makes the notebook."""
    made = notebook.rst2md
    if not hasattr(made, "reads"):

        def rst2md(text: str, *arguments: Any, **options: Any) -> str:
            return str(made(readable(text), *arguments, **options))

        rst2md.reads = readable  # type: ignore[attr-defined]
        notebook.rst2md = rst2md
