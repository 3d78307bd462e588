"""What holds for every mechanism in each of its implementations: of what forward saved, and of what masks hide."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.mechanisms.record import Mechanism, Unsupported
from refattn.verify.selfcheck.probe import Core, Values
from refattn.verify.selfcheck.samples import Sample, sample, shrunk

NUMPY = backends.get("numpy")
RECORDS = [record for record in map(ra.mechanism, ra.list_mechanisms()) if record.core is not None]


def calls(record: Mechanism, *names: str) -> Iterator[tuple[str, Core, Sample]]:
    """Yield a small call of every case and every implementation; `names` are all that a case may be given."""
    for case in record.cases:
        if names and ({*case.inputs} - {*names} or case.given or 0 in case.inputs["k"].shape):
            continue
        small = sample(record, shrunk(case))
        for implementation in record.implementations:
            yield f"{case.name}, {implementation}", Core(record, implementation, NUMPY, "float64"), small


@pytest.mark.filterwarnings("ignore:step. got more than")
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_what_forward_saved_can_be_copied_and_pickled(record: Mechanism) -> None:
    """A copy has the same gradients, to the bit; a pickle to rounding, as it stores strided arrays row by row."""
    count = 0
    for where, core, small in calls(record):
        with contextlib.suppress(Unsupported):
            saved = core.forward(small.inputs, small.options)[1]
            expected = core.backward(saved, small.upstream)
            found = core.backward(copy.deepcopy(saved), small.upstream)
            assert all(found[name].tobytes() == x.tobytes() for name, x in expected.items()), where
            found = core.backward(pickle.loads(pickle.dumps(saved)), small.upstream)
            for name, x in expected.items():
                scale = max(np.max(np.abs(x), initial=0.0), 1.0)
                np.testing.assert_allclose(found[name], x, rtol=0.0, atol=1e-11 * scale)
            count += 1
    assert count >= len(record.cases)


def hides(record: Mechanism, name: str) -> bool:
    return name in record.defaults


def masked(record: Mechanism, small: Sample, name: str, hidden: Any, value: float) -> Values:
    """The arguments with a mask that hides some tokens from all, as keys and as queries, which hold `value`."""
    arrays = {n: x.copy() for n, x in small.inputs.items()}
    keys, queries = arrays["k"].shape[2], arrays["q"].shape[2]
    for n in "qkv":
        if n != "q" or record.one_sequence or queries == keys:
            arrays[n][:, :, hidden[: arrays[n].shape[2]]] = value
    if name == "key_mask":
        return {**arrays, "key_mask": np.broadcast_to(~hidden, (len(arrays["k"]), keys))}
    pairs = np.broadcast_to(~hidden, (1, 1, queries, keys))
    both = pairs & ~hidden[:, None] if queries == keys else pairs
    return {**arrays, "mask": both & arrays.get("mask", True)}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("record", [r for r in RECORDS if hides(r, "key_mask")], ids=lambda record: record.name)
def test_behind_a_key_mask_nothing_is_read(record: Mechanism, value: float) -> None:
    """What a token holds that a key_mask hides changes no bit of any result, forward or backward."""
    for where, core, small in calls(record, *"qkv"):
        hidden = np.arange(small.inputs["k"].shape[2]) == 1
        with contextlib.suppress(Unsupported):
            given = [masked(record, small, "key_mask", hidden, x) for x in (0.0, value)]
            for x in given:
                x["q"] = small.inputs["q"]
            right, found = (core(x, small.options, small.upstream) for x in given)
            assert all(found[name].tobytes() == x.tobytes() for name, x in right.items()), where


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:step. got more than")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("record", [r for r in RECORDS if hides(r, "mask")], ids=lambda record: record.name)
def test_behind_a_mask_of_pairs_a_number_that_is_not_finite_makes_no_wrong_one(record: Mechanism, value: float) -> None:
    """It may reach results, since 0 times NaN is NaN; what is finite is what it is without it."""
    for where, core, small in calls(record, *"qkv", "mask"):
        hidden = np.arange(small.inputs["k"].shape[2]) == 1
        with contextlib.suppress(Unsupported):
            right, found = (
                core(masked(record, small, "mask", hidden, x), small.options, small.upstream) for x in (0.0, value)
            )
            for name, x in right.items():
                finite = np.isfinite(found[name])
                scale = max(np.max(np.abs(x), initial=0.0), 1.0)
                assert np.all(np.abs(np.where(finite, found[name] - x, 0.0)) <= 1e-12 * scale), (where, name)
