"""The numbers of the flow that a block learns, per head, and where scores of keys start.

Equations (the largest slope of the coupling is 1)::

    [GE.anchor_strength]  mu = log(1 + exp(r_mu))           with classes one for each, nu
    [GE.node_strength]  mu_j = nu of the class of node j    with classes alone
    [GE.coupling_strength]  kappa = log(1 + exp(r_kappa))
    [GE.safe_step]  step = 1 / (mu + 2 kappa)               not with a step that is the configuration's or learned
    [GE.learned_step]  step = log(1 + exp(r_step))          a step that is learned
    [GE.learned_tau]  tau = log(1 + exp(r_tau))             a threshold that is learned
    [GE.learned_start]  b_j = 1 / (1 + exp(-k_j . u))       "kk" in state "token": where scores start

Adjoints::

    [dGE.coupling_strength]  dkappa = dkappa of the core - 2 step^2 dstep
    [dGE.node_strength]  dnu = sum of dmu_j over the nodes of the class
    [dGE.anchor_strength]  dmu = dmu of the core - step^2 dstep   with classes: dnu
    [dGE.raw_mu]  dr_mu = dmu sigmoid(r_mu)
    [dGE.raw_kappa]  dr_kappa = dkappa sigmoid(r_kappa)
    [dGE.raw_step]  dr_step = sigmoid(r_step) dstep
    [dGE.raw_tau]  dr_tau = dtau sigmoid(r_tau)
    [dGE.learned_start]  dl = db b (1 - b)                  with l = k_j . u
    [dGE.probe]  du = sum_j dl_j k_j

A step that follows mu is none of a block with classes. Coefficients of a polynomial, and how much levels count, go to
the core as they are.

Parameters that nodes of one class share are a table of a number for each class, from which nu or a start is taken, or
of one for each pair of classes, bias_ij = table[class of i, class of j]. The gradient of a table is that of what was
taken from it, added up by class.

Axes: b batch, i and j tokens, j one that is a node, h head, g key/value head, d width of a head, p and r classes.

Source: that of the block; F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), for the map of
nodes to parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

from refattn.args import check_arrays
from refattn.mechanisms.context import Context
from refattn.mechanisms.graph_energy.layer.config import Config, Params, check_bounded
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, arange, concrete, dtype_name, namespace


def numbers(params: Params, context: Context) -> dict[str, Array | None]:
    """Return the numbers of the flow that are learned, by name; None where they are not."""
    config = params.config
    check_bounded(config, context)
    mu = tau = step = None
    if params.raw_mu is not None:
        mu = _softplus(params.raw_mu)  # [GE.anchor_strength]
    if config.classes is not None:
        mu = nodes_forward(mu, classes_of(config, context))  # (h, j) [GE.node_strength]
    kappa = _softplus(params.raw_kappa)  # (h) [GE.coupling_strength]
    if params.raw_step is not None:
        step = _softplus(params.raw_step)  # (h) [GE.learned_step]
    elif config.step is None:
        step = 1.0 / (2.0 * kappa if mu is None else mu + 2.0 * kappa)  # (h) [GE.safe_step]
    if params.raw_tau is not None:
        tau = _softplus(params.raw_tau)  # (h) [GE.learned_tau]
    as_they_are = {"coefficients": params.coefficients, "level_logits": params.level_logits}
    return {"mu": mu, "kappa": kappa, "step": step, "tau": tau, **as_they_are}


def numbers_backward(
    params: Params, classes: Array | None, learned: Mapping[str, Array | None], d: Mapping[str, Array]
) -> dict[str, Array | None]:
    """Return the gradients of parameters, by their names, for those of the numbers that `numbers` returned.

    `classes` are those of the nodes.
    """
    found: dict[str, Array | None] = {name: d.get(name) for name in ("coefficients", "level_logits")}
    # forward: step = 1 / (mu + 2 kappa)
    bound = None if params.raw_step is not None else learned["step"]  # (h): that follows mu and kappa
    moved = 0.0 if bound is None else bound * bound * d["step"]  # (h): step^2 dstep
    d_kappa = d["kappa"] - 2.0 * moved  # (h) [dGE.coupling_strength]
    # forward: kappa = log(1 + exp(raw_kappa)), and so mu
    d_raw_kappa = d_kappa * _sigmoid(params.raw_kappa)  # (h) [dGE.raw_kappa]
    found["raw_kappa"] = d_raw_kappa
    if params.raw_mu is not None:
        d_nodes = d["mu"]  # of the core, (h, j) or without classes (h)
        if params.config.classes is not None:
            # forward: mu = nu[classes]
            d_nodes = nodes_backward(d_nodes, classes, params.config.classes)  # (h, p) [dGE.node_strength]
        d_mu = d_nodes - moved  # [dGE.anchor_strength]
        d_raw_mu = d_mu * _sigmoid(params.raw_mu)  # [dGE.raw_mu]
        found["raw_mu"] = d_raw_mu
    # forward: step = log(1 + exp(raw_step)), and so tau
    if params.raw_step is not None:
        d_raw_step = d["step"] * _sigmoid(params.raw_step)  # (h) [dGE.raw_step]
        found["raw_step"] = d_raw_step
    if params.raw_tau is not None:
        d_raw_tau = d["tau"] * _sigmoid(params.raw_tau)  # (h) [dGE.raw_tau]
        found["raw_tau"] = d_raw_tau
    return found


def starts(params: Params, keys: Array) -> Array | None:
    """Return where the scores of keys (b, g, j, d) start, where that is learned."""
    if params.probe is None:
        return None
    k_heads = repeat_heads(keys, params.config.heads)  # (b, h, j, d): copies of k
    logits = namespace(keys).sum(k_heads * params.probe[:, None, :], axis=-1)  # (b, h, j): l
    begin = _sigmoid(logits)  # (b, h, j) [GE.learned_start]
    return begin


def starts_backward(probe: Array, keys: Array, b: Array, d_start: Array) -> tuple[Array, Array]:
    """Return the gradients of keys (b, g, j, d) and of the probe, for the start b (b, h, j) and its gradient."""
    # forward: begin = sigmoid(sum(k_heads * probe))
    d_logits = d_start * b * (1.0 - b)  # (b, h, j) [dGE.learned_start]
    k_heads = repeat_heads(keys, probe.shape[0])  # (b, h, j, d): copies of k
    d_probe = namespace(keys).sum(d_logits[..., None] * k_heads, axis=(0, 2))  # (h, d) [dGE.probe]
    d_pushed = d_logits[..., None] * probe[:, None, :]  # (b, h, j, d): part of dGE.keys
    return sum_heads(d_pushed, keys.shape[1]), d_probe


def jitter_of(config: Config, context: Context) -> Array | None:
    """Return how far from their start the scores begin, from the context's draws."""
    draws = dict(context.draws or {})
    if set(draws) != ({"start"} if config.jitter else set()):
        got = ", ".join(draws) or "none"
        if config.jitter and not draws:
            raise ValueError(f'jitter: got {config.jitter} without draws, needs "start" of context.draws, or jitter=0')
        needs = '"start"' if config.jitter else "none"
        raise ValueError(f"context.draws: got {got} with jitter={config.jitter}, needs {needs}")
    return config.jitter * draws["start"] if config.jitter else None


