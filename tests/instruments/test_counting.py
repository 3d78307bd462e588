"""The counting arrays: what they count, and that a mechanism computes with them what it computes with NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, philox
from refattn.instruments.counting import Counted, counting
from refattn.xp import namespace


def test_what_is_counted() -> None:
    with counting() as count:
        a, b = count.array(np.ones((3, 4, 5))), count.array(np.ones((5, 6)))
        xp, tally = namespace(a, b), count.start()
        product = a @ b
        assert [tally.products, tally.others, tally.written] == [2 * 3 * 4 * 5 * 6, 0, 8 * 72]
        xp.exp(product) + 1.0
        assert (tally.others, tally.written, tally.peak) == (2 * 72, 8 * 3 * 72, 8 * 3 * 72)
        xp.sum(product, axis=-1)
        assert (tally.others, tally.written) == (3 * 72, 8 * (3 * 72 + 12))
        tally = count.start()
        product += 1.0
        views = product[1:], product.mT, xp.reshape(product, (72,)), xp.permute_dims(product, (2, 0, 1))
        assert (tally.others, tally.written, tally.shapes) == (72, 0, set())
        mask = product > 0.0
        xp.where(mask, product, 0.0), xp.concat([product, product], axis=0)
        assert (tally.others, tally.written) == (72, 72 * (1 + 8 + 16)), "selections and copies are no arithmetic"
        assert tally.largest() == 144 and len(views) == 4
        tally = count.start()
        xp.linalg.solve(count.array(np.eye(6)), count.array(np.ones((6, 2))))
        assert tally.products == 2 * 6**3 / 3 + 2 * 6**2 * 2


def test_memory_that_is_freed_counts_no_more() -> None:
    with counting() as count:
        x = count.array(np.ones(100))
        tally = count.start()
        for _ in range(5):
            y = x + 1.0
            view = y[10:]
            del y
        assert (tally.written, tally.peak) == (5 * 800, 2 * 800)
        del view
        assert count.held == 0


@pytest.mark.parametrize(
    "implementation",
    [
        f"{name}.{implementation}"
        for name in ra.list_mechanisms()
        for implementation in ra.mechanism(name).implementations
    ],
)
def test_counted_arrays_give_the_bits_of_numpy(implementation: str) -> None:
    name, _, chosen = implementation.partition(".")
    core = ra.mechanism(name).core
    assert core is not None
    causal = chosen in ("chunked", "recurrent") and "causal" in ra.mechanism(name).defaults
    options: dict[str, Any] = {"causal": True} if causal else {}
    options |= {"coupling": "sin"} if name == "graph_energy" else {}
    q, k, v, d_out = (0.3 * philox.normal((1, 2, 20, 4), seed=1, purpose=p) for p in ("q", "k", "v", "d_out"))
    out, saved = core.forward(q, k, v, implementation=chosen, **options)
    gradients = core.backward(saved, d_out)
    with counting() as count:
        counted_out, saved = core.forward(*map(count.array, (q, k, v)), implementation=chosen, **options)
        counted = core.backward(saved, count.array(d_out))
    assert isinstance(counted_out, Counted) and np.array_equal(counted_out.value, out)
    for key in ("q", "k", "v"):
        assert np.array_equal(counted[key].value, gradients[key]), key


def test_nothing_is_left_behind() -> None:
    with counting() as count:
        x = count.array(np.ones(1))
        assert backends.of(x).name == "counting"
    assert Counted not in backends._owners
    with pytest.raises(RuntimeError, match="with counting"):
        x + x
