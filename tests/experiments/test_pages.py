"""Every number and every verdict on a page of an experiment, and in its row of the claims, is of the stored results.

A page's function yields sentences and rows of tables with their numbers computed from the results, and another one in
`tests.experiments.settings` what is said of settings and in words. Each has to stand on the page, and what they leave
has to be in `NOT_MEASURED` or `BESIDE`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from docs.experiments import (
    delta,
    graph_energy,
    growing,
    higher_order,
    koopman,
    normalisers,
    presets,
    sweeps,
    sympformer,
)
from docs.experiments.koopman_paths import Path as Measured
from docs.experiments.runs import Run, found, read
from docs.experiments.tasks import standard_library
from docs.experiments.training import fresh
from refattn import tree
from refattn.train import loop
from refattn.train.optimiser import clip
from refattn.train.settings import expanded, flat
from refattn.train.step import measured
from tests.experiments import settings
from tests.experiments.stored import Results as ByWay
from tests.experiments.stored import grouped, mean, ranged, ratios, scores
from tests.rows import holds

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "experiments"

Results = list[dict[str, Any]]


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def of(runs: Sequence[Any], results: Path) -> Results:
    """Return what came of some runs."""
    return [line["result"] for line in found(runs, results)]


def values(results: Results, kind: str) -> list[float]:
    """Return the scores of the trainings that came to their end."""
    return [result[kind] for result in results if result["diverged"] is None]


def told(results: Results, kind: str, digits: int) -> str:
    """Return the mean of some seeds with the smallest and the largest, a single one alone, and how many stopped."""
    own = values(results, kind)
    shown = ranged(own, digits) if len(own) > 1 else f"{own[0]:.{digits}f}"
    return shown + (f", stopped: {len(results) - len(own)}" if len(own) < len(results) else "")


def numbers(run: Run) -> int:
    """Return the number of parameters of a model."""
    return sum(x.size for x in tree.flatten(fresh(run.mechanism, run.options, run.task, run.plan, 0)).values())


def between(many: Sequence[float]) -> str:
    return f"{min(many):.2f} to {max(many):.2f}"


def both(pair: Sequence[float], digits: int = 2) -> str:
    return " and ".join(f"{x:.{digits}f}" for x in pair)


def of_delta() -> Iterator[str]:
    kinds = {"overwriting": ("accuracy", 3), "parity": ("accuracy", 2), "text": ("bits", 3)}

    def results(task: str, name: str, long: bool) -> Results:
        seeds, times = (delta.LONGER_SEEDS, delta.LONGER) if long else (delta.SEEDS, 1)
        return of(delta.grid([name], [task], seeds, longer=times), delta.RESULTS)

    for name in delta.MODELS:
        for long in (False, True):
            yield row(name, *(told(results(task, name, long), *kind) for task, kind in kinds.items()))
        cells = []
        for task in kinds:
            seconds = np.mean([result["seconds"] for result in results(task, name, False)])
            cells.append(f"{numbers(delta.grid([name], [task], [0])[0])}, {seconds:.0f}")
        yield row(name, *cells)
    yield row("embeddings start at", *(f"{plan.embedding:g}" for _, plan in delta.TASKS.values()))
    (first, late), (_, bits) = (
        [
            {name: float(np.mean(values(results(task, name, long), kinds[task][0]))) for name in delta.MODELS}
            for long in (False, True)
        ]
        for task in ("overwriting", "text")
    )
    least = [first[name] for name in ("linear", "gated", "gated by channel")]
    yield f"every seed, {first['delta']:.2f} and {first['gated delta']:.2f} against {between(least)}."
    yield f"gets {late['linear']:.3f} in the long training, and fading memories get {late['gated']:.3f} and"
    yield f"memories get {late['gated']:.3f} and {late['gated by channel']:.3f}. In a task"
    lost = [results("parity", name, True)[0]["losses"][-1] for name in ("gated delta", "KDA")]
    yield f"fall lower there, to {both(lost)} nats"
    gain = {name: bits["linear"] - bits[name] for name in bits}
    yield (
        f"gated by head gains {gain['gated']:.2f} bits over it, delta {gain['delta']:.2f}, both together "
        f"{gain['gated delta']:.2f}. So on top of a gate the delta rule is worth "
        f"{gain['gated delta'] - gain['gated']:.2f}, and by channel nothing ({bits['KDA']:.3f} against "
        f"{bits['gated by channel']:.3f})"
    )
    channel = [bits["gated"] - bits["gated by channel"], bits["gated delta"] - bits["KDA"]]
    yield f"in the long training**, by {channel[0]:.2f} bits without the delta rule and by {channel[1]:.2f} with it"
    yield f"and is {bits['momentum delta'] - bits['gated delta']:.2f} bits behind it on text"
    yield f"its seeds differ most: {between(values(results('overwriting', 'momentum delta', False), 'accuracy'))} in"
    early = [float(np.mean(values(results("text", name, False), "bits"))) for name in ("linear", "delta")]
    yield f"({early[0] - early[1]:.2f} bits in the short training, {gain['delta']:.2f} in the long one)"
    yield (
        f"sooner, {first['delta']:.2f} against {first['linear']:.2f} in the short training, and to the end, "
        f"{late['delta']:.3f} against {late['linear']:.3f} in the long one"
    )
    for long in (False, True):  # guessing gives 0.5
        own = values(results("parity", "delta", long), "accuracy")
        assert max(own) < 0.52 and max(values(results("parity", "delta, beta to 2", long), "accuracy")) > 0.99
    yield "the others stay at 0.5. Without it no rule leaves 0.5, even"


def of_graph_energy() -> Iterator[str]:
    plans = ((graph_energy.PLAN, graph_energy.SHORT), (graph_energy.longer(), graph_energy.LONG))
    known = {
        name: [of(graph_energy.grid(name, plan, seeds), graph_energy.RESULTS) for plan, seeds in plans]
        for name in graph_energy.VARIANTS
    }

    def added(results: Results) -> list[list[float]]:
        return [[one[f"bits, {share} replaced"] - one["bits"] for one in results] for share in graph_energy.NOISE]

    for name, (short, long) in known.items():
        cells = [ranged(many, 3) for many in (values(short, "bits"), *added(short))]
        cells += [f"{one:.3f}" for (one,) in (values(long, "bits"), *added(long))]
        yield row(name, *cells, f"{np.mean([one['seconds'] for one in short]):.0f}")
    last = {name: long[0] for name, (_, long) in known.items()}
    rest = {name: one["bits at rest"] - one["bits"] for name, one in last.items() if "bits at rest" in one}
    for name, one in last.items():
        if "zeros" in one:
            ends = [", ".join(f"{pair[n]:.2f}" for pair in one["spreads"]) for n in (0, 1)]
            at_rest = f"{rest[name]:.3f}" if name in rest else ""
            yield row(name, ", ".join(f"{x:.2f}" for x in one["zeros"]), *ends, at_rest)
    bits = {name: one["bits"] for name, one in last.items()}
    lost = {name: added([one])[1][0] for name, one in last.items()}
    zeros = {name: one["zeros"] for name, one in last.items() if "zeros" in one}
    soft, past, tokens = ("no flow, soft", "flow, soft"), "symmetric past", [*bits.values()][1:5]
    yield (
        f"After the longer training softmax has {bits['softmax']:.3f} bits, and every model with a score of each "
        f"token has {min(tokens):.3f} to {max(tokens):.3f}."
    )
    kept = [1.0 - x for name in soft for x in zeros[name]]
    yield f"longer training {both(zeros['no flow'])} of the weights are 0 without a flow, {both(zeros['flow'])} with it"
    yield f"the models keep {between(kept)} of their weights"
    falls = [end / start for start, end in last["flow"]["spreads"]]
    yield f"With the hard threshold their spread falls to {both(falls)} of what it was"
    yield (
        f"The flow gains another {lost[soft[0]] - lost[soft[1]]:.2f} with the soft threshold, and costs "
        f"{lost['flow'] - lost['no flow']:.2f} with the hard one"
    )
    first = {name: float(np.mean(values(short, "bits"))) for name, (short, _) in known.items()}
    yield f"it is the best of all, {first['softmax'] - first[past]:.2f} bits ahead of softmax"
    yield f"it is behind softmax, {bits[past]:.3f} against {bits['softmax']:.3f} bits"
    slow = [float(np.mean([one["seconds"] for one in known[name][0]])) for name in (past, "softmax")]
    yield f"It takes {slow[0] / slow[1]:.1f} times the time of softmax"
    yield f"it is worse by {rest[past]:.3f} bits"
    flows = [bits[name] for name in ("flow", "flow, soft", past)]
    yield f"softmax attention has {bits['softmax']:.3f} bits, models with a flow {min(flows):.3f} to {max(flows):.3f}"


def of_growing() -> Iterator[str]:
    lines = found(growing.grid(tuple(growing.TASKS), growing.SEEDS), growing.RESULTS)
    known = {task: grouped(lines, task) for task in growing.TASKS}
    ten, one, thirty, text = (known[name] for name in ("condition 10", "condition 1", "condition 30", "text"))

    def over(results: ByWay, way: str, other: str = "scratch", reading: str = "steps") -> float:
        return mean(scores(results, way, reading)) / mean(scores(results, other, reading))

    def left(results: ByWay, way: str, growth: int = 0) -> float:
        return mean(ratios(results, way, growth))

    def apart(way: str, reading: str = "steps") -> list[float]:
        return [a - b for a, b in zip(scores(text, way, reading), scores(text, "scratch", reading), strict=True)]

    for task, results in known.items():
        for way in results:
            cells = []
            for reading in ("steps", "operations"):
                own = scores(results, way, reading)
                if task == "text":
                    bits = apart(way, reading)
                    cells += [f"{np.mean(own):.4f}", f"{np.mean(bits):+.4f} [{min(bits):+.4f}, {max(bits):+.4f}]"]
                else:
                    cells += [f"{mean(own):.2e} [{min(own):.1e}, {max(own):.1e}]"]
                    cells += [f"{over(results, way, reading=reading):.3g}"]
            spent, whole = (np.mean([x["steps"]["operations"] for x in results[name]]) for name in (way, "scratch"))
            yield row(way, *cells, f"{spent / whole:.2f}")
            growths = [growth for result in results[way] for growth in result["growths"]]
            if way not in ("narrow", "scratch", "auto"):
                each = [ratios(results, way, n) for n in range(3)]
                cells = [f"{mean(x):.3f} [{min(x):.3f}, {max(x):.3f}]" for x in each]
                if amplitudes := [growth["amplitude"] for growth in growths if growth.get("amplitude")]:
                    cells += [f"{min(amplitudes):g} to {max(amplitudes):g}"]
                    cells += [f"{np.mean([growth['evaluations'] for growth in growths]):.1f}"]
                yield row(way, *cells, *[""] * (5 - len(cells)))
        looks = [result["growths"] for result in results["auto"]]
        grown = [[look for look in own if look["after"] < look["before"]] for own in looks]
        cells = [", ".join(f"{x['step']} ({'/'.join(map(str, x['widths']))})" for x in own) or "never" for own in grown]
        cells = ["; ".join(cells)]
        for n in range(2):
            rest = [own[n]["after"] / own[n]["before"] for own in grown if len(own) > n]
            cells.append(f"{mean(rest):.3f} [{min(rest):.3f}, {max(rest):.3f}]" if rest else "")
        yield row(task, *cells, str(sum(map(len, looks)) - sum(map(len, grown))))
    first = [ratios(results, "optimal", 0) for results in (ten, thirty)]
    yield f"the first one leaves {between(first[0])} of it, and {between(first[1])}."
    yield (
        f"leaves {left(ten, 'frobenius'):.2f} at condition 10 and {left(thirty, 'frobenius'):.3f} at condition 30, "
        f"where it ends {over(thirty, 'frobenius', 'optimal'):.1f} times above"
    )
    yield f"by a factor of {1 / over(ten, 'optimal'):.0f} at condition 10 and of {1 / over(thirty, 'optimal'):.0f} at"
    yield f"end {over(ten, 'random', 'optimal'):.0f} and {over(ten, 'net2wider', 'optimal'):.0f} times above growing"
    yield f"zeros in the keys end {1 / over(ten, 'zero'):.0f} times below scratch"
    yield f"growing loses**, by a factor of {over(one, 'optimal'):.0f} after as many steps and of "
    yield f"steps and of {over(one, 'optimal', reading='operations'):.0f} at equal operations"
    yield f"it leaves {left(one, 'optimal'):.2f}, {left(one, 'optimal', 1):.2f} and {left(one, 'optimal', 2):.2f}."
    halves = [left(text, way) for way in ("additive", "optimal", "damped")]
    near = max(abs(float(np.mean(apart(way)))) for way in text if way not in ("additive", "optimal"))
    yield f"lowers the loss by {100 * (1 - min(halves)):.1f} per cent, and all ways but two end within {near:.3f} bits"
    lost = {way: float(np.mean(apart(way))) for way in text}
    yield f"{lost['optimal']:.2f} and {lost['additive']:.2f} bits are lost on average"
    most = max(growth["amplitude"] for result in text["additive"] for growth in result["growths"])
    yield f"which went to amplitudes of {most:.0f}."
    yield f"It costs a factor of {over(thirty, 'damped', 'optimal'):.1f} at condition 30"
    rising = ratios(ten, "report", 0)
    yield f"by factors of {min(rising):.3f} to {max(rising):.1f} at the first growth"
    yield f"at condition 1 {1 / over(one, 'auto', 'optimal'):.1f} times below them"
    yield f"it ends {over(thirty, 'auto', 'damped'):.1f} times above damped and {1 / over(thirty, 'auto'):.0f} times"
    damped = apart("damped")
    yield (
        f"damped ends {-lost['damped']:.2f} bits below (seeds from {-min(damped):.2f} below to {max(damped):.2f} "
        f"above), undamped {lost['optimal']:.2f} above, additive {lost['additive']:.2f} above"
    )


def of_higher_order() -> Iterator[str]:
    kinds, alphas = {"text": ("bits", 3), "recall": ("accuracy", 2)}, higher_order.ALPHAS
    runs = higher_order.grid(tuple(higher_order.MECHANISMS), tuple(kinds), higher_order.SEEDS)
    groups: dict[tuple[str, str, float | None], Results] = {}
    for run, result in zip(runs, of(runs, higher_order.RESULTS), strict=True):
        name, alpha = f"order {run.options.get('order')}", run.options.get("alpha")
        if "order" not in run.options:
            name = run.options.get("kind", run.mechanism)
        elif "eps" in run.options["normaliser"]:
            name, alpha = f"{name}, alpha = {alpha:g}, {run.options['normaliser']}", None
        elif not run.options["order"]:
            alpha = None
        groups.setdefault((type(run.task).__name__.lower(), name, alpha), []).append(result)

    def steady(results: Results) -> str:
        pieces = [piece for result in results for piece in result["norms"][1:]]
        spread = math.exp(np.mean([math.log(piece[2] / piece[0]) for piece in pieces]))
        return f"{spread:.2f}, {max(piece[3] / piece[1] for piece in pieces):.1f}"

    for task, (kind, digits) in kinds.items():
        for shown in (functools.partial(told, kind=kind, digits=digits), steady):
            for order in (1, 2, 3, 4, 20):
                yield row(f"order {order}", *(shown(groups[task, f"order {order}", alpha]) for alpha in alphas))
            yield row(*(shown(results) for (at, _, alpha), results in groups.items() if at == task and alpha is None))
    for order in higher_order.ORDERS:
        small = [normalisers.small_sums(*higher_order.TASKS["text"], order, alpha) for alpha in alphas]
        yield row(f"order {order}", *(f"{100 * x:.1f} %" for x in small))
    divided = found(higher_order.divided(), higher_order.RESULTS)
    means: dict[tuple[Any, ...], list[float]] = {}
    for (order, alpha), many in normalisers.DIVISORS.items():
        for normaliser in many:
            cells = [str(order), f"{alpha:g}", f"`{normaliser}`"]
            wanted = {"order": order, "alpha": alpha, "normaliser": normaliser}
            for task, (kind, digits) in kinds.items():
                own = [
                    line["result"]
                    for line in divided
                    if line["run"]["options"] == wanted and line["run"]["task"]["name"] == task
                ]
                means[task, order, alpha, normaliser] = values(own, kind)
                parts = [np.mean([result[part] for result in own]) for part in ("replaced", "small")]
                cells += [ranged(values(own, kind), digits), *(f"{100.0 * x:.1f} %" for x in parts)]
            yield row(*cells)

    def behind(one: tuple[Any, ...], other: tuple[Any, ...]) -> list[float]:
        return [a - b for a, b in zip(means["text", *one], means["text", *other], strict=True)]

    clamp = "clamp(eps=32.0)"
    constant = float(np.mean(behind((1, 1.0, "clamp(eps=512.0)"), (1, 1.0, clamp))))
    assert abs(constant) < 0.02
    yield 'as good as "clamp 32" on text, within 0.02 bits'
    slow = min(behind((1, 1.0, "signed"), (1, 1.0, clamp)))
    yield f"stays {math.floor(10 * slow) / 10:.1f} bits or more behind"
    yield f'There it is {np.mean(behind((1, 5.0, "signed"), (1, 5.0, clamp))):.1f} bits behind "clamp 32"'
    worse = sorted(behind((2, 1.0, "clamp(eps=2048.0)"), (2, 1.0, "signed")))
    yield f"than with the one constant that was tried**, by {worse[0]:.2f} to {worse[1]:.2f} bits on text"
    ahead = behind((1, 1.0, clamp), (2, 1.0, "signed"))
    yield f"order 2, normalised, is {ahead[0]:.2f} and {ahead[1]:.2f} bits ahead of order 1"
    every = {key: float(np.mean(values(results, kinds[key[0]][0]))) for key, results in groups.items()}

    def at(order: int | str, alpha: float | None, task: str = "text") -> float:
        return every[task, f"order {order}" if isinstance(order, int) else order, alpha]

    yield f"For order 2 they rise from {at(2, 1.0):.2f} over {at(2, 3.0):.2f} at the default of 3 to {at(2, 5.0):.2f}"
    lost = max(at(2, alpha) - at(20, alpha) for alpha in alphas)
    missed = max(at(20, alpha, "recall") - at(2, alpha, "recall") for alpha in alphas)
    yield f"order 2 is at most {lost:.2f} bits and {missed:.2f} of accuracy behind order 20"
    softmax, separate = at("softmax", None), at("separate", None)
    nearest = [at(order, 1.0) - softmax for order in (20, 4)]
    yield f"{nearest[0]:.2f} bits ahead of order 20 and {nearest[1]:.2f} ahead of order 4 at alpha = 1,"
    yield f"overlap, {at(2, 1.0) - softmax:.2f} ahead of order 2 there, and {at(2, 3.0) - softmax:.2f} ahead of order 2"
    yield f"at alpha = 5, and {at('elu', None) - at(2, 1.0):.2f} bits behind order 2 at alpha = 1"
    yield f"and {at(2, 3.0) - separate:.2f} ahead of order 2 at the default"
    yield row("embeddings start at", *(f"{plan.embedding:g}" for _, plan in higher_order.TASKS.values()))
    largest = math.sqrt(32.0)
    yield f"{largest:.1f} for alpha = 1 and {largest / 5:.1f} for alpha = 5"
    yield f"scores of at most {largest / 5:.1f} weigh the best key"
    yield f"is {1 - largest:.1f} for order 1 and"


def of_koopman() -> Iterator[str]:
    kinds = {"text": ("bits", 3), "recall": ("accuracy", 2), "one layer": ("accuracy", 2)}

    def results(task: str, name: str) -> Results:
        return of(koopman.grid([name], [task], koopman.SEEDS), koopman.RESULTS)

    for name in koopman.MODELS:
        yield row(name, *(told(results(task, name), *kind) for task, kind in kinds.items()))
        cells = []
        for task in kinds:
            seconds = np.mean([result["seconds"] for result in results(task, name)])
            cells.append(f"{numbers(koopman.grid([name], [task], [0])[0])}, {seconds:.1f}")
        yield row(name, *cells)
    yield row("embeddings start at", *(f"{plan.embedding:g}" for _, plan, _ in koopman.TASKS.values()))
    bits = {name: float(np.mean(values(results("text", name), "bits"))) for name in koopman.MODELS}
    plain, mlp, zero = bits["Koopman"], bits["attention + MLP"], bits["Koopman, ridge to 0"]
    assert plain > bits["attention"] and bits["Koopman + MLP"] > mlp, "it does not help"
    yield f"best model, {bits['attention']:.3f} bits per byte against {plain:.3f} with the update"
    yield f"on the text by {mlp - plain:.3f} bits"
    yield f"the text worse, {bits['Koopman + MLP']:.3f} against {mlp:.3f}"
    yield f"the update wins {bits['attention twice'] - plain:.3f} bits"
    yield f"is the worst of these**: {zero:.3f} bits on the text"
    yield f"the same update is {zero - plain:.2f} bits better"
    yield f"gives nothing**: {bits['Koopman, 3 updates']:.3f} bits on the text"
    yield from of_paths()
    yield from of_updates()


def of_paths() -> Iterator[str]:
    """What an update leaves of a query."""
    stored, ridges = koopman.measures(koopman.RESULTS), koopman.RIDGES
    own, again = (
        {n: [stored[Measured(n, ridge, path=path)] for ridge in ridges] for n in koopman.TRANSITIONS}
        for path in ("own", "attention")
    )
    for n in koopman.TRANSITIONS:
        cells = [[f"{path[n][1]['seen']:.2f}", *(f"{x['length']:.3f}" for x in path[n])] for path in (own, again)]
        yield row(str(n), *cells[0], *cells[1])
    others: dict[str, dict[str, Any]] = {
        "as above": {},
        "the fit of the sources, stein": {"fit": "stein"},
        "kernel x . y alone": {"kernel": "linear"},
        "kernel x . y with Matern 5/2": {"kernel": "matern52"},
        "8 keys": {"keys": 8},
        "128 keys": {"keys": 128},
        "width 4": {"width": 4},
        "width 64": {"width": 64},
        "a ridge to the identity": {"tau": 1},
    }
    for name, options in others.items():
        each = [stored[Measured(n, **options)] for n in (1, 3)]
        yield row(name, *(cell for x in each for cell in (f"{x['seen']:.2f}", f"{x['length']:.3f}")))
    seen, length = own[1][1]["seen"], [x["length"] for x in own[1]]
    yield f"has seen {seen:.2f} of q'. The rest goes to 0: {length[0]:.3f} of its length is left at a ridge of 0.001"
    yield f"a ridge of 0.001, and {length[2]:.3f} at 1."
    widths = [stored[Measured(1, width=width)]["seen"] for width in (4, 64)]
    yield f"{widths[0]:.2f} are seen at width 4, {widths[1]:.2f} at 64"
    yield f"With two it has seen {own[2][1]['seen']:.2f} of q', with eight {own[8][1]['seen']:.2f}."
    yield f"Yet {between([x['length'] for n in koopman.TRANSITIONS[1:] for x in own[n]])} of the length is left"
    kept = [[f"{again[n][ridge]['length']:.2f}" for n in (2, 3, 8)] for ridge in (1, 2)]
    yield f"{kept[0][0]}, {kept[0][1]} and {kept[0][2]} of its length at a ridge of 0.1. Here the ridge counts: at 1"
    yield f"at 1 it is {kept[1][0]}, {kept[1][1]} and {kept[1][2]}."
    trained = of(koopman.trained_paths(), koopman.RESULTS)  # of each seed the ridge to 0 and to the identity
    zero, same = ([layer for result in trained[n::2] for layer in result["layers"]] for n in (0, 1))
    seen_by, left = (between([x[kind] for x in zero]) for kind in ("seen", "length"))
    yield f"the operator has seen {seen_by} of q', and leaves {left} of its length."
    yield f"With a ridge to the identity {between([x['length'] for x in same])} is left"


def of_updates() -> Iterator[str]:
    """The article's own system and longer paths, with what the mechanism's page says of drawing again."""
    runs = koopman.updates_grid()
    groups: dict[tuple[str, str, int], Results] = {}
    names = {str(own): name for name, own in koopman.UPDATES.items()}
    for run, result in zip(runs, of(runs, koopman.RESULTS), strict=True):
        task = type(run.task).__name__.lower()
        name = names[str((run.mechanism, dict(run.options)))]
        groups.setdefault((task, name, run.plan.steps // koopman.SMALLER[task][1].steps), []).append(result)
    kinds, text = {"text": ("bits", 3), "recall": ("accuracy", 2)}, koopman.SMALLER["text"][1]

    def again(name: str) -> str:
        drawn, needed = 0, 0
        for (task, model, times), results in groups.items():
            done = [x for x in results if model == name and "redrawn" in x and x["diverged"] is None]
            plan = koopman.SMALLER[task][1]
            needed += len(done) * times * plan.steps * plan.layers * (koopman.UPDATES[name][1].get("updates", 2) - 1)
            drawn += sum(x["redrawn"] for x in done)
        return f"{100 * drawn / needed:.1f}" if needed else ""

    for name in koopman.UPDATES:
        each = [(groups.get((task, name, times)), kind) for task, kind in kinds.items() for times in koopman.TIMES]
        cells = [told(results, *kind) if results else "not run" for results, kind in each]
        cells += [again(name), f"{np.mean(values(groups['text', name, 1], 'seconds')) / text.steps:.3f}"]
        own = [
            x for (_, model, _), results in groups.items() if model == name for x in results if x["diverged"] is None
        ]
        shares = [100.0 * x["clipped"] for x in own]
        yield row(
            name,
            *cells,
            f"{min(shares):.1f} to {max(shares):.1f}",
            f"{max(piece[-1] for x in own for piece in x['norms']):,.0f}",
        )
    mean_of = {key: float(np.mean(values(results, kinds[key[0]][0]))) for key, results in groups.items()}

    def bits(name: str) -> str:
        return both([mean_of["text", name, times] for times in koopman.TIMES], 3)

    for times in koopman.TIMES:  # every seed of each is behind every seed of the next
        ends = [values(groups["text", name, times], "bits") for name in ("attention", "Koopman", "Tie")]
        assert max(ends[0]) < min(ends[1]) and max(ends[1]) < min(ends[2])
    tie = [x for (task, name, _), own in groups.items() if name[:3] == "Tie" and task == "text" for x in own]
    assert {x["clipped"] for x in tie} == {1.0}
    largest = max(piece[-1] for x in tie for piece in x["norms"])
    yield f"every step of every training on text was clipped, at norms of up to {largest / 1e6:.1f} million"
    four, near = "Koopman, 4 updates", "to the identity, 4 updates"
    yield f"On the text it has {bits('Tie')} bits after 150 and 600 steps, the default {bits('Koopman')}, and"
    yield f"and attention {bits('attention')}: every seed"
    gaps = [mean_of["text", "Tie", times] - mean_of["text", "Koopman", times] for times in koopman.TIMES]
    yield f"from {gaps[0]:.2f} bits to {gaps[1]:.2f}."
    yield f"ahead of the default, {bits(near)} bits, and behind attention"
    yield f"not yet separated: {bits('Koopman')} bits, and {bits(four)}."
    yield f"the preset has {both([mean_of['text', f'Tie, {n} updates', 1] for n in (3, 4)], 3)} bits after 150 steps"
    plateau = [x for name in ("Koopman", four, near) for x in values(groups["recall", name, 4], "accuracy")]
    yield f"the default and longer paths have {between(plateau)}, the preset "
    yield f"the preset {between(values(groups['recall', 'Tie', 4], 'accuracy'))}."
    seconds = sum(result["seconds"] for results in groups.values() for result in results)
    laws = [run for many in koopman.laws_grid().values() for run in many if run not in runs]
    more = sum(result["seconds"] for result in of(laws, koopman.RESULTS))
    first = f"The {len(runs)} trainings of the preset and of longer paths took {seconds:.0f} s of one core, and"
    yield f"{first} {len(laws)} more at other rates and laws {more:.0f} s."


def of_clipping(name: str) -> Iterator[str]:
    """The smallest and the largest share of clipped steps of the trainings on each task."""
    shares: dict[str, list[float]] = {}
    for line in read(RESULTS / f"{name}.jsonl"):
        if "clipped" in line["result"]:
            shares.setdefault(line["run"]["task"]["name"], []).append(100.0 * line["result"]["clipped"])
    for task, own in shares.items():
        yield f"{min(own):.0f} to {max(own):.0f} % of the steps of a training on {task}"


def of_redrawn() -> Iterator[str]:
    """What the mechanism's page says of them."""
    often = {
        fragment.split(" | ")[0].strip("| "): fragment.split(" | ")[5]
        for fragment in of_updates()
        if fragment.startswith("| Tie")
    }
    tie = presets.by_setting(presets.RESULTS, ["Tie"])["Tie"]["operations"]
    needed = sum(line["run"]["steps"] * line["run"]["layers"] for line in tie)
    most = 100 * sum(line["result"]["redrawn"] for line in tie) / needed
    yield f"it drew {often['Tie']} again in calls of 128 to 192 tokens, and {most:.0f} in calls of 768."
    yield f"small calls it was {often['Tie, 3 updates']}, with four {often['Tie, 4 updates']}; and one of these 6"


