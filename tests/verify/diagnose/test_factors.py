"""Kernels that are given numbers and factors, and read the factors wrongly: each is caught, and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage_types import round_to
from refattn.verify.diagnose.suspects import locate
from refattn.verify.run import verify

RECORD = ra.mechanism("softmax")
FEW = dataclasses.replace(RECORD, cases=tuple(map(RECORD.case, ("plain", "grouped"))), kernel_sizes=())
BLOCK = 16
"""Tokens that share a factor where a kernel asks for blocks, and numbers of nvfp4."""

Read = Callable[[str, Any], Any]


class Kernel:
    """The definition on numbers times the factors that it reads, in any of the formats."""

    def __init__(self, reads: Read, descale: Any = None) -> None:
        self.reads = reads
        if descale is not None:
            self.descale = descale

    def __call__(self, q: Any, k: Any, v: Any, *, dtype: str, descale: Any, descale_whole: Any = (1.0,) * 3) -> Any:
        products = []
        for name, x, factor, whole in zip("qkv", (q, k, v), descale, descale_whole, strict=True):
            read = np.asarray(self.reads(name, factor), np.float64)
            if read.ndim == 2:  # one for each head of keys
                read = read.repeat(x.shape[1] // read.shape[1], axis=1)[:, :, None, None]
            elif read.ndim == 3:  # one for so many tokens
                read = read.repeat(BLOCK, axis=2)[:, :, : x.shape[2], None]
            elif read.ndim == 4:  # one for so many numbers along the axis that products sum over
                axis = 2 if name == "v" else 3
                read = np.take(read.repeat(32 if dtype == "mxfp8" else BLOCK, axis), range(x.shape[axis]), axis)
            products.append(x.astype(np.float64) * read * np.float64(whole))
        out, saved = ra.softmax.forward(*products)
        return round_to(out, "bfloat16").astype(np.float32), saved.lse.astype(np.float32)


def first_batch(name: str, x: Any) -> Any:
    return x[:1].repeat(len(x), axis=0)


def none_of_v(name: str, x: Any) -> Any:
    return np.ones_like(x) if name == "v" else x


def next_head_of_k(name: str, x: Any) -> Any:
    return np.roll(x, -1, axis=1) if name == "k" else x


@pytest.mark.parametrize(
    ("dtype", "descale", "reads", "named"),
    [
        ("float8_e4m3fn", None, first_batch, "factors of q, k and v of the first batch in all"),
        ("float8_e5m2", None, first_batch, "factors of q, k and v of the first batch in all"),
        ("float8_e4m3fn", "tensor", none_of_v, "factors of v ignored"),
        ("float8_e5m2", BLOCK, next_head_of_k, "factors of k of the next head"),
        ("mxfp8", None, next_head_of_k, "factors of k of the next head"),
        ("nvfp4", None, first_batch, "factors of q, k and v of the first batch in all"),
    ],
)
def test_factors_that_are_read_wrongly_are_named(dtype: str, descale: Any, reads: Read, named: str) -> None:
    right = verify(FEW, Kernel(lambda name, x: x, descale), dtypes=[dtype])
    assert {outcome.status for outcome in right.outcomes} == {"agrees"}
    report = verify(FEW, Kernel(reads, descale), dtypes=[dtype])
    assert "disagrees" in {outcome.status for outcome in report.outcomes}
    suspects = locate(FEW, report).suspects
    assert suspects is not None
    assert (suspects.ranked[0].kind, suspects.ranked[0].whole) == (named, suspects.ranked[0].failing)
