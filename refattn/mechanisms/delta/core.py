"""The public core of the linear recurrences: arguments are checked once, cast once, and handed to an implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.args import check, naming
from refattn.mechanisms.core_arguments import check_saved, implementation_of, upstream
from refattn.mechanisms.delta import definition, dense
from refattn.mechanisms.delta.implementations import chunked
from refattn.mechanisms.delta.options import GATES, check_chunk, check_eps, check_given, check_scale, hidden
from refattn.mechanisms.use_definition import backward_of_definition, defined_by
from refattn.tree import Shown
from refattn.xp import Array, namespace, zeros

IMPLEMENTATIONS = {"recurrent": dense, "chunked": chunked}

RECURRENT_UP_TO = 16
"""Tokens up to which `implementation="auto"` takes the recurrence."""

SMALL_UP_TO, SMALL = 64, 16384
"""The same for a decay of channels where the states (b, g, d, e) have fewer numbers than the second one: calls of small
arrays cost what calls cost, and halves of halves of a chunk are many."""


@dataclass(frozen=True, repr=False)
class Saved(Shown):
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    implementation
        The implementation that ran: "recurrent" or "chunked".
    state
        (b, g, d, e): the state after the last token; with momentum (b, g, 2, d, e), the state and its momentum; with
        lengths one for each sequence in place of b. For float16 and bfloat16 inputs it is float32.
    """

    implementation: str
    state: Array
    shape: tuple[int, ...]  # of the output
    like: dict[str, Array]  # the inputs by name
    key_mask: Array | None
    inner: Any


def _as_printed(options: dict[str, Any], *arrays: Array) -> str | None:
    channels = len(getattr(options.get("log_decay"), "shape", ())) == 4
    return "the paper has one decay for all channels" if channels else None


