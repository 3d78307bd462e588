"""What a growth step has to know of a batch, gathered with fixed weights; in float64, whatever the block computes in.

With y the augmented tokens of a sequence b (GROW.augmented), N is the gradient of the loss with respect to the kernel
of a head (dGROW.1), and C the sum of all C_b = y_b^T y_b (GROW.2). A change E of the kernel changes the scores of a
sequence by y E y^T, whose square is <E, C_b E C_b>; that of all scores is <E, T(E)>, the metric of growth, with::

    T(Z) = sum_b C_b Z C_b                  with a mask: sum_b y_b^T [mask * (y_b Z y_b^T)] y_b

A mask leaves hidden pairs out. N and C are enough for the Kronecker metric and can be taken over any number of batches;
T itself needs the sequences, which `keep` keeps. Nothing of size queries x keys is made where the block ran in tiles,
but for masks that were given.

Axes: b batch, n token, in width of y, h head.

Source: L. Burgund, Attention Growing Networks, section 2, with weights that several sequences share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from refattn import equations
from refattn.args import check
from refattn.mechanisms.growing import core, dense
from refattn.mechanisms.growing.layer import block
from refattn.ops.masks import allowed_in_tile, causal_offset
from refattn.xp import Array, backend, namespace, sum_wide

CHUNK = 2**22
"""Elements of the largest temporary over several sequences."""

ROWS = 256
"""Queries whose scores are held at once where a mask is in force."""


@dataclass(frozen=True)
class Kept:
    """Some sequences of a batch."""

    tokens: Array  # (b, n, in): y
    gradient: Array  # (b, h, in, in): N of each sequence
    mask: Array | None  # as the core takes it
    offset: int | None  # of the causal mask

    def allowed(self, rows: tuple[int, int]) -> Array | None:
        """Return which of some rows may attend which keys, or None where all may."""
        return allowed_in_tile(self.mask, self.offset, rows, (0, self.tokens.shape[1]), self.tokens)


@dataclass(frozen=True)
class Statistics:
    """The statistics of some batches for one block.

    Attributes
    ----------
    gradient
        (h, in, in): N.
    gram, gram_keys
        (in, in): the sum of C_b, and the same with keys whose mean over the sequence was subtracted.
    sequences, pairs
        How many, and how many scores of all heads they have that no mask hides.
    masked
        Whether some score is hidden.
    kept
        The sequences themselves, where they were kept.
    square
        The sum of the squares of the functional gradient.
    """

    gradient: Array
    gram: Array
    gram_keys: Array
    sequences: int
    pairs: float
    masked: bool
    kept: tuple[Kept, ...]
    square: float

    @property
    def remembered(self) -> tuple[Kept, ...]:
        """What was kept; ValueError where nothing was."""
        if not self.kept:
            raise ValueError("statistics: got some without their sequences, needs those of observe(..., keep=True)")
        return self.kept


def observe(params: block.Params, saved: block.Saved, d_state: block.State, *, keep: bool = False) -> Statistics:
    """Return the statistics of one call of the block.

    Parameters
    ----------
    params, saved, d_state
        As for the backward of the block: the gradient of the loss with respect to the state that it returned. Batches
        that are merged have to be parts of one loss.
    keep
        Whether the sequences are kept, for what asks for T itself.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong class, shape or dtype, or the library does not compute in float64.
    """
    check("params", params, block.Params)
    check("saved", saved, block.Saved)
    check("d_state", d_state, block.State)
    if not backend(saved.tokens).float64():
        raise ValueError(
            f"params: got {backend(saved.tokens).name}, which is not set to compute in float64; needs that"
        )
    xp = namespace(saved.tokens)
    tokens = xp.astype(saved.tokens, xp.float64, copy=False)
    b, n, _ = tokens.shape
    d_attended = equations.active(block).attended_backward(params, saved, d_state)
    gradient, square = core.contract_and_square(saved.core, d_attended, tokens, total=not keep)
    mask, causal = saved.allowed
    kept = Kept(tokens, gradient, mask, causal_offset(causal, n, n))
    gram = equations.active(dense).gram(tokens)
    gram_keys = dense.gram(tokens - xp.mean(tokens, axis=1, keepdims=True))
    heads = params.config.heads
    pairs = _visible(kept, heads)
    masked = pairs < float(b * heads * n * n)
    gradient = xp.sum(gradient, axis=0) if keep else gradient
    return Statistics(gradient, gram, gram_keys, b, pairs, masked, (kept,) if keep else (), float(square))


def merge(a: Statistics, b: Statistics) -> Statistics:
    """Return the statistics of two batches together, both under the same weights and of the same loss."""
    check("a", a, Statistics)
    check("b", b, Statistics)
    if bool(a.kept) != bool(b.kept):
        raise ValueError("b: got statistics of which not all or not none are kept, needs them as those of a")
    sums = {
        field.name: getattr(a, field.name) + getattr(b, field.name) for field in fields(a) if field.name != "masked"
    }
    return Statistics(**sums, masked=a.masked or b.masked)


def apply_metric(statistics: Statistics, z: Array, *, center_keys: bool = False) -> Array:
    """Return T(Z) for Z (h, in, in); with `center_keys` the keys' side has the centred tokens, unmasked."""
    if center_keys and statistics.masked:
        raise ValueError("center_keys: got True with a mask, needs False: hidden keys have no mean")
    total = 0.0 * z
    for part in _parts(statistics, z):
        xp, tokens = namespace(z), part.tokens
        if part.mask is None and part.offset is None:
            keys = tokens - xp.mean(tokens, axis=1, keepdims=True) if center_keys else tokens
            left, right = (xp.matrix_transpose(x) @ x for x in (tokens, keys))
            total = total + xp.sum(left[:, None, :, :] @ z @ right[:, None, :, :], axis=0)
            continue
        for own, scores in _scores(part, z):
            total = total + xp.sum(xp.matrix_transpose(own) @ (scores @ tokens[:, None, :, :]), axis=0)
    return total


