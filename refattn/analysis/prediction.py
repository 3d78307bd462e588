"""How well a fitted operator predicts systems that are known, one step ahead and many: beside EDMD and kernel EDMD.

Many steps ahead in two ways: by powers of the operator, where nothing that was predicted is put in again, and by its
one-step map again and again, which is what updates of queries do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from refattn import philox
from refattn.analysis.known_systems import SYSTEMS, System
from refattn.analysis.operators import EDMD, KernelEDMD, Koopman, Operator
from refattn.analysis.spectrum import COLOURS, TEXT, draw_eigenvalues, draw_unit_circle, pair
from refattn.analysis.text import aligned
from refattn.args import Whole, check_choice, checked
from refattn.mechanisms.koopman.options.kernel import Kernel, Linear, Rbf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (1, 2, 5, 10, 20)
"""Steps ahead of the table."""


@dataclass(frozen=True)
class Prediction:
    """What operators that are fitted to one system predict.

    Attributes
    ----------
    system
        Its name.
    powers, repeated
        By operator: the root mean square of the error after 1, 2, ... steps over that of the states, of states that no
        operator was fitted to; predicted in either way.
    eigenvalues
        By operator, the largest first.
    exact
        The eigenvalues of a linear system, otherwise none.
    path
        (steps + 1, d): of these states the one whose way is longest without leaving where operators were fitted.
    predicted
        By operator, (steps + 1, d): the same by its one-step map.

    Examples
    --------
    >>> from refattn.analysis.prediction import predict
    >>> found = predict("linear", steps=2, states=10)
    >>> found.system, found.path.shape, [round(abs(x), 3) for x in found.exact]
    ('linear', (3, 4), [0.8, 0.947, 0.947, 0.703])
    """

    system: str
    powers: dict[str, tuple[float, ...]]
    repeated: dict[str, tuple[float, ...]]
    eigenvalues: dict[str, Any]
    exact: tuple[complex, ...]
    path: Any
    predicted: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON has it; complex numbers are pairs."""
        return {
            "system": self.system,
            "powers": {name: list(errors) for name, errors in self.powers.items()},
            "repeated": {name: list(errors) for name, errors in self.repeated.items()},
            "eigenvalues": {name: [pair(x) for x in values] for name, values in self.eigenvalues.items()},
            "exact": [pair(x) for x in self.exact],
            "path": self.path.tolist(),
            "predicted": {name: states.tolist() for name, states in self.predicted.items()},
        }


def operators(system: System, seed: int) -> dict[str, Operator]:
    """Return operators fitted to a system: of a linear one to one path of 12 steps, otherwise to 300 transitions."""
    drawn = system.reach * (2.0 * philox.uniform((400, system.width), seed=seed, purpose="analysis.states") - 1.0)
    kernel: Kernel = Linear() if system.eigenvalues else Rbf(1.0, 1.0)
    if system.eigenvalues:
        ridge, keys = 1e-12, drawn[:8]
        path = system.path(drawn[-1:], 12)[:, 0, :]
        starts, ends = path[:-1], path[1:]
    else:
        ridge, keys = 1e-9, drawn[:100]
        starts, ends = drawn[100:], system.advance(drawn[100:])
    given: dict[str, Any] = {"ridge": ridge, "jitter": 1e-12}
    return {
        "Koopman": Koopman(kernel, starts, ends, keys, **given),
        "Koopman, separable": Koopman(kernel, starts, ends, keys, fit="separable", **given),
        "Koopman, full space": Koopman(kernel, starts, ends, keys, space="full", **given),
        "EDMD": EDMD(kernel, starts, ends, keys),
        "kernel EDMD": KernelEDMD(kernel, starts, ends),
    }


