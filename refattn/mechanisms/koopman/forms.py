"""The forms, which of them can compute what is asked for, and which of these is the quicker one."""

from __future__ import annotations

from typing import Any

from refattn import equations
from refattn.mechanisms.koopman import dense, shared
from refattn.mechanisms.koopman.options import Options
from refattn.mechanisms.record import Unsupported
from refattn.xp import Array

FORMS: dict[str, Any] = {"dense": dense, "shared": shared}

LARGEST = 2**25
"""Elements of all matrices that the dense form may hold at once; it takes a few times as much memory."""

DENSE_UP_TO = 2**12
"""Such elements up to which `form="auto"` takes the dense form."""


def choose(
    form: str, options: Options, mask: Array | None, offset: int | None, shape: tuple[int, ...], width: int
) -> str:
    """Return the form to run for scores of this shape (b, h, i, j) and points of this width."""
    if not isinstance(form, str) or form not in ("auto", *FORMS):
        raise ValueError(f"form: got {form!r}, needs one of auto, {', '.join(FORMS)}")
    if 0 in shape:
        return "dense"
    size, why = _elements(options, shape, width), _not_shared(options, mask, offset, shape)
    if form == "shared" and why is not None:
        raise Unsupported(f'form: got "shared" with {why}, or form="dense"')
    hooked = equations.is_active()  # a trace shows whole equations
    if form == "shared" or (form == "auto" and why is None and size > DENSE_UP_TO and not hooked):
        return "shared"
    if size > LARGEST:
        instead = 'needs form="shared"' if why is None else f"{why};"
        raise Unsupported(
            f"form: got {form!r} for a system for each query, with {size} elements in all, {instead} or matrices of at "
            f"most {LARGEST} elements"
        )
    return "dense"


def _not_shared(options: Options, mask: Array | None, offset: int | None, shape: tuple[int, ...]) -> str | None:
    """Return what keeps the shared form from running, and what it needs instead; None where it can run."""
    if options.updates > 1 and mask is not None and mask.shape[2] != 1:
        return "a mask that differs between queries, needs one of shape (..., 1, keys)"
    hidden = offset is not None and offset < shape[3] - 1
    if options.updates > 1 and hidden and options.fit == "stein":
        return 'fit="stein" where the future is hidden, needs fit="separable"'
    return None


def _elements(options: Options, shape: tuple[int, ...], width: int) -> int:
    """Return how many elements the matrices of the dense form have together."""
    b, h, queries, keys = shape
    if options.updates == 1:
        return 0
    transitions = options.updates - 1 if options.window is None else min(options.window, options.updates - 1)
    unknowns = (keys + (width if options.augment else 0)) * (transitions if options.fit == "stein" else 1)
    return b * h * queries * unknowns**2
