"""What the studies of flows on graphs have in common: their options, and how these become a flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from refattn.cli.arguments import MOST_SEED, Problem

if TYPE_CHECKING:
    from refattn.analysis.graph_flow import GraphFlow


def graph_options(**defaults: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds the options of a flow on a graph, with these defaults."""
    options = [
        click.option(
            "--graph", metavar="GRAPH", help="path:N, cycle:N, star:N, complete:N or a file with a link (i j w) a line."
        ),
        click.option("--coupling", metavar="NAME", help="The coupling g, such as sin or tanh."),
        click.option("--intrinsic", metavar="NAME", help="The intrinsic force f: none, anchor or double_well."),
        click.option(
            "--b", metavar="N,...|random", help="What the intrinsic force draws to, one number for all nodes or each."
        ),
        click.option("--starts", type=click.IntRange(1), metavar="N", help="How many random starts."),
        click.option(
            "--seed", type=click.IntRange(0, MOST_SEED), metavar="N", help="Draws the starts, and b if it is random."
        ),
    ]

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        for parameter in command.__click_params__:
            if parameter.name in defaults:
                parameter.default, parameter.show_default = defaults[parameter.name], True
        return command

    return add


def flow_of(graph: str, coupling: str, intrinsic: str, b: str, mu: float, kappa: float, seed: int) -> GraphFlow:
    """Return the flow that the options describe; a Problem names the one that is wrong."""
    from refattn import philox
    from refattn.analysis.graph_flow import GraphFlow
    from refattn.analysis.graphs import graph_of

    numbers = [] if b == "random" else [number("b", word) for word in b.split(",")]
    try:
        links = graph_of(graph)
        drawn = philox.normal((len(links),), seed=seed, purpose="b") if b == "random" else numbers
        return GraphFlow(links, coupling, intrinsic, numbers[0] if len(numbers) == 1 else drawn, mu, kappa)
    except (ValueError, OSError) as error:
        raise Problem(str(error)) from error


def number(name: str, text: str) -> float:
    """Return a finite number; a Problem says which option has none."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise Problem(f"{name}: got {text!r}, needs a finite number")
    return value
