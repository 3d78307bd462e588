"""Fits of an operator whose norm, rank or nuclear norm is limited: they are the best, and have gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.koopman import loops
from refattn.verify.diagnose.error_templates import Templates, changes
from refattn.verify.tolerance.budget import truth
from tests.mechanisms.koopman.calls import drawn, options_of

LIMITS: tuple[dict[str, Any], ...] = ({"norm": 0.3}, {"rank": 1}, {"nuclear": 3.0})
RIDGE = 0.2


draw = drawn(5)


def limited(**limit: Any) -> Any:
    return ra.koopman.Separable(**limit).solver()


def transitions() -> tuple[Any, Any]:
    """Rows W and Y'."""
    return draw("w", 3, 5), draw("y", 3, 5)


def objective(m: Any, w: Any, y: Any, nuclear: float = 0.0) -> float:
    singular = np.linalg.svd(m, compute_uv=False)
    return float(np.sum((w @ m - y) ** 2) + RIDGE * np.sum(m * m) + 2.0 * nuclear * np.sum(singular))


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_no_other_operator_is_better(limit: dict[str, Any]) -> None:
    """Among all matrices, those that act beyond the span of the transitions included; and the limit binds."""
    w, y = transitions()
    m = w.T @ limited(**limit).within(w @ w.T, RIDGE, y)[0]
    nuclear = limit.get("nuclear", 0.0)
    best, singular = objective(m, w, y, nuclear), np.linalg.svd(m, compute_uv=False)
    free = w.T @ np.linalg.solve(w @ w.T + RIDGE * np.eye(3), y)
    assert objective(free, w, y, nuclear) < best if "nuclear" not in limit else np.sum(singular > 1e-12) < 3
    assert singular[0] <= limit.get("norm", np.inf) * (1.0 + 1e-12)
    for n in range(300):
        u, s, v = np.linalg.svd(m + 10.0 ** (-(n % 6)) * draw("change", 5, 5, seed=n))
        s = np.minimum(s, limit.get("norm", np.inf)) * (np.arange(5) < limit.get("rank", 5))
        assert objective((u * s) @ v, w, y, nuclear) >= best * (1.0 - 1e-12)


@pytest.mark.parametrize("limit", ["rank=1", "nuclear=0.1"])
def test_the_loops_find_the_same_without_singular_values(limit: str) -> None:
    """By descent on the operator, or a projection, both found as a function of a matrix; a norm is a designed case."""
    q, k, v, d_out = (draw(name, 1, 1, n, 2) for name, n in (("q", 1), ("k", 3), ("v", 3), ("d_out", 1)))
    options: dict[str, Any] = {"fit": f"separable(ridge=0.5, {limit})", "updates": 3, "jitter": 1e-2}
    out, saved = ra.koopman.forward(q, k, v, **options)
    np.testing.assert_allclose(loops.forward(q, k, v, **options)["KOOP.15[1]"], out, rtol=1e-11)
    expected = loops.backward(q, k, v, d_out, **options)
    for name, x in ra.koopman.backward(saved, d_out).items():  # of the ridge that all updates have, the sum of theirs
        wanted = np.sum(expected["dKOOP.ridge"]) if name == "ridge" else expected[f"dKOOP.{name}"]
        np.testing.assert_allclose(x, wanted, rtol=1e-9, atol=1e-11, err_msg=name)


def test_a_limit_that_does_not_bind_is_the_ridge() -> None:
    w, y = transitions()
    plain = np.linalg.solve(w @ w.T + RIDGE * np.eye(3), y)
    for limit in ({"norm": 50.0}, {"rank": 3}, {"nuclear": 1e-12}):
        np.testing.assert_allclose(w.T @ limited(**limit).within(w @ w.T, RIDGE, y)[0], w.T @ plain, atol=1e-8)


