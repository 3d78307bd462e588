"""Blocks in every type that the core takes: forward, backward and token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import tree
from tests.mechanisms.sympformer.calls import BASELINES, INTEGRATORS, back, decoded, draw, run, stack

UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

CASES: tuple[dict[str, Any], ...] = (
    *({"integrator": name} for name in INTEGRATORS),
    *({"integrator": name, "mlp": "plain"} for name in BASELINES),
    {"integrator": "lie_trotter(connection='r2')", "mlp": "momentum", "look_ahead": True},
    {"integrator": "presymplectic", "oracle": "linear", "mlp": "velocity", "look_ahead": True, "start": "linear"},
    {"oracle": "linear", "start": "table", "mlp": "momentum"},
    {"integrator": "lie_trotter(connection='r2')", "oracle": "signed(ridge=0.5)", "mlp": "velocity(start='table')"},
)


@pytest.mark.skip_xp_backend("jax", reason="compiles every operation of every block; torch has the same types")
@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_block_in_every_type(options: dict[str, Any], backend: Any) -> None:
    """Three layers: what one gives in a type the next one takes. What is computed between is float32."""
    for dtype in filter(backend.has, UNITS):
        check(options, dtype, backend)


def check(options: dict[str, Any], dtype: str, backend: Any) -> None:
    def made(value: Any) -> Any:
        return backend.array(value, dtype)

    def exact(value: Any) -> Any:
        return np.asarray(backend.host(value), np.float64)

    params = tuple(tree.map_leaves(made, each) for each in stack(3, moved=0.05, **options))
    x, d_x = made(draw("x", 2, 5, 6)), made(draw("d_x", 2, 5, 6))
    state, saves = run(params, x)
    found = back(params, state, saves, d_x)
    assert {leaf.dtype for leaf in {**tree.flatten(state), **found}.values()} == {x.dtype}
    # The same numbers in float64: the tokens, and the gradients as one vector.
    others, unit = tuple(tree.map_leaves(exact, each) for each in params), UNITS[dtype]
    whole, other_saves = run(others, exact(x))
    close: dict[str, Any] = {"rtol": 0.0, "atol": 20.0 * unit * float(np.max(np.abs(whole.x)))}
    np.testing.assert_allclose(exact(state.x), whole.x, **close)
    wanted = back(others, whole, other_saves, exact(d_x))
    miss = sum(float(np.sum((exact(found[name]) - value) ** 2)) for name, value in wanted.items())
    assert miss <= (50.0 * unit) ** 2 * sum(float(np.sum(value**2)) for value in wanted.values())
    pieces, _ = decoded(params, x, (3,))
    assert {piece.dtype for piece in pieces} == {x.dtype}
    np.testing.assert_allclose(np.concatenate([exact(piece) for piece in pieces], axis=1), whole.x, **close)
