"""What the tour of growing attention computes besides equations: new weights, the loss, the amplitude."""

from __future__ import annotations

import numpy as np
import pytest

import refattn as ra
from refattn.explorer.tour import build
from refattn.mechanisms.growing import definition
from refattn.ops.plain import softmax
from tests.explorer.test_tours import engine, settings


def test_a_tour_grows_as_the_definition_does() -> None:
    """New columns may be mixed, so their product and the old columns are what two ways to compute them agree on."""
    mechanism = ra.mechanism("growing")
    assert mechanism.tour is not None
    given, words = mechanism.tour.given, build.sentence(mechanism.tour)
    y, wanted, scale = np.array(given["y"]), np.array(given["wanted"]), given["scale"]

    def loss(w_q: np.ndarray, w_k: np.ndarray) -> float:
        return float(np.sum(wanted * np.log(wanted / softmax(scale * y @ w_q @ w_k.T @ y.T))))

    with engine(mechanism, build.data(mechanism)) as ask:
        for knobs, follow in settings(mechanism, 8):
            values, width = build.values(mechanism, words, knobs, follow), knobs["width"]
            w_q, w_k = values["GROW.17"][0], values["GROW.18"][0]
            ask(f"of.set({knobs!r}, {follow})")
            mine_q, mine_k = np.array(ask("of.whole('wqn')")), np.array(ask("of.whole('wkn')"))
            np.testing.assert_allclose(mine_q[:, :width], w_q[:, :width], atol=1e-11)
            np.testing.assert_allclose(mine_k[:, :width], w_k[:, :width], atol=1e-11)
            np.testing.assert_allclose(mine_q @ mine_k.T, w_q @ w_k.T, atol=1e-11)
            assert ask("of.whole('lossn')") == pytest.approx(loss(w_q, w_k), abs=1e-11)

            old_q, old_k = (np.array(given[name])[None, width - 1, :, :width] for name in ("w_q", "w_k"))
            heads = definition.heads_of(old_q, old_k, scale=scale)
            g = softmax(y @ heads.kernel[0] @ y.T) - wanted
            planned = definition.plan(heads, definition.observe(y[None], g[None, None]), damping=knobs["damping"])
            columns = definition.columns_of(planned, share=knobs["share"])
            assert ask("of.whole('c')") == columns == w_q.shape[1] - width

            def loss_at(amplitude: float) -> float:
                new_q, new_k = definition.grow(heads, planned, columns=columns, amplitude=amplitude)  # noqa: B023
                return loss(new_q[0], new_k[0])

            best = definition.search(loss_at, float(definition.slope_of(planned, columns)))
            assert ask("of.whole('best')") == best
