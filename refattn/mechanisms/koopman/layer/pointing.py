"""Decoding: what a last query says about the next token.

A query that has moved points at source tokens: its softmax over the keys is a distribution over them, and the most
probable one is the next token (as in a pointer network). A whole sequence is answered at once: `point` over all of its
last queries gives, after each of its tokens, the source token that comes next. For a stack of layers, or to score a
vocabulary, the last query goes back to token space by a learned matrix, or by the pseudo-inverse of w_q.

Letters: b batch, h head, i query, j key, m width of a token, d width of a head.
Source: N. Tie 2024; pointing: Vinyals et al. 2015 (arXiv:1506.03134).
"""

from __future__ import annotations

from collections.abc import Callable

from refattn.args import ROUNDS, check_arrays, check_whole, described
from refattn.mechanisms.core_arguments import defaults_of, enter
from refattn.mechanisms.koopman.core import KINDS, check_choices, chosen_families, forward, placed
from refattn.mechanisms.koopman.layer.pointer import log_weights_of
from refattn.mechanisms.koopman.options.kernel import Kernel
from refattn.ops.masks import Causal, allowed_pairs
from refattn.xp import Array, namespace, zeros

_USUAL = defaults_of(forward)
CAUSAL: Causal = _USUAL["causal"]
SIMILARITY: str = _USUAL["similarity"]
KERNEL: str = _USUAL["kernel"]


def point(
    q: Array,
    k: Array,
    *,
    similarity: str = SIMILARITY,
    kernel: str | Kernel = KERNEL,
    mask: Array | None = None,
    causal: Causal = CAUSAL,
) -> tuple[Array, Array]:
    """Return which source token each last query points at, and with which probability.

    Parameters
    ----------
    q
        (b, h, i, d): last queries, what `forward` returned. With ``saved.trajectory[-2]`` in their place it is the
        weights of the last update that point.
    k
        (b, g, j, d): the keys, each head of which serves h/g query heads.
    similarity, kernel, mask, causal
        As in `forward`; the kernel is read where it is the similarity.

    Returns
    -------
    indices : Array
        (b, h, i): the most probable key, of equals the first; -1 for a query that sees no key.
    probabilities : Array
        (b, h, i): its probability; 0 for a query that sees no key.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> from refattn.mechanisms.koopman.layer.pointing import point
    >>> q, k = np.asarray([[[[1.0, 1.0]]]]), np.asarray([[[[3.0, 3.0], [1.0, 1.0]]]])
    >>> point(q, k)[0].tolist(), point(q, k, similarity="kernel", kernel="rbf(bandwidth=0.5, weight=9.0)")[0].tolist()
    ([[[0]]], [[[1]]])
    """
    weights, alive = _weights(q, k, similarity, kernel, mask, causal)
    xp = namespace(weights)
    if k.shape[2] == 0:
        return xp.astype(zeros(q.shape[:3], q) - 1.0, xp.int64), zeros(q.shape[:3], q)
    return xp.where(alive, xp.argmax(weights, axis=-1), -1), xp.max(weights, axis=-1)


def sample(
    q: Array,
    k: Array,
    uniform: Array,
    *,
    similarity: str = SIMILARITY,
    kernel: str | Kernel = KERNEL,
    mask: Array | None = None,
    causal: Causal = CAUSAL,
) -> Array:
    """Return a source token for each last query, drawn by the weights that it points with.

    Parameters
    ----------
    q, k, similarity, kernel, mask, causal
        As in `point`.
    uniform
        (b, h, i): numbers in [0, 1), such as those of `refattn.philox`.

    Returns
    -------
    Array
        (b, h, i): the drawn key; -1 for a query that sees no key.
    """
    weights, alive = _weights(q, k, similarity, kernel, mask, causal)
    xp = check_arrays(q=q, uniform=uniform)
    if tuple(uniform.shape) != tuple(q.shape[:3]):
        raise ValueError(f"uniform: got shape {tuple(uniform.shape)}, needs {tuple(q.shape[:3])}")
    if k.shape[2] == 0:
        return xp.astype(zeros(q.shape[:3], q) - 1.0, xp.int64)
    below = xp.cumulative_sum(weights, axis=-1) <= uniform[..., None] * xp.sum(weights, axis=-1, keepdims=True)
    # A key of weight 0, such as one that is hidden, is never drawn: the last one is the last that has a weight.
    last = k.shape[2] - 1 - xp.argmax(xp.flip(xp.astype(weights > 0.0, xp.int32), axis=-1), axis=-1)
    drawn = xp.sum(xp.astype(below, xp.int64), axis=-1)
    return xp.where(alive, xp.where(drawn < last, drawn, last), -1)


def _weights(
    q: Array, k: Array, similarity: str, kernel: str | Kernel, mask: Array | None, causal: Causal
) -> tuple[Array, Array]:
    """Return the softmax over the keys (b, h, i, j), and whether there is a key (b, h, i)."""
    call = enter(q, k, k, mask=mask, causal=causal)
    xp, chosen = namespace(call.q), _USUAL | {"updates": 1, "similarity": similarity, "kernel": kernel}
    plain = {name: chosen[name] for name in ("updates", "space", "similarity", "jitter")}
    check_choices(**plain)
    options, _, _ = placed(call.q, **plain, **chosen_families(**{name: chosen[name] for name in KINDS}))
    seen = zeros(call.plane, call.q) == 0.0
    allowed = allowed_pairs(call.mask, call.offset, *call.plane[2:], call.q)
    seen = seen if allowed is None else seen & allowed
    if k.shape[2] == 0:
        return zeros(call.plane, call.q), zeros(call.plane[:3], call.q) > 0.0
    weights = xp.exp(log_weights_of(call.q, call.k, seen, options.similarity))
    return call.back(weights), xp.any(seen, axis=-1)


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
    *,
    similarity: str = SIMILARITY,
    kernel: str | Kernel = KERNEL,
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
    similarity, kernel
        As in `point`.

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
    check_whole("steps", steps, 0, ROUNDS)
    if stop is not None and (isinstance(stop, bool) or not isinstance(stop, int) or not 0 <= stop < count):
        raise ValueError(f"stop: got {described(stop)}, needs None or one of the {count} source tokens, from 0")
    if uniform is not None and tuple(uniform.shape) != (steps,):
        raise ValueError(f"uniform: got shape {tuple(uniform.shape)}, needs ({steps},)")
    found: list[int] = []
    token = start
    while len(found) < steps:
        q, k, at = last_query(token)[None, None, None, :], keys[None, None, :, :], len(found)
        if uniform is None:
            index, _ = point(q, k, similarity=similarity, kernel=kernel)
        else:
            index = sample(q, k, uniform[None, None, at : at + 1], similarity=similarity, kernel=kernel)
        found.append(int(index[0, 0, 0]))
        if found[-1] == stop:
            break
        token = source[found[-1], :]
    return tuple(found)
