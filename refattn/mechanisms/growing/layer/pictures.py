"""What a page that steps through growing attention draws on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Picture
from refattn.xp import Array, namespace


def asked(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return, for each head, the gradient y^T ds y of the map by which scores come from pairs of tokens."""
    xp, y = namespace(values["GROW.augmented"]), values["GROW.augmented"][0, ...]
    return xp.matrix_transpose(y) @ values["dSM.2"][0, ...] @ y


def present(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return, for each head, the map w_q w_k^T that there is."""
    w_q, w_k = values["params.w_q"], values["params.w_k"]
    return w_q @ namespace(w_q).matrix_transpose(w_k)


PICTURES = (
    Picture("matrix", "The weights w_ij of head 0, token i a row.", lambda values, options: values["SM.4"][0, 0, ...]),
    Picture("singular", "Singular values of w_q w_k^T, by head: as many as heads are wide.", present),
    Picture("singular", "Those of the gradient with respect to that map: what a wider head could use.", asked),
)
