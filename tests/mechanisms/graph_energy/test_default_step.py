"""The step that is taken where none is given holds for where scores start, and is what it was between 0 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import Start, energy
from tests.mechanisms.graph_energy.calls import B, H, N, draw, run

STEEP: list[dict[str, Any]] = [
    {"coupling": "sinh"},
    {"coupling": "sinh", "intrinsic": "none", "graph": "mean"},
    {"coupling": "sinh", "threshold": "proximal(tau=0.1)"},
    {"intrinsic": "double_well"},
    {"intrinsic": "double_well", "mu": np.array([0.0, 1.0, 4.0, 9.0]), "kappa": 5.0, "graph": "min"},
    {"intrinsic": "double_well", "coupling": "identity", "kappa": 3.0},
]


@pytest.mark.parametrize("options", STEEP, ids=str)
@pytest.mark.parametrize("where", ["at", "jitter"])
def test_scores_that_start_far_out_do_not_diverge(options: dict[str, Any], where: str) -> None:
    """Starts of 4 N(0, 1): scores stay within these, or where wells point inwards, and the energy falls."""
    far = 4.0 * draw("far", B, H, N)
    start = Start(at=far) if where == "at" else Start(jitter=far[..., None])
    _, saved = run(start=start, steps=30, **options)
    states = np.stack(saved.inner.flow.states)
    assert np.max(np.abs(states)) <= max(np.max(np.abs(states[0])), 1.0 + 3.0) + 1e-12
    if "threshold" not in options:
        found = energy(saved)
        assert np.all(np.diff(found, axis=-1) <= 1e-12 * (1.0 + np.abs(found[..., :-1])))


@pytest.mark.parametrize("options", STEEP[::3], ids=str)
def test_heads_that_start_between_0_and_1_keep_their_step(options: dict[str, Any]) -> None:
    start = 0.5 + 0.1 * np.tanh(draw("near", B, H, N))
    start[0, 1, 2] = -7.0
    expected = run(**options)[1].inner.flow.step
    step = np.broadcast_to(run(start=start, **options)[1].inner.flow.step, (B, H, 1, 1))
    assert step[0, 1] < 0.2 * expected
    others = np.ones((B, H), bool)
    others[0, 1] = False
    np.testing.assert_array_equal(step[others], expected)


def test_where_no_step_is_known_to_hold() -> None:
    far = 4.0 * draw("far", B, H, N)
    message = 'step: got None with scores that start up to 1[0-9.]* apart with coupling="cubic", where none is known'
    with pytest.raises(ValueError, match=message):
        run(coupling="cubic", start=far)
    with pytest.raises(ValueError, match="step: got None with scores .* apart"):
        run(coupling="sinh", start=100.0 * far)
    with pytest.raises(ValueError, match="step: got None with causal scores that start outside"):
        run(coupling="sinh", start=far, causal=True)
    run(coupling="sinh", start=np.abs(np.sin(far)), causal=True)
    with np.errstate(all="ignore"):
        assert np.isnan(run(coupling="sinh", start=np.where(far > 5.0, np.inf, far))[0]).any()