@checked(steps=Whole(1, 10_000), states=Whole(1, 1_000_000), seed=Whole())
def predict(name: str, *, steps: int = 20, states: int = 200, seed: int = 3) -> Prediction:
    """Return what the operators predict of the system of this name, one of `SYSTEMS`.

    >>> from refattn.analysis.prediction import predict
    >>> found = predict("linear", steps=2, states=10)
    >>> {name: max(errors) < 1e-6 for name, errors in found.powers.items()}
    {'Koopman': True, 'Koopman, separable': True, 'Koopman, full space': True, 'EDMD': True, 'kernel EDMD': True}
    """
    check_choice("system", name, SYSTEMS)
    system = SYSTEMS[name]
    unseen = philox.uniform((states, system.width), seed=seed, purpose="analysis.unseen")
    paths = system.path(system.reach * (2.0 * unseen - 1.0), steps)
    size = np.sqrt(np.mean(paths[1:] ** 2, axis=(1, 2)))
    length = np.sum(np.linalg.norm(np.diff(paths, axis=0), axis=-1), axis=0)
    shown = int(np.argmax(np.where(np.max(np.abs(paths), axis=(0, 2)) < system.reach, length, 0.0)))
    powers, repeated, eigenvalues, predicted = {}, {}, {}, {}

    def errors(found: Any) -> tuple[float, ...]:
        return tuple(float(x) for x in np.sqrt(np.mean((found - paths[1:]) ** 2, axis=(1, 2))) / size)

    for kind, fitted in operators(system, seed).items():
        way = [paths[0]]
        for _ in range(steps):
            way.append(fitted.predict(way[-1], 1)[0])
        powers[kind], repeated[kind] = errors(fitted.predict(paths[0], steps)), errors(np.stack(way[1:]))
        eigenvalues[kind], predicted[kind] = fitted.eigenvalues(), np.stack(way)[:, shown]
    return Prediction(name, powers, repeated, eigenvalues, system.eigenvalues, paths[:, shown], predicted)


def table(results: list[Prediction]) -> str:
    """Return the errors after some numbers of steps, in both ways."""
    steps = [n for n in SHOWN if n <= len(next(iter(results[0].powers.values())))]
    rows = [["relative error after", *(f"{n} step{'s'[: n > 1]}" for n in steps)]]
    for result in results:
        for way, errors in (("powers", result.powers), ("one step, repeated", result.repeated)):
            rows.append([f"{result.system}: {way}", *("" for _ in steps)])
            rows += [[f"  {kind}", *(f"{each[n - 1]:.1e}" for n in steps)] for kind, each in errors.items()]
    return aligned(rows)


def size_of(results: list[Prediction]) -> tuple[float, float]:
    """Return how wide and high a picture of these is, in inches."""
    return 19.0, 0.4 + 4.2 * len(results)


def draw(results: list[Prediction], figure: Figure) -> None:
    """Draw a row for each system: errors by steps in both ways, one path with its predictions, and eigenvalues."""
    for row, result in zip(figure.subplots(len(results), 4, squeeze=False), results, strict=True):
        draw_unit_circle(row[3])
        for kind, colour in zip(result.powers, COLOURS, strict=True):
            for axes, errors in ((row[0], result.powers[kind]), (row[1], result.repeated[kind])):
                axes.semilogy(range(1, len(errors) + 1), errors, color=colour, marker="o", markersize=3, label=kind)
            way = result.predicted[kind]
            row[2].plot(way[:, 0], way[:, 1], color=colour, linewidth=1.2)
            draw_eigenvalues(row[3], result.eigenvalues[kind], colour)
        row[2].plot(result.path[:, 0], result.path[:, 1], "o", color=TEXT, markersize=3, label="as it is")
        for value in result.exact:
            row[3].plot(value.real, value.imag, "o", markersize=9, markerfacecolor="none", markeredgecolor=TEXT)
        middle, spread = np.mean(result.path, axis=0), np.ptp(result.path, axis=0)
        row[0].set(xlabel="steps ahead", ylabel="relative error", title=f"{result.system}: powers of the operator")
        row[1].set(xlabel="steps ahead", ylabel="relative error", title="its one-step map, repeated")
        row[2].set(xlabel="first coordinate", ylabel="second coordinate", title="a state never seen before")
        row[2].set(
            xlim=(middle[0] - spread[0], middle[0] + spread[0]), ylim=(middle[1] - spread[1], middle[1] + spread[1])
        )
        row[3].set(title="eigenvalues" + (", circles as they are" if result.exact else ""))
        row[2].legend(frameon=False)
    figure.axes[0].legend(frameon=False, fontsize=8)
