"""Runs that stop and go on: to the bit, from the last checkpoint that is whole, and only as they began."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refattn import files
from refattn.train import checkpoint, data, loop, metrics
from refattn.train.folder import RunError
from refattn.train.settings import Settings, build
from tests.train.runs import SMALL, Listener, Stopping, Trained, remains, small, train, write_text

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread alone"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def chosen(trained: Trained) -> Settings:
    return trained.settings


@pytest.fixture
def whole(tmp_path: Path, trained: Trained) -> dict[str, Any]:
    """What a run leaves that nothing interrupts."""
    return remains(trained.copy(tmp_path / "whole"))


# --- Ctrl-C


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("sympformer", {"block": {"start": "table"}}),
        ("sympformer", {"block": {"integrator": "ab2"}, "loops": 2}),
        ("graph_energy", {"gamma": 0.1, "block": {"regulariser": "gini"}}),
        ("koopman", {"batch": 2, "context": 8, "block": {"draws": "beta(candidates=2)"}}),
    ],
    ids=str,
)
def test_runs_of_other_blocks_go_on_to_the_same_bytes(
    tmp_path: Path, chosen: Settings, mechanism: str, options: dict[str, Any]
) -> None:
    few = build(mechanism, SMALL | {"data": chosen.data, "layers": 2, "steps": 5} | options)
    expected = remains(train(few, tmp_path / "whole").folder)
    out = tmp_path / "stopped"
    assert not train(few, out, Stopping(3)).finished
    assert remains(train(few, out, resume=True).folder) == expected


@pytest.mark.parametrize(
    ("number", "steps"),
    [
        (signal.SIGINT, (1, 4, 6, 9, 12)),
        (signal.SIGTERM, (11,)),
        pytest.param(signal.SIGINT, (2, 3, 5, 7, 8, 10, 11), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, (1, 6), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(
    tmp_path: Path, chosen: Settings, whole: dict[str, Any], number: signal.Signals, steps: tuple[int, ...]
) -> None:
    """Before the first checkpoint, at one, between two, after one and at the end."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    for step in steps:
        out = tmp_path / f"stopped-{step}"
        stopping = Stopping(step, number)
        result = train(chosen, out, stopping)
        assert (result.finished, result.step, result.facts) == (False, step, {})
        assert stopping.lines[-1] == "interrupted: the step is finished and saved; once more stops at once"
        found = checkpoint.newest(out / "checkpoints", stopping.say)
        assert found is not None and found.step == step
        assert not (out / "result.json").exists()
        report = Listener()
        assert train(chosen, out, report, resume=True).finished
        assert report.lines[0] == f"going on after step {step} of 12"
        assert [row["step"] for row in report.rows] == list(range(step + 1, 13))
        left = remains(out)
        # A checkpoint that the interrupt made may stand in the place of the last but one.
        for kind in ("json", "safetensors"):
            extra, regular = f"checkpoints/step-{step:08d}.{kind}", f"checkpoints/step-00000008.{kind}"
            if step in (9, 10, 11):
                del left[extra]
                left[regular] = whole[regular]
        assert left == whole, step
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_outside_of_the_main_thread_a_run_works(tmp_path: Path, chosen: Settings, whole: dict[str, Any]) -> None:
    thread = threading.Thread(target=lambda: train(chosen, tmp_path / "run"))
    thread.start()
    thread.join()
    assert remains(tmp_path / "run") == whole


# --- from where


def stop_after(chosen: Settings, out: Path, step: int) -> None:
    assert train(chosen, out, Stopping(step)).step == step


def without_checkpoints(chosen: Settings, out: Path) -> None:
    stop_after(chosen, out, 3)
    shutil.rmtree(out / "checkpoints")


def after_a_death_in_the_first_moment(chosen: Settings, out: Path) -> None:
    out.mkdir()
    (out / files.fresh_name()).write_text('{"settings": {')


def with_metrics_beyond_the_checkpoint(chosen: Settings, out: Path) -> None:
    stop_after(chosen, out, 4)
    row = metrics.read(out / "metrics.jsonl")[-1]
    with (out / "metrics.jsonl").open("a") as file:
        for step in (5, 6, 7):
            file.write(json.dumps(row | {"step": step, "loss": 99.0}) + "\n")
        file.write('{"step": 8, "lo')


NO_RUN = "there is no run in OUT: starting at step 0"


@pytest.mark.parametrize(
    ("prepare", "line"),
    [
        (without_checkpoints, "starting at step 0"),
        (lambda chosen, out: None, NO_RUN),
        (lambda chosen, out: out.mkdir(), NO_RUN),
        (after_a_death_in_the_first_moment, NO_RUN),
        (with_metrics_beyond_the_checkpoint, "going on after step 4 of 12"),
    ],
)
def test_whatever_is_there_a_run_goes_on_from_it_to_the_same_bytes(
    tmp_path: Path, chosen: Settings, whole: dict[str, Any], prepare: Callable[[Settings, Path], object], line: str
) -> None:
    out, report = tmp_path / "run", Listener()
    prepare(chosen, out)
    train(chosen, out, report, resume=True)
    assert report.lines[0] == line.replace("OUT", str(out)) and remains(out) == whole


def test_a_death_in_the_first_moment_is_no_hindrance_to_a_new_run(
    tmp_path: Path, chosen: Settings, whole: dict[str, Any]
) -> None:
    after_a_death_in_the_first_moment(chosen, tmp_path / "run")
    assert remains(train(chosen, tmp_path / "run").folder) == whole


