"""What the pictures of the tour of higher-order attention say: bars add up, also where weights are negative."""

from __future__ import annotations

import pytest

import refattn as ra
from refattn.explorer.tour import build
from tests.explorer.test_tours import engine

MARKS = "(title) => of.marks(of.mechanism.forward.find((card) => card.title === title), 780, 400)"


@pytest.mark.parametrize(("order", "alpha"), [(2, 1.2), (1, 0.7), (3, 0.8)])
def test_weights_end_to_end_add_up(order: int, alpha: float) -> None:
    mechanism = ra.mechanism("higher_order")
    with engine(mechanism, build.data(mechanism)) as ask:
        ask(f"(of.set({{ order: {order}, alpha: {alpha} }}), Object.assign(of.state, {{ t: 5, at: 5 }}), 0)")
        weights = [ask(f"of.values.w(of.state.i, {j})") for j in range(5)]
        assert (min(weights) < 0) == (order % 2 == 1)
        marks = {one["key"]: one["set"] for one in ask(f"({MARKS})('Add up the weights')") if not isinstance(one, str)}
        ends = [marks[f"dot.{j}"]["cx"] for j in range(5)]
        unit = (ends[-1] - ends[0]) / sum(weights[1:])
        for j in range(1, 5):
            assert ends[j] - ends[j - 1] == pytest.approx(unit * weights[j], abs=0.1)
            assert marks[f"part.{j}"]["width"] == pytest.approx(abs(unit * weights[j]), abs=0.1)


def test_the_state_is_that_of_the_keys_so_far() -> None:
    mechanism = ra.mechanism("higher_order")
    with engine(mechanism, build.data(mechanism)) as ask:
        shown = f"[...new Set(({MARKS})('Fill the state').map((one) => one.set?.['data-ref']).filter(Boolean))]"
        for order, t, at in ((2, 3, 3.0), (3, 1, 1.0), (2, 3, 3.4)):
            ask(f"(of.set({{ order: {order} }}), Object.assign(of.state, {{ t: {t}, at: {at} }}), 0)")
            rows, exact = ask("of.length('r')"), t == at
            references = ask(shown)
            assert len([one for one in references if one.startswith(f"M.{t}.")]) == (2 * rows if exact else 0)
            assert {f"phi.{r}.{t}" for r in range(rows)} <= {*references}  # of the next key
