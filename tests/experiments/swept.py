"""What pages say of docs/experiments/sweeps.py: tables and sentences with the numbers of its stored results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from docs.experiments import koopman, sweeps, teacher
from docs.experiments.runs import found
from refattn.analysis.order import CRITICAL, kuramoto_limit
from tests.experiments.stored import mean, ranged


def results(jobs: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return some sweeps, each with what came of it."""
    return list(zip(jobs, (line["result"] for line in found(jobs, sweeps.RESULTS)), strict=True))


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def of_graph_energy() -> Iterator[str]:
    (_, free), *wells = results(sweeps.agreements())
    limit = [kuramoto_limit(kappa) for kappa in sweeps.FREQUENCIES]
    yield row("kappa", *(f"{kappa:g}" for kappa in sweeps.FREQUENCIES))
    yield row(f"R of {sweeps.NODES} nodes", *(f"{x:.3f}" for x in free["order"]))
    yield row("R of infinitely many", *(f"{x:.3f}" for x in limit))
    yield f"The critical kappa is 2 / (pi g(0)) = {CRITICAL:.3f}:"
    apart = max(abs(a - b) for a, b in zip(free["order"], limit, strict=True) if b > 0.5)
    below = max(x for x, b in zip(free["order"], limit, strict=True) if b == 0.0)
    assert apart < 0.002 and below < 0.1 < 2.0 / math.sqrt(sweeps.NODES)
    yield f"Above it {sweeps.NODES} nodes have the limit to 0.002 from R = 0.5 on; below it R is less than 0.1,"
    yield "of the size 1 / sqrt(200)"
    shown = (0.1, 0.3, 0.34, 0.6, 0.7)
    places = [sweeps.WELLS.index(kappa) for kappa in shown]
    yield row("graph", *(f"kappa = {kappa:g}" for kappa in shown), "all agree from")
    for job, result in wells:
        cells = [f"{result['order'][n]:.2f}, {100 * result['share'][n]:.0f} %" for n in places]
        yield row(f"`{job.of}`", *cells, f"{result['all agree from']:.3f}")
    assert abs(wells[0][1]["all agree from"] - 1.0 / 3.0) < 0.002
    yield "For two nodes that is the subcritical pitchfork of the study at kappa = 1/3."
    several = wells[1][1]["share"]
    steps = [sweeps.WELLS[n] for n in range(1, len(several)) if several[n] - several[n - 1] > 0.12]
    yield f"it rises in steps, at kappa = {', '.join(f'{x:g}' for x in steps[:-1])} and {steps[-1]:g}"


def of_higher_order() -> Iterator[str]:
    known = {(job.width, job.order, job.alpha): x for job, x in results(sweeps.capacities())}
    names: dict[tuple[int | None, float], str] = {
        (1, 1.0): "order 1",
        (2, 1.0): "order 2",
        (2, 3.0): "order 2, alpha = 3",
        (4, 1.0): "order 4",
    }
    widths = sorted({width for width, _, _ in known})
    yield row("", *(f"width {width}: pairs, bytes" for width in widths))
    most = max(sweeps.SIZES)
    for kind, name in {**names, (None, 1.0): "softmax"}.items():
        cells = []
        for width in widths:
            own = known[(width, *kind)]
            pairs = f"{own['pairs']} or more" if own["pairs"] == most else f"{own['pairs']}"
            cells.append(f"{pairs}, {own['bytes']:,}" if own["pairs"] else f"fewer than {min(sweeps.SIZES)}")
        yield row(name, *cells)
    yield "**A state of order 2 holds fewer pairs than a cache of its bytes.**"
    yield f"from width {widths[1]} on each width holds more with order 4 than with order 2,"
    yield "and more with order 2 than with order 1."
    two, softmax = known[32, 2, 1.0], known[32, None, 1.0]
    equal = two["bytes"] // (4 * 2 * 32)
    yield f"In the {two['bytes']:,} bytes of order 2 at width 32 a cache holds {equal} keys and values"
    yield f"softmax attention finds {softmax['pairs']} values, and order 2 finds {two['pairs']}."
    yield f"At alpha = 3, the default, it finds {known[32, 2, 3.0]['pairs']}."
    for width in widths[1:]:  # at width 8 order 2 holds too few to be told
        assert known[width, 1, 1.0]["pairs"] < known[width, 2, 1.0]["pairs"] < known[width, 4, 1.0]["pairs"]
        assert known[width, 2, 1.0]["bytes"] > 8 * width * known[width, 2, 1.0]["pairs"]
    gains = [known[2 * width, 2, 1.0]["pairs"] / known[width, 2, 1.0]["pairs"] for width in (16, 32)]
    costs = [known[2 * width, 2, 1.0]["bytes"] / known[width, 2, 1.0]["bytes"] for width in (16, 32)]
    told = f"Twice the width holds {gains[0]:.1f} and {gains[1]:.1f} times the pairs of order 2 in"
    yield f"{told} {costs[0]:.1f} and {costs[1]:.1f} times the bytes, from width {widths[1]} on."
    yield "Keys that are trained may lie better than random ones."
    yield f"at least {100 * sweeps.RIGHT:g} % of the queries find their value, of {sweeps.HEADS} heads"
    yield f"from {min(sweeps.SIZES)} to {most} pairs, at alpha = 1"


