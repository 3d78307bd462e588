"""First momenta from two learned tables, one row for each token of the vocabulary and one for each position.

The first velocities of the MLP step may come from two tables of their own, by the same equations.

Equations, for the token at position n::

    [SYMP.looked_up]  p0_n = E[token_n] + P[n]

Adjoints, for given dp0::

    [dSYMP.token_embedding]  dE = sum of dp0_n in the row of token_n
    [dSYMP.position_embedding]  dP_n = sum_b dp0_bn

Axes: b batch, i token, m width, t token of the vocabulary.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535): initial velocities by token and position.
"""

from __future__ import annotations

from refattn.mechanisms.sympformer.params import Add, Mlp, Params
from refattn.ops import embedding
from refattn.xp import Array, arange, concrete, namespace, zeros


def forward(owner: Params | Mlp, tokens: Array, first: int | Array) -> Array:
    """Return the momenta or velocities (b, i, m) of tokens (b, i) at the positions `first`, `first` + 1, ..."""
    table, places = owner.token_embedding, owner.position_embedding
    assert table is not None and places is not None
    at = first + arange(0, tokens.shape[1], tokens)  # (i): positions
    rows = namespace(places).take(places, at, axis=0)  # (i, m): part of P
    p = embedding.embedding_forward(table, tokens) + rows  # (b, i, m) [SYMP.looked_up]
    return p


def backward(owner: Params | Mlp, tokens: Array, d_p: Array, add: Add) -> None:
    """Add the gradients of both tables; the tokens are those from the first position on."""
    xp, n, head = namespace(d_p), tokens.shape[1], "mlp." if isinstance(owner, Mlp) else ""
    table, places = owner.token_embedding, owner.position_embedding
    assert table is not None and places is not None
    # forward: p = table[tokens] + places[:n]
    d_table = embedding.embedding_backward(table, tokens, d_p)  # (t, m) [dSYMP.token_embedding]
    unused = zeros((places.shape[0] - n, d_p.shape[2]), d_p)  # positions without a token
    d_places = xp.concat([xp.sum(d_p, axis=0), unused], axis=0)  # [dSYMP.position_embedding]
    add(f"{head}token_embedding", d_table)
    add(f"{head}position_embedding", d_places)


def check_tokens(params: Params, tokens: Array | None, x: Array, first: int | Array) -> Array:
    """Return the tokens of x; raise where the tables have no row for one of them, or for its position."""
    config, shape = params.config, tuple(x.shape[:2])
    if tokens is None:
        raise ValueError(f"context.tokens: got None, start='table' needs the numbers of the tokens {shape}")
    if tuple(tokens.shape) != shape:
        raise ValueError(f"context.tokens: got shape {tuple(tokens.shape)}, needs {shape}")
    if concrete(namespace(tokens).any((tokens < 0) | (tokens >= config.vocabulary))):
        raise ValueError(f"context.tokens: got one outside of 0 to {config.vocabulary - 1}")
    if concrete(namespace(x).any(namespace(x).asarray(first + shape[1] > config.context))):
        raise ValueError(f"context.tokens: got {int(first) + shape[1]} in all, needs at most {config.context}")
    return tokens
