"""Alpha and delta as numbers with gradients: over parts of a sequence, as parameters of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.higher_order.options import NORMALISERS
from tests.mechanisms.higher_order.calls import make

BLOCK = ra.mechanism("higher_order").block


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


def test_a_block_uses_what_it_learned() -> None:
    config = BLOCK.Config(
        width=8, heads=2, normaliser="signed(delta=0.5)", alpha=2.0, train_alpha=True, train_delta=True
    )
    params = BLOCK.init(config, seed=1, like=np.zeros(1))
    assert (float(params.alpha), float(params.delta)) == (2.0, 0.5)
    assert BLOCK.init(replace(config, train_delta=False), seed=1, like=np.zeros(1)).delta is None
    params = replace(params, alpha=np.asarray(1.3), delta=np.asarray(0.2))
    plain = replace(config, alpha=1.3, normaliser="signed(delta=0.2)", train_alpha=False, train_delta=False)
    fixed = BLOCK.init(plain, seed=1, like=np.zeros(1))
    x, context = np.cos(np.arange(80.0)).reshape(2, 5, 8), ra.Context(causal=True)
    (one, _), (other, _) = (BLOCK.forward(p, BLOCK.start(p, x, context), context) for p in (params, fixed))
    np.testing.assert_array_equal(one.x, other.x)
    with pytest.raises(TypeError, match=r"alpha: got an array, needs a number, where a parameter starts"):
        BLOCK.Config(width=8, heads=2, alpha=np.ones(()))