# --- another run


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": 6}, "steps: got 6, the run in .* has 12. A run goes on as it began; give another folder"),
        ({"width": 32, "seed": 3}, "width: got 32, .* has 16; seed: got 3, .* has 0. A run"),
        ({"block": {"kv_heads": 1}}, "block.kv_heads: got 1, .* has None. A run"),
        ({"backend": "strict"}, "backend: got 'strict', .* has 'numpy'. A run"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, chosen: Settings, whole: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RunError, match=problem):
        train(small(chosen.data, **changes), tmp_path / "whole", resume=True)
    assert remains(tmp_path / "whole") == whole


@pytest.mark.parametrize("before", [12, 5])
def test_a_run_goes_on_beyond_its_end(tmp_path: Path, chosen: Settings, before: int) -> None:
    out = tmp_path / "run"
    if before == 12:
        train(chosen, out)
    else:
        stop_after(chosen, out, before)
    longer = small(chosen.data, steps=18)
    with pytest.raises(RunError, match="exact: got steps 18, needs the 12 that the run in .* began with"):
        loop.run(longer, out, Listener(), resume=True, exact=True)
    assert train(longer, out, resume=True).step == 18
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 19)]
    first, second = chosen.schedule, longer.schedule
    rates = [first(n) if n <= before else second(n) for n in range(1, 19)]
    assert [row["rate"] for row in rows] == pytest.approx(rates)
    config = json.loads((out / "config.json").read_text())
    assert config["settings"]["steps"] == 18 and config["lengths"] == [12, 18]
    with pytest.raises(RunError, match="steps: got 12, the run in .* has 18"):
        train(chosen, out, resume=True)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, chosen: Settings, whole: dict[str, Any]) -> None:
    train(small(chosen.data, learning_rate=1e-2), tmp_path / "other")
    shutil.rmtree(tmp_path / "whole" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "whole" / "checkpoints")
    before = remains(tmp_path / "whole")
    with pytest.raises(RunError, match="learning_rate: got 0.003, the checkpoint of step 12 has 0.01. A run"):
        train(chosen, tmp_path / "whole", resume=True)
    assert remains(tmp_path / "whole") == before


def test_another_text_is_refused_and_the_same_one_elsewhere_is_not(tmp_path: Path, whole: dict[str, Any]) -> None:
    chosen = small(write_text(tmp_path))
    stop_after(chosen, tmp_path / "run", 3)
    before = remains(tmp_path / "run")
    text = Path(chosen.data)
    content = text.read_bytes()
    text.write_bytes(content[:-1] + b"!")
    with pytest.raises(RunError, match="data: the text .*text.txt' is not the one that the run in .* began with"):
        train(chosen, tmp_path / "run", resume=True)
    assert remains(tmp_path / "run") == before
    (tmp_path / "moved.txt").write_bytes(content)
    assert train(small(str(tmp_path / "moved.txt")), tmp_path / "run", resume=True).finished
    after = remains(tmp_path / "run")
    assert after["metrics.jsonl"] == whole["metrics.jsonl"] and after["sample.txt"] == whole["sample.txt"]


BROKEN: dict[str, Any] = {
    "nothing": "",
    "no JSON": "{",
    "a list": "[]",
    "no text of UTF-8": b"\xff\xfe\x00",
    "settings of another version": {"settings": {"mechanism": "softmax", "colour": "red"}},
    "an unknown mechanism": {"settings": {"mechanism": "telepathy"}},
    "a block that is none": {"settings": {"mechanism": "softmax", "block": 3}},
    "no fingerprint": {"text": {}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_is_told(tmp_path: Path, chosen: Settings, whole: dict[str, Any], name: str) -> None:
    file = tmp_path / "whole" / "config.json"
    broken = BROKEN[name]
    if isinstance(broken, dict):
        broken = json.dumps(json.loads(file.read_text()) | broken)
    file.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    for resume in (False, True):
        with pytest.raises(RunError, match=r"config.json: is no configuration of a run that this version reads \(.+\)"):
            train(chosen, tmp_path / "whole", resume=resume)
    assert remains(tmp_path / "whole") | {"config.json": b""} == whole | {"config.json": b""}


def test_the_state_that_is_loaded_is_the_one_that_was_saved(tmp_path: Path, chosen: Settings) -> None:
    """Parameters and moments too, whatever the library: what goes on is not merely close."""
    from refattn import backends, tree
    from refattn.train.folder import hold

    text = data.load(chosen.data)
    for name in ("numpy", "strict"):
        other = small(chosen.data, backend=name)
        fresh = loop.fresh(other)
        state, _ = loop.step(fresh, other, text)
        with hold(tmp_path / name) as folder:
            loop._save(folder, other, state)
            again = loop._load(folder, other, fresh, Listener())
        owner = backends.get(name)
        for one, two in ((state.params, again.params), (state.moments, again.moments)):
            a, b = ({k: owner.to_numpy(x) for k, x in tree.flatten({"x": part}).items()} for part in (one, two))
            assert {k: (x.dtype, x.tobytes()) for k, x in a.items()} == {
                k: (x.dtype, x.tobytes()) for k, x in b.items()
            }
        assert (again.step, again.tokens) == (1, 64)
