"""What the flow of graph energy attention is good for: sparsity, robustness, and scores that have converged.

    python -m docs.experiments.graph_energy run     # some 7 minutes of one core; goes on where it was stopped
    python -m docs.experiments.graph_energy page    # the tables of graph_energy.md, from the results

Each variant learns the text with three seeds, and one more time, with one seed, for four times as many steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from docs.experiments.page import bullets, put, ranged, sure, table
from docs.experiments.runs import Line, Run, found, run_all
from docs.experiments.tasks import Batch, Task, Text
from docs.experiments.training import Plan, fresh, score, trained
from refattn import model, philox, tree
from refattn.cli.arguments import campaign_options
from refattn.many_runs import Where
from refattn.mechanisms.graph_energy import residual

RESULTS = Path(__file__).with_name("graph_energy.jsonl")
PAGE = Path(__file__).with_name("graph_energy.md")

TEXT = Text(context=32, scored=1 << 19, every=64)
PLAN = Plan(
    width=48,
    heads=4,
    layers=2,
    mlp=True,
    embedding=0.02,
    steps=250,
    batch=16,
    learning_rate=3e-3,
    warmup=25,
    weight_decay=0.1,
)
SHORT, LONG = (0, 1, 2), (0,)
TIMES = 4

STILL = {"steps": 1, "step": 1e-9}
SOFT = {"threshold": "soft(tau=0.4)", "learn_tau": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "no flow": ("graph_energy", STILL),
    "flow": ("graph_energy", {"steps": 4}),
    "no flow, soft": ("graph_energy", {**STILL, **SOFT}),
    "flow, soft": ("graph_energy", {"steps": 4, **SOFT}),
    "symmetric past": ("graph_energy", {"state": "query", "steps": 8, "step": 0.05}),
}
"""By name: mechanism and options. "no flow" weighs attention with where scores start: the flow adds the rest."""

NOISE = (0.05, 0.15)
"""Shares of the bytes that are replaced by any others."""


@dataclass(frozen=True)
class Perturbed:
    """A task whose held-out sequences have some tokens replaced; what is asked for stays."""

    task: Task
    share: float

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return self.task.vocabulary

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.task.context

    def batch(self, size: int, *, seed: int, step: int) -> Batch:
        """Return sequences as they are."""
        return self.task.batch(size, seed=seed, step=step)

    def held_out(self) -> Iterator[Batch]:
        """Yield the sequences with other tokens."""
        for n, batch in enumerate(self.task.held_out()):
            where = philox.uniform(batch.inputs.shape, seed=n, purpose="perturbed.where") < self.share
            other = philox.integers(batch.inputs.shape, 0, self.vocabulary, seed=n, purpose="perturbed.token")
            yield batch._replace(inputs=np.where(where, other, batch.inputs))


@dataclass(frozen=True)
class Trial(Run):
    """A training, after which the model is asked more."""

    def result(self) -> dict[str, Any]:
        """Train and ask."""
        params, scores = trained(self.mechanism, self.options, self.task, self.plan, self.seed)
        asked = {f"bits, {share} replaced": score(params, Perturbed(self.task, share))["bits"] for share in NOISE}
        if self.mechanism == "graph_energy":
            asked |= self._flows(params)
        return scores | asked

    def _flows(self, params: model.Params) -> dict[str, Any]:
        """Return what the flow does on the first held-out sequences, and the bits when it goes on to its rest."""
        batch = next(iter(self.task.held_out()))
        _, saved = model.forward(params, batch.inputs)
        cores = [layer.block.core for layer in saved.layers]
        past = np.tril(np.ones((self.task.context,) * 2, np.bool_))
        zeros = [float(np.mean(core.weights[..., past] == 0.0)) for core in cores]
        spreads = []
        for core in cores:
            # Of the tokens that a query sees: how far scores are apart, relative to their mean.
            ends = (core.inner.flow.states[0], core.scores)
            spreads.append([float(np.mean(np.std(x, axis=2)) / np.mean(np.abs(x))) for x in ends])
        found: dict[str, Any] = {"zeros": zeros, "spreads": spreads}
        if self.options["steps"] > 1:
            found["residual"] = [float(np.max(residual(core))) for core in cores]
            rest = fresh(self.mechanism, {**self.options, "steps": 60}, self.task, self.plan, 0)
            found["bits at rest"] = score(tree.unflatten(rest, tree.flatten(params)), self.task)["bits"]
        return found


def grid(name: str, plan: Plan, seeds: Sequence[int]) -> list[Run]:
    """Return the runs of a variant."""
    mechanism, options = VARIANTS[name]
    return [Trial(mechanism, TEXT, plan, seed, options) for seed in seeds]


def every() -> list[Run]:
    """Return all runs, those of a seed together."""
    runs = [run for seed in SHORT for name in VARIANTS for run in grid(name, PLAN, [seed])]
    return runs + [run for seed in LONG for name in VARIANTS for run in grid(name, longer(), [seed])]


def longer() -> Plan:
    """Return the plan with four times as many steps."""
    return replace(PLAN, steps=TIMES * PLAN.steps)


@click.group(help=__doc__)
def main() -> None:
    """Run the experiment, or write its page."""


@main.command(short_help="Train all models that have no line in the results yet.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, help="The file of lines.")
@campaign_options(keep=False)
def run(results: Path, where: Where) -> None:
    """Train all models that have no line in the results yet."""
    for each, line in zip(every(), run_all(every(), results, where), strict=True):
        click.echo(each.told(line["result"]))


@main.command(short_help="Write the tables into graph_energy.md.")
@click.option("--results", type=click.Path(exists=True, path_type=Path), default=RESULTS, help="The file of lines.")
def page(results: Path) -> None:
    """Write the tables into graph_energy.md, from the lines of the whole experiment."""
    known = known_from(results)
    put(PAGE, parts_of(known))
    click.echo(f"{PAGE}")


def known_from(results: Path) -> dict[str, list[list[Line]]]:
    """Return the lines of each variant, of the shorter trainings and of the longer ones."""
    plans = ((PLAN, SHORT), (longer(), LONG))
    return {name: [found(grid(name, plan, seeds), results) for plan, seeds in plans] for name in VARIANTS}


def scores_of(known: Mapping[str, Sequence[Sequence[Line]]]) -> str:
    """Return the table of bits: as they are, and what replaced bytes cost."""
    more = [f"+ with {100 * share:.0f} % replaced" for share in NOISE]
    rows = [["", "bits", *more, "bits, 4 times as long", *more, "seconds of the CPU"]]
    for name, (short, long) in known.items():
        results = [[line["result"] for line in lines] for lines in (short, long)]
        cells = [name]
        for each in results:
            added = ([one[f"bits, {share} replaced"] - one["bits"] for one in each] for share in NOISE)
            cells += [_shown(values) for values in ([one["bits"] for one in each], *added)]
        rows.append([*cells, f"{np.mean([one['seconds'] for one in results[0]]):.0f}"])
    return table(rows)


def verdict(known: Mapping[str, Sequence[Sequence[Line]]]) -> str:
    """Return what the row of the claims says; ValueError where the results do not say so."""
    long = {name: float(np.mean([line["result"]["bits"] for line in lines])) for name, (_, lines) in known.items()}
    flows = sorted(bits for name, bits in long.items() if name in ("flow", "flow, soft", "symmetric past"))
    return sure(
        long["softmax"] < flows[0],
        "measured here: the flow makes no better model; after the longer training softmax attention has "
        f"{long['softmax']:.3f} bits, models with a flow {flows[0]:.3f} to {flows[-1]:.3f}",
    )


def parts_of(known: Mapping[str, Sequence[Sequence[Line]]]) -> dict[str, str]:
    """Return what the page is made of, by the names of the places."""
    said = conclusions(known)
    found = {"scores": scores_of(known), "flows": flows_of(known)}
    return found | {"conclusions": bullets(said[:3]), "longer": bullets(said[3:])}


def conclusions(known: Mapping[str, Sequence[Sequence[Line]]]) -> list[str]:
    """Return what came out, with the numbers of the results; ValueError where they do not say so."""
    short = {name: [line["result"] for line in lines] for name, (lines, _) in known.items()}
    long = {name: lines[0]["result"] for name, (_, lines) in known.items()}
    early = {name: [one["bits"] for one in results] for name, results in short.items()}
    bits = {name: one["bits"] for name, one in long.items()}
    lost = {name: one[f"bits, {NOISE[1]} replaced"] - one["bits"] for name, one in long.items()}
    whole = {name: bits[name] + lost[name] for name in bits}
    zeros = {name: one["zeros"] for name, one in long.items() if "zeros" in one}
    spread = [end / start for start, end in long["flow"]["spreads"]]
    rest = {name: one["bits at rest"] - bits[name] for name, one in long.items() if "bits at rest" in one}
    of_tokens = [bits[name] for name in bits if name not in ("softmax", "symmetric past")]
    soft, past = ("no flow, soft", "flow, soft"), "symmetric past"
    first = {name: float(np.mean(values)) for name, values in early.items()}
    kept = [1.0 - x for name in soft for x in zeros[name]]
    gained = first["softmax"] - first[past]
    slow = [float(np.mean([one["seconds"] for one in short[name]])) for name in (past, "softmax")]
    return [
        sure(
            bits["softmax"] < min(bits[name] for name in bits if name != "softmax")
            and all(min(early["softmax"]) < first[name] < max(early[name]) for name in ("flow", "flow, soft"))
            and bits["flow"] < bits["no flow"]
            and bits[soft[1]] > bits[soft[0]],
            f"**The flow does not make a better model.** After {PLAN.steps} steps softmax, the flow and no flow lie "
            f"within the seeds of each other. After the longer training softmax has {bits['softmax']:.3f} bits, and "
            f"every model with a score of each token has {min(of_tokens):.3f} to {max(of_tokens):.3f}. There the flow "
            f"gains {bits['no flow'] - bits['flow']:.2f} bits with the hard threshold, and costs "
            f"{bits[soft[1]] - bits[soft[0]]:.2f} with the soft one.",
        ),
        sure(
            all(a > b for a, b in zip(zeros["no flow"], zeros["flow"], strict=True)) and min(kept) > 0.8,
            "**Some weights are 0, but fewer with the flow.** Scores below tau are cut off, and the flow draws scores "
            f"together and above tau. With the hard threshold {_both(zeros['no flow'])} of the weights are 0 without a "
            f"flow, {_both(zeros['flow'])} with it. If tau is learned, the models keep {min(kept):.2f} to "
            f"{max(kept):.2f} of their weights: training does not favour sparsity.",
        ),
        sure(
            max(spread) < 0.9 and max(abs(rest["flow"]), abs(rest["flow, soft"])) < 0.0015,
            f"**Scores are nearly at rest after four steps.** Their spread falls to {_both(spread)} of what it was. "
            "Continuing to the rest changes the bits by "
            f"{max(abs(rest['flow']), abs(rest['flow, soft'])):.3f} or less, so convergence adds nothing here.",
        ),
        sure(
            max(lost[name] for name in soft) < lost["softmax"]
            and max(whole[name] for name in soft) < whole["softmax"]
            and min(bits[name] for name in soft) > bits["softmax"]
            and lost[soft[1]] < lost[soft[0]]
            and lost["flow"] > lost["no flow"],
            f"**Robustness.** After {PLAN.steps} steps all models lose the same to replaced bytes. After the longer "
            "training, models with a soft threshold lose less than softmax: "
            f"{_both([lost[name] for name in soft])} bits against {lost['softmax']:.2f} with {100 * NOISE[1]:.0f} % "
            f"replaced. There they are also better in total, {_both([whole[name] for name in soft])} against "
            f"{whole['softmax']:.2f} bits, although they are worse without replaced bytes. The cause is the threshold: "
            f"the flow gains another {lost[soft[0]] - lost[soft[1]]:.2f} with the soft one, and costs "
            f"{lost['flow'] - lost['no flow']:.2f} with the hard one. This is one seed, of models that are less sharp, "
            "and no more than a hint.",
        ),
        sure(
            first[past] == min(first.values())
            and gained < np.ptp(early["softmax"])
            and bits["softmax"] < bits[past] < min(of_tokens)
            and rest[past] > 0.01,
            f"**The symmetric past.** After {PLAN.steps} steps it is the best of all, {gained:.2f} bits ahead of "
            "softmax, which is less than the range of the seeds. After the longer training it is behind softmax, "
            f"{bits[past]:.3f} against {bits['softmax']:.3f} bits, and ahead of all models with a score of each token. "
            f"It has an energy, which falls. It takes {slow[0] / slow[1]:.1f} times the time of softmax in sequences "
            f"of {TEXT.context}, and its cost grows with the cube of the length. Its steps are short, so its scores "
            "are "
            f"not at rest when they are read. At rest it is worse by {rest[past]:.3f} bits: it has learned its number "
            "of steps. (Its scores are those of a query; a spread includes the zeros of later tokens.)",
        ),
    ]


def _both(values: Sequence[float]) -> str:
    return " and ".join(f"{x:.2f}" for x in values)


def _shown(values: Sequence[float]) -> str:
    """Return a mean with its range, or a number alone."""
    return ranged(values, 3) if len(values) > 1 else f"{values[0]:.3f}"


def flows_of(known: Mapping[str, Sequence[Sequence[Line]]]) -> str:
    """Return the table of what the flow does, of the longer trainings."""
    rows = [["", "weights that are 0", "spread of scores, start", "end", "bits at rest, more"]]
    for name, (_, long) in known.items():
        results = [line["result"] for line in long if "zeros" in line["result"]]
        if not results:
            continue
        spreads = np.asarray([one["spreads"] for one in results])  # (seeds, layers, 2)
        zeros = [f"{np.mean([one['zeros'][n] for one in results]):.2f}" for n in range(PLAN.layers)]
        ends = [", ".join(f"{x:.2f}" for x in np.mean(spreads[:, :, n], axis=0)) for n in (0, 1)]
        rest = [one["bits at rest"] - one["bits"] for one in results if "bits at rest" in one]
        rows.append([name, ", ".join(zeros), *ends, _shown(rest) if rest else ""])
    return table(rows)


if __name__ == "__main__":
    main()
