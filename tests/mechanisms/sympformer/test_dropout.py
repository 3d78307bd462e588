"""Dropout with given masks: gradients, what each mask multiplies, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Context
from refattn.mechanisms import softmax
from refattn.ops.heads import merge_heads
from tests.mechanisms.sympformer.calls import RECORD, check_gradients, draw, run, stack

SHAPES = {"force": (2, 5, 6), "velocity": (2, 1, 6), "mlp": (2, 5, 1), "weights": (2, 2, 5, 5)}


def masks(*names: str) -> dict[str, Any]:
    return {name: 2.0 * (draw(f"keep {name}", *SHAPES[name]) < 0.4) for name in names}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("force velocity mlp", {}),
        ("force velocity mlp", {"integrator": "strang", "mlp": "momentum", "bias": True}),
        ("force velocity", {"oracle": "linear", "integrator": "ab2", "mlp": "none"}),
        ("force mlp weights", {"integrator": "classical", "mlp": "plain"}),
        ("force", {"integrator": "lie_trotter", "mlp": "none", "oracle": "signed"}),
    ],
)
def test_gradients_with_dropout_agree(names: str, options: dict[str, Any]) -> None:
    params, x, keep = stack(2, **options), draw("x", 2, 5, 6), masks(*names.split())
    check_gradients(params, Context(causal=True, draws=keep))
    for name in keep:
        assert np.any(run(params, x, Context(causal=True, draws={name: keep[name]}))[0].x - run(params, x)[0].x)


def test_what_the_masks_multiply() -> None:
    (params,) = stack(1, integrator="classical", mlp="plain")
    x, keep = draw("x", 2, 5, 6), masks("weights", "force", "mlp")
    state, saves = run((params,), x, Context(causal=True, draws=keep))
    attended = saves[0].attention.attended
    by_head, _ = softmax.forward(*attended.qkv, causal=True, keep=keep["weights"])
    moved = x + keep["force"] * (merge_heads(by_head) @ params.w_o)
    np.testing.assert_allclose(state.x, moved + keep["mlp"] * (saves[0].mlp.active @ params.mlp.w_out), rtol=1e-13)


def test_masks_of_ones_change_nothing() -> None:
    params, x = stack(2, mlp="momentum"), draw("x", 2, 5, 6)
    ones = {name: np.ones((1, 1, 1)) for name in ("force", "velocity", "mlp")}
    assert np.array_equal(run(params, x, Context(causal=True, draws=ones))[0].x, run(params, x)[0].x)


@pytest.mark.parametrize(
    ("draws", "options", "message"),
    [
        (
            {"weights": np.ones((1, 1, 5, 5))},
            {},
            "got 'weights', a block of this configuration takes force, velo",
        ),
        ({"mlp": np.ones((1, 1, 1))}, {"mlp": "none"}, "got 'mlp', a block of this configuration takes force"),
        ({"force": np.ones((5, 6))}, {}, r"got shape \(5, 6\), needs one that broadcasts to \(2, 5, 6\)"),
        (
            {"force": np.ones((1, 1, 1))},
            {"integrator": "ab2", "oracle": "reduced", "normalise": "none"},
            "got 'force', a block of this configuration takes velocity, mlp",
        ),
        (
            {"force": np.ones((1, 1, 1))},
            {"integrator": "lie_trotter(connection='r2')", "mlp": "momentum"},
            "got 'force', a block of this configuration takes mlp",
        ),
    ],
)
def test_masks_that_there_is_nothing_for(draws: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(stack(2, **options), draw("x", 2, 5, 6), Context(causal=True, draws=draws))


def test_a_stream_drops_nothing() -> None:
    (params,) = stack(1)
    context = Context(causal=True, draws={"force": np.ones((1, 1, 1))})
    state = RECORD.block.start(params, draw("x", 1, 5, 6), context)
    assert RECORD.stream is not None
    with pytest.raises(ValueError, match="context.draws: got force, but a stream takes none"):
        RECORD.stream.prefill(params, RECORD.stream.start(params, 1), state, context)
