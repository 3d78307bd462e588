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
