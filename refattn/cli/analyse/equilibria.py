"""``refattn analyse equilibria``: where a flow on a graph comes to rest, and whether it stays there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from refattn.cli.analyse.graph_options import flow_of, graph_options, number
from refattn.cli.analyse.study import finish, folder_of, out_option
from refattn.cli.output import progress

if TYPE_CHECKING:
    from refattn.analysis.equilibria import Equilibria

SHOWN = 20
"""The most kinds of equilibria that the table has; the data has all."""


@click.command(short_help="Equilibria of a flow on a graph, and their stability.")
@graph_options(graph="cycle:9", coupling="sin", intrinsic="none", b="0", starts=800, seed=0)
@click.option("--mu", default="1", metavar="NUMBER", show_default=True, help="The strength of the intrinsic force.")
@click.option("--kappa", default="1", metavar="NUMBER", show_default=True, help="The strength of the coupling.")
@out_option
def equilibria(
    graph: str,
    coupling: str,
    intrinsic: str,
    b: str,
    starts: int,
    seed: int,
    mu: str,
    kappa: str,
    out: str | None,
) -> None:
    """Count the equilibria of a flow on a graph, x_i' = f(x_i) + kappa sum_j w_ij g(x_j - x_i), from random starts.

    States count as one where they differ by what has no effect: a number added to all scores of a component without an
    intrinsic force, and there with sin a whole turn of any score.
    """
    flow = flow_of(graph, coupling, intrinsic, b, number("mu", mu), number("kappa", kappa), seed)
    folder = folder_of(out, "equilibria")
    from refattn.analysis.equilibria import find_equilibria
    from refattn.analysis.graph_figure import draw_equilibria

    with progress("equilibria", "parts of the starts") as wrap:
        found = find_equilibria(flow, starts, seed=seed, wrap=wrap)
    finish(folder, "equilibria", _told(found), found.to_json(), lambda path: draw_equilibria(found, path))


def _told(found: Equilibria) -> str:
    """Return a line for each kind of equilibrium, by stability and energy."""
    from refattn.analysis.text import aligned

    kinds: dict[tuple[str, str, str], list[float]] = {}
    for one in found.isolated:
        level = "none" if one.energy is None else f"{one.energy + 0.0:.6f}"
        key = (one.stability.label, str(one.stability.negative), level)
        kinds.setdefault(key, []).append(float(one.stability.eigenvalues[0]) if one.stability.eigenvalues.size else 0.0)
    rows = [
        (label, negative, level, str(len(lowest)), f"{min(lowest):.6f}")
        for (label, negative, level), lowest in list(kinds.items())[:SHOWN]
    ]
    lines = [aligned([("stability", "unstable directions", "energy", "equilibria", "smallest eigenvalue"), *rows])]
    if len(kinds) > SHOWN:
        lines.append(f"... and {len(kinds) - SHOWN} kinds more")
    lines.append(f"\n{len(found.isolated)} isolated equilibria found, {len(found.stable)} of them stable")
    if found.degenerate:
        lines.append(f"beside them {len(found.degenerate)} states on lines or surfaces of equilibria")
    lines.append(f"{found.starts} starts, of which {found.lost} led nowhere")
    return "\n".join(lines)
