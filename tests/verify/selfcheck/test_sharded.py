"""The check of implementations over devices: what it runs, what it finds, and that memory falls."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import refattn as ra
from refattn import shards
from refattn.verify.selfcheck import sharded
from refattn.verify.selfcheck.check import check

pytest.importorskip("jax")


def test_what_is_run() -> None:
    def named(name: str, **sizes: int) -> list[str]:
        return [f"{task.section} {task.name}" for task in sharded.tasks(ra.mechanism(name), sizes)]

    implementations = ["sharded dense", "sharded tiled", "sharded ring", "memory dense", "memory tiled", "memory ring"]
    assert named("softmax", heads=2, tokens=4) == implementations
    assert named("delta", tokens=2) == ["sharded recurrent", "sharded chunked", "sharded scan"]
    assert named("koopman", tokens=2) == ["sharded dense", "sharded shared"]


@pytest.mark.slow
def test_forms_agree_and_a_wrong_one_does_not() -> None:
    """A mechanism whose keys are one place off is found, on a mesh as elsewhere."""
    softmax = ra.mechanism("softmax")
    report = check(replace(softmax, cases=softmax.cases[:2]), "jax", mesh={"tokens": 2})
    assert report.exit_code == 0 and len(report.rows) == 3

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.softmax.forward(q, k, v[:, :, ::-1, :], **options)

    core: Any = SimpleNamespace(forward=wrong, backward=ra.softmax.backward)
    found = sharded._agrees(softmax, lambda on: (core, {"implementation": "dense"}), {"tokens": 2}, False)
    assert found[0] > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "higher_order"])
def test_memory_falls_as_one_over_devices(name: str) -> None:
    record = ra.mechanism(name)
    kind = shards.kind_of(record)
    assert kind is not None
    word, tokens, how = sharded.WRITTEN[kind]
    share, told = sharded._falls(record, lambda on: (shards.parallel(record, on, **how), {}), 4, tokens)
    assert share <= 1.0, (word, told)