def of_sympformer() -> Iterator[str]:
    lines = sympformer.by_part(sympformer.RESULTS)
    kept = {
        part: {name: [line["result"] for line in own] for name, own in many.items()} for part, many in lines.items()
    }
    for name, (layers, options) in sympformer.VARIANTS.items():
        own = kept["short"][name]
        (run,) = sympformer.grid([name], [0])
        calls = layers * (4 if options.get("integrator") == "strang" else 1)
        cells = [told(own, "bits", 3), told(own, "accuracy", 3), f"{np.mean(values(own, 'seconds')):.0f}"]
        yield row(name, f"{numbers(run):,}", str(calls), *cells)
        if any(name in kept[part] for part in list(kept)[1:]):
            yield row(name, *(told(part[name], "bits", 3) if name in part else "" for part in kept.values()))
    bits = [{name: float(np.mean(values(own, "bits"))) for name, own in part.items()} for part in kept.values()]
    short, slow, long, high = ({name: part["classical"] - x for name, x in part.items()} for part in bits)
    ab2, euler = "AB2, first momentum", "forward Euler, first momentum"
    strang, wide = "Strang, one layer", "classical, one layer"
    apart = max(
        abs(a - b) for a, b in zip(*(values(kept["0.003"][name], "bits") for name in (ab2, "classical")), strict=True)
    )
    yield f"are {short[ab2]:.2f} and {short[euler]:.2f} bits ahead of the classical block, with ranges apart"
    yield f"After 800 AB2 is level with it, within {apart:.3f} for every seed, and forward Euler is {-long[euler]:.2f}"
    yield "At a rate of 0.001, with which 800 steps lead less far"
    yield f"less far, they are {slow[ab2]:.2f} and {slow[euler]:.2f} ahead"
    yield f"At 0.01 AB2 is {-high[ab2]:.2f} behind and forward Euler {high[euler]:.2f} ahead, but neither is as good "
    yield "as good there as the classical block at 0.003"
    assert [f"{line['classical'][0]['run']['plan']['learning_rate']:g}" for line in lines.values()] == [
        *("0.003", "0.001", "0.003", "0.01")
    ]
    yield row("", "200 steps, rate 0.003", *(f"800 steps, rate {rate}" for rate in ("0.001", "0.003", "0.01")))
    yield f"At a rate of 0.01 it does not learn well: {bits[3]['presymplectic Euler']:.2f} bits"
    yield f"is {short[strang]:.2f} bits ahead of four classical layers after 200 steps and {long[strang]:.2f} after 800"
    yield "at every rate; at 0.01 it is better still"
    yield f"single call, {short[wide]:.2f} ahead of four layers after 200 steps, is {long[wide]:.2f} ahead after 800"
    one, plain = (told(kept["0.003"][name], "bits", 3) for name in (strang, "classical"))
    yield f"after 800 steps {one} bits against {plain} of the classical block"


