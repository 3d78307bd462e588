"""Presets: each trains from the command line, as its settings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import model
from refattn.train import metrics, settings
from tests.cli.command import run

PRESETS = [(name, preset) for name in ra.list_mechanisms() for preset in ra.mechanism(name).presets]
SMALL = "width=16 heads=2 layers=2 context=8 batch=2 accumulate=1 steps=2 score_bytes=40 sample_bytes=2".split()


def trained(mechanism: str, preset: str, folder: Path, *more: str) -> Path:
    (folder / "text.txt").write_text("to be or not to be, " * 50)
    grows = ["grow=[1]"] if "grow" in ra.mechanism(mechanism).presets[preset] else []
    words = [word for size in (*SMALL, *grows, *more, f"preset={preset}") for word in ("--set", size)]
    result = run("train", mechanism, *words, "--data", str(folder / "text.txt"), "--out", str(folder / "run"))
    assert result.exit_code == 0, result.output
    return folder / "run"


def test_the_choices_of_authors() -> None:
    """What their words or their code say; the tests of SympFormer's are in its own folder."""
    block = settings.build("koopman", {"preset": "tie2024"}).model.block(0)
    assert (block.families["perturbation"].of_phi, block.law.candidates, block.fit) == ("", 64, "separable")
    block = settings.build("higher_order", {"preset": "mercat2020"}).model.block(0)
    assert (block.order, block.alpha, block.normaliser.delta, block.layer_norm) == (2, 3.0, 1.0, True)
    printed = settings.build("higher_order", {}).model.block(0)  # equations 1 and 2
    assert (printed.order, printed.alpha, printed.normaliser.delta, printed.layer_norm) == (2, 3.0, 0.0, True)


@pytest.mark.parametrize(("mechanism", "preset"), PRESETS)
def test_of_every_setting_of_a_preset_it_is_said_whose_it_is(mechanism: str, preset: str) -> None:
    """Printed in the paper, of its authors' code, or ours, and where or why. What is named beside is a setting, too."""
    record = ra.mechanism(mechanism)
    whose = record.whose[preset]
    own = {name for name in settings.flat(record.presets[preset]) if name not in settings.MAPPINGS}
    assert own <= set(whose) and set(record.whose) == set(record.presets)
    for name, text in whose.items():
        kind, comma, why = text.partition(", ")
        assert kind in ("printed", "code", "ours") and comma and len(why) > 4, name
    options: Any = record.block.Config
    assert {name.removeprefix("block.") for name in set(whose) - own} <= set(options.__dataclass_fields__)


def test_a_preset_sets_the_model_too() -> None:
    """Tie has updates in place of the feed-forward network, no heads, and points at source tokens."""
    built = settings.build("koopman", {"preset": "tie2024"})
    assert (built.mlp, built.heads, built.decode) == (False, 1, "pointer")
    params = model.init(built.model, like=np.ones(1, dtype=np.float32))
    assert all(layer.mlp is None for layer in params.layers)


def test_a_run_says_how_often_it_drew_again(tmp_path: Path) -> None:
    folder = trained("koopman", "tie2024", tmp_path, "context=32", "batch=4", "width=32", "heads=4")
    assert any(row.get("redrawn", 0) > 0 for row in metrics.read(folder / "metrics.jsonl"))


@pytest.mark.parametrize(("mechanism", "preset"), PRESETS)
def test_a_preset_trains_from_the_command_line(mechanism: str, preset: str, tmp_path: Path) -> None:
    folder = trained(mechanism, preset, tmp_path)
    known = json.loads((folder / "config.json").read_text())["settings"]["block"]
    assert known == dict(ra.mechanism(mechanism).presets[preset]["block"])
    assert [row["step"] for row in metrics.read(folder / "metrics.jsonl")] == [1, 2]