def classes_of(config: Config, context: Context) -> Array | None:
    """Return the class of each node, or None where there are none."""
    if config.classes is None:
        return None
    positions = context.positions  # (j): it came in
    if positions is None:
        raise ValueError("classes: got some, needs context.positions (tokens,) with the class of each, or classes=None")
    if len(positions.shape) != 1:
        raise ValueError(f"context.positions: got shape {tuple(positions.shape)} with classes, needs (tokens,)")
    return positions % config.classes


def _softplus(x: Array) -> Array:
    xp = namespace(x)
    return xp.log1p(xp.exp(-xp.abs(x))) + 0.5 * (x + xp.abs(x))


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * namespace(x).tanh(0.5 * x)


# --- parameters that nodes of one class share


def nodes_forward(table: Array, classes: Array) -> Array:
    """Return what each node has, (..., n), from a table (..., p) and the classes (n,) of nodes, from 0 to p - 1."""
    _check("classes", classes, table.shape[-1], table)
    return namespace(table).take(table, classes, axis=-1)


def nodes_backward(d_nodes: Array, classes: Array, count: int) -> Array:
    """Return the gradient of a table of `count` classes."""
    return d_nodes @ _members(classes, count, d_nodes)


def pairs_forward(table: Array, rows: Array, columns: Array) -> Array:
    """Return what each pair has, (..., i, j), from a table (..., p, r), and the classes of queries and keys."""
    _check("rows", rows, table.shape[-2], table)
    _check("columns", columns, table.shape[-1], table)
    xp = namespace(table)
    return xp.take(xp.take(table, rows, axis=-2), columns, axis=-1)


def pairs_backward(d_pairs: Array, rows: Array, columns: Array, counts: tuple[int, int]) -> Array:
    """Return the gradient of a table of `counts` classes of queries and of keys."""
    xp = namespace(d_pairs)
    by_column = d_pairs @ _members(columns, counts[1], d_pairs)  # (..., i, r): summed over the keys of a class
    return xp.matrix_transpose(_members(rows, counts[0], d_pairs)) @ by_column


def _members(classes: Array, count: int, like: Array) -> Array:
    """Return 1 where a node is of a class, else 0, as (n, p)."""
    return namespace(like).astype(classes[:, None] == arange(0, count, like), like.dtype)


def _check(name: str, classes: Array, count: int, table: Array) -> None:
    xp = check_arrays(table=table, **{name: classes})
    if not xp.isdtype(classes.dtype, "integral"):
        raise TypeError(f"{name}: got dtype {dtype_name(classes)}, needs an integer one")
    if len(classes.shape) != 1:
        raise ValueError(f"{name}: got shape {tuple(classes.shape)}, needs one axis")
    if concrete(xp.all((classes >= 0) & (classes < count))) is False:
        raise IndexError(f"{name}: got a class that the table does not have, needs numbers from 0 to {count - 1}")
