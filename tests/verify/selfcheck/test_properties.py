"""Every law holds on every library, and is seen to fail where a line is wrong, forward or backward."""

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
from refattn.golden.storage import TYPES
from refattn.mechanisms.softmax import dense, options
from refattn.mechanisms.softmax.implementations import tiled
from refattn.ops import masks
from refattn.ops.masks import Band
from refattn.verify.selfcheck.probe import Core, same_bits, used_share
from refattn.verify.selfcheck.properties import LAWS
from refattn.verify.selfcheck.samples import Sample, law_samples, sample

RECORD = ra.mechanism("softmax")
SMALL = {s.name: s for s in law_samples(RECORD, None)}
LONG = {s.name: s for s in law_samples(RECORD, (300, 530))}


OF_ATTENTION = [law for law in LAWS if law != "sequence_padding"]
"""That one is of sequences, whose queries are as many as their keys: see tests/mechanisms/delta."""


def core(implementation: str = "dense", dtype: str = "float64", backend: str = "numpy") -> Core:
    return Core(RECORD, implementation, backends.get(backend), dtype)


def test_the_record_lists_only_laws_that_there_are() -> None:
    assert set(RECORD.properties) <= set(LAWS)


@pytest.mark.parametrize("law", OF_ATTENTION)
@pytest.mark.parametrize("name", SMALL)
def test_law_holds_and_leaves_little_room(law: str, name: str) -> None:
    known: dict[bytes, dict[str, float]] = {}
    for implementation, dtype in itertools.product(RECORD.implementations, ("float64", "float32")):
        share = LAWS[law](Core(RECORD, implementation, backends.get("numpy"), dtype, known), SMALL[name])
        assert share <= 1.0, (implementation, dtype)
        # An allowed error that is far too large would hide mistakes.
        assert share == 0.0 or share > 1e-3, (implementation, dtype)


@pytest.mark.parametrize("law", OF_ATTENTION)
@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape: see the slow test")
def test_law_holds_on_every_library(law: str, backend: Any) -> None:
    for implementation in RECORD.implementations:
        assert LAWS[law](Core(RECORD, implementation, backend.owner, "float32"), SMALL["masked"]) <= 1.0, implementation


@pytest.mark.slow
@pytest.mark.parametrize("law", OF_ATTENTION)
@pytest.mark.parametrize("name", SMALL)
def test_law_holds_on_jax(law: str, name: str) -> None:
    owner = backends.get("jax")
    if (reason := owner.why_unavailable()) is not None:
        pytest.skip(reason)
    sampled = bool(os.environ.get("REFATTN_SLOW_SAMPLE"))
    if sampled and (name != "masked" or law == "lengths" or [*LAWS].index(law) % 8 != 2):
        pytest.skip("not of the sample: the check on JAX has others, and each length is compiled")
    owner.enable_float64()
    for implementation, dtype in itertools.product(
        RECORD.implementations, ("float32",) if sampled else ("float64", "float32")
    ):
        assert LAWS[law](Core(RECORD, implementation, owner, dtype), SMALL[name]) <= 1.0, (implementation, dtype)


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

# Law, equation, what is done to its value, sample.
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


@pytest.mark.parametrize("law, id, change, name", MUTANTS)
def test_law_fails_where_an_equation_is_wrong(law: str, id: str, change: Change, name: str) -> None:
    with equations.mutate(id, change):
        assert LAWS[law](core(), SMALL[name]) > 1.0


def test_every_law_is_seen_to_fail_forward_and_backward() -> None:
    seen = {(law, id.startswith("d")) for law, id, _, _ in MUTANTS}
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
    laws = ("causal", "causal_mask", "permutation")
    assert {law for law in laws if LAWS[law](core(implementation), SMALL["plain"]) > 1.0} == caught