@defined_by(definition, _as_printed)
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    beta: Array | None = None,
    log_decay: Array | None = None,
    log_momentum: Array | None = None,
    step: Array | None = None,
    state: Array | None = None,
    scale: float | Array | None = None,
    qk_norm: bool = False,
    norm_eps: float = 1e-6,
    key_mask: Array | None = None,
    lengths: tuple[int, ...] | None = None,
    chunk: int = 32,
    implementation: str = "auto",
) -> tuple[Array, Saved]:
    """Read a state with queries q, after it has decayed and been written to with keys k and values v, token by token.

    What is absent is neutral: nothing but q, k and v is linear attention, with `log_decay` gated, with `beta` the delta
    rule, with both the gated delta rule (a decay of heads) or KDA (of channels), and with `log_momentum` too the
    momentum delta rule.

    `refattn show delta > delta.py` writes the definition, the gated delta rule, as one file on NumPy alone; in a block
    ``with ra.reading():`` a debugger steps through it.

    Parameters
    ----------
    q
        (b, h, n, d), float64, float32, float16 or bfloat16; the last two are computed in float32.
    k
        (b, f, n, d) with f a divisor of g: each key head serves g/f consecutive state heads.
    v
        (b, g, n, e): g is the number of states, and h is a multiple or a divisor of it.
    beta
        (b, g, n): how much of its error a token writes, in (0, 1) or (0, 2) by custom. None: nothing is predicted, and
        the value itself is written.
    log_decay
        (b, g, n), or (b, g, n, d) for the channels of keys: natural logarithm of what is kept of the state before it is
        read and written. At most 0 by custom; -inf begins a new sequence.
    log_momentum
        (b, g, n): natural logarithm of what is kept of the momentum. It needs beta, and no log_decay of channels.
    step
        (b, g, n): factor of the error that enters the momentum, 1 if None. It needs log_momentum.
    state
        (b, g, d, e), with log_momentum (b, g, 2, d, e) for the state and its momentum: before the first token, 0 if
        None. It is float32 for float16 and bfloat16 inputs, or of their dtype.
    scale
        Factor of what is read; None means 1/sqrt(d).
    qk_norm, norm_eps
        Whether queries and keys are divided by sqrt(sum x^2 + norm_eps).
    key_mask
        Boolean (b, n); False = padding: the token changes nothing, whatever it holds, and its query reads.
    lengths
        For a batch of 1, the lengths of sequences that are packed along n; `state` then has one for each in place of b.
    chunk
        How many tokens a chunk of the chunked implementation has. It changes nothing but rounding.
    implementation
        "recurrent" (token by token), "chunked" (a few products for each chunk) or "auto": what is quicker, which is the
        first for 16 tokens or fewer, and for 64 or fewer with a decay of channels and small states.

    Returns
    -------
    out : Array
        (b, max(h, g), n, e) in the dtype of the inputs. Output head o is of query head floor(o h / max(h, g)) and of
        state head floor(o g / max(h, g)).
    saved : Saved
        What `backward` reads, with `saved.implementation` and `saved.state`, the state after the last token.

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, the implementation or a device does not fit, heads do not divide, or arrays exclude
        each other.

    Notes
    -----
    The equations stand in `refattn.mechanisms.delta.dense` with their sources, those of the gated delta rule alone,
    DELTA.1 to DELTA.5, in `refattn.mechanisms.delta.definition`. Numbers that are not finite propagate; in a chunk that
    holds one they may spread through 0 * inf, also to earlier tokens of it.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = np.ones((1, 1, 3, 1))
    >>> v = np.array([1.0, 2.0, 4.0]).reshape(1, 1, 3, 1)
    >>> ra.delta.forward(q, k, v)[0].ravel()
    array([1., 3., 7.])
    >>> ra.delta.forward(q, k, v, beta=np.ones((1, 1, 3)))[0].ravel()
    array([1., 2., 4.])
    """
    gates = {"beta": beta, "log_decay": log_decay, "log_momentum": log_momentum, "step": step}
    given = check_given(q, k, v, gates, state, key_mask, lengths)
    check("qk_norm", qk_norm, bool)
    eps, size, tokens = check_eps(norm_eps), check_chunk(chunk), q.shape[2]
    by_calls = log_decay is not None and len(log_decay.shape) == 4 and math.prod(given.state_shape) < SMALL
    limit = SMALL_UP_TO if by_calls else RECURRENT_UP_TO
    chosen = implementation_of(implementation, IMPLEMENTATIONS, usual="recurrent" if tokens <= limit else "chunked")
    factor = check_scale(scale, q)
    xp = namespace(q, k, v)
    arrays = {"q": q, "k": k, "v": v, **gates, "state": state, "scale": factor}
    like = {name: x for name, x in arrays.items() if x is not None}
    shape = (q.shape[0], max(q.shape[1], v.shape[1]), tokens, v.shape[3])
    if tokens == 0:
        last = zeros(given.state_shape, given.q) if given.state is None else given.state  # as `state`
        out, inner = zeros(shape, given.q), None  # (b, h, 0, e)
    else:
        more = {"chunk": size} if chosen == "chunked" else {"moving": log_momentum is not None}
        out, last, inner = equations.active(IMPLEMENTATIONS[chosen]).forward(
            given.q,
            given.k,
            given.v,
            **given.gates,
            state=given.state,
            lengths=given.lengths,
            scale=factor,
            qk_norm=qk_norm,
            norm_eps=eps,
            **more,
        )
    return xp.astype(out, q.dtype, copy=False), Saved(chosen, last, shape, like, key_mask, inner)


@backward_of_definition
@naming("saved")
def backward(saved: Saved, d_out: Array, d_state: Array | None = None) -> dict[str, Array]:
    """Gradients of a loss with respect to the inputs of `forward`.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, max(h, g), n, e): gradient of the loss with respect to `out`.
    d_state
        Gradient with respect to `saved.state`, where the loss depends on it.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", "state" (of the state before the first token) and "scale", and of "beta", "log_decay",
        "log_momentum" and "step" those that were given, each of the shape of its argument.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device.

    Notes
    -----
    The equations stand in `refattn.mechanisms.delta.dense`. Called twice it gives the same bits.
    """
    check_saved(saved, Saved)
    q = saved.like["q"]
    d_out, d_last = upstream(q, d_out=(d_out, saved.shape), d_state=(d_state, tuple(saved.state.shape)))
    names = ("q", "k", "v", "state", "scale", *(name for name in GATES if name in saved.like))
    if saved.inner is None:
        found = {name: zeros(saved.like[name].shape, d_out) for name in names if name in ("q", "k", "v", *GATES)}
        found |= {"state": zeros(saved.state.shape, d_out) if d_last is None else d_last, "scale": zeros((), d_out)}
    else:
        found = equations.active(IMPLEMENTATIONS[saved.implementation]).backward(saved.inner, d_out, d_last)
    if saved.key_mask is not None:
        found |= {name: hidden(found[name], saved.key_mask) for name in names if name in ("k", "v", *GATES)}
    xp = namespace(q)
    dtypes = {name: getattr(saved.like.get(name), "dtype", d_out.dtype) for name in names}
    dtypes["scale"] = q.dtype
    return {name: xp.astype(found[name], dtypes[name], copy=False) for name in names}
