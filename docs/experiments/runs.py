"""A list of trainings, some at a time, each finished one a line of a file; what has its line is not run again."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
from threadpoolctl import threadpool_limits

from docs.experiments.tasks import Task, Text, standard_library
from docs.experiments.training import Plan, train
from refattn import backends, many_runs
from refattn.cli.arguments import campaign_options
from refattn.cli.output import progress
from refattn.files import write_atomically
from refattn.many_runs import HERE, Unit, Where

Line = dict[str, Any]
"""A line of the file: a run, what came of it, and with which versions."""


class Job(Protocol):
    """One training of any experiment: jobs with the same JSON give the same bits on the same machine and versions."""

    @property
    def text(self) -> bool:
        """Whether it reads the text."""

    def to_json(self) -> dict[str, Any]:
        """Return all that it depends on, as JSON has it."""

    def result(self) -> dict[str, Any]:
        """Train, and return what came of it."""

    def told(self, result: Mapping[str, Any]) -> str:
        """Return what came of it in a few words."""


@dataclass(frozen=True)
class Run:
    """One training of a model of one mechanism.

    Attributes
    ----------
    mechanism, options
        The name of a mechanism or one of `docs.experiments.baselines.RECORDS`, and the options of its block.
    task, plan, seed
        The rest: two runs that are equal give the same bits on the same machine with the same versions.
    """

    mechanism: str
    task: Task
    plan: Plan
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON has it."""
        task = {"name": type(self.task).__name__.lower()} | vars(self.task)
        return {
            "mechanism": self.mechanism,
            "options": dict(self.options),
            "task": task,
            "plan": asdict(self.plan),
            "seed": self.seed,
        }

    @property
    def text(self) -> bool:
        """Whether it reads the text."""
        return isinstance(self.task, Text)

    def result(self) -> dict[str, Any]:
        """Train."""
        return train(self.mechanism, self.options, self.task, self.plan, self.seed)

    def told(self, result: Mapping[str, Any]) -> str:
        """Return the scores in a few words."""
        task = type(self.task).__name__.lower()
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        scores = result["diverged"] or f"{result['bits']:.3f} bits, accuracy {result['accuracy']:.3f}"
        return " ".join(filter(None, (task, self.mechanism, options, f"seed {self.seed}: {scores}")))


def read(path: Path) -> list[Line]:
    """Return the lines of a file, without a broken last one; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = []
    for number, text in enumerate(lines, 1):
        try:
            rows.append(json.loads(text))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is no JSON: {error}") from error
    return rows


def found(wanted: Sequence[Job], path: Path) -> list[Line]:
    """Return the lines of all that is wanted, in its order; ValueError where one is missing."""
    known = {_key(line["run"]): line for line in read(path)}
    missing = [run for run in wanted if _key(run.to_json()) not in known]
    if missing:
        raise ValueError(f"{path}: got {len(wanted) - len(missing)} of {len(wanted)} runs, needs all; run the others")
    return [known[_key(run.to_json())] for run in wanted]


def run_all(wanted: Sequence[Job], path: Path, where: Where = HERE) -> list[Line]:
    """Run what has no line in the file yet, and return the lines of all that is wanted, in its order.

    At the end the file has the same order, lines of other runs after these, so that all but the times in it depends on
    nothing but the runs and the versions. Stopped at any time it keeps what is finished.
    """
    known = {_key(line["run"]): line for line in read(path)}
    _write(path, known.values())  # without a broken last line
    missing = [run for run in wanted if _key(run.to_json()) not in known]
    with path.open("a", encoding="utf-8") as file:
        for line in _lines(missing, where):
            known[_key(line["run"])] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
    asked = [_key(run.to_json()) for run in wanted]
    _write(path, [known[key] for key in dict.fromkeys([*asked, *known])])
    return found(wanted, path)


def _lines(runs: Sequence[Job], where: Where) -> Iterator[Line]:
    """Yield the lines of some runs as they are finished, behind a bar."""
    units = [Unit(_key(run.to_json()), one, (run,)) for run in runs]
    with progress("experiment", "trainings") as wrap:
        for _, line in many_runs.run(units, where, progress=wrap):
            yield line


def one(run: Job) -> Line:
    """Run a training and return its line."""
    backends.get("numpy").keep_memory()
    # As many processes as there are cores are quicker than threads in each.
    with backends.use_workers(1), threadpool_limits(1):
        result = run.result()
    versions = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    if run.text:
        versions["text"] = standard_library().fingerprint[:16]
    return {"run": run.to_json(), "result": result, "versions": versions}


def trains(group: click.Group, results: Path | None, short_help: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function that returns jobs: it runs those that have no line in the results yet."""

    def make(wanted: Callable[..., Sequence[Job]]) -> click.Command:
        @functools.wraps(wanted)
        def run(results: Path, where: Where, **chosen: Any) -> None:
            jobs = wanted(**chosen)
            lines = run_all(jobs, results, where)
            for job, line in zip(jobs, lines, strict=True):
                click.echo(job.told(line["result"]))
            click.echo(f"{sum(line['result'].get('seconds', 0.0) for line in lines):.0f} s of the CPU, {results}")

        path = click.Path(dir_okay=False, path_type=Path)
        needed = {"required": True} if results is None else {"default": results}
        file = click.option("--results", type=path, help="The file of lines.", **needed)
        return group.command(short_help=short_help)(file(campaign_options(keep=False)(run)))

    return make


def choice(option: str, name: str, known: Iterable[str]) -> Callable[[Any], Any]:
    """Return the option that takes some of the known names, none for all."""
    return click.option(option, name, type=click.Choice(list(known)), multiple=True, help="Only this one, or these.")


def seeds_option(most: int) -> Callable[[Any], Any]:
    """Return the option that says how many seeds."""
    return click.option("--seeds", type=click.IntRange(1), default=most, help="How many seeds: 0, 1, ...")


def steps_option(least: int = 1) -> Callable[[Any], Any]:
    """Return the option of a quick look."""
    return click.option("--steps", type=click.IntRange(least), help="Updates of every training, for a quick look.")


def _key(run: Mapping[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)


def _write(path: Path, lines: Iterable[Line]) -> None:
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
