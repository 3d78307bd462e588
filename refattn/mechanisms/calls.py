"""Designed calls of a core that maps q, k and v: shapes by a letter each, and a mask where there is one."""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.record import Case, Input


def qkv(
    name: str,
    kind: str,
    purpose: str,
    *,
    b: int = 2,
    h: int = 4,
    g: int | None = None,
    n_q: int = 37,
    n_k: int | None = None,
    d: int = 16,
    e: int | None = None,
    logits: float = 1.0,
    mask: Input | None = None,
    **options: Any,
) -> Case:
    """Return a case: q (b, h, n_q, d) of the size `logits`, k (b, g, n_k, d), v (b, g, n_k, e), and the options.

    g is h, n_k is n_q and e is d where they are not given.
    """
    g, n_k, e = h if g is None else g, n_q if n_k is None else n_k, d if e is None else e
    inputs = {
        "q": Input((b, h, n_q, d), "normal", {"scale": logits}),
        "k": Input((b, g, n_k, d)),
        "v": Input((b, g, n_k, e)),
    }
    if mask is not None:
        inputs["mask"] = mask
    return Case(name, kind, inputs, options, purpose)


def mask(*shape: int, keep: float = 0.7) -> Input:
    """Return a mask of which about so many pairs may attend."""
    return Input(shape, "mask", {"keep": keep})
