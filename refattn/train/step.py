"""The loss of a batch with the gradients of all parameters, and the score of a text.

A batch is cut into shards of a few sequences, whose activations fit a cache; the shards of one part run in order and
add up their gradients, and parts are the tasks of the backend. The cut depends on the shapes and on whether the backend
works with a pool of threads, never on the number of workers, so that any number of workers gives the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from refattn import model, tree
from refattn.args import Axes, Whole, check, check_arrays, checked
from refattn.model import Params
from refattn.model.network import Chance, Watch
from refattn.model.params import check_tokens
from refattn.ops.losses import check_targets, cross_entropy_backward, cross_entropy_forward
from refattn.train import data
from refattn.train.leaves import by_pieces, joined, total
from refattn.xp import Array, backend, device, namespace, sum_wide

SHARD_TOKENS = 512
"""Tokens of a shard."""

Force = tuple[float, int]
"""What the diagnostics of a pass through a block tell: a sum of squares, and of how many."""

PARTS = 8
"""Parts of a batch: each holds gradients of its own."""


@checked(params=Params, inputs=Axes("b n", "whole"), targets=Axes("*", "whole"), accumulate=Whole(1))
def loss_and_gradients(params: Params, inputs: Array, targets: Array, accumulate: int = 1) -> tuple[float, Params]:
    """Return the mean loss of the targets in nats, and its gradients; the arguments are those of `measured`.

    >>> import numpy as np
    >>> from refattn import model
    >>> from refattn.train.step import loss_and_gradients
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> params = model.init(config, like=np.ones(1))
    >>> text = np.asarray([[1, 4, 2, 1]])
    >>> loss, gradients = loss_and_gradients(params, text[:, :-1], text[:, 1:])
    >>> round(loss, 1), round(float(np.log(5)), 1)
    (1.6, 1.6)
    """
    loss, gradients, _ = measured(params, inputs, targets, accumulate)
    return loss, gradients


def measured(
    params: Params,
    inputs: Array,
    targets: Array,
    accumulate: int = 1,
    *,
    forces: bool = False,
    chance: Chance | None = None,
    redrawn: list[int] | None = None,
) -> tuple[float, Params, float | None]:
    """Return the mean loss of the targets in nats, its gradients, and how far blocks are from rest.

    Parameters
    ----------
    params
        The parameters.
    inputs, targets
        (b, n) integers: tokens, and the token after each.
    accumulate
        Take the sequences in so many portions, one after the other, and add up: the same loss and gradients, with the
        memory of one portion.
    forces
        Whether to ask the mechanism's diagnostics of its blocks: for each pass through one the root mean square of the
        norm over batch and heads, summed over passes. Otherwise None is returned.
    chance
        A seed and a step, by which blocks with a law draw numbers; None: they take its means.
    redrawn
        A list that gets how often each pass through a block drew its numbers again, of a mechanism that tells.

    Raises
    ------
    TypeError, ValueError
        Where inputs or targets are no whole numbers of the vocabulary, of one shape, library and device.
    """
    check("params", params, Params)
    check_arrays(params=params.token_embedding, inputs=inputs, targets=targets)
    check_tokens(params, inputs, "inputs")
    check_targets(targets, tuple(inputs.shape), params.token_embedding.shape[0])
    size = inputs.shape[0]
    if size % accumulate:
        raise ValueError(f"accumulate: got {accumulate}, needs a divisor of the {size} sequences")
    weight = 1.0 / math.prod(inputs.shape)
    portion = size // accumulate
    record = params.config.record
    count = record.redrawn if redrawn is not None else None

    def shard(rows: slice) -> tuple[Array, Params, list[Force]]:
        of_passes: dict[int, Force] = {}

        def watch(index: int, block: Any, saved: Any, d_state: Any) -> None:
            if forces:
                squares, elements = record.diagnostics.force(saved)
                of_passes[index] = float(squares), elements
            if redrawn is not None and count is not None:
                redrawn.append(count(saved))

        watched = watch if forces or count is not None else None
        found = there_and_back(params, inputs[rows, :], targets[rows, :], weight, watched, chance)
        return *found, [of_passes[index] for index in sorted(of_passes)]

    def part(shards: list[slice]) -> tuple[Array, Params, list[Force]]:
        return functools.reduce(lambda a, b: (a[0] + b[0], _sum([a[1], b[1]]), _more(a[2], b[2])), map(shard, shards))

    loss = 0.0
    gradients: list[Params] = []
    asked: list[Force] = [(0.0, 0)] * (params.config.depth if forces else 0)
    for first in range(0, size, portion):
        found = backend(params.token_embedding).map(part, parts_of(params, first, first + portion, inputs.shape[1]))
        loss += sum(float(part_loss) for part_loss, _, _ in found)
        gradients = [_sum(gradients + [part_gradients for _, part_gradients, _ in found])]
        asked = functools.reduce(_more, (part_forces for _, _, part_forces in found), asked)
    total_force = sum(math.sqrt(squares / elements) for squares, elements in asked) if forces else None
    return loss * weight, gradients[0], total_force


def parts_of(params: Params, first: int, stop: int, tokens: int) -> list[list[slice]]:
    """Cut the sequences from `first` to `stop` into parts of shards."""
    if not backend(params.token_embedding).pools:
        return [[slice(first, stop)]]
    rows = max(1, SHARD_TOKENS // tokens)
    shards = [slice(n, min(n + rows, stop)) for n in range(first, stop, rows)]
    each = -(-len(shards) // PARTS)
    return [shards[n : n + each] for n in range(0, len(shards), each)]


def _more(a: list[Force], b: list[Force]) -> list[Force]:
    return [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, b, strict=True)]


def there_and_back(
    params: Params, inputs: Array, targets: Array, weight: float, watch: Watch | None, chance: Chance | None = None
) -> tuple[Array, Params]:
    """Return the sum of the losses of some sequences, and the gradients of `weight` times that sum."""
    xp = namespace(params.token_embedding, inputs)
    logits, saved = model.forward(params, inputs, training=True, chance=chance)
    losses, loss_saved = cross_entropy_forward(logits, targets)
    # forward: loss = weight * sum(losses)
    d_losses = xp.full(losses.shape, weight, dtype=losses.dtype, device=device(losses))
    return sum_wide(losses), model.backward(params, saved, cross_entropy_backward(loss_saved, d_losses), watch=watch)


def _sum(parts: list[Params]) -> Params:
    """Return the sum of some gradients, from the first to the last; leaves are tasks of the backend."""
    if len(parts) == 1:
        return parts[0]
    leaves = [tree.flatten(part) for part in parts]
    added = by_pieces(leaves[0], lambda task: total([x[task[0]][task[1]] for x in leaves]), joined)
    return tree.unflatten(parts[0], added)


@checked(params=Params, part=Axes("n", "whole"))
def score(params: Params, part: data.Bytes, every: int = 1) -> float:
    """Return the bits per byte of a text (uint8): the mean loss of each byte after the first, in bits.

    Each byte is predicted from those before it in its window; windows do not overlap, so that the first bytes of a
    window are predicted from little. With `every` above 1 only every so many windows count: a faster estimate.

    >>> import numpy as np
    >>> from refattn import model
    >>> from refattn.train.step import score
    >>> params = model.init(model.Config("softmax", context=8, width=4, heads=2, layers=1), like=np.ones(1))
    >>> text = np.frombuffer(b"to be or not to be", dtype=np.uint8)
    >>> round(score(params, text), 1)
    8.0
    """
    context = params.position_embedding.shape[0]
    if len(part) < 2:
        raise ValueError(f"part: got {len(part)} bytes, needs at least 2: one to predict the other from")
    owner = backend(params.token_embedding)
    cuts = data.windows(part, context=context, size=1 if owner.pools else 64, every=every)

    def loss(window: tuple[Any, Any]) -> tuple[float, int]:
        inputs, targets = (to_tokens(params, x) for x in window)
        losses, _ = cross_entropy_forward(model.forward(params, inputs)[0], targets)
        return float(sum_wide(losses)), math.prod(inputs.shape)

    found = owner.map(loss, cuts)
    return sum(nats for nats, _ in found) / sum(count for _, count in found) / math.log(2.0)


def to_tokens(params: Params, x: data.Tokens) -> Array:
    """Return tokens of the host as an array of the parameters' library, on their device."""
    like = params.token_embedding
    # int32, because JAX has no other integers unless it is told to.
    return backend(like).from_numpy(x.astype("int32"), device=device(like))
