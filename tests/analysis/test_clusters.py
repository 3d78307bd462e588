"""Clusters of tokens: the numbers, the flow beside its theory, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn import counter
from refattn.analysis import clusters
from refattn.cli import cli


def test_what_is_told_of_tokens() -> None:
    three = np.repeat(np.eye(3), [4, 2, 1], axis=0) * 5.0 + 1e-3 * counter.normal((7, 3), seed=0, purpose="c")
    found = clusters.course("layer", range(2), [np.ones((7, 3)), three])
    assert found.clusters.tolist() == [1, 3]
    assert found.ranks[0] == pytest.approx(1.0) and 2.5 < found.ranks[1] < 3.0
    assert found.mean_cosines[0] == pytest.approx(1.0)
    assert found.mean_cosines[1] == pytest.approx((2 * 6 + 2 * 1) / 42, abs=1e-2)
    chain = np.stack([[np.cos(a), np.sin(a)] for a in np.arange(5) * 0.09])
    assert clusters.components(chain @ chain.T > clusters.NEAR) == 1, "neighbours connect"
    lasts = clusters.course("time", range(5), [np.eye(2), np.eye(2), np.eye(2), np.ones((2, 2)), np.ones((2, 2))])
    assert lasts.plateaus() == [(2, 0.0, 3.0), (1, 3.0, 4.0)]


def test_equal_angles_follow_their_equation() -> None:
    x = clusters.simplex(8, 0.1)
    np.testing.assert_allclose(x @ x.T, np.where(np.eye(8) == 1.0, 1.0, 0.1), atol=1e-15)
    options = {"scale": 1.0}
    found = clusters.study(ra.softmax, options, particles=4, dimensions=3, end=0.5, step=0.25, seed=0)
    assert found.equal is not None
    _, measured, predicted = found.equal
    np.testing.assert_allclose(measured, predicted, rtol=1e-5)
    rates = found.rates()
    assert rates is not None and rates[0] / rates[1] == pytest.approx(1.0, abs=0.01)
    assert rates[1] == pytest.approx(2.0, abs=0.01), "the rate of the literature"
    other = clusters.study(ra.higher_order, {}, particles=4, dimensions=3, end=0.5, step=0.25, seed=0)
    assert other.equal is None


def test_tokens_stay_in_several_clusters_for_a_while() -> None:
    x = counter.normal((24, 2), seed=0, purpose="clusters")
    x = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    counts = {}
    for beta in (1.0, 9.0):
        times = np.linspace(0.0, 40.0, 5)
        walked = clusters.on_sphere(lambda x, b=beta: clusters.softmax(x, b), x, times, 0.25)  # type: ignore[misc]
        counts[beta] = clusters.course("time", times, walked).clusters[-1]
    assert counts[1.0] == 1 < counts[9.0] < 8


@pytest.mark.parametrize("mechanism", ["higher_order", pytest.param("softmax", marks=pytest.mark.slow)])
def test_the_command(mechanism: str, tmp_path: Path) -> None:
    small = ["--particles", "6", "--end", "0.4", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, ["analyse", "clusters", mechanism, *small])
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "clusters.json").read_text())
    assert facts["mechanism"] == mechanism and len(facts["clusters"]) == 101
    assert (facts["equal_angles"] is None) == (mechanism != "softmax")
    assert (tmp_path / "clusters.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_refused(tmp_path: Path) -> None:
    for given, words in (
        (["hardmax"], "mechanism: got 'hardmax'"),
        (["softmax", "--beta", "0"], "--beta: got 0, needs a number above 0"),
        (["softmax", "--run", str(tmp_path)], "--run: got"),
        (["softmax", "--step", "1e-300"], "step: got 1e-300, needs a number above 0, and at least 2e-05"),
        (["softmax", "--end", "1e300", "--step", "1e300"], "tokens[1]: got an element that is not finite"),
    ):
        result = CliRunner().invoke(cli, ["analyse", "clusters", *given, "--particles", "4"])
        assert result.exit_code == 2 and words in result.output, result.output