def test_spectra_stay_within_the_circle() -> None:
    arrays = [2.0 * draw(name, 1, 2, 8, 3) for name in "qkv"]
    largest = {}
    for norm in (None, 0.9, 0.5):
        _, saved = ra.koopman.forward(
            *arrays, fit=ra.koopman.Separable(ridge=1e-3, norm=norm), updates=4, implementation="dense"
        )
        found = np.linalg.eigvals(saved.inner.updates[-1].koopman)
        largest[norm] = np.max(np.abs(found))
    assert largest[None] > 0.9 >= largest[0.9] > 0.5 >= largest[0.5]


@pytest.mark.parametrize("limit", [pytest.param(LIMITS[0], marks=pytest.mark.slow), *LIMITS[1:]], ids=str)
def test_gradients_are_those_of_autograd(limit: dict[str, Any]) -> None:
    """Of the steps that are taken to the solution, by PyTorch; the dense implementation's matrix G, too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    w, y = transitions()
    fit, g, d_found = limited(**limit), draw("g", 5, 5), draw("d", 3, 5)
    inputs = {"inner": w @ w.T, "gram": g @ g.T + np.eye(5), "ridge": np.full((1, 1), RIDGE), "targets": y}
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in inputs.items()}
    torch.sum(fit.forward(**leaves) * torch.tensor(d_found)).backward()
    d_targets, rest = fit.backward(**inputs, found=fit.forward(**inputs), d_found=d_found)
    d_inner, d_gram, d_ridge = rest(d_targets)
    found = {"inner": d_inner, "gram": d_gram, "ridge": d_ridge, "targets": d_targets}
    for name, x in found.items():
        expected = leaves[name].grad.numpy()
        if name in ("inner", "gram"):  # which are symmetric
            x, expected = x + x.T, expected + expected.T
        np.testing.assert_allclose(x, expected, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ("separable(norm=0.9, tau=1.0)", r"norm: got 0.9 with tau=1, needs tau=0"),
        ("separable(norm=0.9, rank=1)", r"rank: got a value beside norm, needs one of norm, rank and nuclear"),
        ("separable(norm=0.0)", r"norm: got 0.0, needs"),
        ("separable(rank=0)", r"rank: got 0, needs a whole number of at least 1"),
        ("stein(rank=1)", r"fit: got 'rank' in 'stein\(rank=1\)', but stein has ridge, scale, tau, window"),
    ],
)
def test_a_limit_that_is_wrong(fit: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(fit=ra.mechanism("koopman").families["fit"](fit))


def test_what_has_no_gradient_or_does_not_settle_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, z = limited(rank=1), np.eye(2)
    found, before = fit.within(z, RIDGE, np.eye(2))
    with pytest.raises(ValueError, match=r"fit: got singular values that are equal where they are cut"):
        fit.within_backward(z, RIDGE, found, before, np.ones((2, 2)))
    w, y = transitions()
    w[1] = w[0]
    monkeypatch.setattr("refattn.mechanisms.koopman.options.limited.STEPS", 100)
    with pytest.raises(ValueError, match=r"ridge: got one so small that a limited fit does not settle"):
        limited(norm=0.3).within(w @ w.T, 1e-12, y)


def test_a_gram_matrix_that_is_not_positive_is_told_by_name() -> None:
    q, k = draw("q", 1, 1, 2, 3), np.ones((1, 1, 6, 3))
    with pytest.raises(ValueError, match="jitter: the Gram matrix of the keys is not positive to rounding"):
        ra.koopman.forward(q, k, k, fit=ra.koopman.Separable(norm=0.9), jitter=0.0)


def test_a_wrong_kernel_that_has_no_operator_is_no_crash_of_the_search() -> None:
    """An error in the Gram matrix may leave nothing to factor: what names errors goes on without that one."""
    record = ra.mechanism("koopman")
    case, known = record.case("norm"), changes(record, "float32")
    templates = Templates(record, case, truth(record, case, "float32", grad=True), known)
    assert templates.results("KOOP.1", known["KOOP.1"]["sign flipped"]) is None
    assert templates.results("KOOP.1", known["KOOP.1"]["scaled by 1.02"]) is not None
