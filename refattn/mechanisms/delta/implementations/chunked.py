"""The recurrences in chunks: what the tokens of a chunk write is the solution of one triangular system.

Equations, for a chunk with the state S before it; a row of V, U, U0, W is a token, K_read, Q_read and K_write are the
keys, queries and writes of `weights`, with B and P::

    [DELTA.lower]  L_ij = beta_i B_ij                       with momentum step_i B_ij
    [DELTA.inverse]  T = (I + L)^-1                         computed for a trace alone: what follows are solutions
    [DELTA.solved_values]  U0 = (I + L)^-1 (beta V)         with momentum step V
    [DELTA.solved_keys]  W = (I + L)^-1 (beta K_read)       with momentum step K_read
    [DELTA.corrections]  U = U0 - W S                       the u_n of DELTA.3; without beta U = V
    [DELTA.chunk_state]  S' = s_C S + K_write^T U           the state of the next chunk; with momentum + c0_C M

    O = scale (Q_read S + P U)

Adjoints, for dO and the gradient dS' with respect to the state after the chunk::

    [dDELTA.chunk_state]  dS' = scale Q_read^T dO + s_C dS'' - K_read^T (beta R)    of the next chunk; d_state after all
    [dDELTA.corrections]  dU = scale P^T dO + K_write dS'
    [dDELTA.lower]  R = (I + L)^-T dU                       which is the du_n of dDELTA.3
    [dDELTA.query_products]  dP = scale dO U^T              for j <= i
    [dDELTA.key_products]  dB = -beta R U^T                 for j < i; with momentum -step R U^T

    dV = beta R,  dbeta_i = R_i . (V - K_read S - B U)_i,  dK_read = -beta R S^T,  dQ_read = scale dO S^T,
    dK_write = U dS'^T

The system is solved twice, once forward and once, transposed, backward, and everything but the sweep over the states is
computed for many chunks at once. R depends on dS', and so the backward solves for both parts of dU::

    R = R0 + Z dS',   R0 = (I + L)^-T (scale P^T dO),   Z = (I + L)^-T K_write

Axes: b batch, g state head, l chunk, r query head of a state head, i and j tokens of a chunk, d and e widths.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.delta.dense import sequences
from refattn.mechanisms.delta.implementations import weights
from refattn.mechanisms.delta.implementations.weights import Weights
from refattn.ops.heads import group_heads, repeat_heads, sum_heads, ungroup_heads
from refattn.ops.solve import identity, unit_lower, unit_lower_transposed
from refattn.ops.tiles import concat, run
from refattn.ops.unit_norm import unit, unit_backward
from refattn.xp import Array, backend, namespace, sum_wide, zeros

Gates = dict[str, Array]

AT_ONCE = 2048
"""Tokens times heads whose chunks are computed at once: of more a core's cache does not hold what is passed on."""


@dataclass(frozen=True)
class Piece:
    """What the backward reads of some tokens of a sequence, in chunks."""

    tokens: slice
    queries: Array  # (b, g, l, r, i, d): q'
    keys: Array  # (b, g, l, i, d): k'
    values: Array  # (b, g, l, i, e)
    gates: Gates  # (b, g, l, i) or (b, g, l, i, d)
    weights: Weights
    system: Array | None  # (b, g, l, i, j): L, None without beta
    states: Array  # (b, g, l, d, e), with momentum 2*d: before each chunk
    written: Array  # (b, g, l, i, e): U


Share = tuple[slice, tuple[tuple[Piece, ...], ...]]
"""Some heads, and their pieces of each sequence; none where it has no token."""


