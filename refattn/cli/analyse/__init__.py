"""``refattn analyse``: mechanisms studied as dynamical systems. A study is a command, in a file of its own."""

from __future__ import annotations

import click

from refattn.cli.analyse.bifurcation import bifurcation
from refattn.cli.analyse.clusters import clusters
from refattn.cli.analyse.equilibria import equilibria
from refattn.cli.analyse.flow import flow
from refattn.cli.analyse.lyapunov import lyapunov
from refattn.cli.analyse.spectrum import prediction, spectrum
from refattn.cli.arguments import Group


@click.group("analyse", cls=Group, short_help="Study a mechanism as a dynamical system, in pictures.")
def analyse() -> None:
    """Study a mechanism as a dynamical system: a table, a picture and the data, in a folder."""


for _command in (equilibria, bifurcation, spectrum, prediction, flow, lyapunov, clusters):
    analyse.add_command(_command)
