"""What a page that steps through softmax attention draws on top."""

from __future__ import annotations

from refattn.mechanisms.record import Picture

PICTURES = (
    Picture(
        "matrix",
        "The weights w_ij of head 0: how much token i, a row, takes of token j.",
        lambda values, options: values["SM.4"][0, 0, ...],
    ),
)
