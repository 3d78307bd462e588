"""Fresh parameters of every block: a pure function of the configuration, the seed and the layer."""

from __future__ import annotations

import math

import numpy as np
import pytest

import refattn as ra
from refattn import counter, tree
from tests.mechanisms.test_bad_input import small


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_init_depends_on_seed_and_layer_alone(name: str) -> None:
    block, config, like = ra.mechanism(name).block, small(name), np.zeros(1)
    first = block.init(config, like=like)
    same = tree.flatten(block.init(config, seed=0, like=np.ones((3, 3)), layer=0))
    assert all(x.tobytes() == same[leaf].tobytes() for leaf, x in tree.flatten(first).items())
    others = [block.init(config, seed=1, like=like), block.init(config, like=like, layer=1)]
    weights = [x for params in (first, *others) for n, x in vars(params).items() if n in ("w_q", "w_k", "w_v", "w_o")]
    assert len({w.ravel()[:12].tobytes() for w in weights}) == len(weights)
    assert not any(np.any(x) for n, x in vars(first).items() if n in ("b_q", "b_k", "b_v", "b_o"))


@pytest.mark.parametrize("name", ["softmax", "higher_order", "koopman", "delta"])
def test_weights_are_uniform_draws_of_the_counter(name: str) -> None:
    """Of variance 1 / inputs; whoever trained from a seed gets the same start from every later version."""
    params = ra.mechanism(name).block.init(small(name), seed=7, like=np.zeros(1), layer=2)
    draws = counter.uniform((6, 6), seed=7, purpose=f"{name}.w_k", layer=2)
    np.testing.assert_array_equal(params.w_k, (2.0 * draws - 1.0) * math.sqrt(3.0 / 6.0))
