"""Claims of the report that no other test of the room holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

import refattn as ra

BLOCK = ra.mechanism("growing").block


@pytest.mark.parametrize("bias", [False, True])
def test_the_number_of_parameters_does_not_depend_on_the_heads(bias: bool) -> None:
    """Remark 1.2.1: 2 e d_k + 2 e d_v of them, and with biases 2 d_k + d_v + e more."""
    for heads in (1, 2, 4):
        config = BLOCK.module.Config(width=8, heads=heads, head_width=4 // heads, value_width=12 // heads, bias=bias)
        params = BLOCK.init(config, seed=0, like=np.zeros(1))
        count = sum(w.size for w in (params.w_q, params.w_k, params.w_v, params.w_o))
        assert count == 2 * 8 * 4 + 2 * 8 * 12 + bias * (2 * 4 + 12 + 8)
        shapes = BLOCK.module.Config(width=8, heads=heads, bias=bias).shapes()  # of heads that share the width
        assert sum(map(math.prod, shapes.values())) == 4 * 8 * 8 + bias * 4 * 8
