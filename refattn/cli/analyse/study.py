"""What every study has: its folder, its picture and its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from refattn.cli.arguments import Place, Problem
from refattn.cli.output import deliver
from refattn.files import check_output, reason
from refattn.messages import NO_PICTURE

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

out_option: Decorator = click.option(
    "--out", type=Place(), metavar="DIR", help="The folder for the pictures and the data; analysis/STUDY by default."
)


def folder_of(out: str | None, study: str, *pictures: str) -> Path:
    """Return the folder of a study, made; fail now, not after long work, where it cannot be written.

    `pictures` are the endings of its pictures, PNG where there is none.
    """
    path = Path(out) if out is not None else Path("analysis", study)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for ending in ("json", *(pictures or ("png",))):
            check_output(path / f"{study}.{ending}")
    except OSError as error:
        raise Problem(f"--out: got {str(path)!r}, needs a folder that can be written ({reason(error)})") from error
    return path


def finish(folder: Path, study: str, text: str, data: Any, draw: Callable[[Path], object], *pictures: str) -> None:
    """Draw the pictures, write STUDY.json and print the text, with where they stand.

    Without matplotlib there are no pictures, which a line on standard error says.
    """
    drawn, facts = [folder / f"{study}.{ending}" for ending in pictures or ("png",)], folder / f"{study}.json"
    try:
        for picture in drawn:
            draw(picture)
    except ImportError as error:
        click.echo(f"{', '.join(one.name for one in drawn)}: {NO_PICTURE} ({error})", err=True)
        drawn = []
    places = "\n".join(map(str, (*drawn, facts)))
    deliver(lambda **_: f"{text}\n\n{places}", data, str(facts))
