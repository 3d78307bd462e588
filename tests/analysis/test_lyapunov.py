"""Lyapunov exponents: known answers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import philox
from refattn.analysis.lyapunov import spectrum
from refattn.xp import namespace
from tests.cli.command import run


def of(x: Any, matrix: Any) -> Any:
    return namespace(x).asarray(matrix)


def test_a_linear_map_has_the_logs_of_its_growth() -> None:
    a = philox.normal((6, 6), seed=0, purpose="lyapunov.linear")
    one = spectrum([lambda x: x @ of(x, a).mT], np.ones(6))
    np.testing.assert_allclose(one.exponents, np.log(np.linalg.svdvals(a)), rtol=1e-11, atol=1e-12)
    # A product whose singular values span more digits than a number has.
    turn, _ = np.linalg.qr(a)
    grows = turn @ np.diag([8.0, 4.0, 1.0, 0.5, 0.01, 1e-4]) @ turn.T
    many = spectrum([lambda x: x @ of(x, grows).mT] * 12, np.ones(6))
    np.testing.assert_allclose(many.exponents, np.log([8.0, 4.0, 1.0, 0.5, 0.01, 1e-4]), atol=1e-9)
    assert many.dimension == pytest.approx(4 + np.log(16.0) / -np.log(0.01), rel=1e-6)
    flat = spectrum([lambda x: x @ of(x, np.diag([2.0, 0.0])).mT], np.ones(2))
    assert flat.exponents.tolist() == [np.log(2.0), -np.inf] and flat.to_json()["exponents"][1] is None


@dataclass(frozen=True)
class Pair:
    x: Any
    p: Any
    t: Any


def particles(damping: float, h: float) -> Callable[[Pair], Pair]:
    """A step of attention with momentum: the force is the gradient of sum_ij exp(<x_i, x_j>) / 2n - sum_i |x_i|^2."""

    def step(s: Pair) -> Pair:
        xp = namespace(s.x)
        weights = xp.exp(s.x @ xp.matrix_transpose(s.x)) / s.x.shape[0]
        p = s.p * (1.0 - h * damping) + h * (weights @ s.x - 2.0 * s.x)
        return Pair(s.x + h * p, p, s.t + h)

    return step


def test_damping_pairs_the_exponents() -> None:
    x, p = (0.5 * philox.normal((5, 2), seed=1, purpose=f"lyapunov.{n}") for n in "xp")
    start = Pair(x, p, np.zeros(1))
    for damping in (0.0, 0.7):
        found = spectrum([particles(damping, 0.1)] * 15, start).exponents
        assert found.size == 20, "a clock is no direction"
        np.testing.assert_allclose(found + found[::-1], np.log(1.0 - 0.1 * damping), atol=1e-9)
        assert (found[0] > 0.0) == (damping == 0.0)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="maps: got none, needs at least one layer"):
        spectrum([], np.ones(2))
    with pytest.raises(TypeError, match=r"maps\[0\]: got 3, needs a function"):
        spectrum([3], np.ones(2))  # type: ignore[list-item]
    for state in (np.ones(1), np.ones(4097)):
        with pytest.raises(ValueError, match="state: got [0-9]+ numbers that move, needs from 1 to 4,096"):
            spectrum([lambda x: x], state)
    result = run("analyse", "lyapunov", "softmax", "--tokens", "4096", "--width", "4096")
    assert result.exit_code == 2 and "--tokens, --width: got 4096 times 4096" in result.output, result.output
    wider: Any = lambda x: namespace(x).concat([x, x])  # noqa: E731
    with pytest.raises(ValueError, match="state: its width goes 2, 4, 8, 16 from layer to layer, needs one"):
        spectrum([wider] * 3, np.ones(2))


@pytest.mark.parametrize("mechanism", ["softmax", pytest.param("sympformer", marks=pytest.mark.slow)])
def test_the_command(mechanism: str, tmp_path: Path) -> None:
    small = ["--tokens", "3", "--width", "4", "--layers", "3", "--out", str(tmp_path)]
    result = run("analyse", "lyapunov", mechanism, *small)
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "lyapunov.json").read_text())
    assert len(facts["exponents"]) == {"softmax": 12, "sympformer": 24}[mechanism] and facts["mechanism"] == mechanism
    assert (tmp_path / "lyapunov.png").read_bytes().startswith(b"\x89PNG")
    result = run("analyse", "lyapunov", mechanism, "--run", str(tmp_path))
    assert result.exit_code == 2 and "--run: got" in result.output and "\n\n" not in result.output