@dataclass(frozen=True)
class Saved:
    """What the backward of the chunked implementation reads."""

    q_hat: Array  # (b, h, n, d)
    k_hat: Array  # (b, f, n, d)
    q_normal: tuple[Array, Array] | None
    k_normal: tuple[Array, Array] | None
    groups: int
    given: tuple[str, ...]  # the gates
    lengths: tuple[int, ...] | None
    scale: float | Array
    shape: tuple[int, ...]  # of the first state
    read: Array  # (b, h, n, e): out without its scale
    parts: tuple[Share, ...]


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    beta: Array | None,
    log_decay: Array | None,
    log_momentum: Array | None,
    step: Array | None,
    state: Array | None,
    lengths: tuple[int, ...] | None,
    scale: float | Array,
    qk_norm: bool,
    norm_eps: float,
    chunk: int,
) -> tuple[Array, Array, Saved]:
    """Return (out, last, saved): (b, h, n, e), the state after the last token, and what `backward` reads."""
    groups, heads = v.shape[1], max(q.shape[1], v.shape[1])
    q_hat, q_normal = unit(q, norm_eps) if qk_norm else (q, None)  # (b, h, n, d), -
    k_hat, k_normal = unit(k, norm_eps) if qk_norm else (k, None)  # (b, f, n, d), -
    queries = group_heads(repeat_heads(q_hat, heads), groups)  # (b, g, r, n, d)
    keys = repeat_heads(k_hat, groups)  # (b, g, n, d)
    named = {"beta": beta, "log_decay": log_decay, "log_momentum": log_momentum, "step": step}
    gates = {name: x for name, x in named.items() if x is not None}
    if log_decay is None:
        gates["log_decay"] = zeros(v.shape[:3], v)  # (b, g, n)
    if state is None:
        count = v.shape[0] if lengths is None else len(lengths)
        two = () if log_momentum is None else (2,)
        state = zeros((count, groups, *two, k.shape[3], v.shape[3]), v)  # S_0 = 0
    begin = state  # as it was given

    def swept(heads: slice) -> tuple[Array, Array, Share]:
        """Return what the queries of these heads read (b, g, r, n, e), their last states, and the pieces."""
        reads, ends, parts = [], [], []
        for first, last, at in sequences(begin[:, heads, ...], v.shape[2], lengths):
            found = []
            for own in pieces(first, last, chunk, at.shape[1]):
                count = own.stop - own.start
                size = min(chunk, last - first)
                rows = turned(in_chunks(queries[:, heads, :, own, :], size, 3))  # (b, g, l, r, i, d)
                columns = in_chunks(keys[:, heads, own, :], size, 2)  # (b, g, l, i, d)
                values = in_chunks(v[:, heads, own, :], size, 2)  # (b, g, l, i, e)
                inner = {name: in_chunks(x[:, heads, own, ...], size, 2) for name, x in gates.items()}
                read, at, piece = of_piece(own, rows, columns, values, inner, at)  # (b, g, l, r, i, e), as S, -
                reads.append(of_tokens(turned(read), count, 3))
                found.append(piece)
            ends.append(at)
            parts.append(tuple(found))
        return concat(reads, axis=3), concat(ends, axis=0), (heads, tuple(parts))

    reads, ends, parts = zip(*run(v, swept, shares(groups, v)), strict=True)
    read = ungroup_heads(concat(reads, axis=1))  # (b, h, n, e)
    final = concat(ends, axis=1)  # as `state`
    given = tuple(name for name, x in named.items() if x is not None)
    saved = Saved(q_hat, k_hat, q_normal, k_normal, groups, given, lengths, scale, state.shape, read, parts)
    return scale * read, final, saved


