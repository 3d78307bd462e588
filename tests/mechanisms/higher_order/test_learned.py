"""Alpha and delta as numbers with gradients: over parts of a sequence, as parameters of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.higher_order.options import NORMALISERS
from tests.mechanisms.higher_order.calls import IMPLEMENTATIONS, Call, cut, make

BLOCK = ra.mechanism("higher_order").block


def run(
    call: Call, implementation: str, alpha: float, delta: float, kind: str, **numbers: Any
) -> tuple[float, dict[str, Any]]:
    """The loss sum(out * d_out), and gradients."""
    normaliser = NORMALISERS[kind](delta=np.asarray(delta), **numbers)
    given = {"alpha": np.asarray(alpha), "normaliser": normaliser, "implementation": implementation}
    out, saved = ra.higher_order.forward(call.q, call.k, call.v, **{**call.options, **given})
    return float(np.sum(out * call.d_out)), ra.higher_order.backward(saved, call.d_out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("order", "layer_norm", "kind", "numbers"),
    [(2, True, "exact", {}), (2, True, "clamp", {"plain": True}), (3, False, "add", {"eps": 0.5})],
)
def test_every_form_has_the_gradients_of_differences(
    order: int, layer_norm: bool, kind: str, numbers: dict[str, Any], causal: bool
) -> None:
    call = make(1, 4, 2, 9, 13, 6, 4, keep=0.8, causal=causal, order=order, layer_norm=layer_norm)
    h = 1e-4
    with cut(4):
        expected = {
            "alpha": (
                run(call, "dense", 2.5 + h, 0.3, kind, **numbers)[0],
                run(call, "dense", 2.5 - h, 0.3, kind, **numbers)[0],
            ),
            "delta": (
                run(call, "dense", 2.5, 0.3 + h, kind, **numbers)[0],
                run(call, "dense", 2.5, 0.3 - h, kind, **numbers)[0],
            ),
        }
        for implementation in IMPLEMENTATIONS[causal]:
            found = run(call, implementation, 2.5, 0.3, kind, **numbers)[1]
            for name, (above, below) in expected.items():
                assert found[name].shape == ()
                assert float(found[name]) == pytest.approx((above - below) / (2.0 * h), rel=1e-6, abs=1e-7), (
                    implementation,
                    name,
                )
        masked = call.but(mask=np.tri(9, 13, 5, dtype=bool))
        dense, tiled = (
            run(masked, implementation, 2.5, 0.3, kind, **numbers)[1] for implementation in ("dense", "tiled")
        )
        for name in expected:
            assert float(tiled[name]) == pytest.approx(float(dense[name]), rel=1e-11)


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_gradients_of_parts_add_up(implementation: str) -> None:
    """What comes back through the state is that of its keys, which the earlier part knows."""
    call = make(1, 2, 1, 11, 11, 5, 3, causal=True)
    normaliser = NORMALISERS["exact"](delta=np.asarray(0.25))
    options: dict[str, Any] = {"alpha": np.asarray(1.5), "normaliser": normaliser}
    _, whole = ra.higher_order.forward(call.q, call.k, call.v, causal=True, **options)
    expected = ra.higher_order.backward(whole, call.d_out)
    state: Any = ra.higher_order.empty_state(call.k, call.v, **options)
    parts: list[Any] = []
    for at in (slice(0, 4), slice(4, 11)):
        q, k, v, d_out = (x[:, :, at] for x in (call.q, call.k, call.v, call.d_out))
        _, saved = ra.higher_order.forward(q, k, v, causal=True, implementation=implementation, state=state, **options)
        state = saved.state
        parts.append((saved, d_out))
    second = ra.higher_order.backward(*parts[1])
    first = ra.higher_order.backward(parts[0][0], parts[0][1], second["state"])
    for name in ("alpha", "delta"):
        assert float(first[name] + second[name]) == pytest.approx(float(expected[name]), rel=1e-10)
        assert not np.any(first["state"].settings)


def test_a_block_learns_them_and_decodes_with_them() -> None:
    config = BLOCK.Config(
        width=8, heads=2, normaliser="signed(delta=0.5)", alpha=2.0, train_alpha=True, train_delta=True
    )
    params = BLOCK.init(config, seed=1, like=np.zeros(1))
    assert (float(params.alpha), float(params.delta)) == (2.0, 0.5)
    assert BLOCK.init(replace(config, train_delta=False), seed=1, like=np.zeros(1)).delta is None
    params = replace(params, alpha=np.asarray(1.3), delta=np.asarray(0.2))
    fixed = BLOCK.init(
        replace(config, alpha=1.3, normaliser="signed(delta=0.2)", train_alpha=False, train_delta=False),
        seed=1,
        like=np.zeros(1),
    )
    x, context = np.cos(np.arange(80.0)).reshape(2, 5, 8), ra.Context(causal=True)
    (one, _), (other, _) = (BLOCK.forward(p, BLOCK.start(p, x, context), context) for p in (params, fixed))
    np.testing.assert_array_equal(one.x, other.x)
    stream = ra.mechanism("higher_order").stream
    assert stream is not None
    cache, rows = stream.start(params, 2), []
    for n in range(5):
        state, cache = stream.step(params, cache, BLOCK.module.State(x[:, n : n + 1]), context)
        rows.append(state.x)
    np.testing.assert_allclose(np.concatenate(rows, axis=1), one.x, rtol=0.0, atol=1e-13)
    with pytest.raises(TypeError, match=r"alpha: got an array, needs a number, where a parameter starts"):
        BLOCK.Config(width=8, heads=2, alpha=np.ones(()))
