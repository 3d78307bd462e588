"""``refattn analyse spectrum`` and ``refattn analyse prediction``: the operators that Koopman attention fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from refattn.cli.analyse.study import finish, folder_of, out_option
from refattn.cli.arguments import MOST_SEED, Problem
from refattn.cli.output import progress


@click.command("spectrum", short_help="Show the operators that are fitted to the ways of queries.")
@click.option("--queries", type=click.IntRange(1, 512), default=24, show_default=True, help="Queries.")
@click.option("--keys", type=click.IntRange(1, 256), default=16, show_default=True, help="Keys and values.")
@click.option("--width", type=click.IntRange(1, 256), default=4, show_default=True, help="Coordinates of each.")
@click.option("--updates", type=click.IntRange(2, 32), default=5, show_default=True, help="Updates of each query.")
@click.option("--ridge", type=float, default=0.01, show_default=True, help="The ridge of the fit, above 0.")
@click.option("--epsilon", type=float, default=0.01, show_default=True, help="The size of the perturbation.")
@click.option("--tau", type=click.Choice(["0", "1"]), default="0", show_default=True, help="What the ridge draws to.")
@click.option("--kernel", default="rbf", show_default=True, help="As in the mechanism.")
@click.option("--fit", default="stein", show_default=True, help="As in the mechanism: separable(norm=0.9).")
@click.option("--space", default="keys", show_default=True, help="As in the mechanism.")
@click.option("--causal", is_flag=True, help="Hide the keys to come.")
@click.option("--seed", type=click.IntRange(0, MOST_SEED), default=3, show_default=True, help="Of the arrays.")
@out_option
def spectrum(
    queries: int,
    keys: int,
    width: int,
    seed: int,
    out: str | None,
    tau: str,
    ridge: float,
    epsilon: float,
    fit: str,
    **options: Any,
) -> None:
    """Draw the eigenvalues of the operators that Koopman attention fits, and the ways of its queries.

    Queries, keys and values are normal numbers. Every query has an operator of its own for each update from the second
    on, fitted to its way so far.
    """
    folder = folder_of(out, "spectrum")
    from refattn.analysis import spectrum as study

    try:
        q, k, v = study.designed(queries, keys, width, seed)
        begun = f"{fit[:-1]}, " if fit.endswith(")") else f"{fit}("
        fitted, perturbation = f"{begun}ridge={ridge}, tau={tau})", f"identity(epsilon={epsilon})"
        result = study.spectrum(q, k, v, fit=fitted, perturbation=perturbation, **options)
    except (ValueError, ArithmeticError) as error:
        raise Problem(str(error)) from error
    draw = partial(study.draw, result)
    finish(folder, "spectrum", study.table(result), result.to_json(), partial(_save, draw, (12.0, 5.6)))


@click.command("prediction", short_help="Show how fitted operators predict known systems.")
@click.option("--system", "systems", metavar="NAME", multiple=True, help="Only this one, or these; all by default.")
@click.option("--steps", type=click.IntRange(1, 200), default=20, show_default=True, help="Steps to predict.")
@click.option("--seed", type=click.IntRange(0, MOST_SEED), default=3, show_default=True, help="Of the states.")
@out_option
def prediction(systems: tuple[str, ...], steps: int, seed: int, out: str | None) -> None:
    """Compare predictions of known systems by Koopman attention's operator, by EDMD and by kernel EDMD.

    The systems are a linear one, van der Pol's oscillator and Duffing's. Operators are fitted to some transitions, and
    judged by states that none of them has seen.
    """
    folder = folder_of(out, "prediction")
    from refattn.analysis import prediction as study
    from refattn.analysis.known_systems import SYSTEMS

    try:
        with progress("prediction", "systems") as wrap:
            results = [study.predict(name, steps=steps, seed=seed) for name in wrap(systems or tuple(SYSTEMS))]
    except ValueError as error:
        raise Problem(str(error)) from error
    data = [result.to_json() for result in results]
    draw = partial(_save, partial(study.draw, results), study.size_of(results))
    finish(folder, "prediction", study.table(results), data, draw)


def _save(draw: Callable[[Any], object], size: tuple[float, float], path: Path) -> None:
    from refattn.analysis import figure

    picture = figure.new_figure(*size)
    draw(picture)
    figure.save(picture, path)