def of_piece(
    tokens: slice, queries: Array, keys: Array, values: Array, gates: Gates, state: Array
) -> tuple[Array, Array, Piece]:
    """Return what these tokens read (b, g, l, r, i, e), the state after them, and what the backward reads."""
    xp, own, rate = namespace(keys), equations.active(weights), rate_of(gates)  # -, -, (b, g, l, i, 1)
    by = own.weights_of(queries, keys, gates)  # tagged there
    e = values.shape[-1]
    flat = xp.reshape(state, (*state.shape[:2], -1, e)) if "log_momentum" in gates else state  # (b, g, d, e), or 2*d
    system = None  # without beta
    if "beta" not in gates:
        free, through = values, None  # (b, g, l, i, e): U
    else:
        if rate is None:
            system = by.before  # (b, g, l, i, j): DELTA.lower without a step
        else:
            system = rate * by.before  # (b, g, l, i, j) [DELTA.lower]
        if equations.is_active():
            ones = identity(keys.shape[-2], keys) + xp.zeros_like(system)  # (b, g, l, i, j): I
            inverse = unit_lower(system, ones)  # (b, g, l, i, j) [DELTA.inverse]
            del inverse
        right = xp.concat([values, by.keys], axis=-1)  # (b, g, l, i, ...): V beside K_read
        solved = unit_lower(system, right if rate is None else rate * right)  # (b, g, l, i, ...)
        free = solved[..., :e]  # (b, g, l, i, e) [DELTA.solved_values]
        through = solved[..., e:]  # [DELTA.solved_keys]: (b, g, l, i, d), with momentum 2*d
    before, written = [], []
    for n in range(keys.shape[2]):
        before.append(flat)
        if through is None:
            writes = values[:, :, n, ...]  # (b, g, i, e): DELTA.corrections without beta
        else:
            writes = free[:, :, n, ...] - through[:, :, n, ...] @ flat  # (b, g, i, e) [DELTA.corrections]
        written.append(writes)
        kept = by.kept[:, :, n, ...] * flat  # (b, g, d, e), or 2*d
        if by.crossing is not None:
            kept = kept + crossed(by.crossing[:, :, n, ...], flat)  # (b, g, 2*d, e)
        flat = kept + xp.matrix_transpose(by.writes[:, :, n, ...]) @ writes  # [DELTA.chunk_state]: (b, g, d, e), or 2*d
    states, u = xp.stack(before, axis=2), xp.stack(written, axis=2)  # (b, g, l, ..., e), (b, g, l, i, e)
    read = by.queries @ states[:, :, :, None, ...] + by.pairs @ u[:, :, :, None, ...]  # (b, g, l, r, i, e)
    part = Piece(tokens, queries, keys, values, gates, by, system, states, u)
    return read, xp.reshape(flat, state.shape), part


def backward(saved: Saved, d_out: Array, d_state: Array | None) -> dict[str, Array]:
    """Return the gradients of all that came in, of the scale and of the first state, for d_out and that of the last."""
    d_rows = saved.scale * group_heads(d_out, saved.groups)  # (b, g, r, n, e): for the read without its scale
    d_last = zeros(saved.shape, d_out) if d_state is None else d_state  # as `state`

    def swept(share: Share) -> tuple[dict[str, Array], Array]:
        """Return the gradients of what came in for some heads, and of their first states."""
        heads, parts = share
        found: dict[str, list[Array]] = {name: [] for name in ("q", "k", "v", *saved.given)}
        starts = []
        spans = sequences(d_last[:, heads, ...], d_out.shape[2], saved.lengths)
        for (_, _, d_at), part in zip(spans, parts, strict=True):
            backwards = []
            for piece in part[::-1]:
                size, count = piece.keys.shape[-2], piece.tokens.stop - piece.tokens.start
                d_read = turned(in_chunks(d_rows[:, heads, :, piece.tokens, :], size, 3))  # (b, g, l, r, i, e)
                d, d_at = of_piece_backward(piece, d_read, d_at)  # -, as S
                d["q"] = turned(d["q"])  # (b, g, r, l, i, d)
                backwards.append({name: of_tokens(d[name], count, 3 if name == "q" else 2) for name in found})
            for name, rows in found.items():
                rows += [d[name] for d in backwards[::-1]]
            starts.append(d_at)
        return {name: concat(rows, 3 if name == "q" else 2) for name, rows in found.items()}, concat(starts, axis=0)

    found, starts = zip(*run(d_out, swept, saved.parts), strict=True)
    d = {name: concat([rows[name] for rows in found], axis=1) for name in found[0]}
    d_queries = ungroup_heads(d["q"])  # (b, h, n, d): by head of out
    d_q_hat = sum_heads(d_queries, saved.q_hat.shape[1])  # (b, h, n, d)
    d_k_hat = sum_heads(d["k"], saved.k_hat.shape[1])  # (b, f, n, d)
    q_normal, k_normal = saved.q_normal, saved.k_normal
    d_q = d_q_hat if q_normal is None else unit_backward(*q_normal, d_q_hat)  # (b, h, n, d)
    d_k = d_k_hat if k_normal is None else unit_backward(*k_normal, d_k_hat)  # (b, f, n, d)
    d_scale = sum_wide(d_out * saved.read)  # ()
    return {**d, "q": d_q, "k": d_k, "state": concat(starts, axis=1), "scale": d_scale}


