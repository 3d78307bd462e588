"""``refattn analyse clusters``: what attention makes of tokens that move by it."""

from __future__ import annotations

from typing import Any

import click

from refattn.cli.analyse.study import finish, folder_of, out_option
from refattn.cli.arguments import Place, Problem, record_of


@click.command("clusters", short_help="Show how tokens that move by attention gather in clusters.")
@click.argument("mechanism")
@click.option("--run", type=Place(), metavar="DIR", help="Look at the layers of a model that `refattn train` has made.")
@click.option("--particles", type=click.IntRange(2, 1000), default=64, show_default=True, help="Tokens.")
@click.option("--dimensions", type=click.IntRange(2, 256), default=2, show_default=True, help="Of the sphere's space.")
@click.option("--beta", type=float, default=9.0, show_default=True, help="The scale of scores, where it has one.")
@click.option("--end", type=float, default=20.0, show_default=True, help="The last time.")
@click.option("--step", type=float, default=0.05, show_default=True, help="The size of a step.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the tokens.")
@out_option
def clusters(
    mechanism: str,
    run: str | None,
    particles: int,
    dimensions: int,
    beta: float,
    end: float,
    step: float,
    seed: int,
    out: str | None,
) -> None:
    """Let tokens on a sphere move by MECHANISM with tied weights, or follow them through the layers of a trained model.

    The picture has the cosines of all pairs, the number of clusters and the effective rank; of softmax attention also
    tokens at equal angles beside the differential equation that they have to follow.
    """
    record = record_of(mechanism)
    for name, value in (("beta", beta), ("end", end), ("step", step)):
        if not 0.0 < value < float("inf"):
            raise Problem(f"--{name}: got {value:g}, needs a number above 0")
    folder: Any
    from refattn.analysis import clusters as study

    if run is not None:
        from refattn.cli.analyse.stack import stack

        maps, state, title = stack(mechanism, run, 1, particles, 1, 1, seed)
        folder, tokens = folder_of(out, "clusters"), [state.x[0]]
        for each in maps:
            state = each(state)
            tokens.append(state.x[0])
        found = study.course("layer", range(len(tokens)), tokens)
    else:
        if record.core is None:
            raise Problem(f"mechanism: got {mechanism!r}, which is no map of q, k and v, needs one that is, or --run")
        folder = folder_of(out, "clusters")
        options: dict[str, Any] = {"scale": beta} if "scale" in record.defaults else {}
        asked: dict[str, Any] = {
            "particles": particles,
            "dimensions": dimensions,
            "end": end,
            "step": step,
            "seed": seed,
        }
        try:
            found = study.study(record.core, options, **asked)
        except (ValueError, ArithmeticError) as error:
            raise Problem(str(error)) from error
        title = f"{record.title}: {particles} tokens on the sphere in {dimensions} dimensions"
    data = {"mechanism": mechanism, "run": run, **found.to_json()}
    finish(folder, "clusters", found.text(), data, lambda path: study.draw(found, title, path))
