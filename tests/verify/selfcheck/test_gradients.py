"""Gradients agree three ways, and every wrong line of a backward is seen; that all subjects agree is for the check."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.golden.inputs import make
from refattn.mechanisms.softmax import dense
from refattn.mechanisms.softmax.layer import block
from refattn.verify.selfcheck.gradients import (
    FLOOR,
    STEP,
    TOLERANCES,
    Subject,
    beside,
    block_subjects,
    by_autograd,
    by_differences,
    by_hand,
    core_subjects,
    directions_of,
    largest_error,
)
from refattn.verify.selfcheck.samples import shrunk

RECORD = ra.mechanism("softmax")
NUMPY = backends.get("numpy")
CORES = {subject.name: subject for subject in core_subjects(RECORD, RECORD.cases)}
BLOCKS = {subject.name: subject for subject in block_subjects(RECORD)}
FULL = "all"
CAUSAL = "causal-head"
BLOCK = "block 1 with memory, memory_mask, mask"

_known: dict[str, dict[str, Any]] = {}


def differences(subject: Subject) -> dict[str, Any]:
    """The differences of a right forward, computed once."""
    if subject.name not in _known:
        _known[subject.name] = by_differences(subject)
    return _known[subject.name]


def error(subject: Subject, implementation: str) -> float:
    return largest_error(by_hand(subject, NUMPY, implementation), differences(subject))[0]


@pytest.mark.parametrize("subject", [CORES[FULL], BLOCKS[BLOCK]], ids=["core", "block"])
@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape")
def test_differences_agree_on_every_library(subject: Subject, backend: Any) -> None:
    for implementation in subject.implementations:
        found, leaf = largest_error(by_hand(subject, backend.owner, implementation), differences(subject))
        assert found <= TOLERANCES["differences"], (implementation, leaf)


@pytest.mark.parametrize("name", [*[*CORES][::6], *[*BLOCKS][::6]])
def test_autograd_agrees(name: str) -> None:
    """On some: `refattn check` compares all."""
    pytest.importorskip("torch", reason="torch is not installed")
    subject = (CORES | BLOCKS)[name]
    expected = by_autograd(subject)
    for implementation in subject.implementations:
        assert largest_error(by_hand(subject, NUMPY, implementation), expected)[0] <= TOLERANCES["autograd"], (
            implementation
        )


def test_the_cases_that_matter_are_among_the_subjects() -> None:
    assert set(CORES[FULL].leaves) == {"q", "k", "v", "bias", "sink", "keep", "scale", "softcap"}
    dead = {name for name, subject in CORES.items() if np.any(subject.forward(subject.leaves)["lse"] == -math.inf)}
    assert {CAUSAL, "empty-rows"} <= dead
    alive = CORES["empty-rows"].forward(CORES["empty-rows"].leaves)["lse"]
    assert np.any(np.isfinite(alive))
    assert set(CORES["grouped"].upstream()) == {"out", "lse"}
    biased = set(BLOCKS[BLOCK].leaves)
    assert {"x", "context.memory", "params.w_q", "params.b_k"} <= biased
    assert "params.b_k" not in BLOCKS["block 0 with no context"].leaves


@pytest.mark.parametrize("id", [id for id in RECORD.equations if id.startswith("d")])
def test_every_adjoint_is_seen(id: str) -> None:
    subject = CORES[FULL] if id in equations.declared(dense) else BLOCKS[BLOCK]
    assert error(subject, subject.implementations[0]) <= TOLERANCES["differences"]
    with equations.mutate(id, lambda x: x * (1.0 + 1e-6)):
        assert error(subject, subject.implementations[0]) > TOLERANCES["differences"]


@pytest.mark.parametrize("id", [id for id in RECORD.equations if not id.startswith("d")])
def test_a_forward_that_its_backward_does_not_know_is_seen(id: str) -> None:
    # Only the row maximum and what it is made from may be anything: it cancels.
    subject = BLOCKS[BLOCK] if id in equations.declared(block) else CORES[FULL]
    expected = by_hand(subject, NUMPY, subject.implementations[0])
    along = directions_of(subject, 2)
    with equations.mutate(id, lambda x: x + 1e-4 * x * abs(x)):
        found, _ = largest_error(expected, by_differences(subject, directions=along), along)
    assert (found > TOLERANCES["differences"]) == (id not in ("SM.top", "SM.largest"))


@pytest.mark.parametrize("forgotten", ["residual", "memory", "bias"])
def test_a_part_that_the_block_forgets_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = block.backward

    def wrong(params: Any, saved: Any, d_state: Any) -> Any:
        d_before, d_params, d_context = right(params, saved, d_state)
        if forgotten == "residual":
            d_before = block.State(d_before.x - d_state.x)
        elif forgotten == "memory":
            d_context = {"memory": 0.0 * d_context["memory"]}
        else:
            d_params = replace(d_params, b_v=np.zeros(params.b_v.shape))
        return d_before, d_params, d_context

    monkeypatch.setattr(block, "backward", wrong)
    name = "block 0 with no context" if forgotten == "residual" else BLOCK
    assert error(BLOCKS[name], "auto") > TOLERANCES["differences"]


def polynomial(power: int) -> Subject:
    """x -> x^power, with its derivative."""
    x = np.asarray([0.5, -1.25, 2.0])
    return Subject(
        f"x^{power}",
        {"x": x},
        lambda leaves: {"y": leaves["x"] ** power},
        lambda leaves, upstream, implementation: {"x": power * leaves["x"] ** (power - 1) * upstream["y"]},
        ("",),
    )


@pytest.mark.parametrize("power", range(1, 9))
def test_differences_are_exact_for_polynomials_of_eighth_degree(power: int) -> None:
    """With a long step, at which a lower order would show."""
    subject = polynomial(power)
    assert largest_error(by_differences(subject, 0.25), by_hand(subject, NUMPY, ""))[0] < 1e-11


def bent(slope: float, at: float) -> Subject:
    """Return y = x, from `at` on three times as steep, at x = 1, with a backward that gives `slope`."""
    return Subject(
        "bent",
        {"x": np.asarray([1.0])},
        lambda leaves: {"y": leaves["x"] + 2.0 * np.maximum(leaves["x"] - at, 0.0)},
        lambda leaves, upstream, implementation: {"x": slope * upstream["y"]},
        ("",),
    )


def test_a_kink_within_the_step_is_no_disagreement() -> None:
    subject = bent(1.0, 1.0 + 2.0 * STEP)
    right = by_hand(subject, NUMPY, "")
    assert largest_error(right, by_differences(subject))[0] > TOLERANCES["differences"]
    assert beside(subject, "differences")(right)[0] <= TOLERANCES["differences"]


@pytest.mark.parametrize("at", [1.0 + 2.0 * STEP, 2.0])
def test_a_wrong_gradient_is_wrong_beside_every_step(at: float) -> None:
    subject = bent(1.0 + 1e-8, at)
    assert beside(subject, "differences")(by_hand(subject, NUMPY, ""))[0] > TOLERANCES["differences"]


def test_an_lse_of_minus_infinity_is_a_constant() -> None:
    subject = Subject(
        "some rows are empty",
        {"x": np.asarray([1.0, 2.0])},
        lambda leaves: {"lse": np.where(np.asarray([True, False]), 3.0 * leaves["x"], -math.inf)},
        lambda leaves, upstream, implementation: {"x": np.asarray([3.0, 0.0]) * upstream["lse"]},
        ("",),
    )
    assert largest_error(by_differences(subject), by_hand(subject, NUMPY, ""))[0] < 1e-11


@pytest.mark.parametrize(
    "got, expected, leaf",
    [
        ({"a": [1.0, 4.0], "b": 1e-3}, 0.0, "b"),
        ({"a": [1.0, 4.4], "b": 1e-3}, 0.1, "a"),
        ({"a": [1.0, 4.0], "b": 3e-3}, 2e-3 / (4.0 * FLOOR), "b"),
        ({"a": [1.0, 4.0]}, math.inf, "b"),
        ({"a": [[1.0, 4.0]], "b": 1e-3}, math.inf, "a"),
        ({"a": [1.0, math.nan], "b": 1e-3}, math.inf, "a"),
    ],
)
def test_largest_error(got: dict[str, Any], expected: float, leaf: str) -> None:
    right = {"a": np.asarray([1.0, 4.0]), "b": np.asarray(1e-3)}
    found, where = largest_error({name: np.asarray(x) for name, x in got.items()}, right)
    assert found == pytest.approx(expected)
    assert where == leaf


def test_where_nothing_has_a_gradient_any_number_is_wrong() -> None:
    zero = {"x": np.zeros(2)}
    assert largest_error(zero, zero)[0] == 0.0
    assert largest_error({"x": np.asarray([0.0, 1e-300])}, zero)[0] == math.inf


def nearer(small: Any, large: Any) -> bool:
    """Whether a bound is at most 2 places away, in the same direction, and no farther than it was."""
    if isinstance(large, tuple):
        return len(small) == len(large) and all(map(nearer, small, large))
    if small is None or large is None:
        return small is large
    return bool(np.sign(small) == np.sign(large) and abs(small) == min(abs(large), 2))


@pytest.mark.parametrize("case", RECORD.cases, ids=lambda case: case.name)
def test_shrunk_keeps_what_a_case_is_about(case: Any) -> None:
    small = shrunk(case)
    assert (small.name, small.kind, small.options.keys()) == (case.name, case.kind, case.options.keys())
    for name, value in small.options.items():
        assert nearer(value, case.options[name]) if name in ("window", "offset") else value == case.options[name]
    sizes, before = ([c.inputs[n].shape[a] for n, a in (("q", 2), ("k", 2), ("q", 3), ("v", 3))] for c in (small, case))
    assert all(a <= b for a, b in zip(sizes, before, strict=True))
    assert max(sizes) <= 5
    for i, j in ((0, 1), (2, 3)):
        assert np.sign(sizes[i] - sizes[j]) == np.sign(before[i] - before[j])
    assert all((a == 0) == (b == 0) for a, b in zip(sizes, before, strict=True))
    heads = [(c.inputs["q"].shape[1], c.inputs["k"].shape[1]) for c in (small, case)]
    assert (heads[0][0] > heads[0][1]) == (heads[1][0] > heads[1][1])
    given: dict[str, Any] = {**make("softmax", small, "float64"), **small.options}
    out, _ = ra.softmax.forward(**given)
    assert out.shape[0] == 1
