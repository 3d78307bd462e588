"""The flow as a system of its own, x' = v(x): its rate, and its energy by channel with its gradient.

::

    v = m f(x; b) + kappa c,    c_ic = m_ic sum_j w_ij m_jc g(x_jc - x_ic)
    E_c = sum_i pi_i (m_ic F(x_ic; b_ic) + kappa/2 sum_j w_ij m_ic m_jc G(x_jc - x_ic))

    dx_ic = -pi_i v_ic dE_c         for pi_i w_ij is symmetric
    db_ic = pi_i m_ic (dF/db) dE_c
    dw_ij = kappa/2 sum_c pi_i m_ic m_jc G(x_jc - x_ic) dE_c
    dpi_i = sum_c of what stands behind pi_i in E_c, times dE_c

Where w is symmetric v = -grad E, E(x) = sum_ic F(x_ic; b_ic) + kappa/2 sum_ijc w_ij G(x_jc - x_ic), with F' = -f
and G' = g. "mean", "min" and "causal_mirror" are symmetric; "kernel" has detailed balance, pi_i w_ij = pi_j w_ji with
pi_i = sum_l exp(r_il), where the same holds in the inner product with the weights pi; "none" has no energy. A step of
Euler lowers E where h <= 2/L, L = sup |f'| + 2 kappa sup |g'| max_i sum_j w_ij. One of "proximal" up to 1/L lowers
E + tau sum_ic pi_i |x_ic|, with `signed` or from scores of at least 0.

Gradients are those above, and those of mu, kappa and of the coefficients of a polynomial alike: dF/dmu, and what they
multiply. pi is 1 where the links are symmetric, for "kernel" the weights of its detailed balance, which add up to 1,
and for others with detailed balance weights of mean 1: `balanced`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from refattn.args import Having, checked
from refattn.mechanisms.graph_energy.forces import Coupling, Intrinsic, Number
from refattn.mechanisms.graph_energy.implementations.pairs import OverPairs
from refattn.mechanisms.graph_energy.implementations.sparse import CSR
from refattn.mechanisms.graph_energy.options.call import Options, longest_of
from refattn.ops.sums import summed_for
from refattn.xp import Array, arange, concrete, namespace, sum_wide, zeros

_SAVED = Having(("scores", "system", "inner"), "what the forward of graph energy returned")

_NO_ENERGY = "an energy exists only for graphs with detailed balance"


@dataclass(frozen=True)
class Graph:
    """The graph of a call, and what its backward reads."""

    options: Options
    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    attention: Array | None  # (b, h, i, j); None where nobody reads it
    kernel: Array | None  # (b, h, j, j): n; None if links are not made of it
    links: Any  # (b, h, j, j), or a sparse graph
    start: Array  # (b, h, j, c)
    visible: Array | None  # (..., j, c): m, as numbers; None where every node exists
    rows: tuple[Array, Array] | None  # (b, h, j, 1): of "kernel", t_i = max_l r_il and sum_l exp(r_il - t_i)


@dataclass(frozen=True)
class System:
    """What makes scores flow.

    Attributes
    ----------
    coupling, intrinsic, mu, kappa
        g, f and their strengths, which broadcast to a state.
    links
        w (b, h, j, j), or a sparse graph.
    start
        b (b, h, j, c).
    visible
        m (b, h, j, c): 1 where a node exists in a channel, else 0; None where all do.
    implementation
        What sums over pairs.
    """

    coupling: Coupling
    intrinsic: Intrinsic
    mu: Number
    kappa: Number
    links: Any
    start: Array
    visible: Array | None
    implementation: OverPairs

    def coupled(self, x: Array) -> Array:
        """Return c at x."""
        return self.implementation.couple_forward(self.coupling, self.links, self.visible, x)

    def coupled_keeping(self, x: Array) -> tuple[Array, Any]:
        """Return c, and what the implementation keeps for its backward; None where it keeps nothing."""
        given, implementation = (self.coupling, self.links, self.visible, x), self.implementation
        if implementation.couple_keeping is None:
            return implementation.couple_forward(*given), None
        return implementation.couple_keeping(*given)

    def rate(self, x: Array, coupled: Array | None = None) -> Array:
        """Return v at x, for c where it is known."""
        own = self.seen(self.intrinsic.force(x, self.start, self.mu))
        return own + self.kappa * (self.coupled(x) if coupled is None else coupled)

    def seen(self, x: Array) -> Array:
        """Return m x."""
        return x if self.visible is None else self.visible * x

    def energy(self, balance: Array | float, x: Array) -> Array:
        """Return the energy of each channel as (b, h, 1, c), for the weights pi (b, h, j, 1)."""
        xp = namespace(x)
        own = self.seen(self.intrinsic.potential(x, self.start, self.mu))
        return xp.sum(balance * (own + 0.5 * self.kappa * self._pulls(self.coupling, x)), axis=2, keepdims=True)

    def energy_backward(
        self, balance: Array | float, x: Array, d_energy: Array
    ) -> tuple[dict[str, Array], Array, dict[str, Array]]:
        """Return gradients for that of the sum of the energies of all channels, (b, h).

        They are those of "scores" x, "start" b and "graph" w, then that of pi (b, h, j, 1), then those of the numbers.
        """
        xp, f = namespace(x), self.intrinsic
        each = d_energy[:, :, None, None]
        weight = balance * each  # (b, h, j, 1) or (b, h, 1, 1)
        pulls = self._pulls(self.coupling, x)
        own = self.seen(f.potential(x, self.start, self.mu))
        numbers = {
            "mu": summed_for(weight * self.seen(f.potential_mu(x, self.start, self.mu)), self.mu),
            "kappa": summed_for(0.5 * weight * pulls, self.kappa),
        }
        if self.coupling.powers:
            parts = (self._pulls(power, x) for power in self.coupling.powers)
            sums = [sum_wide(0.5 * self.kappa * weight * part) for part in parts]
            numbers["coefficients"] = xp.stack(sums)
        read = {
            "scores": -weight * self.rate(x),
            "start": weight * self.seen(f.potential_b(x, self.start, self.mu)),
        }
        if not isinstance(self.links, CSR):
            read["graph"] = 0.5 * self.kappa * weight * xp.sum(self._potentials(self.coupling, x), axis=4)
        return read, each * xp.sum(own + 0.5 * self.kappa * pulls, axis=3, keepdims=True), numbers

    def _pulls(self, coupling: Coupling, x: Array) -> Array:
        """Return sum_j w_ij m_ic m_jc G(x_jc - x_ic) as (b, h, i, c)."""
        if not isinstance(self.links, CSR):
            return namespace(x).sum(self.links[..., None] * self._potentials(coupling, x), axis=3)
        known: Any = replace(coupling, force=coupling.potential, terms=None)
        return self.implementation.couple_forward(known, self.links, self.visible, x)

    def _potentials(self, coupling: Coupling, x: Array) -> Array:
        """Return m_ic m_jc G(x_jc - x_ic) as (b, h, i, j, c)."""
        found = coupling.potential(x[:, :, None, :, :] - x[:, :, :, None, :])
        if self.visible is None:
            return found
        return found * self.visible[:, :, None, :, :] * self.visible[:, :, :, None, :]


def system_of(graph: Graph, implementation: OverPairs) -> System:
    """Return the system of a call, with what sums over pairs."""
    known = graph.options
    numbers = (known.mu, known.kappa)
    return System(known.coupling, known.intrinsic, *numbers, graph.links, graph.start, graph.visible, implementation)


def balance_of(graph: Graph) -> Array | None:
    """Return pi as (b, h, j, 1), adding up to 1; None where the links are symmetric or have none."""
    if graph.rows is None:
        return None
    top, total = graph.rows
    xp = namespace(top)
    if top.shape[-2]:
        largest = xp.max(top, axis=-2, keepdims=True)
        total = total * xp.exp(top - xp.where(largest == -float("inf"), 0.0, largest))
    whole = xp.sum(total, axis=-2, keepdims=True)
    return total / xp.where(whole > 0.0, whole, 1.0)


def weights_of(graph: Graph) -> Array | float:
    """Return pi as (b, h, j, 1), or 1 where links are symmetric; raise ValueError where they have no such weights."""
    if (balance := balance_of(graph)) is not None:
        return balance
    return balanced(graph.links) if graph.options.links.name in ("none", "given") else 1.0


def balanced(links: Any) -> Array | float:
    """Return pi (..., j, 1) with pi_i w_ij = pi_j w_ji, of mean 1, for links (..., i, j) or a sparse graph.

    It is 1 where links are symmetric. Otherwise weights spread from one node of each component over its links, and then
    hold for all of them or for none: what goes round a loop has to be the same both ways.

    Raises
    ------
    ValueError
        Where there are none, and so no energy exists.
    """
    if isinstance(links, CSR):
        back = links.turned()
        links = back.turned()  # with its columns in order, too
        xp, w, w_back, columns = namespace(links.data), links.data[:, None], back.data[:, None], links.indices
        same = concrete(xp.all(links.indptr == back.indptr))
        if same is False or concrete(xp.all(columns == back.indices)) is False:
            raise ValueError(f"{_NO_ENERGY}: a link has none back")
        if concrete(xp.all(w == w_back)):
            return 1.0
        rows, pull = links.ends()[0], links.by_row
        own: Any = partial(_taken, rows)
        other: Any = partial(_taken, columns)
        nodes = zeros((links.shape[0], 1), w)
    else:
        xp, w, w_back = namespace(links), links, namespace(links).matrix_transpose(links)
        if concrete(xp.all(w == w_back)):
            return 1.0
        own, other = lambda x: x, xp.matrix_transpose
        pull, nodes = lambda edges: xp.sum(edges, axis=-1, keepdims=True), zeros((*w.shape[:-1], 1), w)
    linked = (w != 0.0) | (w_back != 0.0)
    if concrete(xp.all(~linked | (xp.sign(w) * xp.sign(w_back) > 0.0))) is not True:
        raise ValueError(f"{_NO_ENERGY}: a link has none back, or one of another sign")
    ratio = xp.where(linked, w_back / xp.where(linked, w, 1.0), 0.0)  # pi_i / pi_j
    pi, known, every = nodes, nodes > 0.0, arange(0, nodes.shape[-2], nodes)[:, None]
    while concrete(xp.all(known)) is False:
        reached = pull(xp.astype(linked & other(known), w.dtype))
        new = ~known & (reached > 0.0)
        if concrete(xp.any(new)):
            pi = xp.where(new, pull(ratio * other(pi)) / xp.where(new, reached, 1.0), pi)
        else:
            first = xp.argmax(xp.astype(~known, xp.int8), axis=-2, keepdims=True)
            new = ~known & (every == first)
            pi = xp.where(new, 1.0, pi)
        known = known | new
    error = xp.where(linked, xp.abs(own(pi) - ratio * other(pi)) / own(pi), 0.0)
    if concrete(xp.all(error <= 64.0 * nodes.shape[-2] * float(xp.finfo(w.dtype).eps))) is not True:
        raise ValueError(f"{_NO_ENERGY}: there is a loop of links whose product is another the other way round")
    return pi / xp.mean(pi, axis=-2, keepdims=True)


def _taken(at: Array, x: Array) -> Array:
    return namespace(x).take(x, at, axis=0)


@checked(saved=_SAVED)
def longest_step(saved: Any) -> Array:
    """Return for each head the longest step of Euler that is known to lower the energy of all sequences, (h,).

    It is 2 / L with L = sup |df/dx| + 2 kappa sup |g'| max_i sum_j |w_ij|, and 0 where L is infinite; where f or g gets
    steeper L is that of scores between 0 and 1.
    """
    graph = saved.inner.graph
    longest = longest_of(saved.options, graph.links, graph.visible) + zeros(graph.start[:, :, :1, :].shape, graph.start)
    return namespace(longest).min(longest, axis=(0, 2, 3))


@checked(saved=_SAVED)
def energy(saved: Any) -> Array:
    """Return the energy of each head before the first step and after every step, (b, h, steps + 1).

    E = sum_ic pi_i m_ic F(x_ic; b_ic) + kappa/2 sum_ijc pi_i w_ij m_ic m_jc G(x_jc - x_ic), with pi = 1 where the graph
    is symmetric, for "kernel" the weights of its detailed balance, which add up to 1, and for other links those of
    `balanced`.

    Raises
    ------
    ValueError
        Where the graph has no detailed balance: then no energy exists.

    Notes
    -----
    An edge of a token to itself would add nothing, for G(0) = 0.
    """
    balance, xp = weights_of(saved.inner.graph), namespace(saved.scores)
    each = [xp.sum(saved.system.energy(balance, x), axis=(-2, -1)) for x in saved.inner.flow.states]
    return xp.stack(each, axis=-1)


@checked(saved=_SAVED)
def residual(saved: Any) -> Array:
    """Return the largest rate |v| of each head after the last step, (b, h): 0 at an equilibrium."""
    xp = namespace(saved.scores)
    return xp.max(xp.abs(saved.system.rate(saved.inner.flow.states[-1])), axis=(-2, -1))


@checked(saved=_SAVED)
def steps_taken(saved: Any) -> Array:
    """Return how many steps each channel has taken, (b, h, c)."""
    xp = namespace(saved.scores)
    count = xp.zeros_like(saved.inner.graph.start[:, :, :1, :])
    for step in saved.inner.flow.steps:
        count = count + xp.astype(step.factor + 0.0 * count > 0.0, count.dtype)
    return xp.astype(count[:, :, 0, :], xp.int64)


def energy_backward(saved: Any, d_energy: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return gradients of what the definition has, and those of numbers, for that of the energy after the last step."""
    graph, xp = saved.inner.graph, namespace(d_energy)
    weights = weights_of(graph)
    if graph.options.links.name == "none" and not isinstance(weights, float):
        raise ValueError(
            'graph: got "none" with a gradient of the energy, whose weights follow attention; needs another'
        )
    read, d_balance, numbers = saved.system.energy_backward(weights, saved.inner.flow.states[-1], d_energy)
    if (pi := balance_of(graph)) is not None:
        # forward: pi = exp(l) / sum of exp(l)
        read["sums"] = pi * (d_balance - xp.sum(pi * d_balance, axis=-2, keepdims=True))
    return read, numbers
