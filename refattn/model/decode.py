"""The model token by token: logits of the next token from a cache, or from all tokens again where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.args import Whole, check, checked
from refattn.mechanisms.record import Unsupported
from refattn.model import network, pointer
from refattn.model.params import Layer, Params, check_tokens
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Cache:
    """What is kept of the tokens so far.

    Attributes
    ----------
    tokens
        (b, n): the tokens; only their number is read where the blocks have caches of their own.
    blocks
        The cache of each pass through a block; None where the mechanism, or a block with these options, has no stream.
    head
        That of a head that points.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import model
    >>> from refattn.model import decode
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> params = model.init(config, like=np.ones(1))
    >>> _, cache = decode.extend(params, decode.start(params, batch=1), np.asarray([[1, 4]]))
    >>> cache.tokens.tolist(), len(cache.blocks)
    ([[1, 4]], 1)
    """

    tokens: Array | None
    blocks: tuple[Any, ...] | None
    head: Any = None


@checked(params=Params, batch=Whole(1, 2**31))
def start(params: Params, batch: int) -> Cache:
    """Return the cache before the first token, for `batch` sequences.

    >>> import numpy as np
    >>> from refattn import model
    >>> from refattn.model import decode
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> cache = decode.start(model.init(config, like=np.ones(1)), batch=3)
    >>> len(cache.blocks)
    1
    """
    check("params", params, Params)
    stream = params.config.record.stream
    if stream is None or any(network.reads_draws(layer.block.config) for layer in params.passes):
        return Cache(None, None)
    head = None if params.pointer is None else params.config.record.pointer.start(params.pointer, batch)
    return Cache(None, tuple(stream.start(layer.block, batch) for layer in params.passes), head)


@checked(params=Params, cache=Cache)
def extend(params: Params, cache: Cache, tokens: Array, chance: network.Chance | None = None) -> tuple[Array, Cache]:
    """Return the logits (b, t) after some new tokens (b, n), and the cache with them.

    They equal those of the whole sequence at its last token, by the same `chance`. Raises as `refattn.model.forward`
    does, and ValueError where the sequence becomes longer than the context of the model.

    >>> import numpy as np
    >>> from refattn import model
    >>> from refattn.model import decode
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> params, tokens = model.init(config, like=np.ones(1)), np.asarray([[1, 4, 2]])
    >>> logits, cache = decode.extend(params, decode.start(params, batch=1), tokens[:, :2])
    >>> logits, cache = decode.extend(params, cache, tokens[:, 2:])
    >>> np.allclose(logits, model.forward(params, tokens)[0][:, -1])
    True
    """
    check_tokens(params, tokens)
    xp = namespace(params.token_embedding, tokens)
    first = 0 if cache.tokens is None else cache.tokens.shape[1]
    together = tokens if cache.tokens is None else xp.concat([cache.tokens, tokens], axis=1)
    if together.shape[1] > params.position_embedding.shape[0]:
        raise ValueError(f"tokens: got {together.shape[1]} in all, needs at most {params.position_embedding.shape[0]}")
    stream, own = params.config.record.stream, equations.active(network)
    if cache.blocks is None or stream is None:
        logits, _ = own.forward(params, together, False, chance)
        return logits[:, -1, :], Cache(together, None)
    advance = stream.step if tokens.shape[1] == 1 else stream.prefill
    blocks = cache.blocks

    def step(index: int, layer: Layer, state: Any) -> tuple[Any, Any]:
        context = network.context_of(params, tokens, index, first=first, chance=chance)
        return advance(layer.block, blocks[index], state, context)

    def point(y: Array) -> tuple[Array, Any]:
        context = network.context_of(params, tokens, params.config.depth, first=first, chance=chance)
        *found, longer = params.config.record.pointer.extend(params.pointer, cache.head, y, context)
        return equations.active(pointer).mixed(*found, None, params.token_embedding, together)[0], longer

    head = None if params.pointer is None else point
    try:
        logits, saved = own.run(params, tokens, first, network.context_of(params, tokens, 0, first=first), step, head)
    except Unsupported:
        if first > 0:
            raise
        return extend(params, Cache(None, None), tokens, chance)  # blocks that have no stream with these options
    return logits[:, -1, :], Cache(together, tuple(layer.block for layer in saved.layers), saved.head)
