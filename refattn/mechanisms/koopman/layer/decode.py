"""Decoding: what a last query says about the next token.

A query that has moved points at source tokens: its softmax over the keys is a distribution over them, and the most
probable one is the next token (as in a pointer network). A whole sequence is answered at once: `point` over all of its
last queries gives, after each of its tokens, the source token that comes next. For a stack of layers, or to score a
vocabulary, the last query goes back to token space by a learned matrix, or by the pseudo-inverse of w_q.

Letters: b batch, h head, i query, j key, m width of a token, d width of a head.
Source: N. Tie 2024; pointing: Vinyals et al. 2015 (arXiv:1506.03134).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from refattn.mechanisms.arguments import check_arrays, check_causal, check_mask, check_qkv, check_whole
from refattn.mechanisms.entry import defaults_of
from refattn.mechanisms.koopman.core import forward
from refattn.ops.masks import Causal, allowed_pairs, causal_offset
from refattn.xp import Array, max_last, namespace, zeros

CAUSAL: Causal = defaults_of(forward)["causal"]


def point(q: Array, k: Array, *, mask: Array | None = None, causal: Causal = CAUSAL) -> tuple[Array, Array]:
    """Return which source token each last query points at, and with which probability.

    Parameters
    ----------
    q
        (b, h, i, d): last queries, what `forward` returned. With ``saved.trajectory[-2]`` in their place it is the
        weights of the last update that point.
    k
        (b, h, j, d): the keys.
    mask, causal
        As in `forward`.

    Returns
    -------
    indices : Array
        (b, h, i): the most probable key, of equals the first; -1 for a query that sees no key.
    probabilities : Array
        (b, h, i): its probability; 0 for a query that sees no key.
    """
    weights, alive = _weights(q, k, mask, causal)
    xp = namespace(weights)
    if k.shape[2] == 0:
        return xp.astype(zeros(q.shape[:3], q) - 1.0, xp.int64), zeros(q.shape[:3], q)
    return xp.where(alive, xp.argmax(weights, axis=-1), -1), xp.max(weights, axis=-1)


def sample(q: Array, k: Array, uniform: Array, *, mask: Array | None = None, causal: Causal = CAUSAL) -> Array:
    """Return a source token for each last query, drawn by the weights that it points with.

    Parameters
    ----------
    q, k, mask, causal
        As in `point`.
    uniform
        (b, h, i): numbers in [0, 1), such as those of `refattn.counter`.

    Returns
    -------
    Array
        (b, h, i): the drawn key; -1 for a query that sees no key.
    """
    weights, alive = _weights(q, k, mask, causal)
    xp = check_arrays(q=q, uniform=uniform)
    if tuple(uniform.shape) != tuple(q.shape[:3]):
        raise ValueError(f"uniform: got shape {tuple(uniform.shape)}, needs {tuple(q.shape[:3])}")
    below = xp.cumulative_sum(weights, axis=-1) <= uniform[..., None] * xp.sum(weights, axis=-1, keepdims=True)
    # A key of weight 0, such as one that is hidden, is never drawn: the last one is the last that has a weight.
    last = k.shape[2] - 1 - xp.argmax(xp.flip(xp.astype(weights > 0.0, xp.int32), axis=-1), axis=-1)
    drawn = xp.sum(xp.astype(below, xp.int64), axis=-1)
    return xp.where(alive, xp.where(drawn < last, drawn, last), -1)


def _weights(q: Array, k: Array, mask: Array | None, causal: Causal) -> tuple[Array, Array]:
    """Return the softmax over the keys (b, h, i, j), and whether there is a key (b, h, i)."""
    xp = check_arrays(q=q, k=k, **({} if mask is None else {"mask": mask}))
    check_qkv(q, k, k)
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k: got {k.shape[1]} heads, needs {q.shape[1]} as q")
    shape = (*q.shape[:3], k.shape[2])
    mask = check_mask(mask, shape)
    allowed = allowed_pairs(mask, causal_offset(check_causal(causal), *shape[2:]), shape[2], shape[3], q)
    scores = q @ xp.matrix_transpose(k) / math.sqrt(q.shape[3])
    scores = scores if allowed is None else xp.where(allowed, scores, -math.inf)
    if k.shape[2] == 0:
        return scores, zeros(shape[:3], q) > 0.0
    top = max_last(scores)
    alive = top != -math.inf
    powers = xp.exp(scores - xp.where(alive, top, 0.0))
    total = xp.sum(powers, axis=-1, keepdims=True)
    return powers / xp.where(total == 0.0, 1.0, total), alive[..., 0]


def to_tokens(x: Array, w_q: Array, w: Array | None = None) -> Array:
    """Map queries x (..., d) back to tokens (..., m) by w (d, m), or by the pseudo-inverse of w_q (m, d)."""
    xp = check_arrays(x=x, w_q=w_q, **({} if w is None else {"w": w}))
    if x.shape[-1] != w_q.shape[-1]:
        raise ValueError(f"x: got shape {tuple(x.shape)}, needs (..., {w_q.shape[-1]}) as w_q {tuple(w_q.shape)}")
    back = xp.linalg.pinv(w_q) if w is None else w
    if tuple(back.shape) != (x.shape[-1], w_q.shape[0]):
        raise ValueError(f"w: got shape {tuple(back.shape)}, needs {(x.shape[-1], w_q.shape[0])}")
    return x @ back


def to_tokens_backward(x: Array, w: Array, d_tokens: Array) -> tuple[Array, Array]:
    """Return the gradients with respect to x and w of x @ w."""
    xp = check_arrays(x=x, w=w, d_tokens=d_tokens)
    if len(w.shape) != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(f"w: got shape {tuple(w.shape)}, needs ({x.shape[-1]}, width)")
    needed = (*x.shape[:-1], w.shape[1])
    if tuple(d_tokens.shape) != needed:
        raise ValueError(f"d_tokens: got shape {tuple(d_tokens.shape)}, needs {needed}")
    # forward: tokens = x @ w
    rows, d_rows = xp.reshape(x, (-1, x.shape[-1])), xp.reshape(d_tokens, (-1, d_tokens.shape[-1]))
    return d_tokens @ xp.matrix_transpose(w), xp.matrix_transpose(rows) @ d_rows


def generate(
    last_query: Callable[[Array], Array],
    source: Array,
    keys: Array,
    start: Array,
    steps: int,
    stop: int | None = None,
    uniform: Array | None = None,
) -> tuple[int, ...]:
    """Return the source tokens that a sequence points at, one after the other, from a start token.

    With a fixed source each token depends on the one before alone: after at most as many steps as there are source
    tokens the sequence repeats itself, unless it is sampled.

    Parameters
    ----------
    last_query
        Maps a token (m,) to its last query (d,).
    source
        (j, m): the source tokens.
    keys
        (j, d): their keys.
    start
        (m,): the token to start from, such as a learned empty one.
    steps
        The most tokens to generate.
    stop
        The source token after which nothing follows.
    uniform
        (steps,): numbers in [0, 1) by which tokens are drawn; None: the most probable ones are taken.

    Raises
    ------
    TypeError, ValueError
        Where an argument is no array, or a shape or a number does not fit.
    """
    check_arrays(source=source, keys=keys, start=start, **({} if uniform is None else {"uniform": uniform}))
    if len(keys.shape) != 2 or not keys.shape[0]:
        raise ValueError(f"keys: got shape {tuple(keys.shape)}, needs (keys, width) with at least one key")
    count = keys.shape[0]
    if len(source.shape) != 2 or source.shape[0] != count:
        needs = f"({count}, width), a token for each of the keys"
        raise ValueError(f"source: got shape {tuple(source.shape)}, needs {needs}")
    if tuple(start.shape) != (source.shape[1],):
        raise ValueError(f"start: got shape {tuple(start.shape)}, needs ({source.shape[1]},) as the source tokens")
    check_whole("steps", steps, 0, rounds=True)
    if stop is not None and (isinstance(stop, bool) or not isinstance(stop, int) or not 0 <= stop < count):
        raise ValueError(f"stop: got {stop!r}, needs None or one of the {count} source tokens, from 0")
    if uniform is not None and tuple(uniform.shape) != (steps,):
        raise ValueError(f"uniform: got shape {tuple(uniform.shape)}, needs ({steps},)")
    found: list[int] = []
    token = start
    while len(found) < steps:
        q, k, at = last_query(token)[None, None, None, :], keys[None, None, :, :], len(found)
        index = point(q, k)[0] if uniform is None else sample(q, k, uniform[None, None, at : at + 1])
        found.append(int(index[0, 0, 0]))
        if found[-1] == stop:
            break
        token = source[found[-1], :]
    return tuple(found)
