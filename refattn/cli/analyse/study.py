"""What every study has: its folder, its picture and its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from refattn.cli.arguments import Place, Problem
from refattn.cli.output import deliver
from refattn.files import check_output

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

out_option: Decorator = click.option(
    "--out", type=Place(), metavar="DIR", help="The folder for the pictures and the data; analysis/STUDY by default."
)


def folder_of(out: str | None, study: str) -> Path:
    """Return the folder of a study, made; fail now, not after long work, where it cannot be written."""
    path = Path(out) if out is not None else Path("analysis", study)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in (f"{study}.json", f"{study}.png"):
            check_output(path / name)
    except OSError as error:
        raise Problem(f"--out: got {str(path)!r}, needs a folder that can be written ({error.strerror})") from error
    return path


def finish(folder: Path, study: str, text: str, data: Any, draw: Callable[[Path], object]) -> None:
    """Draw STUDY.png, write STUDY.json and print the text, with where they stand."""
    picture, facts = folder / f"{study}.png", folder / f"{study}.json"
    draw(picture)
    deliver(lambda **_: f"{text}\n\n{picture}\n{facts}", data, str(facts))
