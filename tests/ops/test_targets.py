"""Targets that are none of the vocabulary have no loss: they are refused, not broadcast, wrapped or cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from refattn import backends, model
from refattn.ops.losses import cross_entropy_forward
from refattn.train.step import loss_and_gradients

BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too large": (lambda x: np.where(x == x[0, 0], 300, x), ValueError, "targets: got one outside of 0 to 15"),
    "just too large": (lambda x: x + 15, ValueError, "targets: got one outside of 0 to 15"),
    "negative": (lambda x: x - 16, ValueError, "targets: got one outside of 0 to 15"),
    "ignored elsewhere": (lambda x: x * 0 - 100, ValueError, "targets: got one outside of 0 to 15"),
    "floats": (lambda x: x.astype(np.float64), TypeError, "targets: got dtype float64, needs an integer type"),
    "bools": (lambda x: x > 1, TypeError, "targets: got dtype bool, needs an integer type"),
    "a row": (lambda x: x[:1], ValueError, r"targets: got shape \(1, 5\), needs \(3, 5\)"),
    "a column": (lambda x: x[:, :1], ValueError, r"targets: got shape \(3, 1\), needs \(3, 5\)"),
    "an axis more": (lambda x: x[..., None], ValueError, r"targets: got shape \(3, 5, 1\), needs \(3, 5\)"),
}


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init(model.Config("softmax", 16, 8, 8, 2, 1), like=np.zeros(1))


@pytest.fixture
def inputs() -> Any:
    return np.random.default_rng(0).integers(0, 16, (3, 5))


@pytest.mark.parametrize("kind", BAD)
def test_targets_that_are_none_are_refused(kind: str, params: model.Params, inputs: Any) -> None:
    change, error, message = BAD[kind]
    logits, _ = model.forward(params, inputs)
    cross_entropy_forward(logits, inputs)
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy_forward(logits, change(inputs))
    with pytest.raises(error, match=f"^{message}"):
        loss_and_gradients(params, inputs, change(inputs))


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "strict"])
def test_small_types_hold_targets_of_a_large_vocabulary(name: str) -> None:
    """A comparison with the size of the vocabulary would leave the range of the type."""
    owner = backends.get(name)
    if owner.why_unavailable():
        pytest.skip(name)
    for dtype in ("int8", "uint8", "int32"):
        logits = owner.from_numpy(np.zeros((2, 300), np.float32))
        losses, _ = cross_entropy_forward(logits, owner.from_numpy(np.asarray([0, 100], dtype)))
        assert np.allclose(owner.to_numpy(losses), np.log(300.0))
