"""Decoding in pieces, through stacks of every integrator and every kind of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refattn import tree
from tests.mechanisms.sympformer.calls import BLOCK, INTEGRATORS, RECORD, decoded, draw, run, stack, told

TOKENS = 11
REDUCED = ("exponential_midpoint", "ab2")
MOVING: dict[str, Any] = {"look_ahead": True, "start": "linear", "mlp": "velocity"}
LIE_TROTTER = ("lie_trotter", "lie_trotter(connection='h1')", "lie_trotter(connection='r2')")
STACKS: tuple[dict[str, Any], ...] = (
    *({"integrator": name, "oracle": oracle, **MOVING} for name in INTEGRATORS for oracle in ("softmax", "linear")),
    *({"integrator": name, "oracle": oracle, **MOVING} for name in LIE_TROTTER for oracle in ("softmax", "signed")),
    *({"integrator": "classical", "oracle": oracle, "mlp": "plain"} for oracle in ("softmax", "linear", "signed")),
    *({"integrator": name, "oracle": "reduced", "normalise": "none", "mlp": "none"} for name in REDUCED),
    {"integrator": "lie_trotter", "oracle": "linear", "mlp": "momentum", "start": "table"},
    {"integrator": "lie_trotter", "mlp": "velocity(ratio=2, start='table')"},
)


@pytest.mark.parametrize("options", STACKS, ids=str)
def test_pieces_give_the_whole(options: dict[str, Any]) -> None:
    """Layers hand momenta, velocities and what they remember on; the first piece is of several tokens."""
    params, x = stack(3, **options), draw("x", 2, TOKENS, 6)
    pieces = np.concatenate(decoded(params, x, (4, 5, 6))[0], axis=1)
    np.testing.assert_allclose(pieces, run(params, x)[0].x, rtol=1e-10, atol=1e-11)


def test_the_past_of_linear_attention_does_not_grow() -> None:
    params = stack(2, oracle="linear")
    sizes = []
    for n in (5, TOKENS):
        caches = decoded(params, draw("x", 1, n, 6), (2,))[1]
        sizes.append(sum(leaf.size for leaf in tree.flatten({"caches": caches}).values()))
    assert sizes[0] == sizes[1]


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"oracle": "linear", "start": "linear"},
    {"integrator": "strang", "start": "table"},
    {"integrator": "strang", "oracle": "linear", "start": "table"},
    {"integrator": "lie_trotter(connection='r2')", "mlp": "momentum"},
    {"integrator": "classical", "mlp": "plain"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_cache_that_was_stored_goes_on(options: dict[str, Any], tmp_path: Path) -> None:
    """Its arrays say everything: how many tokens there were stands in them, whatever the template."""
    assert RECORD.stream is not None
    (params,), x = stack(1, **options), draw("x", 2, TOKENS, 6)
    start = RECORD.stream.start(params, 2)
    context = told((params,), x[:, :7])
    _, cache = RECORD.stream.prefill(params, start, BLOCK.start(params, x[:, :7], context), context)
    path = tmp_path / "cache.safetensors"
    save_file(tree.flatten(cache), path)
    stored = tree.unflatten(start, load_file(path))
    context = told((params,), x[:, 7:], first=7)
    state = BLOCK.start(params, x[:, 7:], context)
    found, expected = (RECORD.stream.prefill(params, each, state, context)[0].x for each in (stored, cache))
    assert np.array_equal(found, expected)
    np.testing.assert_allclose(found, run((params,), x)[0].x[:, 7:], rtol=1e-10, atol=1e-11)