MERCATS = ("the default", "minus one")


def norm_of_a_fresh_one(name: str, seed: int) -> float:
    """Return the norm of the gradient on the first batch of a training of the presets, before it is clipped."""
    chosen = presets.SETTINGS[name].settings(seed=seed)
    state = loop.fresh(chosen)
    batch = loop._batch(state.params, chosen, standard_library(), 1)
    return float(clip(measured(state.params, *batch)[1], chosen.clip)[1])


def of_presets() -> Iterator[str]:
    lines = presets.by_setting(presets.RESULTS)
    steps, same = (
        {name: [x["result"] for x in own[kind]] for name, own in lines.items() if kind in own}
        for kind in ("steps", "operations")
    )
    each = {name: own["operations"][0] for name, own in lines.items()}
    cost = {name: x["result"]["operations"] / x["run"]["steps"] for name, x in each.items()}
    for name, own in lines.items():
        first = own.get("steps", own["operations"])[0]
        cells = [presets.SETTINGS[name].of, f"{first['result']['parameters']:,}"]
        cells += [f"{first['result']['operations'] / first['run']['steps'] / 1e6:,.0f}"]
        trained = own.get("steps", own["operations"])
        cells += [f"{np.mean([x['result']['seconds'] / x['run']['steps'] for x in trained]):.3f}"]
        cells += [told(steps[name], "bits", 3) if name in steps else "not run"]
        yield row(name, *cells, str(each[name]["run"]["steps"]), told(same[name], "bits", 3))
    same_whose: dict[tuple[str, str], list[str]] = {}
    for name, setting in presets.SETTINGS.items():
        given = expanded(setting.mechanism, {"preset": setting.preset}) if setting.preset else {}
        sizes = set(presets.SIZE) - {"mlp", "decode"}
        own = {key: value for key, value in flat(given).items() if key not in sizes and key != "grow"}
        differs = ", ".join(f"`{key}={value}`" for key, value in own.items()) or "nothing"
        yield row(f"{name}: `{setting.command}`", ra.mechanism(setting.mechanism).source, differs)
        whose = ra.mechanism(setting.mechanism).whose.get(setting.preset or "", {})
        for text in dict.fromkeys(whose.values()):
            said = (", ".join(f"`{each}`" for each in whose if whose[each] == text), text)
            same_whose.setdefault(said, []).append(name)
    for said, names in same_whose.items():
        yield row(", ".join(names), *said)
    bits = {name: float(np.mean(values(own, "bits"))) for name, own in steps.items()}
    equal = {name: float(np.mean(values(own, "bits"))) for name, own in same.items()}
    yield f"H1 with {bits['H1']:.3f} bits against {bits['softmax']:.3f} of softmax attention"
    size = presets.SIZE
    yield f"width {size['width']}, {size['heads']} heads, {size['layers']} layers with an MLP"
    yield f"sequences of {size['context']} bytes, batches of {size['batch']}, AdamW at"
    yield (
        f"AdamW at {size['learning_rate']:g} after".replace("0.003", "3e-3")
        + f" {size['warmup']} steps, then half a cosine"
    )
    yield f"Bits per byte of {size['score_bytes'] // presets.EVERY:,} held-out bytes"
    yield f"At equal steps each has {size['steps']}. At equal operations"
    yield f"as fit into the floating-point operations of {size['steps']} steps of softmax attention"
    assert max(equal["Y"], equal["H0"]) < equal["softmax"] < equal["R2"] and equal["H1"] < equal["R2"]
    assert max(values(same["Y"], "bits") + values(same["H0"], "bits")) < min(values(same["softmax"], "bits"))
    assert bits["presymplectic Euler"] < bits["SympFormer"] < bits["softmax"] < bits["growing"] < bits["Burgund"]
    assert bits["softmax"] < bits["graph energy"] and bits["softmax"] < bits["Koopman"]
    low, high = ({name: end(values(own, "bits")) for name, own in steps.items()} for end in (min, max))
    assert max(high[name] for name in ("Y", "H0", "H1", "R2")) < low["softmax"]
    assert max(low[name] for name in ("Y", "H0", "H1")) < min(high[name] for name in ("Y", "H0", "H1"))
    assert high["H1"] < low["R2"] < min(high["Y"], high["H0"])
    yield f"Y is {bits['B'] - bits['Y']:.3f} bits ahead of B."
    more = steps["Y"][0]["parameters"] / steps["softmax"][0]["parameters"] - 1.0
    yield f"a table of first velocities here, with {100 * more:.0f} % more parameters than softmax attention"
    yield f"{lines['Y']['steps'][0]['run']['scalar_rate']:g} times as fast here (`scalar_rate`)"
    yield f"At equal operations Y ({equal['Y']:.3f}) and H0 ({equal['H0']:.3f}) are still ahead"
    yield f"H1 ({equal['H1']:.3f}) and R2 ({equal['R2']:.3f}), whose steps"
    yield f"presymplectic Euler ({bits['presymplectic Euler']:.3f}) is ahead of this library's default of the same"
    yield f"of the same block ({bits['SympFormer']:.3f})"
    printed, less = (bits[f"Mercat: {name}"] for name in ("the default", "minus one"))
    yield f"the weights of equations 1 and 2, with the alpha of his code, have {printed:.3f} bits; with 1 subtracted,"
    yield f"made causal by us, {less:.3f}; softmax attention is ahead of both."
    assert bits["softmax"] < printed < less
    chosen = presets.SETTINGS["Mercat: minus one"].settings()
    width = chosen.model.width // chosen.model.heads
    yield f"Heads have width {width} here, and at alpha = 3 no score is above {math.sqrt(width) / 3.0:.2f}."
    fresh_norms = [[norm_of_a_fresh_one(f"Mercat: {name}", seed) for seed in presets.SEEDS] for name in MERCATS]
    assert min(b / a for a, b in zip(*fresh_norms, strict=True)) > 4.0 and chosen.clip == 1.0
    yield "the gradient of a fresh model is more than 4 times that of the default, and what is above 1 is clipped."
    yield f"So {less:.3f} may measure the clipping."
    yield f"steps end at {bits['Burgund']:.3f} bits and the corrected ones at {bits['growing']:.3f}, with ranges apart"
    yield f"which does not grow, has {bits['softmax']:.3f}:"
    yield f"**Graph energy**: the default has {bits['graph energy']:.3f} bits"
    worse = bits["Preetham"] - bits["graph energy"]
    yield f"it has {bits['Preetham']:.3f} at equal steps, {worse:.3f} above the default's"
    yield f"A step takes {cost['Preetham'] / cost['graph energy']:.0f} times the operations"
    yield f"after {each['Preetham']['run']['steps']} steps, it has {equal['Preetham']:.3f}."
    yield f"{bits['Koopman']:.3f} bits, with a step that takes {cost['Koopman'] / cost['softmax']:.1f} times"
    yield f"Tie's preset takes {cost['Tie'] / cost['softmax']:.0f} times those of softmax attention"
    tie = each["Tie"]
    *some, last = (line["result"]["redrawn"] for line in lines["Tie"]["operations"])
    drawn = f"{', '.join(map(str, some))} and {last}"
    yield f"for {tie['run']['steps']} steps alone, in which it drew {drawn} times again (three seeds)"
    alone = [
        values(of(koopman.grid([name], ["text"], koopman.SEEDS), koopman.RESULTS), "bits")
        for name in ("attention", "Koopman, ridge to 0")
    ]
    assert max(alone[0]) < min(alone[1])
    yield "Without an MLP it was [behind with every seed]"
    yield f"and has {equal['Tie']:.3f} bits"
    yield f"has {bits['delta']:.3f} bits at equal steps and {equal['delta']:.3f} at equal operations"


