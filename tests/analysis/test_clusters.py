"""Clusters of tokens: the numbers, the flow beside its theory, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.analysis import clusters, sphere
from tests.cli.command import run


def test_what_is_told_of_tokens() -> None:
    three = np.repeat(np.eye(3), [4, 2, 1], axis=0) * 5.0 + 1e-3 * philox.normal((7, 3), seed=0, purpose="c")
    found = clusters.course("layer", range(2), [np.ones((7, 3)), three])
    assert found.clusters.tolist() == [1, 3]
    assert found.ranks[0] == pytest.approx(1.0) and 2.5 < found.ranks[1] < 3.0
    assert found.mean_cosines[0] == pytest.approx(1.0)
    assert found.mean_cosines[1] == pytest.approx((2 * 6 + 2 * 1) / 42, abs=1e-2)
    chain = np.stack([[np.cos(a), np.sin(a)] for a in np.arange(5) * 0.09])
    assert clusters.components(chain @ chain.T > clusters.NEAR) == 1, "neighbours connect"
    lasts = clusters.course("time", range(5), [np.eye(2), np.eye(2), np.eye(2), np.ones((2, 2)), np.ones((2, 2))])
    assert lasts.plateaus() == [(2, 0.0, 3.0), (1, 3.0, 4.0)]


def flow(name: str, damping: float | None = None, **options: Any) -> sphere.Flow:
    return sphere.Flow(ra.mechanism(name).core.forward, options, damping)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("moved", "law", "rate"),
    [
        (flow("softmax", scale=1.0), "softmax attention", 2.0),
        (flow("graph_energy", scale=2.0), "softmax attention", 2.0),  # scores of length 1 are all at rest
        (flow("higher_order", order=3), "Taylor polynomials", None),
        (flow("graph_energy", scale=1.0, state="feature"), "weights read from the core", None),
        (flow("sympformer", 3.0, scale=1.0), "H of tokens with momenta", None),
    ],
)  # fmt: skip
def test_the_measured_rate_is_the_predicted_one(moved: sphere.Flow, law: str, rate: float | None) -> None:
    found = sphere.equal_angles(moved, end=6.0, step=0.1)
    assert found is not None and found.law == law
    np.testing.assert_allclose(found.measured, found.predicted, rtol=1e-5)
    measured, predicted = found.rates()
    assert measured / predicted == pytest.approx(1.0, abs=0.01)
    if rate is not None:
        assert predicted == pytest.approx(rate, abs=0.02), "the rate of the literature"


def test_equal_angles() -> None:
    x = sphere.simplex(8, 0.1)
    np.testing.assert_allclose(x @ x.T, np.where(np.eye(8) == 1.0, 1.0, 0.1), atol=1e-15)
    assert sphere.equal_angles(flow("softmax", causal=True), end=1.0) is None, "the first token is special"
    assert sphere.equal_angles(flow("sympformer", 1.0, scale=1.0), end=1.0) is None, "they swing through each other"
    far, near = (sphere.weight_of(flow("koopman", perturbation="shift"), gap, 8) for gap in (0.9, 0.1))
    assert far < 0.0 < near, "tokens that are far apart repel each other"


def test_the_energy_of_momenta_is_kept_but_for_the_damping() -> None:
    moved = flow("sympformer", 0.0, scale=2.0)

    def energy(state: Any) -> float:
        x, p = np.split(state, 2, axis=-1)
        e = np.exp(2.0 * (x @ x.T - 1.0))
        z = np.mean(e, axis=1)
        return float(np.sum(np.sum(p * p, axis=1) / z) / 2.0 - np.sum(e) / (2.0 * len(x) * 2.0))

    x = moved.back(moved.start(philox.normal((6, 3), seed=0, purpose="clusters.energy")))
    p = sphere.tangent(x[:, :3], philox.normal((6, 3), seed=1, purpose="clusters.energy"))
    state = np.concatenate([x[:, :3], p], axis=1)
    slope, h = moved.slope(state), 1e-5
    change = (energy(state + h * slope) - energy(state - h * slope)) / (2.0 * h)
    assert abs(change) < 1e-9 * abs(energy(state))
    damped = replace(moved, damping=0.5).slope(state) - slope
    np.testing.assert_allclose(damped, np.concatenate([0.0 * p, -0.5 * p], axis=1), atol=1e-15)


def test_tokens_stay_in_several_clusters_for_a_while() -> None:
    x = philox.normal((24, 2), seed=0, purpose="clusters")
    x = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    times, counts = np.linspace(0.0, 40.0, 5), {}
    for beta in (1.0, 9.0):
        counts[beta] = clusters.course(
            "time", times, sphere.walk(flow("softmax", scale=beta), x, times, 0.25)
        ).clusters[-1]
    assert counts[1.0] == 1 < counts[9.0] < 8


@pytest.mark.parametrize(
    "mechanism", [pytest.param(name, marks=pytest.mark.slow) for name in ("higher_order", "softmax")]
)
def test_the_command(mechanism: str, tmp_path: Path) -> None:
    small = ["--particles", "6", "--end", "0.4", "--out", str(tmp_path)]
    result = run("analyse", "clusters", mechanism, *small)
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "clusters.json").read_text())
    assert facts["mechanism"] == mechanism and len(facts["clusters"]) == 101
    assert (
        facts["equal_angles"]["law"]
        == {"softmax": "softmax attention", "higher_order": "Taylor polynomials"}[mechanism]
    )
    assert (tmp_path / "clusters.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "clusters.svg").read_text()
    assert "prefers-color-scheme: dark" in drawn and "#000000" not in drawn and "currentColor" in drawn


def test_what_is_refused(tmp_path: Path) -> None:
    for given, words in (
        (["hardmax"], "mechanism: got 'hardmax'"),
        (["softmax", "--beta", "0"], "--beta: got 0, needs a number above 0"),
        (["softmax", "--run", str(tmp_path)], "--run: got"),
        (["softmax", "--run", str(tmp_path), "--set", "scale=1"], "--set: got one beside --run, needs one of them"),
        (["softmax", "--set", "implementation=fast"], "implementation: got"),
        (["softmax", "--set", "colour=1"], "colour: is no argument of softmax.forward"),
        (
            ["softmax", "--run", str(Path(__file__))],
            "needs the folder of a run of refattn train with a checkpoint: Not a dir",
        ),
        (["softmax", "--step", "1e-300"], "step: got 1e-300, needs a number above 0, and at least 2e-05"),
        (["softmax", "--end", "1e300", "--step", "1e300"], "tokens[1]: got an element that is not finite"),
        (["softmax", "--damping", "nan"], "--damping: got nan, needs a number above 0"),
    ):
        result = run("analyse", "clusters", *given, "--particles", "4", "--out", str(tmp_path))
        assert result.exit_code == 2 and words in result.output, result.output
        assert len(result.output.strip().splitlines()) == 1, "one line"
