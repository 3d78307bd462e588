"""What a page of an experiment says of its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import refattn as ra
from docs.experiments.page import put


def row(name: str) -> str:
    """Return what the row of the claims says that ends with the page of a mechanism's experiment."""
    page = f"; docs/experiments/{name}.md"
    (found,) = [claim.holds for claim in ra.mechanism(name).claims if claim.holds.endswith(page)]
    return found.removesuffix(page)


def says(page: Path, parts: Mapping[str, str], folder: Path) -> bool:
    """Tell whether a page has these tables, by a copy in a folder into which they are put."""
    copy = folder / "page.md"
    copy.write_bytes(page.read_bytes())
    put(copy, dict(parts))
    return copy.read_bytes() == page.read_bytes()
