"""``refattn analyse``: mechanisms studied as dynamical systems. A study is a command, in a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from refattn.cli.arguments import Group, Problem
from refattn.cli.output import deliver

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

out_option: Decorator = click.option(
    "--out", metavar="DIR", help="The folder for the pictures and the data; analysis/STUDY by default."
)


def folder_of(out: str | None, study: str) -> Path:
    """Return the folder of a study, made; fail now, not after long work, where it cannot be written."""
    path = Path(out) if out is not None else Path("analysis", study)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{study}.json").touch()
    except OSError as error:
        raise Problem(f"--out: got {str(path)!r}, needs a folder that can be written ({error.strerror})") from error
    return path


def finish(folder: Path, study: str, text: str, data: Any, draw: Callable[[Path], object]) -> None:
    """Draw STUDY.png, write STUDY.json and print the text, with where they stand."""
    picture, facts = folder / f"{study}.png", folder / f"{study}.json"
    draw(picture)
    deliver(lambda **_: f"{text}\n\n{picture}\n{facts}", data, str(facts))


@click.group("analyse", cls=Group, short_help="Study a mechanism as a dynamical system, in pictures.")
def analyse() -> None:
    """Study a mechanism as a dynamical system: a table, a picture and the data, in a folder."""


from refattn.cli.analyse_bifurcation import bifurcation  # noqa: E402  (which imports what stands above)
from refattn.cli.analyse_equilibria import equilibria  # noqa: E402
from refattn.cli.analyse_flow import flow  # noqa: E402
from refattn.cli.analyse_spectrum import prediction, spectrum  # noqa: E402

analyse.add_command(equilibria)
analyse.add_command(bifurcation)
analyse.add_command(spectrum)
analyse.add_command(prediction)
analyse.add_command(flow)
