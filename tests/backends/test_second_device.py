"""All that computes, on a device beside the CPU: that of array-api-strict refuses NumPy, and the CPU's own arrays.

What is compared has the same bits on both devices. All cores and blocks are in `refattn check --backend strict`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, backends, model, philox, tree
from refattn.model import decode
from refattn.train import step
from refattn.train.optimiser import AdamW
from refattn.verify import check, verify
from refattn.verify.selfcheck.probe import on_device, same_bits

pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
STRICT = backends.get("strict")
HERE, THERE = (on_device(STRICT, name) for name in STRICT.devices()[:2])
CAUSAL = [name for name in ra.list_mechanisms() if "causal" in ra.mechanism(name).context_fields]
STREAMS = [name for name in ra.list_mechanisms() if ra.mechanism(name).stream is not None]


def same_on_both(run: Callable[[Any], Any]) -> None:
    """What a run gives for arrays on either device has the same bits, and lies there."""
    here, there = (tree.flatten(run(owner)) for owner in (HERE, THERE))
    assert {str(x.device) for x in there.values()} == {"array_api_strict.Device('device1')"}
    first, second = ({n: STRICT.to_numpy(x) for n, x in each.items()} for each in (here, there))
    assert first and same_bits(second, first) == 0.0


def draw(owner: Any, purpose: str, *shape: int) -> Any:
    return owner.from_numpy(philox.normal(shape, seed=3, purpose=purpose))


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str) -> None:
    record = ra.mechanism(name)

    def run(owner: Any) -> Any:
        params = record.block.init(record.block.Config(width=4, heads=2), seed=3, like=draw(owner, "like", 1))
        stream: Any = record.stream
        x, cache, found = draw(owner, "x", 2, 5, 4), stream.start(params, 2), {}
        for first, stop in ((0, 3), (3, 4), (4, 5)):
            state = record.block.start(params, x[:, first:stop, :], Context(causal=True))
            advance = stream.step if stop - first == 1 else stream.prefill
            state, cache = advance(params, cache, state, Context(causal=True))
            found[str(first)] = record.block.read(params, state)
        return found

    same_on_both(run)


@pytest.mark.parametrize("name", CAUSAL)
def test_models_and_a_step_of_training(name: str) -> None:
    config = model.Config(name, vocabulary=7, context=8, width=4, heads=2, layers=2)
    text = philox.integers((2, 6), 0, 7, seed=3, purpose="text")

    def run(owner: Any) -> Any:
        params = model.init(config, seed=5, like=draw(owner, "like", 1))
        inputs, targets = owner.from_numpy(text[:, :-1]), owner.from_numpy(text[:, 1:])
        _, gradients = step.loss_and_gradients(params, inputs, targets)
        adam = AdamW(learning_rate=1e-3)
        moved, _ = adam.update(adam.start(params), params, gradients)
        logits, cache = decode.extend(params, decode.start(params, batch=2), inputs[:, :3])
        more, _ = decode.extend(params, cache, inputs[:, 3:])
        return {"gradients": gradients, "moved": moved, "logits": logits, "more": more}

    same_on_both(run)


def test_an_adapter_there_is_verified() -> None:
    record = ra.mechanism("softmax")
    record = dataclasses.replace(record, cases=tuple(record.case(name) for name in ("tiny", "mask-keys", "softcap")))

    class Attend:
        def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            given = {n: THERE.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
            out, self.saved = ra.softmax.forward(*map(THERE.from_numpy, (q, k, v)), **given)
            return out

        def backward(self, d_out: Any) -> Any:
            return ra.softmax.backward(self.saved, THERE.from_numpy(d_out))

    report = verify(record, Attend(), dtypes=["float64", "float32"], grad=True)
    assert report.counts()["all"] == {"run": 6, "agreed": 6, "failed": 0, "declined": 0}, report.outcomes


def rows(name: str, *what: str) -> list[tuple[str, str, str]]:
    """What the check says of cores or blocks on the second device."""
    names = [f"{each}, device1" for each in what]
    report = check(ra.mechanism(name), "strict", progress=lambda tasks: [task for task in tasks if task.name in names])
    return [(row.name, row.status, row.detail) for row in report.rows]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_blocks_are_checked_there(name: str) -> None:
    ((_, status, detail),) = rows(name, "block")
    assert status == "agrees", detail


def test_a_core_that_puts_an_array_onto_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ra.mechanism("softmax").core
    forward = core.forward  # type: ignore[union-attr]
    assert [row[:2] for row in rows("softmax", "core")] == [("core, device1", "agrees")]

    def mixed(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return forward(q * STRICT.from_numpy(np.ones(1)), k, v, **options)

    monkeypatch.setattr(core, "forward", mixed)
    ((_, status, detail),) = rows("softmax", "core")
    assert status == "disagrees" and "different devices" in detail