PAGES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "delta": ("experiments/delta.md", of_delta),
    "graph_energy": ("experiments/graph_energy.md", of_graph_energy),
    "growing": ("experiments/growing.md", of_growing),
    "higher_order": ("experiments/higher_order.md", of_higher_order),
    "koopman": ("experiments/koopman.md", of_koopman),
    "sympformer": ("experiments/sympformer.md", of_sympformer),
    "presets": ("presets.md", of_presets),
}

CHANCE, SETTING, STORED = "what guessing gives", "a setting of the runs", "of a training that is not stored"

NOT_MEASURED: dict[str, dict[str, str]] = {
    "delta": {
        "guessing gives 0.06, any of the three values of the key 0.33": CHANCE,
        "in 1024 such sequences; guessing gives 0.5 |": CHANCE,
        "rate 3e-3, decay 0.1 |": SETTING,
    },
    "graph_energy": {
        "decay 0.1, clipped at 1": SETTING,
        "those below 0.4 are cut off": SETTING,
        "in eight steps of 0.05": SETTING,
    },
    "growing": {
        "queries and keys 2.5 times as large": SETTING,
        "beta2 0.999, no decay | rate 3e-3 after 30 steps, beta2 0.95, decay 0.1": SETTING,
        "keys are split 0.7 to 0.3": SETTING,
        "the default damping, 0.01 |": SETTING,
        "which lowers the loss by 0.1 %": STORED,
        "factors below 1.5 on the teacher task": "what four seeds can tell",
    },
    "higher_order": {
        "naming the most frequent value of the sequence gives 0.29": CHANCE,
        "arXiv:2006.16236": "a paper",
        "arXiv:1812.01243": "a paper",
        "| order 1, alpha = 1, signed(eps=1.0) | order 1, alpha = 1, clamp(eps=32.0) |": SETTING,
        "The first is the 0.9 quantile divided by the 0.1 quantile": "what is measured",
        "of which no line is stored, separate gets to 0.66 and was still learning, and elu stays at 0.28": STORED,
    },
    "koopman": {
        "naming the most frequent value of the sequence gives 0.29": CHANCE,
        "decay 0.1, clipped at 1 | the same without decay": SETTING,
        "ridge and epsilon 0.1.": SETTING,
        "a mean between 0.5 and 0.8 is of seeds near 0.29": "of three cells, rounded",
        "seen | length, ridge 0.001 | length, ridge 0.1 | length, ridge 1 |": SETTING,
        "at a ridge of 0.1:": SETTING,
    },
    "sympformer": {
        "decay 0.1, clipped at 1": SETTING,
        "**damping of 0.3/t** instead": SETTING,
        "A step of 0.3 is no close": SETTING,
        "deviations are 0.035 to 0.043,": "the authors', held by tests/experiments/test_sympformer.py",
        "has 3.42 M parameters, the others 6.65 M:": "the authors', held by the same",
        "| `B` | 2.659 | 5.395 |": "the authors', held by tests/experiments/test_sympformer.py",
        "| `Y` | 2.575 | 5.267 |": "the authors'",
        "| `H0` | 2.578 | 5.258 |": "the authors'",
        "| `H1` | 2.573 | 5.259 |": "the authors'",
        "| `R2` | 2.572 | 5.255 |": "the authors'",
    },
    "presets": {},
}
"""By page: what has decimals and is none of the stored results, and why."""


