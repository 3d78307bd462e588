"""The designed calls in the sizes of kernels: what they were chosen for is there, and the definition passes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.inputs import make
from refattn.verify.run import verify_case

RECORD = ra.mechanism("softmax")


def test_names_are_their_own() -> None:
    names = [case.name for case in (*RECORD.cases, *RECORD.kernel_sizes)]
    assert len({*names}) == len(names) and RECORD.case("groups-32").inputs["q"].shape[1] == 64


def test_padding_is_longer_than_a_tile_and_scores_are_low() -> None:
    seen = make("softmax", RECORD.case("padded-left"), "float32")["mask"]
    assert (
        seen.dtype == bool and [int(np.argmax(row)) for row in seen[:, 0, 0]] == [150, 0, 199] and seen[..., -1].all()
    )
    low = make("softmax", RECORD.case("low"), "float64")
    assert (low["q"] @ low["k"].swapaxes(2, 3) / 8 < -5e4).all()


class _Tiled:
    """Attention with a fault of a kernel that was tried at other sizes."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults

    def __call__(self, q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, **options: Any) -> Any:
        if "start" in self.faults:  # a maximum that starts at a number, not at -inf
            s = q @ np.repeat(k, q.shape[1] // k.shape[1], 1).swapaxes(2, 3) / np.sqrt(q.shape[3])
            p = np.exp(s - np.maximum(s.max(-1, keepdims=True), self.faults["start"]))
            total = p.sum(-1, keepdims=True)
            return (p @ np.repeat(v, q.shape[1] // v.shape[1], 1) / np.where(total > 0, total, 1)).astype(q.dtype)
        if "columns" in self.faults:
            k = np.where(np.arange(k.shape[3]) < self.faults["columns"], k, 0).astype(k.dtype)
        if "tile" in self.faults and k.shape[2] % self.faults["tile"] == 1:
            k, v = k[:, :, :-1], v[:, :, :-1]
        return ra.softmax.forward(q, k, v, causal=causal, mask=mask, **options)[0]


@pytest.mark.parametrize(
    ("name", "faults"), [("low", {"start": -5e4}), ("wide-256", {"columns": 128}), ("tile-65", {"tile": 64})]
)
def test_faults_that_small_cases_cannot_show(name: str, faults: dict[str, Any]) -> None:
    assert verify_case(RECORD, _Tiled(), RECORD.case(name), "float32").status == "agrees"
    assert verify_case(RECORD, _Tiled(**faults), RECORD.case(name), "float32").status == "disagrees"


HIDDEN = ("low-mask", "low-causal")


@pytest.mark.parametrize("name", HIDDEN)
def test_large_values_stand_in_keys_that_queries_of_low_scores_do_not_see(name: str) -> None:
    given = make("softmax", RECORD.case(name), "float32")
    q, k, v = (given[x] for x in "qkv")
    seen = np.broadcast_to(given.get("mask", np.tri(67, dtype=bool)), (*q.shape[:3], k.shape[2]))
    largest = np.where(seen, q @ k.swapaxes(2, 3) / 8, -np.inf).max(axis=-1)
    assert (largest[..., ::3] < -100).all() and (largest[..., 1::3] > -20).all()
    hidden = ~seen[:, :, :6].any(axis=2)
    assert (v[hidden] > 1000).any() and (np.abs(v[~hidden]) < 4).all()


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scores_that_are_clamped_after_the_mask_are_seen(name: str, dtype: str) -> None:
    def status(bound: float) -> str:
        def attend(q: Any, k: Any, v: Any, *, dtype: str, causal: bool = False, mask: Any = True) -> Any:
            scores = q.astype(np.float64) @ k.swapaxes(2, 3) / 8
            seen = np.tri(q.shape[2], dtype=bool) if causal else mask
            p = np.exp(np.maximum(np.where(seen, scores, -np.inf), -bound) + 128.0)
            return (p @ v / p.sum(axis=-1, keepdims=True)).astype(q.dtype)

        return verify_case(RECORD, attend, RECORD.case(name), dtype).status

    assert [status(bound) for bound in (np.inf, 1e3)] == ["agrees"] * 2
    assert [status(bound) for bound in (20.0, 50.0, 88.0, 128.0)] == ["disagrees"] * 4
