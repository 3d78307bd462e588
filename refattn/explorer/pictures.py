"""What is drawn on top of a page, by what the record of a mechanism says."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.mechanisms.record import Mechanism
from refattn.verify.traced import Traced

DIGITS = 6
"""Of the numbers of a picture."""


def drawn(mechanism: Mechanism, found: Traced) -> list[dict[str, Any]]:
    """Return the pictures of a run as data: those whose equations ran."""
    values = found.tensors()
    made = []
    for picture in mechanism.pictures:
        try:
            data = np.asarray(picture.of(values, found.options))
        except (KeyError, ValueError):  # of the block, of another case, or of what this run does not have
            continue
        kind = picture.kind
        if kind == "eigenvalues":
            found_values = np.linalg.eigvals(data)
            data, kind = np.stack((found_values.real, found_values.imag), axis=-1).reshape(-1, 1, 2), "circle"
        elif kind == "singular":
            data, kind = np.linalg.svd(data, compute_uv=False), "bars"
        made.append({"kind": kind, "title": picture.title, "data": _rounded(data.tolist())})
    return made


def _rounded(data: Any) -> Any:
    if isinstance(data, list):
        return [_rounded(one) for one in data]
    return float(f"{data:.{DIGITS}g}") if np.isfinite(data) else None
