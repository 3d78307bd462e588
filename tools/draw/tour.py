"""The tour of graph energy attention as a reader sees it, light and dark: the picture of README.md."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import refattn as ra
from refattn.explorer.tour import build
from tools.chromium import Tab, browser


@dataclass
class Shot:
    """What a browser shows, to be written as a figure is."""

    tab: Tab
    dpi: int = 96

    def savefig(self, file: Path, **_: Any) -> None:
        """Write it."""
        self.tab.screenshot(file)


def figures() -> Iterator[tuple[str, Shot]]:
    """Yield the card of one step, some steps into the flow, in both colour schemes."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as chromium:
        page = Path(folder) / "tour.html"
        page.write_text(build.page(ra.mechanism("graph_energy")), encoding="utf-8")
        for name, dark in (("tour", False), ("tour_dark", True)):
            tab = chromium.open(page.as_uri() + "#GE.7", width=1240, height=720, dark=dark)
            tab.evaluate("document.querySelector('.active summary').click()")  # the line of code
            tab.evaluate("page.goTo(5)")
            tab.wait(0.2)
            yield name, Shot(tab)
