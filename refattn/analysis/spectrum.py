"""Spectra of the operators that Koopman attention fits: one for each query and update, to the way of that query.

The eigenvalues of an operator K are tau and, on the span of its functions kappa_l, those of tau + R (see
`refattn.mechanisms.koopman.dense`). Inside the unit circle a query comes to rest if the operator is applied for ever,
outside it runs away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from refattn import philox
from refattn.analysis.operators import largest_first
from refattn.analysis.text import aligned
from refattn.args import check
from refattn.mechanisms import koopman

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3a7ca5", "#5b4b8a", "#2a9d55", "#e6872b", "#d7191c")
TEXT = "#222222"
GREY = "#bbbbbb"
FAR = 2.5
"""Eigenvalues of a larger size are not drawn, but counted in the title."""


@dataclass(frozen=True)
class Spectrum:
    """The operators of all queries.

    Attributes
    ----------
    options
        Those of the core.
    eigenvalues
        Of update 2, 3, ...: (b, h, i, l) complex, the largest first; NaN for a query that sees no key.
    trajectory
        (b, h, i, updates + 1, d): q^0, q^1, ... of each query.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.analysis.spectrum import spectrum
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1, 4, 2))
    >>> found = spectrum(q, k, v, updates=3)
    >>> found.trajectory.shape, found.steps.shape, found.radii[0].shape
    ((1, 1, 4, 4, 2), (1, 1, 4, 3), (1, 1, 4))
    >>> list(found.to_json())
    ['options', 'updates', 'trajectory']
    """

    options: dict[str, Any]
    eigenvalues: tuple[Any, ...]
    trajectory: Any

    @property
    def radii(self) -> tuple[Any, ...]:
        """Of each update the size of the largest eigenvalue, (b, h, i)."""
        return tuple(np.abs(values[..., 0]) for values in self.eigenvalues)

    @property
    def steps(self) -> Any:
        """How far each update moves each query, (b, h, i, updates)."""
        return np.linalg.norm(np.diff(self.trajectory, axis=-2), axis=-1)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON has it: by update and query; complex numbers are pairs, what is not there None."""
        places = list(np.ndindex(self.trajectory.shape[:3]))
        return {
            "options": {name: _as_json(x) for name, x in self.options.items()},
            "updates": [
                {
                    "update": update,
                    "queries": [
                        {"position": list(at), "eigenvalues": [pair(x) for x in values[at] if np.isfinite(x)]}
                        for at in places
                    ],
                }
                for update, values in enumerate(self.eigenvalues, start=2)
            ],
            "trajectory": self.trajectory.tolist(),
        }


def _as_json(option: Any) -> Any:
    """Return an option as JSON has it; one that is a family, such as a kernel, as the text of its object."""
    if hasattr(option, "tolist"):
        return option.tolist()
    return repr(option) if is_dataclass(option) else option


