"""``refattn analyse clusters``: what attention makes of tokens that move by it."""

from __future__ import annotations

import itertools
from typing import Any

import click

from refattn.cli.analyse.study import finish, folder_of, out_option
from refattn.cli.arguments import MOST_SEED, Name, Place, Problem, record_of

PICTURES = ("png", "svg")


@click.command("clusters", short_help="Show how tokens that move by attention gather in clusters.")
@click.argument("mechanism", type=Name())
@click.option("--run", type=Place(), metavar="DIR", help="Look at the layers of a model that `refattn train` has made.")
@click.option("--particles", type=click.IntRange(2, 1000), default=64, show_default=True, help="Tokens.")
@click.option("--dimensions", type=click.IntRange(2, 256), default=2, show_default=True, help="Of the sphere's space.")
@click.option("--beta", type=float, default=9.0, show_default=True, help="The scale of scores, where it has one.")
@click.option("--end", type=float, default=20.0, show_default=True, help="The last time.")
@click.option("--step", type=float, default=0.05, show_default=True, help="The size of a step.")
@click.option("--damping", type=float, default=3.0, show_default=True, help="Of momenta, where tokens have them.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any option of the mechanism's core.")
@click.option("--seed", type=click.IntRange(0, MOST_SEED), default=0, show_default=True, help="Of the tokens.")
@out_option
def clusters(
    mechanism: str,
    run: str | None,
    particles: int,
    dimensions: int,
    beta: float,
    end: float,
    step: float,
    damping: float,
    assignments: tuple[str, ...],
    seed: int,
    out: str | None,
) -> None:
    """Let tokens on a sphere move by MECHANISM with tied weights, or follow them through the layers of a trained model.

    The picture has the tokens or the cosines of all pairs, the number of clusters and the effective rank; of tokens on
    the sphere also what they do at equal angles, beside the differential equation that they have to follow, and of a
    trained model also what it was before its first step.
    """
    record = record_of(mechanism)
    for name, value in (("beta", beta), ("end", end), ("step", step), ("damping", damping)):
        if not 0.0 < value < float("inf"):
            raise Problem(f"--{name}: got {value:g}, needs a number above 0")
    from refattn.analysis import clusters as study

    found: dict[str, study.Course] = {}
    if run is not None:
        from refattn.cli.analyse.stack import stacks

        if assignments:
            raise Problem("--set: got one beside --run, needs one of them: a trained model has its options")
        looked_at = stacks(mechanism, run, 1, particles, 1, 1, seed)
        folder, title = folder_of(out, "clusters", *PICTURES), next(iter(looked_at.values())).title
        for name, each in looked_at.items():
            states = list(itertools.accumulate(each.maps, lambda state, layer: layer(state), initial=each.state))
            found[name] = study.course("layer", range(len(states)), [state.x[0] for state in states])
    else:
        if record.core is None:
            raise Problem(f"mechanism: got {mechanism!r}, which is no map of q, k and v, needs one that is, or --run")
        folder = folder_of(out, "clusters", *PICTURES)
        from refattn.train import settings

        options: dict[str, Any] = {"scale": beta} if "scale" in record.defaults else {}
        asked: dict[str, Any] = {"particles": particles, "dimensions": dimensions, "end": end, "step": step}
        try:
            options |= settings.parse(assignments)
            found["tokens"] = study.study(record.core, options, **asked, seed=seed, damping=damping)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise Problem(str(error)) from error
        title = f"{record.title}: {particles} tokens on the sphere in {dimensions} dimensions"
    first, *rest = found.items()
    data = {"mechanism": mechanism, "run": run, "model": first[0] if run else None, **first[1].to_json()}
    data |= {name: each.to_json() for name, each in rest}
    finish(folder, "clusters", study.text(found), data, lambda path: study.draw(found, title, path), *PICTURES)
