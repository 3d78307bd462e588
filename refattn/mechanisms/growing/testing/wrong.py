"""Plausible wrong readings: those of softmax attention, and one of the scale.

Each has the signature of the core without `implementation` and returns (out, lse). Verification has to tell them from
the core.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.growing import core
from refattn.mechanisms.softmax.testing.wrong import WRONG as OF_SOFTMAX
from refattn.mechanisms.wrong import Changed, conventions
from refattn.xp import Array


def _core(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, saved = core.forward(q, k, v, **options)
    return out, saved.lse


# 1/sqrt(d) of the width that there is, whatever scale is stored: so a growth would change all scores.
scale_of_the_width = Changed(_core, lambda given: {"scale": None})

WRONG = {
    **OF_SOFTMAX,
    **conventions({"the scale follows the width": scale_of_the_width}, ("lse",)),
}
