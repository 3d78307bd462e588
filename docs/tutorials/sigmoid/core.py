"""The public core: what every core shares checks and casts the arguments; `dense` computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.entry import check_saved, enter, form_of, returned, upstream
from refattn.ops.masks import allowed_pairs
from refattn.xp import Array

from . import dense

FORMS = {"dense": dense}


@dataclass(frozen=True)
class Saved:
    """What `backward` reads."""

    like: Array
    inner: Any
    shape: tuple[int, ...]


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    causal: Any = False,
    scale: float | None = None,
    form: str = "auto",
) -> tuple[Array, Saved]:
    """Return out (b, h, i, e) of q (b, h, i, d), k (b, g, j, d), v (b, g, j, e), and what `backward` reads."""
    call = enter(q, k, v, mask=mask, causal=causal)
    chosen = form_of(form, FORMS, usual="dense", plane=call.plane)
    usual = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    allowed = allowed_pairs(call.mask, call.offset, *call.plane[2:], call.q)
    out, inner = equations.active(FORMS[chosen]).forward(call.q, call.k, call.v, allowed, usual)
    return call.back(out), Saved(q, inner, tuple(out.shape))


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v."""
    check_saved(saved, Saved)
    (d_out,) = upstream(saved.like, d_out=(d_out, saved.shape))
    return returned(equations.active(dense).backward(saved.inner, d_out), "qkv", saved.like)
