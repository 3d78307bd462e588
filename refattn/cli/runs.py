"""``refattn sample`` and ``refattn plot``: what the model of a run says, and the curves of several runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from refattn.cli.arguments import MOST_SEED, Name, Place, Problem, check_writable, record_of
from refattn.cli.train import printable
from refattn.messages import NO_PICTURE


@click.command(short_help="Let the model of a run go on with a text.")
@click.argument("folder", metavar="RUN", type=Place())
@click.option("--prompt", required=True, metavar="TEXT", help="What it goes on from.")
@click.option("--bytes", "length", type=click.IntRange(0), default=400, metavar="N", help="How many; 400 by default.")
@click.option(
    "--temperature", type=click.FloatRange(0.0), default=0.8, metavar="X", help="0 takes the likeliest; 0.8 by default."
)
@click.option(
    "--seed", type=click.IntRange(0, MOST_SEED), default=0, metavar="N", help="Of the random choices; 0 by default."
)
@click.option("--mechanism", type=Name(), metavar="MECHANISM", help="That of the run, if it is of another package.")
def sample(folder: str, prompt: str, length: int, temperature: float, seed: int, mechanism: str | None) -> None:
    """Print TEXT and what the model of a run's newest checkpoint makes of it.

    RUN is a folder that `refattn train` has made, whether it has come to its end or not.
    """
    own = {} if mechanism is None else {"mechanism": record_of(mechanism)}
    from refattn.train import loop
    from refattn.train.checkpoint import CheckpointError
    from refattn.train.folder import RunError

    given = prompt.encode("utf-8", "surrogateescape")
    try:
        made = loop.continued(
            Path(folder),
            given,
            length,
            lambda line: click.echo(line, file=sys.stderr),
            own=own,
            seed=seed,
            temperature=temperature,
        )
    except (ImportError, ValueError, TypeError, RunError, CheckpointError) as error:
        raise Problem(str(error)) from error
    click.echo(printable(given + made), file=sys.stdout)


@click.command(short_help="Draw the curves of runs into one picture.")
@click.argument("folders", metavar="RUN...", type=Place(), nargs=-1, required=True)
@click.option("--out", type=Place(), required=True, metavar="FILE", help="The picture, a PNG.")
def plot(folders: tuple[str, ...], out: str) -> None:
    """Draw the loss of each step and the held-out scores of all RUNs, in bits per byte, into one picture."""
    from refattn.train import metrics
    from refattn.train.plot import draw

    check_writable(out, "--out")
    runs: dict[str, Any] = {}
    for folder in folders:
        try:
            runs[folder.rstrip("/")] = metrics.read(Path(folder, "metrics.jsonl"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise Problem(f"run: got {folder!r}, needs the folder of a run with its metrics.jsonl ({why})") from error
    try:
        draw(runs, out)
    except ImportError as error:
        raise Problem(f"{out}: {NO_PICTURE} ({error})") from error
