"""What pages say of docs/experiments/sweeps.py: tables and sentences with the numbers of its stored results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from docs.experiments import koopman, sweeps, teacher
from docs.experiments.runs import found
from refattn.analysis.order import CRITICAL, kuramoto_limit
from tests.experiments.stored import mean


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
    jumps = f"{', '.join(f'{x:g}' for x in steps[:-1])} and {steps[-1]:g}"
    yield f"it rises in steps, at kappa = {jumps} (of a grid of {sweeps.WELLS[1]:g})"


def of_higher_order() -> Iterator[str]:
    known: dict[tuple[int, sweeps.Kind], dict[str, Any]] = {
        (job.width, (job.order, job.alpha, job.delta)): x for job, x in results(sweeps.capacities())
    }
    widths = sorted({width for width, _ in known})
    yield row("", *(f"width {width}: pairs, bytes" for width in widths))
    most = max(sweeps.SIZES)
    for kind in sweeps.READ:
        order, alpha, delta = kind
        name = ("softmax" if order is None else f"order {order}") + (f", alpha = {alpha:g}" if alpha != 1.0 else "")
        name += f", {Fraction(delta)} subtracted" if delta else ""
        cells = []
        for width in widths:
            own = known[width, kind]
            pairs = f"{own['pairs']} or more" if own["pairs"] == most else f"{own['pairs']}"
            cells.append(f"{pairs}, {own['bytes']:,}" if own["pairs"] else f"fewer than {min(sweeps.SIZES)}")
        yield row(name, *cells)
    yield "**Of a state of order 2 fewer pairs are found than of a cache of its bytes.**"
    yield f"for more bytes: from width {widths[1]} on more with order 4 than with order 2,"
    yield "and more with order 2 than with order 1."
    first, four, usual, large = (1, 1.0, 0.0), (4, 1.0, 0.0), (None, 1.0, 0.0), (None, 3.0, 0.0)
    two, softmax = known[32, sweeps.ONE], known[32, usual]
    equal = two["bytes"] // (4 * 2 * 32)
    yield f"In the {two['bytes']:,} bytes of order 2 at width 32 a cache holds {equal} keys and values"
    yield f"At alpha = 1 softmax attention finds {softmax['pairs']} values there, and order 2 finds {two['pairs']}."
    three, half, whole = (known[32, kind]["pairs"] for kind in (sweeps.THREE, sweeps.HALF, sweeps.WHOLE))
    yield f"and yet order 2 finds {three} at alpha = 3, the default."
    yield f"There softmax attention finds {known[32, large]['pairs']}: most keys weigh nearly alike."
    yield f"With 1/2 subtracted from every weight order 2 finds {half}, and with 1, as in the author's code, {whole};"
    for width in widths[1:]:  # at width 8 order 2 holds too few to be told
        assert known[width, first]["pairs"] < known[width, sweeps.ONE]["pairs"] < known[width, four]["pairs"]
        assert known[width, sweeps.ONE]["bytes"] > 8 * width * known[width, sweeps.ONE]["pairs"]
        assert known[width, sweeps.THREE]["pairs"] < known[width, sweeps.HALF]["pairs"]
        assert known[width, sweeps.HALF]["pairs"] < known[width, sweeps.WHOLE]["pairs"]
    gains = [known[2 * width, sweeps.ONE]["pairs"] / known[width, sweeps.ONE]["pairs"] for width in (16, 32)]
    costs = [known[2 * width, sweeps.ONE]["bytes"] / known[width, sweeps.ONE]["bytes"] for width in (16, 32)]
    told = f"At twice the width {gains[0]:.1f} and {gains[1]:.1f} times the pairs of order 2 are found in"
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
    (_, four), (_, tie) = known
    middle = [[layer["largest"][1] for layer in four[when]] for when in ("fresh", "trained")]
    told = [f"{a:.2f} and {b:.2f}" for a, b in middle]
    nearer = [abs(1.0 - after) < abs(1.0 - before) for before, after in zip(*middle, strict=True)]
    assert nearer == [True, False]
    told_ = (
        f"the median is {told[0]} in size before the training, and {told[1]} after it, nearer to 1 in the first layer"
    )
    yield f"{told_} and farther in the second."
    out = [[100 * layer["outside"] for layer in four[when]] for when in ("fresh", "trained")]
    assert out[1][0] > out[0][0] and out[1][1] < out[0][1]
    yield f"more queries leave the circle, {out[1][0]:.0f} % instead of {out[0][0]:.0f} %, and in the second fewer."
    told = [" and ".join(f"{layer['largest'][1]:.2f}" for layer in tie[when]) for when in ("fresh", "trained")]
    pairs = zip(tie["fresh"], tie["trained"], strict=True)
    assert all(before["largest"][1] < after["largest"][1] for before, after in pairs)
    assert all(layer["turning"] == 0.0 for when in ("fresh", "trained") for layer in tie[when])
    yield f"Training makes the median larger, from {told[0]} to {told[1]};"
    shares = [100 * layer["outside"] for when in ("fresh", "trained") for layer in tie[when]]
    yield f"{min(shares):.0f} to {max(shares):.0f} % are outside the circle before and after it."
    yield "are the quantiles 0.1, 0.5 and 0.9 of the largest eigenvalue of a query in size"
    yield "|  | 0.1 | 0.5 | 0.9 | outside | turning |"
    yield f"after {sweeps.LONGER * koopman.SMALLER['text'][1].steps} steps on the text with the first seed"
    yield f"in the first {sweeps.SEQUENCES} held-out sequences"
    yield from of_laws()


def of_laws() -> Iterator[str]:
    """The grid of rates and laws of the preset, with attention and the default beside it."""
    grid = {key: found(runs, koopman.RESULTS) for key, runs in koopman.laws_grid().items()}
    seen = {key: [line["result"] for line in lines] for key, lines in grid.items()}
    assert all(x["diverged"] is None for own in seen.values() for x in own)
    names = {}
    for b in koopman.LAWS:
        short = f"{b:g}" if b >= 1.0 else f"1/{1.0 / b:.0f}"
        names[koopman.law_option(b)["draws"]] = f"Beta(1, {short}), mean {1.0 / (1.0 + b):.2f}"
    for name, shown in {**names, **{name: name for name in koopman.BESIDE}}.items():
        cells = []
        for rate in koopman.RATES:
            own = seen[name, rate]
            norm = max(piece[-1] for x in own for piece in x["norms"])
            clipped = 100.0 * float(np.mean([x["clipped"] for x in own]))
            cells.append(f"{np.mean([x['bits'] for x in own]):.2f}, {clipped:.0f} %, {norm:,.0f}")
        yield row(shown, *cells)
    bits = {key: float(np.mean([x["bits"] for x in own])) for key, own in seen.items()}
    first, *_, last = names
    top, next_, usual, low = koopman.RATES
    own = [f"{bits[first, rate]:.2f}" for rate in (usual, next_, top)]
    assert own[1] == own[2]
    yield "**The rate does as much as the law.** At 3e-3, the rate of the other trainings, the preset has"
    yield f"the preset has {own[0]} bits. At 1e-2 and at 3e-2 it has {own[1]}, and so it has at 3e-3 with Beta(1, 1/3)."
    assert f"{bits[last, usual]:.2f}" == own[1]
    assert all(max(x["clipped"] for x in seen[name, top]) < 1.0 for name in names)
    yield "are clipped to 1 there too, but at 3e-2 no longer in every step."
    gaps = [bits[first, rate] - bits[last, rate] for rate in koopman.RATES]
    assert min(gaps) > 0.0
    yield "**A law with less near 0 is better**: Beta(1, 1/3) is ahead of Beta(1, 9) at every rate,"
    yield f"at every rate, by {min(gaps):.2f} to {max(gaps):.2f} bits."
    yield "But Beta(1, 1) and Beta(1, 1/3) are not concentrated at 0, so they are not the article's."
    beside = [{name: bits[name, rate] for name in koopman.BESIDE} for rate in koopman.RATES]
    behind = [min(bits[name, rate] for name in names) > max(beside[n].values()) for n, rate in enumerate(koopman.RATES)]
    assert all(behind), behind
    yield "At each of the four rates it is behind the default and attention, with each of the four laws;"
    best = [min(bits[name, rate] for rate in koopman.RATES) for name in koopman.BESIDE]
    least = min(bits[name, rate] for name in names for rate in koopman.RATES)
    told = f"the best of attention {best[0]:.2f} and of the default {best[1]:.2f}."
    every = {key: [x["bits"] for x in own] for key, own in seen.items()}
    within = [
        (name, rate)
        for name in names
        for rate in koopman.RATES
        if min(every[name, rate]) <= max(every["Koopman", rate])
    ]
    assert within == [(last, next_)]
    yield "With two seeds this is not certain: at 1e-2 the range of Beta(1, 1/3) overlaps with the default's."
    yield f"the best of its cells has {least:.2f} bits, {told}"
    steps = koopman.SMALLER["text"][1].steps
    yield f"These are {steps} steps of a tiny model, most of them clipped."
    yield f"with two seeds and {steps} steps, at the size of the table above. Beta(1, b) is the law: the smaller b is,"
    yield "the less is near 0, and Beta(1, 1) is uniform."
    yield "| | " + " | ".join(f"rate {rate:.0e}".replace("e-0", "e-") for rate in koopman.RATES) + " |"
    yield "larger rates than this page's, most of their steps clipped, and is behind attention with four laws;"
