"""What other readings of the papers would do: each departure of docs/deviations.md that a test can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from tests.mechanisms.koopman.calls import drawn, forward
from tests.rows import holds

draw = drawn(41)


def root(function: Callable[[Any], Any], target: Any) -> Any:
    """Where a function that grows with slope 0.2 at least takes the target: by bisection, for every element."""
    low, high = -20.0 + 0.0 * target, 20.0 + 0.0 * target
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = np.where(function(middle) < target, middle, low), np.where(function(middle) < target, high, middle)
    return 0.5 * (low + high)


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.3), (0.5, 1.0)])
def test_the_operator_acts_on_the_function(a: float, b: float) -> None:
    """The operator of a true map f has phi = f: then (K psi)(q') = psi(f(q')), and only that predicts f(q')."""

    def f(x: Any) -> Any:
        return np.tanh(1.5 * x) + 0.3 * x

    def psi(x: Any) -> Any:
        return a * x + b * f(x)

    x = np.linspace(-2.0, 2.0, 9)
    on_the_function = root(psi, a * f(x) + b * f(f(x)))
    on_the_vector = root(psi, f(psi(x)))
    assert np.max(np.abs(on_the_function - f(x))) < 1e-12
    assert np.max(np.abs(on_the_vector - f(x))) > 0.05


def test_the_core_takes_the_function() -> None:
    """What it returns is where psi takes a phi(q') + b (K phi)(q'), from the numbers that the fit has."""
    q, k, v = draw("q", 1, 1, 4, 3), draw("k", 1, 1, 6, 3), draw("v", 1, 1, 6, 3)
    out, saved = forward(q, k, v, perturbation="identity", epsilon=0.5, updates=3, implementation="dense")
    step = saved.inner.updates[-1]
    phi = np.sum(step.modes * step.section[..., None], axis=-2)
    twice = np.sum((step.koopman @ step.modes) * step.section[..., None], axis=-2)
    kernel, options = saved.inner.options.kernel, {"perturbation": "identity", "epsilon": 0.5}
    at_out = np.swapaxes(step.kappa.dual @ np.swapaxes(kernel.values(out[..., None, :], k[:, :, None]), -1, -2), -1, -2)
    np.testing.assert_allclose(out + 0.5 * (at_out @ step.modes)[..., 0, :], phi + 0.5 * twice, atol=1e-11)
    other = forward(q, k, v, updates=3, **{**options, "epsilon": 0.0})[0]
    assert np.max(np.abs(out - other)) > 1e-3


def test_shift_and_identity_have_other_limits() -> None:
    """As epsilon goes to 0, psi = pi + epsilon phi gives phi(q'), and psi = phi + epsilon pi something else."""
    k, q = draw("k", 1, 1, 5, 1), draw("q", 1, 1, 3, 1)
    given: dict[str, Any] = {"updates": 2, "kernel": "linear", "ridge": 0.5}
    small = {p: forward(q, k, k, perturbation=p, epsilon=1e-6, **given)[0] for p in ("identity", "shift")}
    _, saved = forward(q, k, k, perturbation="identity", epsilon=0.0, implementation="dense", **given)
    step = saved.inner.updates[0]
    phi = np.sum(step.modes * step.section[..., None], axis=-2)
    assert np.max(np.abs(small["identity"] - phi)) < 1e-5
    assert np.max(np.abs(small["shift"] - phi)) < 1e-5  # a linear operator: both predict what it says, T7
    given |= {"kernel": "rbf"}
    small = {p: forward(q, k, k, perturbation=p, epsilon=1e-6, **given)[0] for p in ("identity", "shift")}
    assert np.max(np.abs(small["identity"] - small["shift"])) > 1e-3


def test_the_default_can_be_inverted() -> None:
    """Where psi = phi + epsilon pi has no inverse, and in later updates."""
    arrays = [philox.normal((1, 2, 8, 4), seed=3, purpose=name) for name in "qkv"]
    with pytest.raises(ra.koopman.KoopmanInverseError):
        ra.koopman.forward(*arrays, perturbation="shift")
    assert np.all(np.isfinite(ra.koopman.forward(*arrays, updates=4)[0]))
    rare = [philox.normal((1, 2, 8, 4), seed=295, purpose=name) for name in "qkv"]  # the one of seeds 0 to 299
    assert np.all(np.isfinite(ra.koopman.forward(*rare, updates=4)[0]))
    with pytest.raises(ra.koopman.KoopmanInverseError):
        ra.koopman.forward(*rare, updates=4, perturbation="identity(epsilon=1.0)")


@pytest.mark.slow(sampled=True)
@pytest.mark.parametrize(
    ("psi", "updates", "failures"),  # of 300 calls: up to 4 and 60 %; none for epsilon = 0.1
    [("shift", 2, 13), ("shift", 4, 180), ("identity(epsilon=0.1)", 4, 0), ("identity(epsilon=1.0)", 4, 1)],
)
def test_how_often_psi_has_no_inverse(psi: str, updates: int, failures: int) -> None:
    """With random q, k and v, in two heads of 8 tokens of width 4."""
    failed = 0
    for seed in range(300):
        arrays = [philox.normal((1, 2, 8, 4), seed=seed, purpose=name) for name in "qkv"]
        try:
            ra.koopman.forward(*arrays, updates=updates, perturbation=psi)
        except ra.koopman.KoopmanInverseError:
            failed += 1
    assert failed == failures


def test_more_is_left_where_tokens_attend_to_their_like() -> None:
    """Of what is attended, in units of its length: with independent tokens a part, with q = k = v more."""
    arrays = [philox.normal((1, 2, 32, 16), seed=0, purpose=name) for name in "qkv"]

    def left(*given: Any) -> float:
        attended, out = ra.softmax.forward(*given)[0], ra.koopman.forward(*given)[0]
        return float(np.median(np.linalg.norm(out, axis=-1) / np.linalg.norm(attended, axis=-1)))

    assert left(*arrays) < 0.06 < 0.3 < left(*3 * [arrays[0]])


def test_a_draw_that_does_not_invert_is_replaced() -> None:
    q, k, v = draw("q", 1, 1, 3, 2), draw("k", 1, 1, 5, 2), draw("v", 1, 1, 5, 2)
    with pytest.raises(ra.koopman.KoopmanInverseError):
        forward(q, k, v, perturbation="shift", epsilon=0.0)
    out, saved = forward(q, k, v, perturbation="shift", epsilon=np.asarray([[0.0], [4.0]]))
    np.testing.assert_array_equal(out, forward(q, k, v, perturbation="shift", epsilon=4.0)[0])
    assert saved.chosen == (1,)


def test_the_operator_of_no_transition() -> None:
    """It is the identity here. The least operator, 0, would put every query at 0, and then all attend the same."""
    q, k, v = draw("q", 1, 1, 4, 3), draw("k", 1, 1, 6, 3), draw("v", 1, 1, 6, 3)
    attended = ra.softmax.forward(q, k, v)[0]
    for perturbation in ("identity", "shift", "pencil"):
        first = forward(q, k, v, perturbation=perturbation, epsilon=2.0)[1].trajectory[1]
        np.testing.assert_allclose(first, attended, rtol=0.0, atol=1e-14)
    from_nothing = ra.softmax.forward(0.0 * q, k, v)[0]
    assert np.max(np.abs(from_nothing - from_nothing[:, :, :1])) < 1e-15
    assert np.max(np.abs(from_nothing - attended)) > 0.1


def test_the_ridge_draws_to_0_or_to_the_identity() -> None:
    q, k, v = draw("q", 1, 1, 4, 3), draw("k", 1, 1, 6, 3), draw("v", 1, 1, 6, 3)
    twice = ra.softmax.forward(ra.softmax.forward(q, k, v)[0], k, v)[0]
    for tau, limit in ((0.0, 0.0 * twice), (1.0, twice)):
        gaps = [
            np.max(np.abs(forward(q, k, v, perturbation="identity", tau=tau, ridge=ridge)[0] - limit))
            for ridge in (1.0, 1e3, 1e6)
        ]
        assert gaps[0] > 1e-2 > gaps[1] > 1e-4 > gaps[2]
    said = (
        "as said with tau = 0; tau = 1 draws it to the identity, and a huge ridge then leaves attention, applied once"
    )
    assert holds("koopman", "the ridge draws the operator to 0") == f"{said} an update"


def test_all_sections_would_know_the_keys_to_come() -> None:
    """Masks act on the observables too: with the softmax masked alone, keys to come change what a query becomes."""
    q, k, v = draw("q", 1, 1, 5, 3), draw("k", 1, 1, 5, 3), draw("v", 1, 1, 5, 3)
    attended = ra.softmax.forward(q, k, v, causal=True)[0]
    given: dict[str, Any] = {"perturbation": "identity", "epsilon": 0.0, "jitter": 1e-2}

    def first_row(keys: Any) -> Any:
        # The update of the first query, its path and what it attends given, with all keys as observables.
        x = np.concatenate([q[:, :, :1], attended[:, :, :1]], axis=2)
        kernel = forward(q, k, v, implementation="dense", **given)[1].inner
        kernel = kernel.options.kernel
        gram = kernel.values(keys, keys)[0, 0] + 1e-2 * np.eye(5)
        b = kernel.values(x, keys)[0, 0]
        dual = np.linalg.solve(gram, b[:1].T).T
        found = b[1:] @ np.linalg.inv(gram) / (dual @ b[:1].T + 0.1)
        return (kernel.values(attended[:, :, :1], keys)[0, 0] @ dual.T) @ found @ keys[0, 0]

    changed = np.concatenate([k[:, :, :1], 2.0 * k[:, :, 1:]], axis=2)
    assert np.max(np.abs(first_row(k) - first_row(changed))) > 1e-2
    ours = [forward(q, keys, v, causal=True, **given)[0][:, :, 0] for keys in (k, changed)]
    assert np.array_equal(*ours)