def of_piece_backward(part: Piece, d_read: Array, d_state: Array) -> tuple[dict[str, Array], Array]:
    """Return the gradients of queries, keys, values and gates in chunks, and of the state before these tokens.

    `d_read` is (b, g, l, r, i, e), the gradient of what is read, and `d_state` that of the state after them.
    """
    xp, own = namespace(d_read), equations.active(weights)
    by, rate = part.weights, rate_of(part.gates)  # -, (b, g, l, i, 1)
    e, u, states = part.values.shape[-1], part.written, part.states  # -, (b, g, l, i, e): U, and S of each chunk
    # forward: read = queries @ states + pairs @ u
    local = xp.sum(xp.matrix_transpose(by.pairs) @ d_read, axis=3)  # (b, g, l, i, e): dU but for what goes by the state
    d_states = xp.sum(xp.matrix_transpose(by.queries) @ d_read, axis=3)  # (b, g, l, d, e), or 2*d: dS likewise
    if part.system is None:
        solved, through = local, by.writes  # (b, g, l, i, e), (b, g, l, i, ...)
    else:
        right = xp.concat([local, by.writes], axis=-1)  # (b, g, l, i, ...)
        both = unit_lower_transposed(part.system, right)  # (b, g, l, i, ...)
        solved, through = both[..., :e], both[..., e:]  # (b, g, l, i, e): R0, and Z
    flat = xp.reshape(d_state, (*d_state.shape[:2], -1, e)) if by.crossing is not None else d_state  # as S
    after = []
    for n in range(u.shape[2] - 1, -1, -1):
        after.append(flat)
        # forward: flat = kept * flat + crossed(flat) + writes^T @ u; u = free - through @ flat
        d_kept = by.kept[:, :, n, ...] * flat + d_states[:, :, n, ...]  # (b, g, d, e), or 2*d
        if by.crossing is not None:
            d_kept = d_kept + crossed_backward(by.crossing[:, :, n, ...], flat)  # (b, g, 2*d, e)
        if part.system is not None:
            r = solved[:, :, n, ...] + through[:, :, n, ...] @ flat  # (b, g, i, e): R
            d_errors = r if rate is None else rate[:, :, n, ...] * r  # (b, g, i, e)
            d_kept = d_kept - xp.matrix_transpose(by.keys[:, :, n, ...]) @ d_errors  # (b, g, d, e), or 2*d
        flat = d_kept  # of S of the chunk
    ends = xp.stack(after[::-1], axis=2)  # [dDELTA.chunk_state]: (b, g, l, d, e), or 2*d
    d_u = local + by.writes @ ends  # (b, g, l, i, e) [dDELTA.corrections]
    d_pairs = d_read @ xp.matrix_transpose(u)[:, :, :, None, ...]  # (b, g, l, r, i, j) [dDELTA.query_products]
    d_queries = d_read @ xp.matrix_transpose(states)[:, :, :, None, ...]  # (b, g, l, r, i, ...): of Q_read
    d_writes = u @ xp.matrix_transpose(ends)  # (b, g, l, i, ...): of K_write
    d_kept_rows = xp.sum(ends * states, axis=-1, keepdims=True)  # (b, g, l, ..., 1): of s_C
    gates: Gates = {}
    if part.system is None:
        d_v, d_keys = d_u, xp.zeros_like(by.keys)  # (b, g, l, i, e), (b, g, l, i, ...)
        d_before = xp.zeros_like(by.before)  # (b, g, l, i, j)
    else:
        du = solved + through @ ends  # (b, g, l, i, e) [dDELTA.lower]
        d_v = du if rate is None else rate * du  # (b, g, l, i, e): of V, and of the errors
        d_before = -(d_v @ xp.matrix_transpose(u))  # (b, g, l, i, j) [dDELTA.key_products]
        d_keys = -(d_v @ xp.matrix_transpose(states))  # (b, g, l, i, ...): of K_read
        if rate is not None:
            errors = part.values - by.keys @ states - by.before @ u  # (b, g, l, i, e): of DELTA.2
            gates["step" if "log_momentum" in part.gates else "beta"] = xp.vecdot(du, errors)  # (b, g, l, i)
    crossing = None
    if by.crossing is not None:
        d = states.shape[-2] // 2
        crossing = xp.sum(ends[..., :d, :] * states[..., d:, :], axis=(-2, -1), keepdims=True)  # (b, g, l, 1, 1)
    elif by.kept.shape[-2] == 1:
        d_kept_rows = xp.sum(d_kept_rows, axis=-2, keepdims=True)  # (b, g, l, 1, 1)
    d_weights = Weights(d_queries, d_keys, d_writes, d_pairs, d_before, d_kept_rows, crossing)
    d_q, d_k, more = own.weights_backward(by, part.queries, part.keys, part.gates, d_weights)  # tagged there
    return {"q": d_q, "k": d_k, "v": d_v, **gates, **more}, xp.reshape(flat, d_state.shape)