def one_line(text: str) -> str:
    """Return a text with single spaces, however its lines are broken."""
    return re.sub(r"\s+", " ", text)


NUMBER = re.compile(r"(?<![\w.:/#-])[+-]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:th|nd)?(?![\w]|\.\w)")
VERDICT = re.compile(r"\b(ahead|behind|better|worse|best|worst|gains?|gained|loses?|wins|helps?|level|never|fails?)\b")
"""What has to stand in a sentence that is held: every number, and every word that weighs one thing against another."""


def read_by_a_reader(page: str) -> str:
    """Return a page without blocks of code, targets of links, numbers of a list, and years."""
    for pattern in (r"(?ms)^```.*?^```$", r"(?<=\])\([^)]*\)", r"(?m)^\d+\. ", r"\b(?:19|20)[12]\d\b"):
        page = re.sub(pattern, "", page)
    return one_line(page)


def unheld(page: str, sentences: Sequence[str]) -> list[str]:
    """Return the sentences that do not stand on a page, and each number and verdict that is in none of them.

    A verdict in a question is none.
    """
    text = read_by_a_reader(page)
    known = [read_by_a_reader(each) for each in sentences]
    wrong = [f"not on the page: {each}" for each in known if each not in text]
    held = [match.span() for each in known for match in re.finditer(re.escape(each), text)]
    for match in (*NUMBER.finditer(text), *VERDICT.finditer(text)):
        asked = match[0].isalpha() and re.match(r"[^.?!:|]*\?", text[match.end() :])
        if not asked and not any(start <= match.start() and match.end() <= end for start, end in held):
            wrong.append(f"in no sentence that is held: {text[max(0, match.start() - 60) : match.end() + 30]}")
    return wrong


