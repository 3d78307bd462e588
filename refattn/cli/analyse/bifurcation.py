"""``refattn analyse bifurcation``: how the equilibria of a flow on a graph come, go and lose their stability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from refattn.cli.analyse.graph_options import flow_of, graph_options, number
from refattn.cli.analyse.study import finish, folder_of, out_option
from refattn.cli.arguments import Problem
from refattn.cli.output import progress

if TYPE_CHECKING:
    from refattn.analysis.diagram import Diagram


SHOWN = 20
"""The most kinds of bifurcations that the table has; the data has all."""


@click.command(short_help="Branches of equilibria over a parameter, and their bifurcations.")
@graph_options(graph="path:2", coupling="identity", intrinsic="double_well", b="0", starts=200, seed=0)
@click.option("--mu", metavar="NUMBER|LOW:HIGH", help="The strength of the intrinsic force.  [default: 1]")
@click.option("--kappa", metavar="NUMBER|LOW:HIGH", help="The strength of the coupling.  [default: 0:0.7]")
@out_option
def bifurcation(
    graph: str,
    coupling: str,
    intrinsic: str,
    b: str,
    starts: int,
    seed: int,
    mu: str | None,
    kappa: str | None,
    out: str | None,
) -> None:
    """Follow the equilibria of a flow on a graph, x_i' = f(x_i) + kappa sum_j w_ij g(x_j - x_i), over mu or kappa.

    One of --mu and --kappa is a range LOW:HIGH. The last column says whether the condition of the article holds that
    the third derivative of the energy is not 0.
    """
    ranges = {"mu": mu or "1", "kappa": kappa or ("1" if mu and ":" in mu else "0:0.7")}
    varied = [name for name, text in ranges.items() if ":" in text]
    if len(varied) != 1:
        raise Problem(f"mu, kappa: got {ranges['mu']} and {ranges['kappa']}, needs one range LOW:HIGH and one number")
    parameter = varied[0]
    low, high = (number(parameter, word) for word in ranges[parameter].split(":", 1))
    fixed = {name: low if name == parameter else number(name, text) for name, text in ranges.items()}
    flow = flow_of(graph, coupling, intrinsic, b, fixed["mu"], fixed["kappa"], seed)
    from refattn.analysis.diagram import check_range, diagram_of
    from refattn.analysis.graph_figure import draw_diagram

    try:
        check_range(flow, parameter, low, high)
    except ValueError as error:
        raise Problem(str(error)) from error
    folder = folder_of(out, "bifurcation")
    with progress("bifurcation", f"values of {parameter}") as wrap:
        found = diagram_of(flow, parameter, low, high, starts=starts, seed=seed, wrap=wrap)
    finish(folder, "bifurcation", _told(found), found.to_json(), lambda path: draw_diagram(found, path))


def _told(found: Diagram) -> str:
    """Return a line for each bifurcation; those that differ in x alone share one, with the x of the first."""
    from refattn.analysis.text import aligned

    alike: dict[tuple[str, ...], list[str]] = {}
    for one in found.bifurcations:
        third = "" if one.numbers is None else _shown(abs(one.numbers["b2"]))
        holds = {None: "", True: "yes", False: "no"}[one.article_condition]
        x = " ".join(map(_shown, one.x[:4]))
        alike.setdefault((_shown(one.at, 9), one.label, third, holds), []).append(x)
    rows = [(*key[:2], str(len(xs)), xs[0], *key[2:]) for key, xs in alike.items()][:SHOWN]
    where = "x" if found.flow.n <= 4 else "x (first 4)"
    head = (found.parameter, "bifurcation", "points", where, "third derivative", "article")
    counts = [f"{len(each.isolated)} ({len(each.stable)})" for each in found.sampled]
    values = [f"{getattr(each.flow, found.parameter):.3g}" for each in found.sampled]
    seen = aligned([(found.parameter, *values), ("equilibria (stable)", *counts)])
    more = f"\n... and {len(alike) - SHOWN} kinds more" if len(alike) > SHOWN else ""
    total = f"{len(found.branches)} branches, {len(found.bifurcations)} bifurcations"
    return f"{aligned([head, *rows])}{more}\n\n{seen}\n\n{total}"


def _shown(value: float, digits: int = 4) -> str:
    """Return a number without the sign of a zero."""
    return f"{round(float(value), digits) + 0.0:.{digits}f}"
