"""The table of the presets: its script, its results, and that its page says what these say."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import refattn as ra
from docs.experiments import presets
from docs.experiments.presets import RESULTS, SETTINGS, SIZE, Cost, Job, by_setting, cost, steps_of
from docs.experiments.runs import read
from refattn.train import settings


def test_every_mechanism_with_presets_has_both_in_the_table() -> None:
    """Settings after its source, and this library's, which in one mechanism are its source's in part."""
    for name in ra.list_mechanisms():
        if ra.mechanism(name).presets:
            own = [setting.of for setting in SETTINGS.values() if setting.mechanism == name]
            expected = ["in part ours"] * 2 if name == "higher_order" else own
            assert own == expected and own.count("this library's") == (name != "higher_order") < len(own), name


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.preset])
def test_whose_settings_they_are_is_what_is_said_of_each(name: str) -> None:
    """None is as printed: each has something of the authors' code, or of ours."""
    setting = SETTINGS[name]
    assert setting.preset is not None
    whose = ra.mechanism(setting.mechanism).whose[setting.preset]
    kinds = {text.partition(",")[0] for of, text in whose.items() if of != "accumulate"}
    if setting.of == "authors'":
        assert "code" in kinds and "ours" not in kinds
    else:
        assert "ours" in kinds and setting.of in ("in part ours", "ours, parts of his", "this library's")
        assert setting.of != "ours, parts of his" or kinds == {"ours"}


TRAINED_WITH = {"B": 215_053_644.0, "H1": 343_654_602.0}
"""Operations of a step when these were trained: their attention took the core of sympformer, and divided by z."""


@pytest.mark.parametrize("name", ["softmax", "B", "H1", "Mercat: minus one", "delta"])
def test_operations_are_those_that_are_stored(name: str) -> None:
    """And at equal operations a training has those of the baseline, to half a step."""
    found, budget = by_setting(RESULTS, [name])[name], cost(SETTINGS["softmax"]).of(SIZE["steps"])
    own = Cost((TRAINED_WITH[name],), 0.0) if name in TRAINED_WITH else cost(SETTINGS[name])
    for lines in found.values():
        for line in lines:
            assert line["result"]["operations"] == own.of(line["run"]["steps"])
    (steps,) = {line["run"]["steps"] for line in found["operations"]}
    assert name in TRAINED_WITH or steps == steps_of(SETTINGS[name])
    assert abs(own.of(steps) - budget) <= 0.5 * own.of(1)
    assert 0.97 * own.of(1) < cost(SETTINGS[name]).of(1) <= own.of(1)  # docs/presets.md says by how much


@pytest.mark.slow
def test_growth_is_counted_and_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    # A head has 16 columns after two growths. In a width of 16 the second would find gradients of rounding alone.
    monkeypatch.setattr(presets, "SIZE", {**SIZE, "context": 16, "heads": 2, "score_bytes": 2000})
    cost.cache_clear()
    setting = SETTINGS["Burgund"]
    own = cost(setting)
    assert own.growth > 0.0 and len(own.steps) == 3 and own.steps[0] < own.steps[1] < own.steps[2]
    assert own.of(6) == pytest.approx(2.0 * sum(own.steps) + own.growth)
    result = Job(setting, 6, 0).result()
    cost.cache_clear()
    plain = presets.train(settings.build("growing", {**presets.SIZE, "steps": 6}))
    columns = 2 * SIZE["layers"] * 2 * 2 * 4  # twice, of queries and keys of each head, four
    assert result["diverged"] is None and result["parameters"] - plain["parameters"] in (columns * 32, columns * 33)


@pytest.mark.slow
def test_the_script_goes_on_where_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**SIZE, "context": 8, "width": 8, "heads": 2, "layers": 1, "steps": 3, "batch": 2, "score_bytes": 2000}
    monkeypatch.setattr(presets, "SIZE", small)
    cost.cache_clear()
    results = tmp_path / "results.jsonl"
    words = ["run", "--results", str(results), "--seeds", "1", "-j", "1", "--setting", "softmax"]
    stored = []
    for more in ([], ["--setting", "B"]):
        done = CliRunner().invoke(presets.main, [*words, *more])
        assert done.exit_code == 0, done.output
        stored.append(results.read_bytes().splitlines())
    assert stored[0][0] == stored[1][0] and len(stored[0]) == 1 < len(stored[1])  # not run again, times and all
    cost.cache_clear()
    assert len(read(results)) == len(stored[1])
    with pytest.raises(ValueError, match="got 1 lines of softmax at equal steps, needs one of each seed"):
        by_setting(results, ["softmax"])
