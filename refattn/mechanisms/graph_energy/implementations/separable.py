"""Matrix products in place of pairs, for a coupling g(x_j - x_i) = sum_t alpha_t(x_i) beta_t(x_j).

With sin x_j cos x_i - cos x_j sin x_i for sin, and the binomials of a polynomial, a coupling costs a few products with
the graph, and memory for the scores alone; nothing is approximated. Where scores are large and close to each other,
large products cancel: polynomials then lose digits that pairs keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refattn.mechanisms.graph_energy.forces import Coupling, Terms
from refattn.mechanisms.graph_energy.implementations.pairs import OverPairs
from refattn.mechanisms.record import Unsupported
from refattn.xp import Array, namespace, product


@dataclass(frozen=True)
class Factors:
    """A gradient of the links as factors (b, h, i, t*c) and (b, h, j, t*c) of a product, each in parts.

    So the gradient of a sum over stages is one product in the end, not one each.
    """

    left: tuple[Array, ...]
    right: tuple[Array, ...]

    def __add__(self, other: Factors) -> Factors:
        return Factors(self.left + other.left, self.right + other.right)

    def whole(self) -> Array:
        """Return the gradient of the links."""
        xp = namespace(*self.left)
        return product(xp.concat(self.left, axis=-1), xp.matrix_transpose(xp.concat(self.right, axis=-1)))


def couple_forward(coupling: Coupling, links: Array, visible: Array | None, x: Array) -> Array:
    """Return c_ic = m_ic sum_t alpha_t(x_ic) (W (m beta_t(x)))_ic."""
    return couple_keeping(coupling, links, visible, x)[0]


def couple_keeping(
    coupling: Coupling, links: Array, visible: Array | None, x: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Return c, and what the backward would otherwise compute again: each W (m beta_t(x)), (b, h, i, c)."""
    terms = terms_of(coupling, x)
    every = _at_once(links, [seen(visible, term[1]) for term in terms])
    total = None
    for (alpha, _, _, _), pulled in zip(terms, every, strict=True):
        total = alpha * pulled if total is None else total + alpha * pulled
    return seen(visible, total), every


def couple_backward(
    coupling: Coupling,
    links: Array,
    visible: Array | None,
    d_coupled: Array,
    x: Array,
    kept: tuple[Array, ...] | None = None,
) -> tuple[Array, Factors]:
    """Return the gradient of x for a given gradient of c, and the factors of that of the links.

    `kept` is what `couple_keeping` returned; without it, it is computed again.
    """
    xp = namespace(links, x)
    received, terms = seen(visible, d_coupled), terms_of(coupling, x)
    # forward: coupled = m sum_t alpha_t * (links @ (m beta_t))
    left = tuple(received * alpha for alpha, _, _, _ in terms)
    right = tuple(seen(visible, beta) for _, beta, _, _ in terms)
    there = _at_once(links, right) if kept is None else kept
    back = _at_once(xp.matrix_transpose(links), left)
    d_x = None
    for (_, _, d_alpha, d_beta), pulled, pushed in zip(terms, there, back, strict=True):
        part = received * d_alpha * pulled + seen(visible, d_beta) * pushed
        d_x = part if d_x is None else d_x + part
    return d_x, Factors(left, right)


def _at_once(matrix: Array, parts: Sequence[Array]) -> tuple[Array, ...]:
    """Return the product of a matrix with each part, reading the matrix once."""
    width = parts[0].shape[-1]
    every = product(matrix, namespace(matrix).concat(list(parts), axis=-1))
    return tuple(every[..., n * width : (n + 1) * width] for n in range(len(parts)))


def terms_of(coupling: Coupling, x: Array) -> Terms:
    """Return the terms of a coupling; raise where it has none."""
    if coupling.terms is None:
        raise Unsupported(f'implementation: got "products" with the coupling {coupling.name}, needs "tiled" or "dense"')
    return coupling.terms(x)


def seen(visible: Array | None, x: Array) -> Array:
    """Return m x."""
    return x if visible is None else visible * x


PRODUCTS = OverPairs(couple_forward, couple_backward, couple_keeping)