def change_of_scores(statistics: Statistics, z: Array) -> float:
    """Return <Z, T(Z)> for Z (h, in, in): the sum of the squares of the scores' change, which is never negative."""
    return sum(float(sum_wide(scores * scores)) for part in _parts(statistics, z) for _, scores in _scores(part, z))


def _parts(statistics: Statistics, z: Array) -> Iterator[Kept]:
    """Yield the sequences that were kept, as many at once as memory shall hold."""
    for kept in statistics.remembered:
        b, n, width = kept.tokens.shape
        size = max(1, CHUNK // (z.shape[0] * max(width * width, min(n, ROWS) * n)))
        for first in range(0, b, size):
            at = slice(first, min(first + size, b))
            mask = kept.mask
            if mask is not None and mask.shape[0] != 1:
                mask = mask[at, ...]
            yield replace(kept, tokens=kept.tokens[at, ...], mask=mask)


def _scores(kept: Kept, z: Array) -> Iterator[tuple[Array, Array]]:
    """Yield rows of the tokens (b, 1, i, in) and of the visible scores y Z y^T (b, h, i, j), block by block."""
    xp, everything = namespace(z), kept.tokens[:, None, :, :]
    for first in range(0, kept.tokens.shape[1], ROWS):
        rows = (first, min(first + ROWS, kept.tokens.shape[1]))
        own = everything[..., slice(*rows), :]
        scores = own @ z @ xp.matrix_transpose(everything)
        allowed = kept.allowed(rows)
        yield own, scores if allowed is None else xp.where(allowed, scores, 0.0)


def _visible(kept: Kept, heads: int) -> float:
    """Return how many scores of all heads no mask hides."""
    b, n, _ = kept.tokens.shape
    xp = namespace(kept.tokens)
    count = 0.0
    for first in range(0, n, ROWS):
        rows = (first, min(first + ROWS, n))
        allowed, whole = kept.allowed(rows), b * heads * (rows[1] - rows[0]) * n
        # An element of an axis of one stands for as many scores as that axis has.
        each = whole if allowed is None else whole // math.prod(allowed.shape)
        count += each * (1.0 if allowed is None else float(sum_wide(xp.astype(allowed, xp.float64))))
    return count
