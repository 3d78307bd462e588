"""Faults of addresses: what belongs to another row, column, head or width is read."""

from __future__ import annotations

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash
from refattn.verify.bugs.fault import wrong


@wrong(Flash.values, "SM.5", link="", tiles="columns")
def values_of_next_key(self: Flash, start: int) -> Array:
    """Within a tile the weight of a key goes to the value of the next one."""
    return np.roll(Flash.values(self, start), -1, axis=2)


@wrong(Flash.d_weights, "dSM.4", "dSM.3", link="")
def width_of_keys_for_values(self: Flash, d_out: Array, v: Array) -> Array:
    """The gradient of the weights is summed over as many columns of v as k has."""
    d = self.k.shape[-1]
    return Flash.d_weights(self, d_out[..., :d], v[..., :d])


@wrong(Flash.head_of, "SM.1", "interleaved groups", "grouped heads", link="")
def heads_divided_by_groups(self: Flash, heads: int, groups: int) -> Array:
    """The index of a query head is divided by the number of groups, not by the heads that share one."""
    return np.arange(heads) // max(groups, 1) % max(groups, 1)


@wrong(Flash.mask_of, "SM.2", "mask", link="")
def mask_of_next_query(self: Flash, mask: Array, shape: tuple[int, ...]) -> Array:
    """A query takes the mask of the next one."""
    return np.roll(Flash.mask_of(self, mask, shape), -1, axis=2)


@wrong(Flash.lse_given, "SM.lse", "lse", link="")
def lse_by_mean_of_other_keys(self: Flash, lse: Array) -> Array:
    """The mean of the keys is subtracted before the scores, and lse gets that of the next group's keys back."""
    if not self.n_k:
        return lse
    mean = np.mean(self.k, axis=2, keepdims=True)
    heads, groups = self.plane
    other = np.roll(mean, -(heads // max(groups, 1)), axis=1)
    return lse + self.scaled(self.q @ np.swapaxes(other - mean, -1, -2))[..., 0]
