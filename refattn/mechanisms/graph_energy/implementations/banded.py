"""A level of tokens that read the nodes near them, in time and memory linear in the number of tokens.

Nodes are cut into blocks of at least as many as a token reads, so that these lie in the block of the token and those
beside it. Blocks stand where heads are, and each has its few nodes in full: the sums are those of the definition, over
what is near. What is near overlaps; the adjoint of looking there adds up what comes back.

It takes explicit steps on the links of attention ("none") and those of "kernel".

Axes: b batch, h head, r block, i token or node of a block, j node near to it, c channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.graph_energy import dense
from refattn.mechanisms.graph_energy.dense import Flow, Readout, flow_backward, flow_forward
from refattn.mechanisms.graph_energy.implementations import pairs
from refattn.mechanisms.graph_energy.layer.level import Level
from refattn.mechanisms.graph_energy.options.call import Options, check_step, tau_of
from refattn.mechanisms.graph_energy.options.integrator import RK4, Euler, Heun
from refattn.mechanisms.graph_energy.system import Graph
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import where_allowed
from refattn.ops.softmax import softmax_backward, softmax_forward
from refattn.ops.sums import plus
from refattn.xp import Array, all_finite, arange, device, is_array, namespace, sum_wide

LEAST = 16
"""Nodes that a block has at least, if there are as many: products of smaller matrices are slower."""


@dataclass(frozen=True)
class Band:
    """How nodes are cut into blocks, and, as an implementation, the sums over the links of each node with those near
    it.

    Attributes
    ----------
    blocks, size
        How many blocks there are, and of how many nodes.
    beside
        Which blocks are near to one, as differences of their numbers, in order; 0 is itself.
    """

    blocks: int
    size: int
    beside: tuple[int, ...]

    def split(self, x: Array) -> Array:
        """Return (b, h, r*i, c) as (b, h*r, i, c)."""
        b, h, n, c = x.shape
        size = n // self.blocks if self.blocks else 0
        return namespace(x).reshape(x, (b, h * self.blocks, size, c))

    def joined(self, x: Array) -> Array:
        """Return (b, h*r, i, c) as (b, h, r*i, c)."""
        b, blocks, size, c = x.shape
        return namespace(x).reshape(x, (b, blocks // self.blocks, self.blocks * size, c))

    def near(self, x: Array) -> Array:
        """Return of nodes (b, h, r*i, c) those near to each block, (b, h*r, j, c); nothing, 0, lies beyond the ends."""
        b, h, _, c = x.shape
        xp, parts = namespace(x), namespace(x).reshape(x, (b, h, self.blocks, self.size, c))
        every = xp.concat([_moved(parts, by) for by in self.beside], axis=3)
        return xp.reshape(every, (b, h * self.blocks, len(self.beside) * self.size, c))

    def far(self, x: Array) -> Array:
        """Return the adjoint of `near`: the sums (b, h, r*i, c) of what blocks (b, h*r, j, c) say of a node."""
        b, blocks, _, c = x.shape
        xp, h = namespace(x), blocks // self.blocks
        parts = xp.reshape(x, (b, h, self.blocks, len(self.beside), self.size, c))
        total = None
        for at, by in enumerate(self.beside):
            part = _moved(parts[:, :, :, at, :, :], -by)
            total = part if total is None else total + part
        return xp.reshape(total, (b, h, self.blocks * self.size, c))

    def turned(self, x: Array) -> Array:
        """Return x_ji for x_ij (b, h*r, i, j), where each is near the other."""
        b, blocks, size, _ = x.shape
        xp, h = namespace(x), blocks // self.blocks
        parts = xp.reshape(x, (b, h, self.blocks, size, len(self.beside), size))
        turns = [_moved(xp.matrix_transpose(parts[..., self.beside.index(-by), :]), by) for by in self.beside]
        return xp.reshape(xp.concat(turns, axis=4), x.shape)

    @property
    def own(self) -> slice:
        """Where among the nodes near to a block its own are."""
        first = self.beside.index(0) * self.size
        return slice(first, first + self.size)

    def itself(self, like: Array) -> Array:
        """Tell which pairs (i, j) are those of a node with itself."""
        near = arange(0, len(self.beside) * self.size, like)[None, :]
        return near == arange(0, self.size, like)[:, None] + self.own.start

    # The sums over pairs, as `refattn.mechanisms.graph_energy.implementations.pairs` has them

    def couple_forward(self, coupling: Any, links: Array, visible: None, x: Array) -> Array:
        """Return c_i = sum_j w_ij g(x_j - x_i) as (b, h, r*i, c), for links (b, h*r, i, j)."""
        return self.joined(pairs.rows_forward(coupling, links, None, self.own, self.near(x)))

    def couple_backward(
        self, coupling: Any, links: Array, visible: None, d_coupled: Array, x: Array
    ) -> tuple[Array, Array]:
        """Return the gradients of x and of the links."""
        d_blocks = self.split(d_coupled)
        toward, own, d_links = pairs.rows_backward(coupling, links, None, self.own, d_blocks, self.near(x))
        return self.far(toward) - self.joined(own), d_links


@dataclass(frozen=True)
class Saved:
    """What the backward of a level reads; queries, keys and attention are those of blocks."""

    level: Level
    band: Band
    q: Array  # (b, h*r, i, d)
    near_k: Array  # (b, h*r, j, d)
    attention: Array  # (b, h*r, i, j)
    flow: Flow
    readout: Readout
    groups: int

    @property
    def scores(self) -> Array:
        """The scores after the last step, (b, h, j, 1)."""
        return self.flow.states[-1][:, :, : self.level.count, :]

    @property
    def rate(self) -> Array:
        """Their rate."""
        return self.flow.system.rate(self.flow.states[-1])[:, :, : self.level.count, :]


def fits(options: Options) -> bool:
    """Tell whether the linear implementation computes calls with these options."""
    how = options.integrator
    explicit = isinstance(how, (Euler, Heun, RK4)) and how.stops is None and how.adjoint == "unroll"
    return explicit and options.links.name in ("none", "kernel") and options.bias is None


def band_of(level: Level) -> Band:
    """Return the blocks of a level."""
    size = max(min(max(level.window or level.count, LEAST), level.count), 1)
    blocks = -(-level.n // (size * level.every))
    return Band(blocks, size, (0,) if blocks <= 1 else (-1, 0) if level.causal else (-1, 0, 1))


def forward(
    q: Array,
    k: Array,
    values: Array,
    level: Level,
    mask: Array | None,
    key_mask: Array | None,
    options: Options,
) -> tuple[Array, Saved]:
    """Return what tokens (b, h, n, d) read of a level, (b, h, n, e), and what `backward` reads.

    Keys (b, g, n, d) are those of all tokens, `values` (b, h, m, e) those of nodes. `mask` (..., n, n) tells which
    token may attend which, `key_mask` (b, n) what is one. Where nodes differ the options have a mu of each.
    """
    xp, heads, band = namespace(q), q.shape[1], band_of(level)
    rows, nodes = band.blocks * band.size * level.every, band.blocks * band.size
    own_q, own_k = (_padded(level.take(x, 2), nodes, 2) for x in (q, repeat_heads(k, heads)))
    blocks_q, near_k = band.split(_padded(q, rows, 2)), band.near(own_k)
    allowed = _allowed(level, band, mask, key_mask, q)
    scores = blocks_q @ xp.matrix_transpose(near_k) * options.scale  # (b, h*r, i, j)
    masked = xp.where(allowed, scores, -math.inf)  # (b, h*r, i, j)
    attention = softmax_forward(masked)
    itself = band.itself(q)
    if not options.links.of_alike:
        links = _rows(level, band, attention)
    else:
        seen, pair = _rows(level, band, allowed), _rows(level, band, scores)
        links = softmax_forward(where_allowed(seen & band.turned(seen), 0.5 * (pair + band.turned(pair)), -math.inf))
    to_itself = options.scale * xp.sum(own_q * own_k, axis=-1, keepdims=True)
    start = 0.5 + 0.5 * xp.tanh(0.5 * to_itself)
    mu: Any = options.mu
    if is_array(mu) and len(mu.shape) == 3 and mu.shape[1] > 1:
        options = replace(options, mu=_padded(mu, nodes, 1))
    kernel = links if options.links.of_alike else None
    graph = Graph(options, own_q, own_k, None, kernel, xp.where(itself, 0.0, links), start, None, None)
    tau = tau_of(options, None, start)
    x, flow = flow_forward(graph, tau, band)
    check_step(options, graph.links, None)
    if all_finite(x) is False and all_finite(start) is not False:
        raise FloatingPointError(f"the scores diverged: reduce step, which is {options.step}")
    near_v = band.near(_padded(values, nodes, 2))
    out, readout = dense.readout_forward(
        band.near(x), masked, attention, near_v, allowed=allowed, options=options, tau=_by_block(tau, band)
    )
    saved = Saved(level, band, blocks_q, near_k, attention, flow, readout, k.shape[1])
    return band.joined(out)[:, :, : level.n, :], saved


def backward(saved: Saved, d_out: Array) -> tuple[Array, dict[str, Array]]:
    """Return the gradients of the values of nodes, and those of q, k and the numbers."""
    level, band, graph = saved.level, saved.band, saved.flow.graph
    xp, options, groups = namespace(d_out), graph.options, saved.groups
    scale, nodes, n = options.scale, level.count, level.n
    d_blocks = band.split(_padded(d_out, band.blocks * band.size * level.every, 2))
    d_near_x, d_scores, d_attention, d_near_v, tau_terms = dense.readout_backward(saved.readout, d_blocks, None)
    assert d_scores is not None and d_near_v is not None
    # forward: x, flow = flow_forward(graph)
    d_start, d_links, numbers = flow_backward(saved.flow, band.far(d_near_x), band.far(tau_terms))
    # forward: links = those of attention, or of "kernel", and 0 of a node with itself
    d_links = xp.where(band.itself(d_links), 0.0, d_links)
    d_pair = None
    if graph.kernel is None:
        d_attention = plus(d_attention, _rows_backward(level, band, d_links))
    else:
        d_mean = softmax_backward(graph.kernel, d_links)
        d_pair = _rows_backward(level, band, 0.5 * (d_mean + band.turned(d_mean)))
    # forward: attention = softmax(masked)
    d_softmax = None if d_attention is None else softmax_backward(saved.attention, d_attention)
    # forward: masked = blocks_q @ near_k^T * scale, and links are made of this, or of attention
    d_scores = plus(plus(d_scores, d_softmax), d_pair)
    # forward: start = sigmoid(scale q_j . k_j)
    d_own = d_start * graph.start * (1.0 - graph.start)
    d_q = band.joined(d_scores @ saved.near_k)[:, :, :n, :] + level.spread((d_own * graph.k)[:, :, :nodes, :], 2)
    d_own_k = band.far(xp.matrix_transpose(d_scores) @ saved.q) + d_own * graph.q
    d_k = sum_heads(level.spread(d_own_k[:, :, :nodes, :], 2), groups)
    found = {"q": d_q * scale, "k": d_k * scale, **numbers}
    if len(numbers["mu"].shape):
        found["mu"] = xp.reshape(numbers["mu"], (numbers["mu"].shape[0], -1))
        if found["mu"].shape[1] > nodes:  # one for each node, and for what the last block was filled up with
            found["mu"] = found["mu"][:, :nodes]
    if "scale" in options.numbers:
        found["scale"] = sum_wide(d_own_k * graph.k)
    return band.far(d_near_v)[:, :, :nodes, :], found


def _allowed(level: Level, band: Band, mask: Array | None, key_mask: Array | None, q: Array) -> Array:
    """Tell which tokens may attend which nodes near them, (b, h*r, i, j)."""
    xp, (b, h), (r, size) = namespace(q), q.shape[:2], (band.blocks, band.size)
    first = arange(0, r, q)[:, None, None]
    tokens = first * (size * level.every) + arange(0, size * level.every, q)[:, None]
    near = first * size + (arange(0, len(band.beside) * size, q) + band.beside[0] * size)
    allowed = level.read(tokens, near)[None, None, ...]  # (1, 1, r, i, j)
    if mask is not None:
        # Where no token or no node is, whatever pair is taken: it reads nothing.
        pairs = level.take(xp.broadcast_to(mask, (*mask.shape[:2], level.n, level.n)), 3)
        place = xp.clip(tokens, 0, level.n - 1) * level.count + xp.clip(near, 0, level.count - 1)
        flat = xp.reshape(pairs, (*mask.shape[:2], level.n * level.count))
        allowed = allowed & xp.reshape(xp.take(flat, xp.reshape(place, (-1,)), axis=2), (*mask.shape[:2], *place.shape))
    if key_mask is not None:
        rows = xp.reshape(_padded(key_mask, r * size * level.every, 1), (b, 1, r, size * level.every, 1))
        nodes = _padded(level.take(key_mask, 1), r * size, 1)[:, None, :, None]
        allowed = allowed & rows & xp.reshape(band.near(nodes), (b, 1, r, 1, -1))
    shape = (b, h, r, size * level.every, len(band.beside) * size)
    return xp.reshape(xp.broadcast_to(allowed, shape), (b, h * r, *shape[3:]))


def _rows(level: Level, band: Band, x: Array) -> Array:
    """Return the rows of nodes of what tokens have, (b, h*r, i, j)."""
    if level.every == 1:
        return x
    every = band.joined(x)
    return band.split(_padded(level.take(every[:, :, : level.n, :], 2), band.blocks * band.size, 2))


def _rows_backward(level: Level, band: Band, d_rows: Array) -> Array:
    if level.every == 1:
        return d_rows
    d_nodes = band.joined(d_rows)[:, :, : level.count, :]
    return band.split(_padded(level.spread(d_nodes, 2), band.blocks * band.size * level.every, 2))


def _padded(x: Array, size: int, axis: int) -> Array:
    """Return x with zeros behind, so that an axis has a size."""
    xp, missing = namespace(x), size - x.shape[axis]
    if not missing:
        return x
    shape = tuple(missing if at == axis else n for at, n in enumerate(x.shape))
    return xp.concat([x, xp.zeros(shape, dtype=x.dtype, device=device(x))], axis=axis)


def _moved(x: Array, by: int) -> Array:
    """Return what block r + by has (b, h, r, ...), for every block r; 0 where there is none."""
    if not by:
        return x
    xp, size = namespace(x), abs(by)
    none = xp.zeros((*x.shape[:2], size, *x.shape[3:]), dtype=x.dtype, device=device(x))
    return xp.concat([x[:, :, size:, ...], none] if by > 0 else [none, x[:, :, :-size, ...]], axis=2)


def _by_block(number: Any, band: Band) -> Any:
    """Return a number of each head (h, 1, 1) as one of each block, (h*r, 1, 1)."""
    if not is_array(number) or len(number.shape) == 0:
        return number
    xp, h = namespace(number), number.shape[0]
    return xp.reshape(xp.broadcast_to(number[:, None, ...], (h, band.blocks, 1, 1)), (h * band.blocks, 1, 1))
