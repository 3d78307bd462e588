"""Bad input is refused with an error that names the argument, what it got and what it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.higher_order.options import Exact

X = np.ones((1, 2, 3, 4))
BLOCK = ra.mechanism("higher_order").block


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": -1}, r"order: got -1, needs a whole number of at least 0"),
        ({"normaliser": "exact(delta=nan)"}, r"normaliser: got 'exact\(delta=nan\)', needs a name"),
        ({"alpha": np.asarray(-3.0)}, r"alpha: got -3.0, needs a finite number above 0"),
        ({"causal": True, "normaliser": Exact(delta=np.asarray(0.8))}, r"got 'exact' with delta=0.8 and causal=True"),
        (
            {"mask": np.ones((3, 3), bool), "implementation": "linear"},
            r"implementation: got \"linear\" with a mask, needs \"dense\"",
        ),
        ({"normaliser": "exact(delta=1)", "order": 0}, r"normaliser: got delta=1 with order=0, needs delta 0 or 1/2"),
        ({"alpha": 0.0}, r"alpha: got 0.0, needs a finite number above 0"),
        ({"alpha": np.inf}, r"alpha: got inf, needs a finite number above 0"),
        ({"normaliser": "none"}, r"normaliser: got 'none', needs one of exact, add, clamp, signed"),
        (
            {"normaliser": "exact(eps=1e-3)"},
            r"normaliser: got 'eps' in 'exact\(eps=1e-3\)', but exact has delta, plain",
        ),
        (
            {"normaliser": "add(eps=0.0)"},
            r"normaliser: got 'add\(eps=0.0\)'; eps: got 0.0, needs a finite number above 0",
        ),
        ({"norm_eps": -1.0}, r"norm_eps: got -1.0, needs a finite number of at least 0"),
        ({"causal": True, "normaliser": "exact(delta=1)"}, r"needs \"signed\": without its 1 a weight may be negative"),
        (
            {"causal": "top_left", "normaliser": "add(delta=1)"},
            r"normaliser: got 'add' with delta=1 and causal='top_left'",
        ),
        ({"key_mask": np.ones((1, 4), bool)}, r"key_mask: got shape \(1, 4\), needs \(batch, keys\) = \(1, 3\)"),
    ],
)
def test_a_value_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ra.higher_order.forward(X, X, X, **options)


# --- states


def test_a_state_of_other_options_is_refused() -> None:
    state = ra.higher_order.empty_state(X, X, alpha=2.0)
    made = "order 2, alpha 2, delta 0, layer_norm 1, norm_eps 1e-05, width 4"
    given = "order 2, alpha 3, delta 0, layer_norm 1, norm_eps 1e-05, width 4"
    with pytest.raises(ValueError, match=f"state: got one of {made}, needs one of {given}"):
        ra.higher_order.forward(X, X, X, causal=True, state=state)
    for options in ({"normaliser": "exact(delta=0.5)"}, {"norm_eps": 1e-6}, {"order": 1}, {"layer_norm": False}):
        other = ra.higher_order.empty_state(X, X, **options)
        with pytest.raises(ValueError, match=r"state: got one of"):
            ra.higher_order.forward(X, X, X, causal=True, state=other)


def test_a_state_of_other_sizes_is_refused() -> None:
    state = ra.higher_order.empty_state(X, X)
    with pytest.raises(ValueError, match=r"state: got one of .* width 4, needs one of .* width 3"):
        ra.higher_order.forward(X[..., :3], X[..., :3], X, causal=True, state=state)
    with pytest.raises(ValueError, match=r"state.products: got shape \(1, 2, 10, 5\), needs \(1, 2, 10, 4\)"):
        ra.higher_order.forward(X, X, X[..., :3], causal=True, state=state)
    small = X.astype("float32")
    with pytest.raises(TypeError, match=r"state.settings: got dtype float64, needs float32"):
        ra.higher_order.forward(small, small, small, causal=True, state=state)


def test_a_state_needs_what_comes_later() -> None:
    state = ra.higher_order.empty_state(X, X)
    with pytest.raises(ValueError, match=r"state was given with causal=False, needs causal"):
        ra.higher_order.forward(X, X, X, state=state)
    with pytest.raises(ValueError, match=r'implementation: got "tiled" with a state, needs "chunked" or "recurrent"'):
        ra.higher_order.forward(X, X, X, causal=True, state=state, implementation="tiled")
    with pytest.raises(ValueError, match=r"mask was given with a state, whose keys every query attends"):
        ra.higher_order.forward(X, X, X, causal=True, state=state, mask=np.ones((3, 3), bool))
    with pytest.raises(ValueError, match=r"state was given with q .* needs no size of 0"):
        ra.higher_order.forward(X[:, :, :0], X, X, causal=True, state=state)


def test_gradients_that_do_not_fit() -> None:
    out, saved = ra.higher_order.forward(X, X, X)
    state = ra.higher_order.empty_state(X, X)
    with pytest.raises(ValueError, match=r"d_state was given, but forward was given no state"):
        ra.higher_order.backward(saved, out, state)
    _, saved = ra.higher_order.forward(X, X, X, causal=True, state=state)
    with pytest.raises(TypeError, match=r"d_state: got ndarray, needs a State"):
        ra.higher_order.backward(saved, out, out)
    with pytest.raises(ValueError, match=r"d_state.products: got shape"):
        ra.higher_order.backward(saved, out, replace(state, products=state.products[:, :1]))


# --- the block


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"order": -2}, r"order: got -2"),
        ({"normaliser": "none"}, r"normaliser: got 'none'"),
        ({"order": 0, "normaliser": "exact(delta=1)"}, r"normaliser: got delta=1 with order=0"),
    ],
)
def test_a_configuration_that_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK.Config(**{"width": 6, "heads": 3, **given})