def versions(name: str) -> list[str]:
    """Return with what the experiment of a page ran, where the page says that."""
    if name == "presets":
        return []
    ran = {(line["versions"]["python"], line["versions"]["numpy"]) for line in read(RESULTS / f"{name}.jsonl")}
    return [f"Python {python}, NumPy {numpy}" for python, numpy in ran] * (name != "graph_energy")


@functools.cache
def sentences(name: str) -> tuple[str, ...]:
    """Return all that has to stand on a page, or in its row of the claims."""
    more = [*getattr(settings, f"of_{name}")(), *settings.BESIDE.get(name, {}), *of_clipping(name)]
    return (*PAGES[name][1](), *more, *versions(name), *NOT_MEASURED[name])


def wrong_on(name: str, page: str) -> list[str]:
    """Return what a page of these words says that the results and the settings do not."""
    if name in ra.list_mechanisms():
        (claim,) = [
            one.holds for one in ra.mechanism(name).claims if one.holds.endswith(f"; docs/{PAGES[name][0]}")
        ] or [holds(name, "announced, for it was tested on random data alone")]
        page += f"\n\n{claim}"
    return unheld(page, sentences(name))


@pytest.mark.parametrize("name", PAGES)
def test_every_number_and_verdict_is_of_the_results(name: str) -> None:
    assert wrong_on(name, (DOCS / PAGES[name][0]).read_text(encoding="utf-8")) == []


