"""The operator's one-step map phi(x) = tau x + D^T kappa(x) at any point, its Jacobian and its steepness.

Letters: b batch, h head, i query, l transition, o observable, d coordinate, c centre: a key, or in the full space the
start of a transition.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.koopman.kernel import STEEPEST
from refattn.mechanisms.koopman.observables import Observables
from refattn.mechanisms.koopman.options import Options
from refattn.xp import Array, concrete, namespace


class OneStep:
    """D^T kappa(x) = C g(x) with C = D^T N; in the full space C = D^T, and g are the sections at the transitions."""

    def __init__(self, observables: Observables, dual: Array | None, first: Array, modes: Array) -> None:
        transpose = namespace(modes).matrix_transpose
        self.observables, self.full = observables, dual is None
        self.centres = first if dual is None else observables.keys  # (b, h, i or 1, c, d)
        self.factors = transpose(modes) if dual is None else transpose(modes) @ dual  # (b, h, i, d, c or o)

    def at(self, x: Array) -> tuple[Array, Array, Array]:
        """Return D^T kappa(x) (b, h, i, d), the sizes of the terms of its sums, and its Jacobian (b, h, i, d, d)."""
        xp, count = namespace(x), self.centres.shape[-2]
        transpose, kernel, row = xp.matrix_transpose, self.observables.kernel, x[..., None, :]
        values = kernel.values(row, self.centres) if self.full else self.observables.values(row)  # (b, h, i, 1, c or o)
        value = (self.factors @ transpose(values))[..., 0]
        size = (xp.abs(self.factors) @ transpose(xp.abs(values)))[..., 0]
        along, towards = kernel.slopes(row, self.centres)
        at_centres, beyond = self.factors[..., :count], self.factors[..., count:]
        pull = xp.sum(at_centres * towards, axis=-1, keepdims=True)
        jacobian = (at_centres * (along - towards)) @ self.centres + pull * row
        return value, size, jacobian if beyond.shape[-1] == 0 else jacobian + beyond

    def steepness(self) -> Array:
        """Return a bound on |D^T kappa(x) - D^T kappa(y)| / |x - y|, (b, h, i)."""
        xp, count, kernel = namespace(self.factors), self.centres.shape[-2], self.observables.kernel
        at_centres, beyond = self.factors[..., :count], self.factors[..., count:]
        linear = at_centres @ self.centres
        linear = linear if beyond.shape[-1] == 0 else linear + beyond
        bound = xp.linalg.matrix_norm(linear, ord=2)
        if kernel.name == "linear":
            return bound
        columns = xp.sum(xp.sqrt(xp.sum(at_centres * at_centres, axis=-2)), axis=-1)
        return bound + kernel.weight * STEEPEST[kernel.name] / kernel.bandwidth * columns


def certify(steepness: Array, own: Any, share: Any, alive: Array) -> None:
    """Raise ValueError where psi(x) = own x + share f(x), with f of a given steepness, is not sure to be one to one."""
    xp = namespace(steepness)
    rate = share * steepness / own
    worst = xp.max(xp.where(alive, rate, 0.0))
    if concrete(worst >= 1.0):
        raise ValueError(
            f"certify: got a perturbation whose share of the one-step map is {float(worst):.3g} times as steep as the "
            "identity's, needs less than 1: a smaller epsilon with perturbation='identity', or certify=False"
        )


def kappa(observables: Observables, dual: Array | None, first: Array, x: Array) -> Array:
    """Return kappa(x) (b, h, i, l) for x (b, h, i, d)."""
    if dual is None:
        return observables.kernel.values(first, x[..., None, :])[..., 0]
    return (dual @ namespace(x).matrix_transpose(observables.values(x[..., None, :])))[..., 0]


def full_backward(
    observables: Observables, points: tuple[Array, Array, Array], gradients: tuple[Array, Array, Array]
) -> dict[str, Array]:
    """Return what the full space adds: gradients of the starts, of q', and of the kernel's numbers.

    `points` are the starts (b, h, i, l, d), q' and the root (b, h, i, d); `gradients` those of Z, kappa(q') and
    kappa(root).
    """
    kernel, (first, attended, root) = observables.kernel, points
    d_inner, d_section, d_at_root = gradients
    # forward: inner = k(first, first); section = k(first, attended); kappa(root) = k(first, root) with a given root
    left, right = kernel.backward(first, first, d_inner)
    total = {"first": left + right}
    numbers = [kernel.numbers_backward(first, first, d_inner)]
    for name, x, d_values in (("attended", attended, d_section), ("root", root, d_at_root)):
        d_first, d_x = kernel.backward(first, x[..., None, :], d_values[..., None])
        add(total, {"first": d_first, name: d_x})
        numbers.append(kernel.numbers_backward(first, x[..., None, :], d_values[..., None]))
    for d_bandwidth, d_weight in numbers:
        add(total, {"bandwidth": d_bandwidth, "weight": d_weight})
    return total


def add(total: dict[str, Array], parts: dict[str, Array]) -> None:
    """Add parts to a total that is the caller's own, name by name."""
    for name, part in parts.items():
        total[name] = total[name] + part if name in total else part


def total(parts: list[Array]) -> Array:
    """Return the sum of at least one array."""
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found


def ridge_factor(options: Options, observables: Observables, first: Array) -> Array | float:
    """Return what multiplies the ridge: 1, or for a mean error the number of its terms, (b, h, i, 1, 1)."""
    if options.ridge_scale == "sum":
        return 1.0
    xp = namespace(first)
    count = xp.sum(xp.astype(observables.seen, first.dtype), axis=-1)[..., None, None]
    return float(first.shape[-2]) * xp.where(count == 0.0, 1.0, count)
