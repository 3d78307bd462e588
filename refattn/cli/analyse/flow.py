"""``refattn analyse flow``: attention as a flow of particles, with momentum beside without."""

from __future__ import annotations

import click

from refattn.cli.analyse.study import finish, folder_of, out_option
from refattn.cli.arguments import MOST_SEED, Problem


@click.command("flow", short_help="Show attention as a flow of particles, with momentum beside without.")
@click.option(
    "--system",
    type=click.Choice(["linear", "exponential"]),
    default="linear",
    show_default=True,
    help="Linear attention, or attention with a softmax.",
)
@click.option("--particles", type=click.IntRange(3, 2000), default=120, show_default=True, help="How many.")
@click.option("--c-log", type=float, default=3.0, show_default=True, help="The damping is c_log / t + c_lin.")
@click.option("--c-lin", type=float, default=0.0, show_default=True, help="The same.")
@click.option("--end", type=float, default=40.0, show_default=True, help="The last time.")
@click.option("--step", type=float, default=0.1, show_default=True, help="The size of the steps that are counted.")
@click.option("--seed", type=click.IntRange(0, MOST_SEED), default=0, show_default=True, help="Of the particles.")
@out_option
def flow(
    system: str, particles: int, c_log: float, c_lin: float, end: float, step: float, seed: int, out: str | None
) -> None:
    """Draw the particles, ellipses and energies of attention with and without momentum, from the same particles.

    The table tells when each energy, a share of the first one, is reached first: in time, and in calls of the oracle by
    explicit steps of one size.
    """
    folder = folder_of(out, "flow")
    from refattn.analysis.flow import study
    from refattn.analysis.flow_figure import draw
    from refattn.analysis.particles import Damping

    try:
        found = study(system, particles=particles, damping=Damping(c_log, c_lin), end=end, step=step, seed=seed)
    except ValueError as error:
        raise Problem(f"--{str(error).replace('times:', 'end:', 1).replace('_', '-', 1)}") from error
    finish(folder, "flow", found.text(), found.to_json(), lambda path: draw(found, path))
