"""Honest kernels at huge scores: those that compute them again in another order, and those that round them."""

from __future__ import annotations

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage_types import round_to
from refattn.mechanisms.case_builders import qkv
from refattn.mechanisms.record import Case
from refattn.verify.outcome import Result, Truth
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge

RECORD = ra.mechanism("softmax")
F = np.float32
SEEDS = 12


def kernel(known: Truth, dtype: str, rounded: int) -> Result:
    """A kernel in float32 that keeps lse alone: sums in order, in the backward as a library makes them.

    Scores are rounded to the storage type so many times: once they are scaled, and before that, too.
    """

    def store(x: np.ndarray) -> np.ndarray:
        return round_to(x.astype(np.float64), dtype).astype(F)

    q, k, v = (known.inputs[name].astype(F) for name in "qkv")
    assert known.upstream is not None
    d_out, scale = known.upstream.astype(F), F(q.shape[3] ** -0.5)

    def scores(in_order: bool) -> np.ndarray:
        if rounded == 2:
            return store(store(q @ k.swapaxes(2, 3)) * scale)
        terms = q[:, :, :, None] * k[:, :, None]
        s = np.add.accumulate(terms, axis=-1)[..., -1] * scale if in_order else (q * scale) @ k.swapaxes(2, 3)
        return store(s) if rounded else s

    s = scores(in_order=True)
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    out, lse = store(store(p / total) @ v), top + np.log(total)
    p = np.exp(scores(in_order=False) - lse)
    d_s = store(p * (d_out @ v.swapaxes(2, 3) - (d_out * out).sum(axis=-1, keepdims=True)))
    d_q, d_k, d_v = d_s @ k * scale, d_s.swapaxes(2, 3) @ q * scale, store(p).swapaxes(2, 3) @ d_out
    found = {"out": out, "lse": lse[..., 0], "d_q": store(d_q), "d_k": store(d_k), "d_v": store(d_v)}
    return Result(found, known.stored)


CASES = {
    "recomputed": ("float32", qkv("recomputed", "extreme", "", b=1, h=4, n_q=17, n_k=33, d=32, logits=64.0), 0),
    "rounded": ("bfloat16", RECORD.case("huge-scores"), 1),
    "rounded twice": ("bfloat16", qkv("twice", "plain", "", b=1, h=2, n_q=8, n_k=65, d=24, logits=4.0), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_no_false_alarm_at_twelve_seeds(name: str) -> None:
    dtype, case, rounded = CASES[name]
    declared = {"SM.1": ""} if rounded else {}
    worst: dict[int, float] = {}
    for seed in range(SEEDS):
        known = truth(RECORD, case, dtype, grad=True, seed=seed, roundings=declared)
        worst[seed] = max(verdict.share for verdict in judge(kernel(known, dtype, rounded), known))
    assert max(worst.values()) <= 0.8, worst


def test_rounded_scores_that_were_not_declared_are_seen() -> None:
    case: Case = RECORD.case("peaked")
    known = truth(RECORD, case, "bfloat16", grad=True)
    assert max(verdict.share for verdict in judge(kernel(known, "bfloat16", 1), known)) > 1.0
