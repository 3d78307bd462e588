"""``refattn analyse bifurcation``: how the equilibria of a flow on a graph come, go and lose their stability."""

from __future__ import annotations

from dataclasses import replace
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
@click.option("--run", metavar="DIR", help="A run of graph energy attention, whose block, graph and numbers are taken.")
@click.option("--layer", type=click.IntRange(0), default=0, show_default=True, help="Of a run: which of its blocks.")
@click.option("--head", type=click.IntRange(0), default=0, show_default=True, help="Of a run: which head of it.")
@click.option("--text", metavar="TEXT", default="def f(x):", show_default=True, help="Of a run: what it reads.")
@click.option("--towards", metavar="TEXT", help="Of a run: as many other bytes; t leads from the one to the other.")
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
    run: str | None,
    layer: int,
    head: int,
    text: str,
    towards: str | None,
    out: str | None,
) -> None:
    """Follow the equilibria of a flow on a graph, x_i' = f(x_i) + kappa sum_j w_ij g(x_j - x_i), over a parameter.

    One of --mu, --kappa and --b is a range LOW:HIGH, or with --run and --towards the parameter is t, from one text to
    another. The last column says whether the condition of the article holds that the third derivative of the energy is
    not 0.
    """
    if run is not None:
        from refattn.analysis.graph_flow import with_number
        from refattn.cli.analyse.stack import flow_of_run

        ends = [flow_of_run(run, layer, head, each) for each in (text, towards or text)]
        flow = replace(ends[0], towards=ends[1])
        usual = {"t": "0:1"} if towards else {} if mu and ":" in mu else {"kappa": f"0:{2.0 * flow.kappa:.3g}"}
        ranges = {name: given for name, given in (("mu", mu), ("kappa", kappa)) if given} or usual
        ranges = usual | ranges
    else:
        swept = any(":" in (given or "") for given in (mu, b))
        ranges = {"mu": mu or "1", "kappa": kappa or ("1" if swept else "0:0.7"), "b": b}
    varied = [name for name, given in ranges.items() if ":" in given]
    if len(varied) != 1:
        got = ", ".join(f"{name} {given}" for name, given in ranges.items())
        raise Problem(f"mu, kappa, b: got {got}, needs one range LOW:HIGH and numbers")
    parameter = varied[0]
    low, high = (number(parameter, word) for word in ranges[parameter].split(":", 1))
    fixed = {n: low if n == parameter else number(n, given) for n, given in ranges.items() if n in ("mu", "kappa")}
    if run is None:
        own = "0" if parameter == "b" else b
        flow = flow_of(graph, coupling, intrinsic, own, fixed["mu"], fixed["kappa"], seed)
    else:
        for name, value in fixed.items():
            flow = with_number(flow, name, value)
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