@pytest.mark.parametrize("implementation", RECORD.implementations)
def test_a_window_that_is_one_wider(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vars(options)["_band"]

    def wrong(*given: Any) -> tuple[Any, Any]:
        first, last = right(*given)
        return None if first is None else first - 1, last

    monkeypatch.setattr(options, "_band", wrong)
    assert LAWS["band"](core(implementation), SMALL["plain"]) > 1.0


def test_causality_is_judged_in_the_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dense.backward

    def wrong(saved: dense.Saved, d_out: Any, d_lse: Any) -> dict[str, Any]:
        gradients = right(saved, d_out, d_lse)
        return gradients | {"k": gradients["k"] + 1e-12 * np.mean(saved.k, axis=2, keepdims=True)}

    monkeypatch.setattr(dense, "backward", wrong)
    assert LAWS["causal"](core(), SMALL["plain"]) == math.inf


def test_a_choice_that_sees_the_future_is_caught_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vars(tiled)["safe_rows"]

    def wrong(q: Any, k: Any, v: Any, offset: Any, *rest: Any) -> Any:
        return right(q, k, v, None, *rest)

    monkeypatch.setattr(tiled, "safe_rows", wrong)
    assert LAWS["causal"](core("tiled"), LONG["long"]) == math.inf
    assert LAWS["causal_mask"](core("tiled"), LONG["long"]) <= 1.0


def test_interleaved_groups_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "repeat_heads", lambda x, heads: np.concatenate([x] * (heads // x.shape[1]), axis=1))
    caught = {law for law in OF_ATTENTION if LAWS[law](core(), SMALL["plain"]) > 1.0}
    assert {"independent", "constant_value", "key_shift"} <= caught


@pytest.mark.parametrize("implementation", RECORD.implementations)
def test_an_ignored_mask_is_caught(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dense, masks):
        monkeypatch.setattr(module, "band_pairs", lambda *given: None)
    for law in ("padding", "empty"):
        assert LAWS[law](core(implementation), SMALL["plain"]) == math.inf


def test_a_cut_that_depends_on_the_workers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vars(tiled)["plan"]
    monkeypatch.setattr(tiled, "plan", lambda q, k, most: replace(right(q, k, most), columns=64 * backends.workers()))
    assert LAWS["workers"](core("tiled"), LONG["long"]) == math.inf


def test_a_missing_tile_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Band.blocks
    monkeypatch.setattr(Band, "blocks", lambda *given: list(right(*given))[:2])
    assert LAWS["permutation"](core("tiled"), LONG["long"]) > 1.0
    assert LAWS["permutation"](core("tiled"), SMALL["plain"]) <= 1.0


def test_noise_is_that_of_the_dtype_and_is_measured_once() -> None:
    known: dict[bytes, dict[str, float]] = {}
    s = SMALL["masked"]
    noises = {}
    for dtype in ("float64", "float32"):
        noises[dtype] = Core(RECORD, "tiled", backends.get("numpy"), dtype, known).noise(
            s.inputs, s.options, s.upstream
        )
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


def test_without_noise_only_equal_numbers_agree() -> None:
    assert used_share(ONE, ONE, {"x": 0.0}) == 0.0
    assert used_share({"x": np.asarray([1.0, -np.inf, 2.1])}, ONE, {"x": 0.0}) == math.inf


def test_same_bits_tells_zeros_dtypes_and_shapes_apart() -> None:
    a = {"x": np.zeros(2)}
    assert same_bits(a, {"x": np.zeros(2)}) == 0.0
    assert same_bits({"x": np.full(2, np.nan)}, {"x": np.full(2, np.nan)}) == 0.0
    for other in (-np.zeros(2), np.zeros(2, dtype=np.float32), np.zeros((1, 2))):
        assert same_bits(a, {"x": other}) == math.inf


def test_numpy_is_given_read_only_arrays() -> None:
    class Writer:
        @staticmethod
        def forward(q: Any, **given: Any) -> Any:
            q += 1.0
            return q, None

    writing = replace(RECORD, core=Writer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        Core(writing, "dense", backends.get("numpy"), "float64").forward(SMALL["plain"].inputs, {})


def test_a_sample_of_a_case_has_upstream_gradients_of_all_outputs() -> None:
    s: Sample = sample(RECORD, RECORD.case("grouped"))
    assert s.upstream["d_out"].shape == (2, 6, 37, 16)
    assert s.upstream["d_lse"].shape == (2, 6, 37)
