"""What the core and the block refuse, and how they say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context

GATE = np.full((1, 2, 3), 0.5)


def call(**other: Any) -> tuple[Any, Any]:
    x = {"q": np.ones((1, 2, 3, 4)), "k": np.ones((1, 2, 3, 4)), "v": np.ones((1, 2, 3, 5))}
    return ra.delta.forward(**{**x, **other})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"q": np.ones((1, 3, 3, 4))}, ValueError, "q: got 3 heads, needs a multiple or a divisor of the 2 heads of v"),
        ({"k": np.ones((1, 4, 3, 4))}, ValueError, "k: got 4 heads, needs a number that divides the 2 heads of v"),
        ({"beta": np.ones((1, 2, 3), int)}, TypeError, "beta: got dtype int64"),
        ({"beta": np.ones((1, 2, 4))}, ValueError, "beta: got shape"),
        ({"log_decay": np.ones((1, 2, 3, 5))}, ValueError, "log_decay: got shape"),
        ({"log_momentum": GATE}, ValueError, "log_momentum: got it without beta"),
        ({"step": GATE, "beta": GATE}, ValueError, "step: got it without log_momentum"),
        (
            {"log_momentum": GATE, "beta": GATE, "log_decay": -np.ones((1, 2, 3, 4))},
            ValueError,
            "log_momentum: got it with a log_decay of channels",
        ),
        ({"state": np.ones((1, 2, 5, 4))}, ValueError, "state: got shape"),
        ({"state": np.ones((1, 2, 4, 5)), "log_momentum": GATE, "beta": GATE}, ValueError, "state: got shape"),
        ({"state": np.ones((1, 2, 4, 5), np.float32)}, TypeError, "state: got dtype float32"),
        ({"key_mask": np.ones((1, 3))}, TypeError, "key_mask: got dtype float64"),
        ({"key_mask": np.ones((1, 2), bool)}, ValueError, "key_mask: got shape"),
        ({"lengths": (1, 1)}, ValueError, "lengths: got"),
        ({"lengths": (4, -1)}, ValueError, "lengths: got"),
        ({"lengths": (1.0, 2.0)}, TypeError, "lengths: got float"),
        ({"norm_eps": -1.0}, ValueError, "norm_eps: got -1.0"),
        ({"chunk": 0}, ValueError, "chunk: got 0"),
    ],
)
def test_the_core_refuses(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        call(**given)


def test_the_backward_refuses() -> None:
    out, saved = call()
    with pytest.raises(ValueError, match="d_state: got shape"):
        ra.delta.backward(saved, out, out)


def test_numbers_are_not_checked() -> None:
    out, _ = call(beta=np.full((1, 2, 3), np.nan))
    assert np.all(np.isnan(out))
    assert np.all(np.isfinite(call(beta=np.full((1, 2, 3), 3.0), log_decay=np.full((1, 2, 3), 0.1))[0]))


def test_half_types_have_a_wide_state() -> None:
    x = [np.ones((1, 2, 3, 4), np.float16)] * 3
    out, saved = ra.delta.forward(*x, state=np.ones((1, 2, 4, 4), np.float32))
    assert out.dtype == np.float16 and saved.state.dtype == np.float32
    gradients = ra.delta.backward(saved, out)
    assert gradients["q"].dtype == np.float16 and gradients["state"].dtype == np.float32


def test_widths_of_0() -> None:
    x = np.ones((1, 2, 3, 0))
    out, saved = ra.delta.forward(x, x, np.ones((1, 2, 3, 5)), beta=GATE)
    assert out.shape == (1, 2, 3, 5) and not np.any(out)
    assert ra.delta.backward(saved, out)["k"].shape == x.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "kda"}, "rule: got 'kda'"),
        ({"rule": "momentum", "decay": "channel"}, "decay: got"),
        ({"conv": 1}, "conv: got 1"),
        ({"lower_bound": 0.0}, "lower_bound: got 0.0"),
        ({"beta_max": 3.0}, "beta_max: got 3.0"),
        ({"norm_eps": -1.0}, "norm_eps: got -1.0"),
    ],
)
def test_the_block_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ra.mechanism("delta").block.Config(width=4, heads=2, **options)


def test_a_block_is_causal_and_a_cache_belongs_to_its_rule() -> None:
    record, x = ra.mechanism("delta"), np.ones((1, 3, 4))
    params = record.block.init(record.block.Config(width=4, heads=2), like=x)
    state = record.block.start(params, x, Context(causal=True))
    with pytest.raises(ValueError, match="context.causal: got False, needs True"):
        record.block.forward(params, state, Context())
    assert record.stream is not None
    other = record.block.init(record.block.Config(width=4, heads=2, rule="delta"), like=x)
    with pytest.raises(ValueError, match="cache: got one with the gates"):
        record.stream.prefill(params, record.stream.start(other, 1), state, Context(causal=True))
