"""What a stored case says beside its values, against what the package says today: options, inputs, and every budget.

The sums of a set protect against accidents, not against whoever writes both the files and the manifest. So inputs are
compared bit by bit in every type, facts exactly, and budgets up to `FACTOR`: their noise depends on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTOR = 4.0
"""How much larger or smaller a stored budget may be than the one of today."""

ROUNDINGS = 8.0
"""By how many times its noise the two derivations of an equation may differ, whatever they do today."""

Stored = Mapping[str, tuple[str, NDArray[Any]]]


def first_difference(
    entry: Mapping[str, Any], arrays: Stored, entry_now: Mapping[str, Any], arrays_now: Stored
) -> str | None:
    """Return the first field or array of a stored case that is not what it is today, None where all are."""
    for field in ("kind", "options", "inputs", "dtypes"):
        if entry[field] != entry_now[field]:
            return f"{field}: {entry_now[field]} now, {entry[field]} in the set"
    for field in ("equations", "results"):
        if differ := set(entry[field]) ^ set(entry_now[field]):
            return f"{field}: not in both: {', '.join(sorted(differ))}"
        for name, facts in entry[field].items():
            if (found := _facts(facts, entry_now[field][name])) is not None:
                return f"{field}.{name}.{found}"
    if differ := set(arrays) ^ set(arrays_now):
        return f"arrays: not in both: {', '.join(sorted(differ))}"
    for name, (dtype, x) in arrays.items():
        dtype_now, y = arrays_now[name]
        if dtype != dtype_now or x.shape != y.shape:
            return f"{name}: {dtype_now} {y.shape} now, {dtype} {x.shape} in the set"
        kind = name.partition("/")[0]
        if kind == "granted" and not _close(x, y):
            return f"{name}: another budget than the one of today"
        if kind not in ("granted", "equations", "results") and x.tobytes() != y.tobytes():
            return f"{name}: the generator gives other numbers"
    return None


def _facts(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for field, value in now.items():
        told = f"{field}: {value} now, {stored.get(field)} in the set"
        if field in ("noise", "bias"):
            pairs = [(stored[field], value)] if field == "noise" else [(stored[field].get(k), value[k]) for k in value]
            if any(x is None or not _close(np.asarray(x), np.asarray(y)) for x, y in pairs):
                return told
        elif field == "differs":
            # Two derivations differ by some rounding errors, which machines have of their own.
            if not stored[field] <= FACTOR * (value + ROUNDINGS * now["noise"]):
                return told
        elif stored.get(field) != value:
            return told
    return None


def _close(x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Tell whether budgets are the same but for what a machine may change."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    largest = np.max(np.where(np.isfinite(y), y, 0.0), initial=0.0)
    # What is nothing beside the largest budget may be anything as small.
    small = 1e-3 * largest
    return bool(np.all((x == y) | ((x <= FACTOR * y + small) & (y <= FACTOR * x + small))))
