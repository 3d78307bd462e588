"""What a page of an experiment says of its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from docs.experiments.page import put


def says(page: Path, parts: Mapping[str, str], folder: Path) -> bool:
    """Tell whether a page has these tables, by a copy in a folder into which they are put."""
    copy = folder / "page.md"
    copy.write_bytes(page.read_bytes())
    put(copy, dict(parts))
    return copy.read_bytes() == page.read_bytes()
