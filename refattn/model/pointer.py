"""A head that points: the next token is one that was there, or, where a query finds none, one of the vocabulary.

In place of LM.7, with the log weights l of the mechanism's pointer for an empty token, j = 0, and the tokens so far,
and the tokens x' that its queries lead to::

    [LM.8]  c_ij = log(sum_h exp(l_hij) / h) if j in J(i), else -inf       what the heads point at, together
    [LM.9]  v_it = x'_i . E_t - log sum_t exp(x'_i . E_t)
    [LM.10]  z_it = log(exp(c_i0 + v_it) + sum_{j: token_j = t} exp(c_ij))

z are logarithms of probabilities: the weight of the empty token is spread over the vocabulary by v, and that of any
other belongs to what stands there. Their softmax is exp(z), and the cross entropy -z of the target. A copy whose
weight is 0 to the dtype counts as none.

J(i) are the empty token and those up to i. Adjoints, for given dz (shares are parts of exp(z), at most 1)::

    [dLM.10]  dc_ij = dz_it exp(c_ij - z_it) for t = token_j; dc_i0 = sum_t dv_it
    [dLM.9]  dv_it = dz_it exp(c_i0 + v_it - z_it)
    [dLM.8]  dl_hij = dc_ij exp(l_hij - c_ij) / h
    [dLM.following]  dx' = du E                                            with du_it = dv_it - exp(v_it) sum_t dv_it
    [dLM.head]  dE = du^T x'                                               in place of dz^T y in dLM.token_embedding

Axes: b batch, i query token, j the empty token and those so far, h head, m width, t token of the vocabulary.

Source: N. Tie 2024, Koopman attention: a token is a source token, with the weight it is pointed at; Merity et al. 2017
(arXiv:1609.07843), equations 3 to 5: the mixture, whose gate is the weight of what is no token (the sentinel).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.context import Context
from refattn.model.params import Params
from refattn.ops.embedding import one_hot
from refattn.xp import Array, max_last, namespace, product, transpose


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    own: Any  # of the mechanism's pointer
    log_weights: Array  # (b, h, i, j)
    together: Array  # (b, i, j): c
    following: Array  # (b, i, m): x'
    words: Array  # (b, i, t): v
    hot: Array  # (b, j, t): 1 where the token is t; none for the empty one
    z: Array  # (b, i, t)


def forward(params: Params, y: Array, tokens: Array, context: Context) -> tuple[Array, Saved]:
    """Return the log probabilities (b, i, t) of what follows tokens (b, i), whose last values are y (b, i, m)."""
    log_weights, following, own = params.config.record.pointer.forward(params.pointer, y, context)  # tagged there, -
    return mixed(log_weights, following, own, params.token_embedding, tokens)


def mixed(log_weights: Array, following: Array, own: Any, embedding: Array, tokens: Array) -> tuple[Array, Saved]:
    """Return the log probabilities, and what `backward` reads."""
    xp = namespace(log_weights)
    top = xp.max(log_weights, axis=1)  # (b, i, j)
    finite = xp.where(top == -math.inf, 0.0, top)  # (b, i, j)
    mean = xp.mean(xp.exp(log_weights - finite[:, None, :, :]), axis=1)  # (b, i, j): 0 for what is not seen
    together = finite + _log(mean)  # (b, i, j) [LM.8]
    scores = product(following, transpose(embedding))  # (b, i, t)
    shifted = scores - max_last(scores)  # (b, i, t)
    words = shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))  # (b, i, t) [LM.9]
    hot = one_hot(tokens, embedding.shape[0], embedding)  # (b, n, t)
    copied = xp.exp(together[:, :, 1:]) @ hot  # (b, i, t)
    z = xp.logaddexp(together[:, :, :1] + words, _log(copied))  # (b, i, t) [LM.10]
    return z, Saved(own, log_weights, together, following, words, hot, z)


def backward(params: Params, saved: Saved, d_z: Array) -> tuple[Array, Any, Array]:
    """Return the gradients of y, of the pointer's parameters, and of the embedding as it is used here."""
    d_log_weights, d_following, d_embedding = mixed_backward(params.token_embedding, saved, d_z)  # as the first two, -
    found = params.config.record.pointer.backward(params.pointer, saved.own, d_log_weights, d_following)
    return *found, d_embedding


def mixed_backward(embedding: Array, saved: Saved, d_z: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of the log weights, of x' and of the embedding."""
    xp, z, together = namespace(d_z), saved.z, saved.together  # -, (b, i, t), (b, i, j)
    # forward: z = log(exp(together_0 + words) + sum of exp(together) where the token is t)
    d_words = d_z * xp.exp(together[:, :, :1] + saved.words - z)  # (b, i, t) [dLM.9]
    back = transpose(saved.hot)  # (b, t, n)
    shares = xp.exp(xp.minimum(together[:, :, 1:] - z @ back, 0.0 * z[:, :, :1]))  # (b, i, n): 0 is its bound
    d_copied = (d_z @ back) * shares  # (b, i, n)
    d_together = xp.concat([xp.sum(d_words, axis=-1, keepdims=True), d_copied], axis=-1)  # (b, i, j) [dLM.10]
    # forward: words = log softmax(following @ embedding^T)
    d_scores = d_words - xp.exp(saved.words) * xp.sum(d_words, axis=-1, keepdims=True)  # (b, i, t)
    d_following = product(d_scores, embedding)  # (b, i, m) [dLM.following]
    rows = xp.reshape(d_scores, (-1, d_scores.shape[-1]))  # (b*i, t)
    flat = xp.reshape(saved.following, (-1, embedding.shape[1]))  # (b*i, m)
    d_embedding = product(transpose(rows), flat)  # (t, m) [dLM.head]
    # forward: together = log mean over heads of exp(log_weights)
    heads, seen = saved.log_weights.shape[1], together > -math.inf  # -, (b, i, j)
    known = xp.where(seen, together, 0.0)[:, None, :, :]  # (b, 1, i, j)
    d_log_weights = d_together[:, None, :, :] * xp.exp(saved.log_weights - known) / heads  # (b, h, i, j) [dLM.8]
    return d_log_weights, d_following, d_embedding


def _log(x: Array) -> Array:
    """Return the logarithm, -inf for 0."""
    xp = namespace(x)
    return xp.where(x > 0.0, xp.log(xp.where(x > 0.0, x, 1.0)), -math.inf)
