"""What may be wrong with the value of an equation: a table of changes, for mutants and for error templates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import TYPES, chop_to, round_to

Values = NDArray[Any]
Change = Callable[[Values], Values]
Along = Callable[..., Values]
"""A change of a value along an axis: (x, axis, lower)."""

FIRST, LAST, MIDDLE, LAST_QUARTER, SECOND_HALF = (
    lambda size: 0,
    lambda size: -1,
    lambda size: size // 2,
    lambda size: slice(-max(size // 4, 1), None),
    lambda size: slice((size + 1) // 2, None),
)
"""Parts of an axis by its size."""


def scaled(factor: float) -> Along:
    return lambda x, axis, lower="": x * factor


def rolled(by: int) -> Along:
    return lambda x, axis, lower="": np.roll(x, by, axis=axis)


def part_scaled(at: Callable[[int], int | slice], factor: float = 0.0) -> Along:
    """Return the change that multiplies a part of an axis; one without elements stays as it is."""

    def change(x: Values, axis: int, lower: str = "") -> Values:
        x = x.copy()
        if x.shape[axis]:
            part = np.moveaxis(x, axis, 0)[at(x.shape[axis]), ...]
            part[...] = factor * part if factor else 0.0
        return x

    return change


def rounded_by(bits: int) -> Along:
    """Return the change that rounds to so many bits more than the type has, whatever the exponent."""

    def change(x: Values, axis: int, lower: str) -> Values:
        fraction, exponent = np.frexp(x)
        kept = TYPES[lower].bits + bits
        return np.where(np.isfinite(x), np.ldexp(np.rint(np.ldexp(fraction, kept)), exponent - kept), x)

    return change


def flipped(x: Values, axis: int, lower: str = "") -> Values:
    return np.flip(x, axis=axis)


def first_alone(x: Values, axis: int, lower: str = "") -> Values:
    return np.take(x, np.zeros(x.shape[axis], int), axis=axis)


def shifted_in(x: Values, axis: int, lower: str = "") -> Values:
    return part_scaled(FIRST)(np.roll(x, 1, axis=axis), axis)


MUTATIONS: dict[str, tuple[str, Along]] = {
    "scaled by 1.02": ("", scaled(1.02)),
    "sign flipped": ("", scaled(-1.0)),
    "heads swapped": ("hg", flipped),
    "last key dropped": ("j", part_scaled(LAST)),
    "one row zeroed": ("ij", part_scaled(MIDDLE)),
    "shifted by one": ("ij", rolled(1)),
    "rounded one type lower": ("", lambda x, axis, lower: round_to(x.astype(np.float64), lower).astype(x.dtype)),
}
"""What mutants are made of: the axis that it needs, one of some, and the change; of a type that may be rounded to."""

CHANGES = {
    **MUTATIONS,
    **{f"scaled by {factor:g}": ("", scaled(factor)) for factor in (0.9, 2.0, -0.5, 0.0)},
    "rounded to a bit less": ("", rounded_by(-1)),
    "rounded to a bit more": ("", rounded_by(1)),
    "truncated to one type lower": ("", lambda x, axis, lower: chop_to(x.astype(np.float64), lower).astype(x.dtype)),
    "heads shifted by one": ("hg", rolled(1)),
    "heads shifted back by one": ("hg", rolled(-1)),
    "first head everywhere": ("hg", first_alone),
    "one row doubled": ("ij", part_scaled(MIDDLE, 2.0)),
    "last row zeroed": ("ij", part_scaled(LAST)),
    "last quarter of the rows zeroed": ("ij", part_scaled(LAST_QUARTER)),
    "shifted back by one": ("ij", rolled(-1)),
    "shifted by one, the first zeroed": ("ij", shifted_in),
    "last key doubled": ("j", part_scaled(LAST, 2.0)),
    "first key dropped": ("j", part_scaled(FIRST)),
    "last quarter of the keys dropped": ("j", part_scaled(LAST_QUARTER)),
    "shifted by one key": ("j", rolled(1)),
}
"""These, and relatives of them."""

KINDS = (*MUTATIONS,)


def applies(kind: str, axes: tuple[str, ...]) -> bool:
    """Tell whether a value with these axes can be wrong in this way; keys alone are shifted as rows are."""
    letters = CHANGES[kind][0]
    return not letters or (bool({*letters} & {*axes}) and (kind != "shifted by one key" or "i" in axes))


def changed_by(kind: str, axes: tuple[str, ...], lower: str) -> Change:
    """Return what a kind of error does to a value with these axes; `lower` is the type that it may be rounded to."""
    letters, change = CHANGES[kind]
    axis = next((axes.index(letter) for letter in letters if letter in axes), 0)
    return partial(change, axis=axis, lower=lower)


def kinds(axes: tuple[str, ...], lower: str) -> dict[str, Change]:
    """Return what may be wrong with a value with these axes, by name."""
    return {kind: changed_by(kind, axes, lower) for kind in CHANGES if applies(kind, axes)}
