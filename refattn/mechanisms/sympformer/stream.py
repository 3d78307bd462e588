"""Decoding: every call of the force keeps its own past.

The force is of positions and momenta, which the calls of one step do not share, so a step that calls it four times
keeps four pasts. Of softmax attention a past is the keys, values and u of all tokens, of linear attention two sums of
constant size. What a later token asks of an earlier one does not change the earlier one: its state stays as it was.

Axes: b batch, n new token, m width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn import equations, tree
from refattn.mechanisms.context import Context
from refattn.mechanisms.sympformer import block
from refattn.mechanisms.sympformer.forces.linear import Linear
from refattn.mechanisms.sympformer.forces.prefix import Past, Prefix
from refattn.mechanisms.sympformer.forces.reduced import Reduced
from refattn.mechanisms.sympformer.forces.signed import Signed
from refattn.xp import device, namespace, raised, zeros


@dataclass(frozen=True)
class Cache:
    """The pasts of the calls of one step: a tree of arrays, which says everything that there is to know."""

    calls: tuple[Past, ...]


def start(params: block.Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    config, like = params.config, raised(next(iter(tree.flatten(params).values())))
    m, h = config.width, config.heads if config.integrator.baseline else 1
    d = m // h
    if not isinstance(config.oracle, Linear | Reduced):
        wide = d if config.kicks else 0
        past = Past(*(zeros((batch, h, 0, width), like) for width in (d, wide, 1)))
        more = (replace(past, v=zeros((batch, h, 0, 3 * d), like)),) if config.connects else ()
        return Cache((past,) * config.integrator.calls + more)
    shapes: dict[str, tuple[int, ...]] = {"force": (m, m), "velocity": (m, m)}
    if isinstance(config.oracle, Reduced):
        shapes = {"moments": (1, m, m)}
    elif isinstance(config.oracle, Signed):
        shapes = {"force": (h, d, d), **({"queries": (h, d, d + m), "keys": (h, d, 3 * d)} if config.connects else {})}
    xp, sums = namespace(like), {name: zeros((batch, *shape), like) for name, shape in shapes.items()}
    none = xp.zeros((1,), dtype=xp.int32, device=device(like))
    return Cache((Past(count=none, sums=sums),) * config.integrator.calls)


def prefill(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of new tokens (b, n, m), and the cache with them."""
    prefix = Prefix(cache.calls)
    result, _ = equations.active(block).advance(params, state, prefix, context.tokens)
    return result, Cache(tuple(prefix.after))


def step(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of one new token (b, 1, m), and the cache with it."""
    return prefill(params, cache, state, context)