def spectrum(q: Any, k: Any, v: Any, **options: Any) -> Spectrum:
    """Return the spectra for NumPy arrays q (b, h, i, d), k and v (b, g, j, d), and options of the core.

    Raises
    ------
    ValueError
        Where there is no operator, for a single update; and where the core raises.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.analysis.spectrum import spectrum
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1, 4, 2))
    >>> found = spectrum(q, k, v, updates=3)
    >>> [x.shape for x in found.eigenvalues]
    [(1, 1, 4, 1), (1, 1, 4, 2)]
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check(name, x, "b h n d")
        if not np.all(np.isfinite(x)):
            raise ValueError(f"{name}: got numbers that are not finite, which have no spectrum; needs finite ones")
    _, saved = koopman.forward(q, k, v, **{**options, "implementation": "dense"})
    if not saved.inner.updates:
        raise ValueError(f"updates: got {options.get('updates')}, needs at least 2: the first one fits no operator")
    return replace(spectrum_of(saved), options=options)


def spectrum_of(saved: koopman.Saved) -> Spectrum:
    """Return the spectra of a call of the core that has run, of a layer of a model for instance; NumPy, dense.

    Within ``with ra.trace()`` the layers of a model take the dense implementation.

    Raises
    ------
    ValueError
        Where the call was of another implementation, or had a single update.

    Examples
    --------
    >>> import numpy as np
    >>> import refattn as ra
    >>> from refattn import model
    >>> from refattn.analysis.spectrum import spectrum_of
    >>> config = model.Config("koopman", vocabulary=8, context=6, width=4, heads=1, layers=1, options={"updates": 3})
    >>> params = model.init(config, seed=0, like=np.zeros(1))
    >>> with ra.trace():
    ...     _, saved = model.forward(params, np.arange(6)[None])
    >>> [x.shape for x in spectrum_of(saved.layers[0].block.core).eigenvalues]
    [(1, 1, 6, 1), (1, 1, 6, 2)]
    """
    if saved.implementation != "dense" or not saved.inner.updates:
        got = f'implementation="{saved.implementation}" and {len(saved.trajectory) - 1} updates'
        raise ValueError(f"saved: got {got}, needs a dense call of at least two updates")
    found = []
    for step in saved.inner.updates:
        values = saved.inner.options.tau + eigenvalues_of(step.koopman, step.inner)
        found.append(largest_first(np.where(np.any(saved.inner.g.seen, axis=-1)[..., None], values, np.nan)))
    return Spectrum({}, tuple(found), np.stack(saved.trajectory, axis=-2))


def eigenvalues_of(koopman: Any, inner: Any) -> Any:
    """Return the eigenvalues of R (..., l, l), for Z (..., l, l).

    R is 0 on the kernel of Z, and what it has in its direction, as much as 1 / ridge, is no part of the operator:
    without it rounding is that of the others.
    """
    sizes, vectors = np.linalg.eigh((inner + np.swapaxes(inner, -1, -2)) / 2.0)
    kept = (sizes > 1e-12 * sizes[..., -1:]).astype(float)
    turned = np.swapaxes(vectors, -1, -2) @ koopman @ vectors
    return np.linalg.eigvals(turned * kept[..., None, :] * kept[..., :, None])


def designed(queries: int, keys: int, width: int, seed: int) -> tuple[Any, Any, Any]:
    """Return normal q, k and v (1, 1, n, width) for a study."""
    sizes = {"q": queries, "k": keys, "v": keys}
    q, k, v = (philox.normal((1, 1, n, width), seed=seed, purpose=f"figure.{name}") for name, n in sizes.items())
    return q, k, v


def table(result: Spectrum) -> str:
    """Return, for each update, the largest eigenvalues of its operators and how far it moves queries."""
    rows = [["update", "transitions", "largest eigenvalue: median", "most", "outside the circle", "median step"]]
    for number, (values, radii) in enumerate(zip(result.eigenvalues, result.radii, strict=True), start=2):
        some = radii[np.isfinite(radii)]
        outside = f"{np.count_nonzero(some > 1.0)} of {some.size}"
        length = np.median(result.steps[..., number - 1][np.isfinite(radii)])
        numbers = [f"{np.median(some):.3f}", f"{np.max(some):.3f}", outside, f"{length:.3f}"]
        rows.append([str(number), str(values.shape[-1]), *numbers])
    return aligned(rows)


def draw(result: Spectrum, figure: Figure) -> None:
    """Draw the eigenvalues of every update on the unit circle, and the ways of the queries."""
    left, right = figure.subplots(1, 2)
    draw_unit_circle(left)
    far = 0
    for number, values in enumerate(result.eigenvalues, start=2):
        far += draw_eigenvalues(left, values, COLOURS[(number - 2) % len(COLOURS)], f"update {number}")
    left.set(title="Eigenvalues of the fitted operators" + (f", {far} further out" if far else ""))
    left.legend(frameon=False)
    for n, at in enumerate(np.ndindex(result.trajectory.shape[:3])):
        draw_way(right, result.trajectory[at][1:], COLOURS[n % len(COLOURS)])
    right.set(xlabel="first coordinate", ylabel="second coordinate", title="Queries from update 1 (circles) on")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)


def draw_unit_circle(axes: Axes) -> None:
    """Draw the unit circle, and name the axes."""
    angle = np.linspace(0.0, 2.0 * np.pi, 200)
    axes.plot(np.cos(angle), np.sin(angle), color=GREY, linewidth=1)
    axes.set(xlabel="real part", ylabel="imaginary part", aspect="equal")


def draw_eigenvalues(axes: Axes, values: Any, colour: str, label: str | None = None) -> int:
    """Draw eigenvalues of any shape; return how many are too far out to be shown."""
    flat = np.ravel(values)
    flat = flat[np.isfinite(flat)]
    shown = flat[np.abs(flat) <= FAR]
    axes.scatter(shown.real, shown.imag, s=14, color=colour, alpha=0.7, label=label)
    return flat.size - shown.size


def draw_way(axes: Axes, points: Sequence[Any], colour: str, label: str | None = None) -> None:
    """Draw the way of a query, (n, d), by its first two coordinates, or against the update if there is one."""
    way = np.asarray(points)
    x, y = (way[:, 0], way[:, 1]) if way.shape[1] > 1 else (np.arange(len(way)), way[:, 0])
    axes.plot(x, y, color=colour, marker="o", markersize=3, linewidth=1.3, label=label)
    axes.plot(x[0], y[0], "o", markersize=6, markerfacecolor="white", markeredgecolor=TEXT)


def pair(x: complex) -> list[float]:
    """Return a complex number as JSON has it."""
    return [float(np.real(x)), float(np.imag(x))]
