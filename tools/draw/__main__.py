"""Draw the figures of docs/figures that show what the library computes.

    python -m tools.draw                       # all; budget.png alone takes a minute
    python -m tools.draw koopman tour          # those of some modules of this folder

What each figure shows stands at the head of its module. Nothing is drawn from a formula of its own.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import click

MODULES = ("budget", "graph_energy", "higher_order", "koopman", "sweeps", "tour")
TARGET = Path(__file__).parents[2] / "docs" / "figures"


@click.command(help=__doc__.partition("\n")[0])
@click.argument("modules", nargs=-1, type=click.Choice(MODULES), metavar=f"[{'|'.join(MODULES)}]...")
@click.option("--out", type=click.Path(path_type=Path), default=TARGET, help="The folder to write to (docs/figures).")
def main(modules: tuple[str, ...], out: Path) -> None:
    """Compute, draw and save."""
    out.mkdir(parents=True, exist_ok=True)
    for module in modules or MODULES:
        for name, figure in importlib.import_module(f"tools.draw.{module}").figures():
            figure.savefig(out / f"{name}.png", dpi=figure.dpi, metadata={"Software": None})
            click.echo(out / f"{name}.png")


if __name__ == "__main__":
    main()