KOOPMAN = [*koopman.grid(tuple(koopman.MODELS), tuple(koopman.TASKS), koopman.SEEDS), *koopman.PATHS]
UPDATES = koopman.updates_grid()
LAWS = [run for runs in koopman.laws_grid().values() for run in runs if run not in UPDATES]
ORDERS = higher_order.grid(tuple(higher_order.MECHANISMS), tuple(higher_order.TASKS), higher_order.SEEDS)
RUNS: dict[str, list[Any]] = {
    "delta": delta.whole(),
    "graph_energy": graph_energy.every(),
    "growing": growing.grid(tuple(growing.TASKS), growing.SEEDS),
    "higher_order": [*ORDERS, *higher_order.divided()],
    "koopman": [*KOOPMAN, *koopman.trained_paths(), *UPDATES, *LAWS],
    "sweeps": sweeps.every(),
    "sympformer": [run for part in sympformer.parts().values() for run in part],
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_stored_is_what_the_script_runs(name: str) -> None:
    stored = read(RESULTS / f"{name}.jsonl")
    assert found(RUNS[name], RESULTS / f"{name}.jsonl") == stored


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("growing", "sweeps")])
def test_every_page_shows_the_share_of_clipped_steps(name: str) -> None:
    text = one_line((RESULTS / f"{name}.md").read_text(encoding="utf-8"))
    said = list(of_clipping(name))
    assert said and [each for each in said if each not in text] == []


