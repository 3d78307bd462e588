"""``refattn analyse lyapunov``: how fast the layers of a stack let states part."""

from __future__ import annotations

import functools
from typing import Any

import click

from refattn.cli.analyse.study import Decorator, finish, folder_of, out_option
from refattn.cli.arguments import MOST_SEED, Name, Place, Problem

PICTURES = ("png", "svg")


def stack_options(tokens: int, width: int, layers: int) -> Decorator:
    """Return what gives a command the options of a stack, with these defaults."""
    options = [
        click.option(
            "--run",
            type=Place(),
            metavar="DIR",
            help="A folder that `refattn train` has made; a fresh model if absent.",
        ),
        click.option("--layers", type=click.IntRange(1, 1000), default=layers, show_default=True, help="Fresh layers."),
        click.option("--tokens", type=click.IntRange(1, 4096), default=tokens, show_default=True, help="How many."),
        click.option("--width", type=click.IntRange(1, 4096), default=width, show_default=True, help="Of the tokens."),
        click.option("--heads", type=click.IntRange(1, 256), default=2, show_default=True, help="Of a fresh layer."),
        click.option(
            "--seed", type=click.IntRange(0, MOST_SEED), default=0, show_default=True, help="Of the fresh model."
        ),
    ]
    return lambda command: functools.reduce(lambda found, option: option(found), reversed(options), command)


@click.command("lyapunov", short_help="Show how fast the layers of a stack let states part.")
@click.argument("mechanism", type=Name())
@stack_options(tokens=6, width=8, layers=12)
@out_option
def lyapunov(mechanism: str, out: str | None, **given: Any) -> None:
    """Draw the finite-time Lyapunov exponents of a stack of MECHANISM, fresh or trained, as a map of states.

    The state is all that flows from layer to layer: tokens, and where a mechanism has them momenta and histories. An
    exponent is the log of what a layer makes of a difference in one direction: above 0 it grows. A trained model stands
    beside what it was before its first step.
    """
    from refattn.cli.analyse.stack import stacks

    if given["run"] is None and (size := given["tokens"] * given["width"]) > 4096:
        raise Problem(f"--tokens, --width: got {given['tokens']} times {given['width']} = {size}, needs at most 4096")
    looked_at = stacks(mechanism, **given)
    folder = folder_of(out, "lyapunov", *PICTURES)
    from refattn.analysis import lyapunov as study

    try:
        found = {name: study.spectrum(each.maps, each.state) for name, each in looked_at.items()}
    except ValueError as error:
        raise Problem(str(error)) from error
    (name, first), *rest = found.items()
    data = {"mechanism": mechanism, **given, "model": name, **first.to_json()}
    data |= {other: each.to_json() for other, each in rest}
    title = looked_at[name].title
    finish(folder, "lyapunov", study.text(found), data, lambda path: study.draw(found, title, path), *PICTURES)
