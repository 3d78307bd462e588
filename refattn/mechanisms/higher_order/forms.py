"""The forms, and which of them is the quickest: as measured on one core of a CPU."""

from __future__ import annotations

from refattn import equations
from refattn.mechanisms.higher_order import chunked, dense, linear, recurrent, tiled
from refattn.mechanisms.higher_order.kernel import Kernel
from refattn.mechanisms.higher_order.options import Options
from refattn.mechanisms.record import Unsupported
from refattn.xp import Array

FORMS = {"dense": dense, "tiled": tiled, "linear": linear, "chunked": chunked, "recurrent": recurrent}

DENSE_UP_TO = 128 * 128
"""Scores of one head up to which `form="auto"` takes the dense form."""


def choose(form: str, options: Options, offset: int | None, carries: bool, q: Array, k: Array, v: Array) -> str:
    """Return the form to run for arrays of these shapes; `carries` tells whether a state comes in."""
    if not isinstance(form, str) or form not in ("auto", *FORMS):
        raise ValueError(f"form: got {form!r}, needs one of auto, {', '.join(FORMS)}")
    if form == "linear" and offset is not None:
        raise Unsupported('form: got "linear" with a causal mask, needs "chunked" or "recurrent", or another form')
    if form in ("chunked", "recurrent") and offset is None:
        raise Unsupported(f'form: got "{form}" without a causal mask, needs "linear" or another form')
    if carries and form not in ("auto", "chunked", "recurrent"):
        raise Unsupported(f'form: got "{form}" with a state, needs "chunked" or "recurrent"')
    if carries:
        return "chunked" if form == "auto" else form
    # An empty plane has no tiles and no chunks; a trace shows whole equations.
    if 0 in (*q.shape[:3], k.shape[2]):
        return "dense"
    if form != "auto":
        return form
    if equations.is_active() or q.shape[2] * k.shape[2] <= DENSE_UP_TO:
        return "dense"
    if _pairs_are_quicker(options, offset, q, k, v):
        return "tiled"
    return "linear" if offset is None else "chunked"


def _pairs_are_quicker(options: Options, offset: int | None, q: Array, k: Array, v: Array) -> bool:
    """Tell whether tiles of pairs take less time than features do, as measured on one core for widths of 16 to 64.

    A pair costs about as much as a feature of a token.
    """
    (queries, d), (keys, e) = q.shape[2:], v.shape[2:]
    features = Kernel(options, d).features
    pairs = queries * keys - (0 if offset is None else min(queries, keys) ** 2 // 2)
    per_token = 1.1 * features + 150 if offset is None else 1.2 * features
    return pairs * (d + e) / (2.0 * e) < per_token * (queries + keys) / 2.0 if e else True