def test_pages_say_which_results_have_no_share_of_clipped_steps() -> None:
    for name, page in (("growing", "experiments/growing.md"), ("presets", "presets.md")):
        assert not any("clipped" in line["result"] for line in read(RESULTS / f"{name}.jsonl"))
        assert "How many steps were clipped is not stored." in one_line((DOCS / page).read_text(encoding="utf-8"))


RATES = {
    "delta": "The rates are ours; none of the authors' trainings is repeated.",
    "graph_energy": "the rate was not tuned for any of them: the article's, gamma / norm of grad E, has no number.",
    "growing": "The rates are ours, and no training of the report is repeated.",
    "higher_order": "The author names no rate, as he trains nothing.",
    "koopman": "The article names no rate.",
    "sympformer": "The rates of the authors are {presymp} in their first program and {R2} in the later manuscript.",
}


@pytest.mark.parametrize("name", RATES)
def test_every_page_says_whose_the_rates_are(name: str) -> None:
    known = ra.mechanism("sympformer").presets
    rates = {preset: settings.RATES[known[preset]["learning_rate"]] for preset in ("presymp", "R2")}
    assert RATES[name].format(**rates) in one_line((RESULTS / f"{name}.md").read_text(encoding="utf-8"))


def test_a_page_of_a_mechanism_says_how_often_numbers_were_drawn_again() -> None:
    text = one_line((DOCS / "mechanisms" / "koopman.md").read_text(encoding="utf-8"))
    assert [sentence for sentence in of_redrawn() if sentence not in text] == []


def test_a_wrong_digit_and_a_number_of_its_own_are_seen() -> None:
    page = "It has 3.51\nbits, 0.5 more.\n\n| a | 3.51 [3.40, 3.60] |"
    said = ["has 3.51 bits", "0.5 more", "| a | 3.51 [3.40, 3.60] |"]
    assert unheld(page, said) == []
    for n, character in enumerate(page):
        if character.isdigit():
            wrong = page[:n] + str((int(character) + 1) % 10) + page[n + 1 :]
            assert unheld(wrong, said), wrong
    assert unheld(page, said[:2]) and unheld(page + " 1.5", said)
