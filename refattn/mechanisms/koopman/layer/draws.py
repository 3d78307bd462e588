"""Ridge and epsilon as random numbers: a stochastic trajectory, whose law is `Beta`(1, b) or one of your own.

One pair belongs to an update of a layer, and is shared by batch, heads and queries, which keeps the mechanism
equivariant. With several candidates the first one by which psi is inverted is taken, as if it had been drawn again. The
numbers are a pure function of the seed, the step and the layer. Where none are drawn, a block with a law takes its
means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refattn import philox
from refattn.args import ROUNDS, check_number, check_whole
from refattn.mechanisms.koopman.core import CANDIDATES
from refattn.mechanisms.option_kinds import choose
from refattn.xp import Array, backend, device, namespace

Quantile = Callable[[Array], Array]
"""What makes of numbers from 0 to 1, uniformly drawn, numbers of a law, element by element."""

SAMPLE = (philox.permutation(4096, seed=0, purpose="koopman.law") + 0.5) / 4096
"""Midpoints of [0, 1], by which a law is checked and its mean is found."""


@dataclass(frozen=True)
class Law:
    """A law of your own: one quantile function for the ridge, which is above 0, and one for epsilon, at least 0.

    Attributes
    ----------
    ridge, epsilon
        They take an array of NumPy with numbers in [0, 1), and return as many.
    candidates
        From 1 to 64: how many numbers are drawn for an update.
    """

    ridge: Quantile
    epsilon: Quantile
    candidates: int = 1

    def __post_init__(self) -> None:
        _check_candidates(self.candidates)
        xp = namespace(SAMPLE)
        for name, least in (("ridge", 5e-324), ("epsilon", 0.0)):
            found = getattr(self, name)(SAMPLE)
            if getattr(found, "shape", None) != SAMPLE.shape or not xp.all(xp.isfinite(found) & (found >= least)):
                needs = f"finite numbers {'above' if least else 'of at least'} 0, as many as it was given"
                raise ValueError(f"{name}: got a law that does not return {needs}")

    @property
    def means(self) -> dict[str, float]:
        """The mean of each, by the midpoint rule."""
        return {name: float(getattr(self, name)(SAMPLE).mean()) for name in ("ridge", "epsilon")}


@dataclass(frozen=True)
class Beta:
    """Beta(1, b) for both: on (0, 1], concentrated at 0, of mean 1 / (1 + b).

    Attributes
    ----------
    b
        Above 0.
    candidates
        From 1 to 64: how many numbers are drawn for an update.
    """

    b: float = 9.0
    candidates: int = 1

    def __post_init__(self) -> None:
        check_number("b", self.b, positive=True)
        _check_candidates(self.candidates)

    def ridge(self, uniform: Any) -> Any:
        """Return the quantiles."""
        return (1.0 - uniform ** (1.0 / self.b)).clip(1e-12)

    epsilon = ridge

    @property
    def means(self) -> dict[str, float]:
        """The mean of each."""
        return dict.fromkeys(("ridge", "epsilon"), 1.0 / (1.0 + self.b))


LAWS: dict[str, type[Beta]] = {"beta": Beta}


def law_of(given: Any) -> Law | Beta:
    """Return the law that is meant: an object, or "beta" with or without numbers."""
    return given if isinstance(given, Law) else choose("draws", given, LAWS)


def draw(
    updates: int, *, seed: int, step: int, layer: int, like: Array, law: str | Law | Beta = "beta"
) -> dict[str, Array]:
    """Return "ridge" and "epsilon", (candidates, updates - 1) each, for `context.draws`.

    Without a block the one is a number of the fit, the other of the perturbation. `like` gives the array library, the
    dtype and the device. TypeError or ValueError where an argument does not fit.
    """
    check_whole("updates", updates, 1, ROUNDS)
    xp, made, found = namespace(like), law_of(law), {}
    shape = (made.candidates, updates - 1)
    for name, quantile in (("ridge", made.ridge), ("epsilon", made.epsilon)):
        values = quantile(philox.uniform(shape, seed=seed, purpose=f"koopman.{name}", step=step, layer=layer))
        values = values if backend(like).float64() else values.astype("float32")
        found[name] = xp.astype(backend(like).from_numpy(values, device=device(like)), like.dtype)
    return found


def _check_candidates(candidates: int) -> None:
    check_whole("candidates", candidates, 1)
    if candidates > CANDIDATES:
        raise ValueError(f"candidates: got {candidates}, needs at most {CANDIDATES}")
