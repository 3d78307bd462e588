"""The rules that are set side by side: each accepts what it says it does, and rejects what is beyond."""

from __future__ import annotations

import numpy as np
import pytest

from tools.gates import RULES, Seen

TRUE = np.linspace(1.0, 2.0, 40).reshape(2, 20)


def seen(error: float, *, usual: float = 1e-3, single: bool = False, dtype: str = "bfloat16") -> Seen:
    """Return a tensor that is off by so much, everywhere or in one element; the eager one is off by `usual`."""
    wrong = np.zeros_like(TRUE) if single else np.full_like(TRUE, error)
    wrong[0, 0] = error
    return Seen(TRUE + wrong, TRUE, TRUE + usual, dtype)


@pytest.mark.parametrize(
    ("rule", "fine", "wrong"),
    [
        ("allclose, 1e-2", seen(1.9e-2), seen(3.1e-2)),
        ("allclose, 1e-3", seen(1.9e-3), seen(3.1e-3)),
        ("torch.testing.assert_close", seen(1.5e-2), seen(1.7e-2, single=True)),
        ("torch.testing.assert_close", seen(1e-6, dtype="float32"), seen(2e-5, dtype="float32")),
        ("1e-2 for 95 % of the elements", seen(0.5, single=True), seen(0.5)),
        ("RMS ratio 0.005", seen(7e-3), seen(8e-3)),
        ("the same; an error below 0.3 only warns", seen(0.29), seen(0.31)),
        ("twice the eager error", seen(1.9e-3), seen(2.1e-3, single=True)),
        ("the same, and 1.5 times its mean", seen(1.9e-3, single=True), seen(1.9e-3)),
        ("twice (eager error + eps max)", seen(3.2e-2), seen(3.4e-2)),
        ("cosine 0.95", seen(0.5), Seen(TRUE * np.sign(TRUE - 1.3), TRUE, TRUE, "bfloat16")),
        ("cosine 0.99", seen(0.1), Seen(TRUE * (1 + np.sign(TRUE - 1.5)), TRUE, TRUE, "bfloat16")),
        ("relative error 1e-2, 1e-7 in the denominator", seen(9e-3), seen(1.1e-2, single=True)),
    ],
)
def test_a_rule(rule: str, fine: Seen, wrong: Seen) -> None:
    assert RULES[rule](fine) and not RULES[rule](wrong)


@pytest.mark.parametrize("rule", RULES)
def test_numbers_that_are_not_finite(rule: str) -> None:
    right = Seen(np.asarray([-np.inf, 1.0]), np.asarray([-np.inf, 1.0]), np.asarray([-np.inf, 1.0]), "float32")
    wrong = Seen(np.asarray([np.nan, 1.0]), np.asarray([1.0, 1.0]), np.asarray([1.0, 1.0]), "float32")
    assert RULES[rule](right) and not RULES[rule](wrong)
