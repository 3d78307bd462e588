"""Finite-time Lyapunov exponents of a stack of layers: how fast neighbouring states part, in each direction.

A stack is a map of states s -> f_L(...f_1(s)). With the singular values sigma_1 >= sigma_2 >= ... of its Jacobian J
the exponents are, in units of one layer,

    lambda_i = log(sigma_i) / L

Above 0: a difference in that direction grows, and the layers tell states apart; below 0: it is forgotten. J is a
product of many matrices and is never formed, for its small singular values would be lost: a basis Q of tangents is
pushed through each layer by arrays that carry a derivative, and J_l Q_{l-1} = Q_l R_l; the product of the triangular
R_l is then factorised a few times from alternate sides, which orders it, and turned until its columns are orthogonal.

Sources: Benettin, Galgani, Giorgilli, Strelcyn 1980 (Meccanica 15), for QR layer by layer; Stewart 1997 (SIAM J. Matrix
Anal. Appl. 18), for products of triangles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import tree
from refattn.analysis.figure import FRESH, GROWS, SHRINKS, new_figure, save
from refattn.analysis.text import aligned
from refattn.args import Function, Tree, checked
from refattn.instruments.dual import tangents

Matrix = NDArray[Any]
Map = Callable[[Any], Any]

WIDEST = 4096
"""Numbers of a state that move, at most: of each there is a column of the basis."""

SWEEPS = 4
"""Pairs of factorisations of the product, after which the columns are in order of their lengths."""

ROTATIONS = 60
"""Rounds of rotations, each of all pairs, at most; about ten are needed."""

EPS = 4.0 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Spectrum:
    """The exponents of a stack.

    Attributes
    ----------
    exponents
        (n,), the largest first, in units of one layer; -inf where a layer forgets a direction altogether.
    growth
        (layers + 1, n): the sum of the logs of the diagonals of R up to each layer, in the order of the basis.
    skipped
        Layers before the first one that is measured: those after which the state still got arrays of its own. A last
        layer that ends one is left out too.
    momenta
        Whether the state is made of two arrays of one shape, positions and momenta.
    """

    exponents: Matrix
    growth: Matrix
    skipped: int = 0
    momenta: bool = False

    @property
    def pairs(self) -> Matrix:
        """The sums of the largest and the smallest, the second of each, ...; of momenta that a damping alone shrinks,
        e^-a a layer, and with positions that move by a Hamiltonian, they are all -a."""
        half = self.exponents.size // 2
        return self.exponents[:half] + self.exponents[::-1][:half]

    @property
    def dimension(self) -> float:
        """How many directions a volume has that does not shrink (Kaplan and Yorke)."""
        sums = np.cumsum(self.exponents)
        if not sums.size or sums[0] < 0.0:
            return 0.0
        whole = int(np.max(np.nonzero(sums >= 0.0)[0])) + 1
        if whole == sums.size or not np.isfinite(self.exponents[whole]):
            return float(whole)
        return whole + float(sums[whole - 1] / -self.exponents[whole])

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain data; None where one is not finite."""

        def plain(x: Matrix) -> Any:
            return [plain(row) for row in x] if x.ndim > 1 else [float(v) if np.isfinite(v) else None for v in x]

        facts = {"layers": len(self.growth) - 1, "skipped": self.skipped, "dimension": self.dimension}
        pairs = {"pairs": plain(self.pairs)} if self.momenta else {}
        return {**facts, "exponents": plain(self.exponents), **pairs, "growth": plain(self.growth)}

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers of the table, by name."""
        x = self.exponents
        numbers = {"largest": x[0], "median": float(np.median(x)), "smallest": x[-1], "sum": float(np.sum(x))}
        rows = [(name, f"{value:.6f}") for name, value in numbers.items()]
        if self.momenta:
            rows.append(("pairs, median", f"{float(np.median(self.pairs)):.6f}"))
        rows.append(("above 0", f"{int(np.sum(x > 0.0))} of {x.size}"))
        rows.append(("dimension", f"{self.dimension:.2f}"))
        rows.append(("layers", f"{len(self.growth) - 1}" + (f" after {self.skipped}" if self.skipped else "")))
        return rows


def text(found: Mapping[str, Spectrum]) -> str:
    """Return the table of spectra by name, a column each."""
    columns = [dict(each.rows()) for each in found.values()]
    return aligned([["", *found], *([name, *(column[name] for column in columns)] for name in columns[0])])


@checked(maps=[Function], state=Tree)
def spectrum(maps: Sequence[Map], state: Any) -> Spectrum:
    """Return the exponents of maps, one after the other, at a state.

    Parameters
    ----------
    maps
        Each takes a state, an array or a tree of arrays of NumPy, and returns the next one.
    state
        The first one. Its arrays of at least one axis of several elements are what moves; a clock, an array of one
        number, is not moved.

    Raises
    ------
    ValueError
        Where there is no map, or a state without numbers that move, with more than 4,096, or whose width changes along
        half of the maps or more.
    """
    if not maps:
        raise ValueError("maps: got none, needs at least one layer")
    if not 1 <= (width := sum(x.size for x in _moving(state).values())) <= WIDEST:
        raise ValueError(f"state: got {width} numbers that move, needs from 1 to {WIDEST:,}")
    states = [state]
    for each in maps:
        states.append(each(states[-1]))
    sizes = [{name: x.shape for name, x in _moving(s).items()} for s in states]
    # A first layer may begin a history, and a last one end a momentum: the longest stretch of one width is measured.
    runs = [(len(list(run)), n) for n, (_, run) in enumerate(itertools.groupby(map(repr, sizes)))]
    length, which = max(runs, key=lambda run: (run[0], -run[1]))
    skipped = sum(length for length, n in runs if n < which)
    if length <= len(maps) // 2:
        widths = ", ".join(str(sum(int(np.prod(shape)) for shape in size.values())) for size in sizes)
        raise ValueError(f"state: its width goes {widths} from layer to layer, needs one that most layers keep")
    maps, states = maps[skipped : skipped + length - 1], states[skipped : skipped + length]
    first = _moving(states[0])
    basis = np.eye(sum(x.size for x in first.values()))
    triangles = []
    for each, before in zip(maps, states[:-1], strict=True):
        basis, triangle = np.linalg.qr(_push(each, before, basis))
        triangles.append(triangle)
    steps = np.stack([_logs(r) for r in triangles])
    growth = np.concatenate([np.zeros((1, basis.shape[1])), np.cumsum(steps, axis=0)])
    shapes = [x.shape for x in first.values()]
    return Spectrum(_exponents(triangles), growth, skipped, len(shapes) == 2 and len(set(shapes)) == 1)


def _moving(state: Any) -> dict[str, Matrix]:
    return {n: x for n, x in tree.flatten(state).items() if x.dtype.kind == "f" and x.size > 1}


def _push(each: Map, state: Any, basis: Matrix) -> Matrix:
    """Return the derivatives of the next state along the columns of a basis."""
    leaves, moving = tree.flatten(state), _moving(state)
    cuts = np.cumsum([x.size for x in moving.values()])[:-1]
    columns = []
    with tangents() as instrument:
        for column in basis.T:
            parts = dict(zip(moving, np.split(column, cuts), strict=True))
            lifted = {
                n: instrument.array(x, parts[n].reshape(x.shape) if n in parts else None) for n, x in leaves.items()
            }
            found = tree.flatten(each(tree.unflatten(state, lifted)))
            columns.append(np.concatenate([np.reshape(found[n].tangent, (-1,)) for n in moving]))
    return np.stack(columns, axis=1)


def _logs(triangle: Matrix) -> Matrix:
    with np.errstate(divide="ignore"):
        return np.log(np.abs(np.diagonal(triangle)))


def _exponents(triangles: list[Matrix]) -> Matrix:
    """Return the logs of the singular values of a product of triangles, the last one leftmost, for one of them each."""
    for _ in range(2 * SWEEPS):  # an even number: the product itself
        # (R_L ... R_1)^T = R_1^T ... R_L^T, factorised from the right: nearer to the diagonal of singular values.
        turn, after = np.eye(len(triangles[0])), []
        for r in reversed(triangles):
            turn, new = np.linalg.qr(r.T @ turn)
            after.append(new)
        triangles = after
    columns, sizes = np.eye(len(triangles[0])), np.zeros(len(triangles[0]))
    for r in triangles:
        columns = r @ columns
        length = np.sqrt(np.sum(columns * columns, axis=0))
        columns = columns / np.where(length > 0.0, length, 1.0)
        with np.errstate(divide="ignore"):
            sizes = sizes + np.log(length)
    largest = float(np.max(sizes))
    graded = columns * np.exp(sizes - largest)  # what is below 10^-300 of the largest counts as 0
    with np.errstate(divide="ignore"):
        return np.sort(np.log(_lengths(graded)) + largest)[::-1] / len(triangles)


def _lengths(columns: Matrix) -> Matrix:
    """Return the singular values of a matrix whose columns have very different lengths, each with all its digits.

    One-sided Jacobi rotations, after Demmel and Veselic 1992 (SIAM J. Matrix Anal. Appl. 13).
    """
    rows = np.ascontiguousarray(columns.T)
    for _ in range(ROTATIONS):
        turned = False
        for n in range(len(rows) - 1):
            inner, squares = rows[n + 1 :] @ rows[n], np.sum(rows * rows, axis=1)
            for m in np.nonzero(np.abs(inner) > EPS * np.sqrt(squares[n] * squares[n + 1 :]))[0] + n + 1:
                a, b, c = rows[n] @ rows[n], rows[m] @ rows[m], rows[n] @ rows[m]
                if abs(c) <= EPS * np.sqrt(a * b):
                    continue
                with np.errstate(over="ignore"):
                    zeta = (b - a) / (2.0 * c)
                    tangent = (1.0 if zeta >= 0.0 else -1.0) / (abs(zeta) + np.hypot(1.0, zeta))
                cosine = 1.0 / np.hypot(1.0, tangent)
                p, q = rows[n].copy(), rows[m].copy()
                rows[n], rows[m] = cosine * (p - tangent * q), cosine * (q + tangent * p)
                turned = True
        if not turned:
            break
    return np.sqrt(np.sum(rows * rows, axis=1))


def draw(found: Mapping[str, Spectrum], title: str, path: Path) -> None:
    """Draw the exponents, and those of a fresh model beside; how the basis grows; of momenta the sums of pairs."""
    first, *rest = found.values()
    figure = new_figure(15.0 if first.momenta else 10.5, 4.4)
    left, right, *third = figure.subplots(1, 3 if first.momenta else 2)
    x, at, finite = first.exponents, np.arange(1, first.exponents.size + 1), np.isfinite(first.exponents)
    for each in rest:
        shown = np.isfinite(each.exponents)
        left.plot(at[shown], each.exponents[shown], color=FRESH, label="fresh")
    for chosen, colour, label in ((x > 0.0, GROWS, "grows"), (x <= 0.0, SHRINKS, "shrinks")):
        left.plot(at[chosen & finite], x[chosen & finite], "o", color=colour, markersize=3.0, label=label)
    left.set(xlabel="direction", ylabel="exponent, a layer", title=f"Lyapunov exponents, {next(iter(found))}")
    left.legend(frameon=False)
    # What a layer forgets altogether is somewhere below, where rounding leaves it.
    lost = math.log(np.finfo(np.float64).eps) / max(1, len(first.growth) - 1)
    kept = np.concatenate([each.exponents[np.isfinite(each.exponents)] for each in found.values()])
    kept = kept[kept > 0.9 * lost]
    if np.sum(finite & (x > 0.9 * lost)) < x.size and kept.size:
        left.set(ylim=(min(0.0, float(np.min(kept))) - 0.3, max(0.0, float(np.max(kept))) + 0.15))
        forgotten = x.size - int(np.sum(finite & (x > 0.9 * lost)))
        left.text(0.03, 0.03, f"{forgotten} directions forgotten", transform=left.transAxes)
    depth = np.arange(len(first.growth)) + first.skipped
    for n in np.unique(np.linspace(0, x.size - 1, 9).astype(int)):
        shade = n / max(1, x.size - 1)
        right.plot(depth, first.growth[:, n], color=(0.85 - 0.62 * shade, 0.45 + 0.04 * shade, 0.09 + 0.76 * shade))
    lowest = float(np.min(np.where(np.isfinite(first.growth), first.growth, 0.0)))
    right.set(ylim=(max(lowest - 1.0, -25.0), float(np.max(first.growth[np.isfinite(first.growth)])) + 1.0))
    right.set(xlabel="layer", ylabel="log of the growth", title="directions of the basis, from layer to layer")
    for axes in third:
        for (name, each), colour in zip(reversed([*found.items()]), (FRESH, SHRINKS)[-len(found) :], strict=True):
            shown = each.exponents[::-1][: each.pairs.size] > 0.9 * lost
            axes.plot(1 + np.nonzero(shown)[0], each.pairs[shown], "o", color=colour, markersize=3.0, label=name)
        axes.set(
            xlabel="pair", ylabel="sum of two exponents", title="the largest and the smallest, the second of each, ..."
        )
        axes.legend(frameon=False)
    for axes in (left, right, *third):
        axes.axhline(0.0, color=FRESH, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    save(figure, path)