def shares(groups: int, like: Array) -> list[slice]:
    """Return the state heads two by two where the backend has workers, and all at once otherwise and under a hook.

    One by one they would be twice as many calls, each of so little work that the workers wait for the interpreter.
    """
    step = 2 if backend(like).pools and not equations.is_active() else groups
    return [slice(first, first + step) for first in range(0, groups, step)]


def pieces(first: int, last: int, chunk: int, heads: int) -> list[slice]:
    """Return the tokens of a sequence in pieces of whole chunks."""
    step = chunk * max(AT_ONCE // (chunk * heads), 1)
    return [slice(start, min(start + step, last)) for start in range(first, last, step)]


def rate_of(gates: Gates) -> Array | None:
    """Return what multiplies the errors, (b, g, l, i, 1): beta, or with momentum the step; None where it is 1."""
    rate = gates.get("step" if "log_momentum" in gates else "beta")  # (b, g, l, i)
    return None if rate is None else rate[..., None]


def crossed(crossing: Array, state: Array) -> Array:
    """Return what the momentum adds to the state, for both (b, g, 2*d, e), one above the other."""
    xp, d = namespace(state), state.shape[-2] // 2
    return xp.concat([crossing * state[..., d:, :], xp.zeros_like(state[..., d:, :])], axis=-2)


def crossed_backward(crossing: Array, d_state: Array) -> Array:
    """Return the adjoint of `crossed`."""
    xp, d = namespace(d_state), d_state.shape[-2] // 2
    return xp.concat([xp.zeros_like(d_state[..., :d, :]), crossing * d_state[..., :d, :]], axis=-2)


def in_chunks(x: Array, size: int, axis: int) -> Array:
    """Return x with an axis of tokens cut into (chunks, size), and tokens of 0 at the end, which change nothing."""
    shape = x.shape
    chunks = -(-shape[axis] // size)
    missing = chunks * size - shape[axis]
    if missing:
        x = namespace(x).concat([x, zeros((*shape[:axis], missing, *shape[axis + 1 :]), x)], axis=axis)  # padded
    return namespace(x).reshape(x, (*shape[:axis], chunks, size, *shape[axis + 1 :]))


def turned(x: Array) -> Array:
    """Return (b, g, l, r, ...) for (b, g, r, l, ...), and the other way."""
    return namespace(x).permute_dims(x, (0, 1, 3, 2, 4, 5))


def of_tokens(x: Array, count: int, axis: int) -> Array:
    """Return the first tokens of what was cut into chunks, in one axis: the adjoint of `in_chunks`."""
    shape = x.shape
    whole = namespace(x).reshape(x, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))  # with padding
    return whole[(slice(None),) * axis + (slice(count), ...)]
