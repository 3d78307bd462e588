"""The sweeps: what is measured again is what is stored, and values grow by the best step of their length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from docs.experiments import sweeps, teacher
from docs.experiments.runs import found

SOME = [job for job in sweeps.capacities() if (job.width, job.alpha) == (16, 1.0)]


def test_what_is_measured_is_what_is_stored() -> None:
    for job, line in zip(SOME, found(SOME, sweeps.RESULTS), strict=True):
        assert job.measured() == {name: x for name, x in line["result"].items() if name != "seconds"}


def test_a_cache_holds_its_keys_and_values() -> None:
    for job in SOME:
        state = job.bytes(10)
        assert state == (10 * 2 * 16 * 4 if job.order is None else job.bytes(20))


def test_values_grow_by_the_best_length_along_what_is_hidden() -> None:
    given = teacher.task(0, 10.0, 64, "x")
    params = sweeps.Widths("values", "optimal", 0).fresh(4)
    found_ = sweeps.ValuesBottleneck(params, given)
    assert 0.0 < found_.psi < 1.0
    np.testing.assert_allclose(found_.normal @ params.w_o.T, 0.0, atol=1e-9 * float(np.linalg.norm(found_.normal)))
    grown = found_.grown(3)
    losses = [
        teacher.loss(replace(grown, w_o=np.concatenate([params.w_o, times * grown.w_o[4:]])), given)
        for times in (0.9, 1.0, 1.1)
    ]
    assert losses[1] < min(losses[0], losses[2]) and losses[1] < teacher.loss(params, given)
    assert sweeps.ValuesBottleneck(sweeps.Widths("values", "scratch", 0).fresh(16), given).psi == 0.0


def test_psi_is_what_no_weight_of_the_width_can_follow() -> None:
    """A change of either weight is at right angles to what is hidden."""
    given = teacher.task(0, 10.0, 64, "x")
    params = sweeps.Widths("values", "narrow", 0).fresh(4)
    bottleneck = sweeps.ValuesBottleneck(params, given)
    random = np.random.default_rng(0).standard_normal
    for change in (random((16, 4)) @ params.w_o, params.w_v[0] @ random((4, 16))):
        root = np.linalg.inv(bottleneck.back)
        assert np.sum(bottleneck.normal * (root @ change)) == pytest.approx(0.0, abs=1e-8)
