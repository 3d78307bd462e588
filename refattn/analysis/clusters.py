"""What attention makes of tokens that move by it: do they gather, in how many clusters, and how fast.

Tokens are particles on the sphere that attend to each other with tied weights, q = k = v = x::

    x_i' = P_i A(x)_i,   P_i y = y - <x_i, y> x_i,   A the core of a mechanism; for softmax attention

    A(x)_i = sum_j w_ij x_j,   w_ij = exp(beta <x_i, x_j>) / sum_k exp(beta <x_i, x_k>)

n tokens at equal angles, with all cosines rho, stay so under softmax attention. From rho' = 2 <x_i', x_j>,
<A_i, x_j> - rho <A_i, x_i> = e^(beta rho) (1 - rho) (1 + (n - 1) rho) / Z and Z = e^beta + (n - 1) e^(beta rho) follows

    rho' = 2 e^(beta rho) (1 - rho) ((n - 1) rho + 1) / (e^beta + (n - 1) e^(beta rho))

so that 1 - rho falls like e^(-2t) in the end. Random tokens gather in a few clusters first, which is a state that lasts
the longer the larger beta is, and only then in one.

Sources: Geshkovski, Letrouit, Polyanskiy, Rigollet 2023 (arXiv:2312.10794), section 6 for the equal angles; Rigollet
2025 (arXiv:2512.01868).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from refattn import counter
from refattn.analysis.figure import new_figure, save
from refattn.checked import Each, Having, Real, Whole, checked, naming, read

Matrix = NDArray[Any]
Velocity = Callable[[Matrix], Matrix]

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
    equal
        Of tokens at equal angles, where they were looked at: times, 1 - rho measured, 1 - rho predicted.
    """

    unit: str
    times: Matrix
    cosines: Matrix
    ranks: Matrix
    clusters: Matrix
    equal: tuple[Matrix, Matrix, Matrix] | None = None
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

    def rates(self) -> tuple[float, float] | None:
        """Return the rate at which 1 - rho falls in the end, measured and predicted, of tokens at equal angles."""
        if self.equal is None:
            return None
        times, *both = self.equal
        late = slice(len(times) // 2, None)
        measured, predicted = (-np.polyfit(times[late], np.log(x[late]), 1)[0] for x in both)
        return float(measured), float(predicted)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        rates, equal = self.rates(), self.equal
        return {
            **self.facts,
            "unit": self.unit,
            "times": self.times.tolist(),
            "mean_cosine": self.mean_cosines.tolist(),
            "effective_rank": self.ranks.tolist(),
            "clusters": self.clusters.tolist(),
            "plateaus": self.plateaus(),
            "equal_angles": None
            if equal is None or rates is None
            else {
                "times": equal[0].tolist(),
                "measured": equal[1].tolist(),
                "predicted": equal[2].tolist(),
                "rate_measured": rates[0],
                "rate_predicted": rates[1],
            },
        }

    def text(self) -> str:
        """Return the table."""
        lines = [f"{self.unit:>8}  mean cosine  effective rank  clusters"]
        for n in np.unique(np.linspace(0, len(self.times) - 1, 9).astype(int)):
            row = f"{self.mean_cosines[n]:>11.4f}  {self.ranks[n]:>14.2f}  {self.clusters[n]:>8d}"
            lines.append(f"{self.times[n]:>8g}  {row}")
        for count, first, last in self.plateaus():
            lines.append(f"{count} cluster{'s' if count > 1 else ''} from {first:g} to {last:g}")
        if (rates := self.rates()) is not None:
            lines.append(
                f"equal angles: 1 - cosine falls at the rate {rates[0]:.6f}, predicted {rates[1]:.6f}, "
                f"ratio {rates[0] / rates[1]:.6f}"
            )
        return "\n".join(lines)


def course(unit: str, times: Iterable[float], tokens: Iterable[Matrix], **facts: Any) -> Course:
    """Return what became of tokens (n, d), one array for each time."""
    times, tokens = _listed("times", times), _listed("tokens", tokens)
    read("unit", unit, str)
    read("times", times, [Real()])
    read("tokens", tokens, ["n d"], {})
    if not tokens or len(times) != len(tokens):
        raise ValueError(f"tokens: got {len(tokens)} arrays, needs one for each of {len(times)} times, at least 1")
    cosines, ranks, clusters = [], [], []
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
    return Course(
        unit, np.asarray(times, float), np.stack(cosines), np.asarray(ranks), np.asarray(clusters), None, facts
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


def on_sphere(velocity: Velocity, x: Matrix, times: Matrix, step: float) -> list[Matrix]:
    """Return tokens (n, d) on the sphere at times, by Runge-Kutta steps of at most a size, each put back on it."""

    def slope(x: Matrix) -> Matrix:
        y = velocity(x)
        return y - np.sum(x * y, axis=-1, keepdims=True) * x

    found, now = [x], float(times[0])
    for end in times[1:]:
        count = max(1, math.ceil((end - now) / step - 1e-9))
        h = (end - now) / count
        for _ in range(count):
            a = slope(x)
            b = slope(x + 0.5 * h * a)
            c = slope(x + 0.5 * h * b)
            x = x + h / 6.0 * (a + 2.0 * b + 2.0 * c + slope(x + h * c))
            x = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
        now = float(end)
        found.append(x)
    return found


def equal_angles(n: int, beta: float, rho: float, times: Matrix) -> Matrix:
    """Return 1 - rho at times, for softmax attention between n tokens at equal angles, integrated to 1e-10."""

    def slope(_: float, gap: Matrix) -> Matrix:  # in 1 - rho, which keeps its digits
        away = np.exp(-beta * gap)
        return -2.0 * away * gap * ((n - 1) * (1.0 - gap) + 1.0) / (1.0 + (n - 1) * away)

    found = solve_ivp(slope, (times[0], times[-1]), [1.0 - rho], t_eval=times, method="DOP853", rtol=1e-12, atol=1e-22)
    return np.asarray(found.y[0])


def simplex(n: int, rho: float) -> Matrix:
    """Return n unit vectors (n, n) whose cosines are all rho."""
    return np.linalg.cholesky((1.0 - rho) * np.eye(n) + rho * np.ones((n, n)))


def softmax(x: Matrix, beta: float) -> Matrix:
    """Return sum_j w_ij x_j of softmax attention with tied weights."""
    scores = beta * (x @ x.T)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return weights @ x / np.sum(weights, axis=-1, keepdims=True)


@checked(
    core=Having(("forward", "backward"), "a core, a pair of functions forward and backward"),
    options=Each(None),
    particles=Whole(1, 10_000),
    dimensions=Whole(1, 10_000),
    end=Real(0.0),
    step=Real(0.0),
    seed=Whole(),
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
) -> Course:
    """Return what a core makes of random tokens on the sphere.

    Where the core with a scale is softmax attention, tokens at equal angles are looked at too, with a scale of 1.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong type or out of its range, `step` is 0 or less than a millionth of `end`, or the
        tokens do not stay finite.
    """
    if not step > 0.0 or end > MOST * step:
        raise ValueError(f"step: got {step:g}, needs a number above 0, and at least {end / MOST:g} for the end {end:g}")

    def moved_by(more: dict[str, Any]) -> Velocity:
        return lambda x: np.asarray(core.forward(*[x[None, None]] * 3, **{**options, **more})[0][0, 0])

    x = counter.normal((particles, dimensions), seed=seed, purpose="clusters")
    x = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    times = np.linspace(0.0, end, 101)
    with np.errstate(over="ignore", invalid="ignore"):
        found = course("time", times, on_sphere(moved_by({}), x, times, step))
    equal = None
    if "scale" in options and np.allclose(moved_by({"scale": 1.0})(x), softmax(x, 1.0), rtol=1e-12, atol=1e-12):
        when = np.linspace(0.0, 8.0, 81)
        moved = on_sphere(moved_by({"scale": 1.0}), simplex(8, 0.1), when, 0.05)
        gaps = [np.mean(np.sum((x[1:] - x[:-1]) ** 2, axis=-1)) / 2.0 for x in moved]  # |x - y|^2 = 2 (1 - rho)
        equal = when, np.asarray(gaps), equal_angles(8, 1.0, 0.1, when)
    facts = {"particles": particles, "dimensions": dimensions, "step": step, "seed": seed, "options": options}
    return replace(found, equal=equal, facts=facts)


def draw(found: Course, title: str, path: Path) -> None:
    """Draw cosines early, in the middle and late; clusters and rank; and the equal angles beside theory."""
    figure = new_figure(12.0, 7.4)
    upper, lower = figure.subplots(2, 3)
    last = len(found.times) - 1
    order = np.argsort(found.cosines[last // 2] @ np.linspace(1.0, 2.0, found.cosines.shape[1]))
    for axes, n in zip(upper, (0, last // 4, last), strict=True):
        image = axes.imshow(found.cosines[n][np.ix_(order, order)], vmin=-1.0, vmax=1.0, cmap="RdBu_r")
        axes.set(title=f"cosines, {found.unit} {found.times[n]:g}", xticks=[], yticks=[])
    figure.colorbar(image, ax=list(upper), shrink=0.8)
    lower[0].step(found.times, found.clusters, where="post", color="#d7191c")
    lower[0].set(xlabel=found.unit, title="clusters", ylim=(0.0, None))
    lower[1].plot(found.times, found.ranks, color="#2c7bb6", label="effective rank")
    lower[1].set(xlabel=found.unit, title="effective rank", ylim=(0.0, None))
    if found.equal is not None:
        times, measured, predicted = found.equal
        lower[2].plot(times, predicted, color="#888888", linewidth=3.0, label="the differential equation")
        lower[2].plot(times[::4], measured[::4], "o", color="#d7191c", markersize=4.0, label="tokens")
        lower[2].set(yscale="log", xlabel="time", title="equal angles: 1 - cosine")
        lower[2].legend(frameon=False)
    else:
        lower[2].plot(found.times, found.mean_cosines, color="#7b3294")
        lower[2].set(xlabel=found.unit, title="mean cosine of a pair", ylim=(None, 1.05))
    for axes in lower:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    save(figure, path)
