"""The default step is a number: gradients of the default are those of its loss, whatever it depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import core, longest_step
from tests.mechanisms.graph_energy.calls import STATES, draw, forward, qkv, run


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", [{"symmetrise": "mean"}, {"causal": True}, {"kind": "proximal", "tau": 0.01}], ids=str)
@pytest.mark.filterwarnings("ignore:step. got more than")
def test_gradients_of_the_default_are_those_of_the_loss(state: str, how: dict[str, Any]) -> None:
    """By differences along random directions of q, k, mu and kappa: nothing of the step is held back."""
    arrays = dict(zip("qkv", qkv(5), strict=True)) | {"mu": np.asarray(0.7), "kappa": np.asarray(1.4)}
    out, saved = forward(**arrays, state=state, steps=3, **how)
    d_out = draw("d_out", *out.shape)
    found = core.backward(saved, d_out)
    for name, x in arrays.items():
        towards, sides = draw(name, *x.shape), []
        for h in (-1e-5, 1e-5):
            moved = forward(**{**arrays, name: x + h * towards}, state=state, steps=3, **how)[0]
            sides.append(np.sum(d_out * moved))
        slope = np.sum(found[name] * towards)
        np.testing.assert_allclose((sides[1] - sides[0]) / 2e-5, slope, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_step_that_is_too_long_is_told_with_the_longest() -> None:
    """2/L follows the strengths and the steepest slope, for each head; where slopes have no bound nothing is known."""
    kappa = np.array([0.5, 1.0, 2.0, 4.0])
    _, saved = run(coupling="sinh", kappa=kappa, steps=0)
    np.testing.assert_allclose(longest_step(saved), 2.0 / (1.0 + 2.0 * np.cosh(1.0) * kappa), rtol=1e-15)
    with pytest.warns(UserWarning, match="step: got more than 2/L = 0.15, the longest known"):
        run(coupling="sinh", kappa=kappa, steps=1)
    for more in ({"coupling": "sinh"}, {"intrinsic": "double_well"}):
        unbounded: dict[str, Any] = {"state": "feature", "steps": 0, **more}
        assert np.all(longest_step(run(**unbounded)[1]) == 0.0)
    assert np.all(longest_step(run(intrinsic="none", kappa=0.0, steps=0)[1]) == np.inf)
