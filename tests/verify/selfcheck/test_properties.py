"""Every property holds on every library, and is seen to fail where a line is wrong, forward or backward."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.golden.storage_types import TYPES
from refattn.mechanisms.softmax import dense, options
from refattn.mechanisms.softmax.implementations import tiled
from refattn.ops.masks import Band
from refattn.verify.selfcheck.probe import Core, used_share
from refattn.verify.selfcheck.properties import PROPERTIES
from refattn.verify.selfcheck.samples import property_samples

RECORD = ra.mechanism("softmax")
NUMPY = backends.get("numpy")
SMALL = {s.name: s for s in property_samples(RECORD, None)}
LONG = {s.name: s for s in property_samples(RECORD, (300, 530))}


OF_ATTENTION = [invariant for invariant in PROPERTIES if invariant != "sequence_padding"]
"""That one is of sequences, whose queries are as many as their keys: see tests/mechanisms/delta."""


def core(implementation: str = "dense", dtype: str = "float64") -> Core:
    return Core(RECORD, implementation, NUMPY, dtype)


def share(invariant: str, implementation: str = "dense", name: str = "plain") -> float:
    """The used share of the allowed error on NumPy in float64."""
    return PROPERTIES[invariant](core(implementation), (LONG | SMALL)[name])


@pytest.mark.parametrize("invariant", OF_ATTENTION)
@pytest.mark.parametrize("name", SMALL)
def test_a_property_holds_and_leaves_little_room(invariant: str, name: str) -> None:
    known: dict[bytes, dict[str, float]] = {}
    for implementation, dtype in itertools.product(RECORD.implementations, ("float64", "float32")):
        used = PROPERTIES[invariant](Core(RECORD, implementation, NUMPY, dtype, known), SMALL[name])
        # An allowed error that is far too large would hide mistakes.
        assert used == 0.0 or 1e-3 < used <= 1.0, (implementation, dtype)


@pytest.mark.parametrize("invariant", OF_ATTENTION)
@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape: see the slow test")
def test_a_property_holds_on_every_library(invariant: str, backend: Any) -> None:
    for implementation in RECORD.implementations:
        assert PROPERTIES[invariant](Core(RECORD, implementation, backend.owner, "float32"), SMALL["masked"]) <= 1.0, (
            implementation
        )


@pytest.mark.slow
@pytest.mark.parametrize("invariant", OF_ATTENTION)
@pytest.mark.parametrize("name", SMALL)
def test_a_property_holds_on_jax(invariant: str, name: str) -> None:
    owner = backends.get("jax")
    if (reason := owner.why_unavailable()) is not None:
        pytest.skip(reason)
    sampled = bool(os.environ.get("REFATTN_SLOW_SAMPLE"))
    if sampled and (name != "masked" or invariant == "lengths" or [*PROPERTIES].index(invariant) % 8 != 2):
        pytest.skip("not of the sample: the check on JAX has others, and each length is compiled")
    owner.enable_float64()
    for implementation, dtype in itertools.product(
        RECORD.implementations, ("float32",) if sampled else ("float64", "float32")
    ):
        assert PROPERTIES[invariant](Core(RECORD, implementation, owner, dtype), SMALL[name]) <= 1.0, (
            implementation,
            dtype,
        )


Change = Callable[[Any], Any]


def along(axis: int) -> Change:
    """Multiply by numbers that depend on the position along an axis."""

    def change(x: Any) -> Any:
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        return x * (1.0 + 1e-3 * np.arange(x.shape[axis]).reshape(shape))

    return change


def mixed(axis: int) -> Change:
    """Let what is first on an axis leak into all the others."""
    return lambda x: x + 1e-6 * np.take(x, [0], axis=axis)


def more_at_each_call() -> Change:
    calls = itertools.count()
    return lambda x: x * (1.0 + 1e-12 * next(calls))


SCALED: Change = lambda x: 1.001 * x  # noqa: E731
SQUARED: Change = lambda x: x + 1e-3 * x * x  # noqa: E731
LIFTED: Change = lambda x: x + 1e-3  # noqa: E731
BY_LENGTH: Change = lambda x: x * (1.0 + 1e-5 * x.shape[-1])  # noqa: E731
BY_WORKERS: Change = lambda x: x * (1.0 + 1e-12 * backends.workers())  # noqa: E731

# Property, equation, what is done to its value, sample.
MUTANTS: list[tuple[str, str, Change, str]] = [
    ("permutation", "SM.4", along(-1), "plain"),
    ("permutation", "dSM.k", along(2), "plain"),
    ("permutation", "dSM.4", along(-1), "plain"),
    ("query_permutation", "SM.5", along(2), "plain"),
    ("query_permutation", "dSM.q", along(2), "plain"),
    ("query_permutation", "dSM.total", along(2), "plain"),
    ("linear_in_v", "SM.5", SQUARED, "plain"),
    ("linear_in_v", "dSM.4", SQUARED, "plain"),
    ("linear_in_v", "dSM.k", LIFTED, "plain"),
    ("constant_value", "SM.4", SCALED, "plain"),
    ("constant_value", "SM.total", LIFTED, "masked"),
    ("constant_value", "dSM.total", SCALED, "plain"),
    ("constant_value", "dSM.3", LIFTED, "plain"),
    ("key_shift", "SM.1", SQUARED, "plain"),
    ("key_shift", "SM.1", SCALED, "plain"),
    ("key_shift", "SM.lse", lambda x: x + 1e-3 * x * x, "plain"),
    ("key_shift", "dSM.total", SCALED, "plain"),
    ("split_and_merge", "SM.lse", SCALED, "plain"),
    ("split_and_merge", "SM.total", LIFTED, "plain"),
    ("split_and_merge", "dSM.total", LIFTED, "masked"),
    ("split_and_merge", "dSM.q", LIFTED, "plain"),
    ("split_and_merge", "SM.sunk", LIFTED, "plain"),
    ("padding", "SM.3", LIFTED, "plain"),
    ("padding", "dSM.v", LIFTED, "plain"),
    ("padding", "dSM.k", mixed(2), "plain"),
    ("token_permutation", "SM.5", lambda x: np.roll(x, 1, axis=2), "plain"),
    ("token_permutation", "dSM.k", lambda x: np.roll(x, 1, axis=2), "plain"),
    ("token_padding", "SM.5", LIFTED, "plain"),
    ("token_padding", "dSM.q", LIFTED, "plain"),
    ("empty", "SM.5", LIFTED, "plain"),
    ("empty", "dSM.q", LIFTED, "plain"),
    ("empty", "dSM.4", mixed(2), "plain"),
    ("causal", "SM.4", lambda x: x + 1e-9 * np.flip(x, axis=2), "plain"),
    ("causal", "dSM.v", lambda x: np.roll(x, 1, axis=2), "plain"),
    ("causal", "dSM.k", lambda x: x + 1e-9 * np.flip(x, axis=2), "masked"),
    ("truncation", "SM.5", lambda x: x * (1.0 + 1e-5 * x.shape[2]), "plain"),
    ("truncation", "SM.4", BY_LENGTH, "masked"),
    ("truncation", "dSM.4", BY_LENGTH, "plain"),
    ("independent", "SM.5", mixed(0), "plain"),
    ("independent", "SM.1", mixed(1), "plain"),
    ("independent", "dSM.k", mixed(1), "plain"),
    ("independent", "dSM.v", mixed(0), "masked"),
    ("workers", "SM.5", BY_WORKERS, "plain"),
    ("workers", "dSM.q", BY_WORKERS, "plain"),
    ("repeatable", "SM.5", more_at_each_call(), "plain"),
    ("repeatable", "dSM.v", more_at_each_call(), "plain"),
    ("far", "SM.1", mixed(-1), "plain"),
    ("far", "dSM.4", mixed(-1), "plain"),
    ("bias_shift", "SM.biased", SCALED, "plain"),
    ("bias_shift", "dSM.bias", SCALED, "masked"),
    ("sink_key", "SM.sunk", SCALED, "masked"),
    ("sink_key", "dSM.sink", SCALED, "plain"),
    ("sinks", "SM.sunk", along(-1), "plain"),
    ("sinks", "dSM.sink", along(-1), "masked"),
    ("lengths", "SM.5", lambda x: x * (1.0 + 1e-5 * x.shape[2]), "plain"),
    ("lengths", "dSM.q", lambda x: x * (1.0 + 1e-5 * x.shape[2]), "masked"),
    ("dropout_in_two", "SM.kept", SCALED, "masked"),
    ("dropout_in_two", "dSM.kept", SCALED, "plain"),
]


@pytest.mark.parametrize("invariant, id, change, name", MUTANTS)
def test_a_property_fails_where_an_equation_is_wrong(invariant: str, id: str, change: Change, name: str) -> None:
    with equations.mutate(id, change):
        assert share(invariant, name=name) > 1.0


def test_every_property_is_seen_to_fail_forward_and_backward() -> None:
    seen = {(invariant, id.startswith("d")) for invariant, id, _, _ in MUTANTS}
    by_convention = set(itertools.product(("causal_mask", "band"), (False, True)))  # see below
    assert seen | by_convention == set(itertools.product(OF_ATTENTION, (False, True)))


@pytest.mark.parametrize("implementation", RECORD.implementations)
@pytest.mark.parametrize("by, caught", [(1, {"causal", "causal_mask"}), (-1, {"causal_mask"})])
def test_a_causal_offset_that_is_off_by_one(
    implementation: str, by: int, caught: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = vars(options)["_band"]

    def wrong(causal: Any, *given: Any) -> tuple[Any, Any]:
        first, last = right(causal, *given)
        return first, last if causal is False else last + by

    monkeypatch.setattr(options, "_band", wrong)
    properties = ("causal", "causal_mask", "permutation")
    assert {invariant for invariant in properties if share(invariant, implementation) > 1.0} == caught


@pytest.mark.parametrize("implementation", RECORD.implementations)
def test_a_window_that_is_one_wider(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vars(options)["_band"]

    def wrong(*given: Any) -> tuple[Any, Any]:
        first, last = right(*given)
        return None if first is None else first - 1, last

    monkeypatch.setattr(options, "_band", wrong)
    assert share("band", implementation) > 1.0


def test_causality_is_judged_in_the_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dense.backward

    def wrong(saved: dense.Saved, d_out: Any, d_lse: Any) -> dict[str, Any]:
        gradients = right(saved, d_out, d_lse)
        return gradients | {"k": gradients["k"] + 1e-12 * np.mean(saved.k, axis=2, keepdims=True)}

    monkeypatch.setattr(dense, "backward", wrong)
    assert share("causal") == math.inf


def test_a_choice_that_sees_the_future_is_caught_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vars(tiled)["safe_rows"]

    def wrong(q: Any, k: Any, v: Any, offset: Any, *rest: Any) -> Any:
        return right(q, k, v, None, *rest)

    monkeypatch.setattr(tiled, "safe_rows", wrong)
    assert share("causal", "tiled", "long") == math.inf
    assert share("causal_mask", "tiled", "long") <= 1.0


def test_a_missing_tile_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Band.blocks
    monkeypatch.setattr(Band, "blocks", lambda *given: list(right(*given))[:2])
    assert share("permutation", "tiled", "long") > 1.0
    assert share("permutation", "tiled") <= 1.0


def test_noise_is_that_of_the_dtype_and_is_measured_once() -> None:
    known: dict[bytes, dict[str, float]] = {}
    s = SMALL["masked"]
    noises = {}
    for dtype in ("float64", "float32"):
        noises[dtype] = Core(RECORD, "tiled", NUMPY, dtype, known).noise(s.inputs, s.options, s.upstream)
    assert len(known) == 1
    for name, noise in noises["float32"].items():
        unit = TYPES["float32"].unit / TYPES["float64"].unit
        assert noise == pytest.approx(unit * noises["float64"][name])
    assert {"out", "lse", "d_q", "d_k", "d_v", "d_scale", "d_softcap", "SM.1", "dSM.2"} <= set(noises["float32"])


def test_noise_grows_with_the_conditioning_of_the_scores() -> None:
    s = SMALL["plain"]
    ill = {**s.inputs, "q": 16.0 * s.inputs["q"]}
    assert core().noise(ill, {}, s.upstream)["lse"] > 4.0 * core().noise(s.inputs, {}, s.upstream)["lse"]


def test_an_honest_error_is_within_what_is_allowed_and_ten_times_of_it_is_not() -> None:
    s = SMALL["masked"]
    exact = core()(s.inputs, s.options, s.upstream)
    honest = core(dtype="float32")
    noise = honest.noise(s.inputs, s.options, s.upstream)
    found = honest(s.inputs, s.options, s.upstream)
    assert used_share(found, exact, noise) <= 1.0
    assert used_share({n: x + 10.0 * (8.0 * 2.0**0.5 * noise[n]) for n, x in exact.items()}, exact, noise) > 9.0


ONE = {"x": np.asarray([1.0, -np.inf, 2.0])}


@pytest.mark.parametrize(
    "got, share",
    [
        (ONE["x"], 0.0),
        (np.asarray([1.0, -np.inf, np.nan]), math.inf),
        (np.asarray([1.0, np.inf, 2.0]), math.inf),
        (np.asarray([1.0, -1e30, 2.0]), math.inf),
        (np.asarray([1.0, -np.inf]), math.inf),
        (np.asarray([1.0, -np.inf, 2.0 + 8.0 * 2.0**0.5]), 1.0),
    ],
)
def test_used_share(got: Any, share: float) -> None:
    assert used_share({"x": got}, ONE, {"x": 1.0}) == pytest.approx(share)


def test_numpy_is_given_read_only_arrays() -> None:
    class Writer:
        @staticmethod
        def forward(q: Any, **given: Any) -> Any:
            q += 1.0
            return q, None

    writing = replace(RECORD, core=Writer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        Core(writing, "dense", NUMPY, "float64").forward(SMALL["plain"].inputs, {})
