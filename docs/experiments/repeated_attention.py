"""Attention again and again within a layer: the block of Koopman attention with an operator that is the identity.

A huge ridge that draws the operator to the identity leaves it there: every update is then attention of the last query
among the same keys and values. So it costs what the Koopman block does, has the same parameters, and lacks the one
thing that the comparison is about.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.koopman.layer import block
from refattn.mechanisms.koopman.layer.block import (  # noqa: F401  (what a block's module has)
    Config,
    Params,
    Saved,
    State,
    backward,
    init,
)

RIDGE = 1e6
"""The operator differs from the identity by about one in so many."""


def forward(params: Params, state: State, context: Context) -> tuple[State, Saved]:
    """Return the next state and what `backward` reads, for a configuration with tau = 1."""
    fit = params.config.families["fit"]
    if fit.tau != 1.0:
        raise ValueError(f"tau: got {fit.tau}, needs 1, the ridge that draws the operator to the identity")
    ridge = np.asarray(RIDGE, dtype=state.x.dtype)
    return projections.forward(block, params, state, replace(context, draws={"ridge": ridge}))
