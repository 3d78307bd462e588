"""What attention makes of tokens that move by it: do they gather, in how many clusters, and how fast.

Tokens are followed in time, as particles on the sphere (`sphere`), or from layer to layer of a model. Random tokens
gather in a few clusters first, which is a state that lasts the longer the larger the scale of the scores is, and only
then in one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import philox
from refattn.analysis.figure import FRESH, GROWS, SHRINKS, new_figure, save
from refattn.analysis.sphere import EqualAngles, Flow, equal_angles, walk
from refattn.args import Each, Having, Real, Whole, check, checked, naming

Matrix = NDArray[Any]

MOST = 1_000_000
"""Steps in time, at most."""

NEAR = 0.995
"""Tokens whose cosine is above this are neighbours; a cluster is what neighbours connect."""


@dataclass(frozen=True)
class Course:
    """What became of tokens.

    Attributes
    ----------
    times
        (t,): times, or numbers of layers.
    cosines
        (t, n, n): of each pair of tokens.
    ranks
        (t,): effective rank of the tokens, exp of the entropy of their squared singular values.
    clusters
        (t,): how many clusters.
    angles
        (t, n): of tokens in two dimensions; None: they have more.
    equal
        What becomes of tokens at equal angles, where they were looked at.
    """

    unit: str
    times: Matrix
    cosines: Matrix
    ranks: Matrix
    clusters: Matrix
    angles: Matrix | None = None
    equal: EqualAngles | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def mean_cosines(self) -> Matrix:
        """(t,): the mean over pairs of different tokens."""
        n = self.cosines.shape[1]
        return (np.sum(self.cosines, axis=(1, 2)) - n) / max(1, n * (n - 1))

    def plateaus(self) -> list[tuple[int, float, float]]:
        """Return (clusters, from, to) for each number of clusters that lasts a tenth of the time or more."""
        found, start = [], 0
        for n in range(1, len(self.times) + 1):
            if n == len(self.times) or self.clusters[n] != self.clusters[start]:
                last = min(n, len(self.times) - 1)
                if self.times[last] - self.times[start] >= 0.1 * (self.times[-1] - self.times[0]):
                    found.append((int(self.clusters[start]), float(self.times[start]), float(self.times[last])))
                start = n
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return {
            **self.facts,
            "unit": self.unit,
            "times": self.times.tolist(),
            "mean_cosine": self.mean_cosines.tolist(),
            "effective_rank": self.ranks.tolist(),
            "clusters": self.clusters.tolist(),
            "plateaus": self.plateaus(),
            "equal_angles": None if self.equal is None else self.equal.to_json(),
        }

    def text(self) -> str:
        """Return the table."""
        lines = [f"{self.unit:>8}  mean cosine  effective rank  clusters"]
        for n in np.unique(np.linspace(0, len(self.times) - 1, 9).astype(int)):
            row = f"{self.mean_cosines[n]:>11.4f}  {self.ranks[n]:>14.2f}  {self.clusters[n]:>8d}"
            lines.append(f"{self.times[n]:>8g}  {row}")
        for count, first, last in self.plateaus():
            lines.append(f"{count} cluster{'s' if count > 1 else ''} from {first:g} to {last:g}")
        if self.equal is not None:
            measured, predicted = self.equal.rates()
            lines.append(
                f"equal angles: 1 - cosine falls at the rate {measured:.6f}, predicted {predicted:.6f} "
                f"({self.equal.law}), ratio {measured / predicted:.6f}"
            )
        return "\n".join(lines)


def course(unit: str, times: Iterable[float], tokens: Iterable[Matrix], **facts: Any) -> Course:
    """Return what became of tokens (n, d), one array for each time."""
    times, tokens = _listed("times", times), _listed("tokens", tokens)
    check("unit", unit, str)
    check("times", times, [Real()])
    check("tokens", tokens, ["n d"], {})
    if not tokens or len(times) != len(tokens):
        raise ValueError(f"tokens: got {len(tokens)} arrays, needs one for each of {len(times)} times, at least 1")
    cosines, ranks, clusters, angles = [], [], [], []
    for n, x in enumerate(tokens):
        if not np.all(np.isfinite(x)):
            raise ValueError(f"tokens[{n}]: got an element that is not finite, needs finite numbers")
        length = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
        unit_x = x / np.where(length > 0.0, length, 1.0)
        cosines.append(unit_x @ unit_x.T)
        share = np.linalg.svdvals(unit_x) ** 2
        share = share[share > 0.0] / np.sum(share)
        ranks.append(float(np.exp(-np.sum(share * np.log(share)))))
        clusters.append(components(cosines[-1] > NEAR))
        angles.append(np.atan2(x[:, 1], x[:, 0]) if x.shape[1] == 2 else x[:, 0])
    return Course(
        unit,
        np.asarray(times, float),
        np.stack(cosines),
        np.asarray(ranks),
        np.asarray(clusters),
        np.stack(angles) if x.shape[1] == 2 else None,
        None,
        facts,
    )


def _listed(name: str, given: Iterable[Any]) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, np.ndarray) and not given.ndim:
        raise TypeError(f"{name}: got {type(given).__name__}, needs a sequence")
    return list(given)


def components(near: Matrix) -> int:
    """Return the number of connected components of a symmetric relation (n, n)."""
    left, count = set(range(len(near))), 0
    while left:
        count += 1
        waiting = [left.pop()]
        while waiting:
            found = {int(m) for m in np.nonzero(near[waiting.pop()])[0]} & left
            left -= found
            waiting.extend(found)
    return count


@checked(
    core=Having(("forward", "backward"), "a core, a pair of functions forward and backward"),
    options=Each(None),
    particles=Whole(1, 10_000),
    dimensions=Whole(1, 10_000),
    end=Real(0.0),
    step=Real(0.0),
    seed=Whole(),
    damping=Real(0.0),
)
@naming("core", "options")
def study(
    core: Any,
    options: dict[str, Any],
    *,
    particles: int,
    dimensions: int,
    end: float,
    step: float,
    seed: int,
    damping: float = 3.0,
) -> Course:
    """Return what a core makes of random tokens on the sphere, and of tokens at equal angles with a scale of 1.

    Where the core takes the kinetic terms of tokens, they have momenta with this damping.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong type or out of its range, `step` is 0 or less than a millionth of `end`, or the
        tokens do not stay finite.
    """
    if not step > 0.0 or end > MOST * step:
        raise ValueError(f"step: got {step:g}, needs a number above 0, and at least {end / MOST:g} for the end {end:g}")
    momenta = "kinetic" in inspect.signature(core.forward).parameters
    options = {name: value for name, value in options.items() if name != "scale" or value is not None}
    if momenta:
        options.setdefault("scale", 1.0 / math.sqrt(dimensions))
    flow = Flow(core.forward, options, damping if momenta else None)
    x = philox.normal((particles, dimensions), seed=seed, purpose="clusters")
    x = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    times = np.linspace(0.0, end, 101)
    with np.errstate(over="ignore", invalid="ignore"):
        found = course("time", times, walk(flow, x, times, step))
    slow = replace(flow, options={**options, "scale": 1.0} if "scale" in options else options)
    # Tokens that are far apart may repel each other.
    equal = next(filter(None, (equal_angles(slow, rho) for rho in (0.1, 0.5))), None)
    facts = {"particles": particles, "dimensions": dimensions, "step": step, "seed": seed, "options": options}
    if momenta:
        facts["damping"] = damping
    return replace(found, equal=equal, facts=facts)


def text(found: Mapping[str, Course]) -> str:
    """Return the tables of courses by name, one below the other."""
    return "\n\n".join((f"{name}\n" if len(found) > 1 else "") + each.text() for name, each in found.items())


def draw(found: Mapping[str, Course], title: str, path: Path) -> None:
    """Draw the tokens of the first course, and below clusters, ranks and cosines of all."""
    (name, first), *rest = found.items()
    figure = new_figure(12.5, 7.4)
    grid = figure.add_gridspec(2, 1)
    above, below = (grid[n].subgridspec(1, 3) for n in range(2))
    last = len(first.times) - 1
    order = np.argsort(first.cosines[last // 2] @ np.linspace(1.0, 2.0, first.cosines.shape[1]))
    shown = [0, last // 3, last]
    if first.angles is not None:
        _worldlines(figure.add_subplot(above[:2]), first)
        shown = [last]
    for place, n in zip(range(3 - len(shown), 3), shown, strict=True):
        axes = figure.add_subplot(above[place])
        image = axes.imshow(first.cosines[n][np.ix_(order, order)], vmin=-1.0, vmax=1.0, cmap="RdBu_r")
        axes.set(title=f"cosines, {first.unit} {first.times[n]:g}", xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, shrink=0.9)
    panels = [figure.add_subplot(below[n]) for n in range(3)]
    for label, each in (*rest, (name, first)):  # what is looked at comes on top
        warm, cold, line = (GROWS, SHRINKS, "-") if each is first else (FRESH, FRESH, "--")
        panels[0].step(each.times, each.clusters, where="post", color=warm, linestyle=line)
        panels[1].plot(each.times, each.ranks, color=cold, linestyle=line)
        if first.equal is None:
            panels[2].plot(each.times, each.mean_cosines, color=warm, linestyle=line, label=label)
    for axes, words in zip(panels, ("clusters", "effective rank", "mean cosine of a pair"), strict=True):
        axes.set(xlabel=first.unit, title=words)
    for axes in panels[:2]:
        axes.set(ylim=(0.0, None))
    if (equal := first.equal) is not None:
        panels[2].plot(equal.times, equal.predicted, color=FRESH, linewidth=3.0, label=f"predicted: {equal.law}")
        panels[2].plot(equal.times[::4], equal.measured[::4], "o", color=GROWS, markersize=4.0, label="eight tokens")
        panels[2].set(yscale="log", xlabel="time", title="equal angles: 1 - cosine")
        panels[2].legend(frameon=False, fontsize=9)
    elif rest:
        panels[2].legend(frameon=False)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    save(figure, path)


def _worldlines(axes: Any, found: Course) -> None:
    """Draw the angle of each token over time; the colour is that of where it ends."""
    from matplotlib import colormaps

    assert found.angles is not None
    colours = colormaps["twilight_shifted"](0.12 + 0.76 * (found.angles[-1] + np.pi) / (2.0 * np.pi))
    for line, colour in zip(found.angles.T, colours, strict=True):
        # A line that leaves below comes back above.
        jumps = np.nonzero(np.abs(np.diff(line)) > np.pi)[0] + 1
        axes.plot(np.insert(found.times, jumps, np.nan), np.insert(line, jumps, np.nan), color=colour, linewidth=0.9)
    axes.set(xlabel=found.unit, ylabel="angle", title="the tokens on the circle", ylim=(-np.pi, np.pi))
    axes.set(yticks=[-np.pi, 0.0, np.pi], yticklabels=["-\u03c0", "0", "\u03c0"])
    axes.spines[["top", "right"]].set_visible(False)