def of_growing() -> Iterator[str]:
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for job, result in results(sweeps.widths()):
        known.setdefault((job.side, job.way), []).append(result)
    at = {step: n for n, (step, _, _) in enumerate(known["values", "narrow"][0]["curve"])}

    def psi(side: str, way: str, step: int, before: bool = False) -> float:
        rows = [[entry for entry in x["curve"] if entry[0] == step] for x in known[side, way]]
        return float(np.mean([own[0 if before else -1][1] for own in rows]))

    assert at[sweeps.STEPS]
    first, *_, last = sweeps.GROWS
    for (side, way), own in known.items():
        cells = [f"{psi(side, way, 0):.2f}", f"{psi(side, way, first, before=True):.2f}"]
        if own[0]["growths"]:
            cells += [f"{psi(side, way, first):.2f}", f"{psi(side, way, last, before=True):.2f}"]
            cells += [", ".join(f"{mean([x['growths'][n] for x in own]):.2f}" for n in range(len(sweeps.GROWS)))]
        else:
            cells += ["", f"{psi(side, way, last):.2f}", ""]
        losses = [x["loss"] for x in own]
        yield row(f"{side}: {way}", *cells, f"{psi(side, way, sweeps.STEPS):.2f}", f"{mean(losses):.1e}")
    columns = [sweeps.Widths(side, "optimal", 0).columns for side in sweeps.FIRST]
    grows = ", ".join(map(str, sweeps.GROWS[:-1]))
    yield f"They grow after {grows} and {last} of {sweeps.STEPS} steps, queries and keys by {columns[0]} columns and"
    yield f"and values by {columns[1]}."
    end = {key: mean([x["loss"] for x in own]) for key, own in known.items()}
    for side in sweeps.FIRST:
        assert end[side, "optimal"] < end[side, "random"] and end[side, "optimal"] < end[side, "scratch"]
    ratio = [end[side, "scratch"] / end[side, "optimal"] for side in sweeps.FIRST]
    yield f"ends {ratio[0]:.0f} times below scratch where queries and keys grow, and {ratio[1]:.1f} times where values"
    firsts = [mean([x["growths"][0] for x in known[side, "optimal"]]) for side in sweeps.FIRST]
    yield f"the first growth of queries and keys leaves {firsts[0]:.2f} of the loss, that of values {firsts[1]:.2f}"
    condition = sweeps.Widths("values", "narrow", 0).condition
    yield f"with inputs of condition {condition:g} and three seeds"
    yield f"queries and keys have width {teacher.HEAD_WIDTH} and its values {teacher.WIDTH}."
    starts = [sweeps.FIRST[side] for side in sweeps.FIRST]
    yield f"one of the two begins narrow, at {starts[0]} or at {starts[1]},"
    worst = min(x for own in known.values() for one in own for x in one["growths"] if own is known["values", "random"])
    assert worst > 1.0 and ratio[0] > 10 * ratio[1] > 10 and min(ratio) > 1.0
    yield "**Values gain less.**"
    narrow = [psi(side, "narrow", sweeps.STEPS) for side in sweeps.FIRST]
    yield f"without growth psi goes to {narrow[0]:.2f} and {narrow[1]:.2f}"


def of_koopman() -> Iterator[str]:
    known = results(sweeps.spectra())
    for job, result in known:
        for when in ("fresh", "trained"):
            for n, layer in enumerate(result[when]):
                low, middle, high = layer["largest"]
                cells = [f"{low:.2f}", f"{middle:.2f}", f"{high:.2f}", f"{100 * layer['outside']:.0f} %"]
                yield row(f"{job.name}, {when}, layer {n + 1}", *cells, f"{100 * layer['turning']:.0f} %")
    yield f"after {sweeps.LONGER * koopman.SMALLER['text'][1].steps} steps on the text with the first seed"
    yield f"in the first {sweeps.SEQUENCES} held-out sequences"
    yield from of_laws()


def of_laws() -> Iterator[str]:
    """The grid of rates and laws of the preset."""
    runs = koopman.laws_grid()
    each: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run, line in zip(runs, found(runs, koopman.RESULTS), strict=True):
        each.setdefault((run.options["draws"], run.plan.learning_rate), []).append(line["result"])
    for b in koopman.LAWS:
        cells = []
        for rate in koopman.RATES:
            own = each[koopman.law_option(b)["draws"], rate]
            ended = [x for x in own if x["diverged"] is None]
            cells.append(ranged([x["bits"] for x in ended], 2) if len(ended) > 1 else f"{ended[0]['bits']:.2f}")
            shares = [100.0 * x["clipped"] for x in ended]
            norm = max(piece[-1] for x in ended for piece in x["norms"])
            cells[-1] += f"; {min(shares):.1f} %, {norm:,.0f}"
        name = f"b = {b:g}, mean {1.0 / (1.0 + b):.2f}" if b >= 1 else f"b = 1/{1 / b:.0f}, mean {1.0 / (1.0 + b):.2f}"
        yield row(name, *cells)
