"""Biases of a block: where they stand, and where there are none. Their gradients are in `test_block.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.mechanisms.sympformer.calls import draw, run, stack


def test_biases_are_those_of_their_projections() -> None:
    """They start at 0 and change nothing there; keys have none where nobody would see it."""
    given: dict[str, Any] = {"integrator": "lie_trotter", "mlp": "momentum"}
    x = draw("x", 1, 5, 6)
    (plain,), (params,) = (stack(1, moved=0.0, bias=bias, **given) for bias in (False, True))
    assert np.array_equal(run((plain,), x)[0].x, run((params,), x)[0].x)
    shapes, others = params.config.shapes(), plain.config.shapes()
    more = {"b_q", "b_v", "b_o", "shift", "shift_p", "mlp.b_in", "mlp.b_out", "mlp.shift", "mlp.shift_v"}
    assert set(shapes) - set(others) == more and shapes["mlp.b_in"] == (12,)
    moved = dataclasses.replace(params, b_o=draw("b_o", 6))
    state, saves = run((moved,), x)
    force = saves[0].attention.attended.joined @ moved.w_o + moved.b_o
    np.testing.assert_allclose(saves[0].attention.force, force, rtol=1e-13)
    assert {f"b_{name}" for name in "qkvo"} <= set(stack(2, bias=True)[1].config.shapes())
    assert not {f"b_{name}" for name in "qkvo"} & set(stack(2, bias=True, oracle="linear")[1].config.shapes())
