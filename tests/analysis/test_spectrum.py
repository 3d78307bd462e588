"""Spectra of the operators that queries get, and the command that shows them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.analysis.spectrum import designed, spectrum, spectrum_of, table
from tests.cli.command import run

GIVEN: dict[str, Any] = {"perturbation": "identity", "updates": 4}


command = partial(run, "analyse")


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_an_eigenfunction_grows_by_its_eigenvalue(tau: float) -> None:
    """For an eigenvector c of R the function kappa^T c is one of K: its values at any state are multiplied."""
    q, k, v = designed(3, 6, 2, seed=1)
    given = {**GIVEN, "fit": ra.koopman.Stein(ridge=0.3, tau=tau), "jitter": 1e-12}
    found = spectrum(q, k, v, **given)
    _, saved = ra.koopman.forward(q, k, v, implementation="dense", **given)
    kernel = saved.inner.options.kernel
    for step, values in zip(saved.inner.updates, found.eigenvalues, strict=True):
        known, vectors = np.linalg.eig(step.koopman)
        at_keys = np.swapaxes(step.starts, -1, -2)  # kappa(keys) = B^T, to the jitter
        dual = step.kappa.dual[:, :, 0]  # of query 0
        unseen = kernel.values(q, k) @ np.swapaxes(dual, -1, -2)  # kappa of other states
        before = unseen @ vectors[:, :, 0]
        after = tau * before + unseen @ (step.found[:, :, 0] @ at_keys[:, :, 0] @ vectors[:, :, 0])
        np.testing.assert_allclose(after, before * (tau + known[:, :, 0])[..., None, :], atol=1e-8)
        np.testing.assert_allclose(sorted(np.abs(values[0, 0, 0])), sorted(np.abs(tau + known[0, 0, 0])), rtol=1e-9)
        assert np.all(np.diff(np.abs(values), axis=-1) <= 1e-11)


@pytest.mark.parametrize("factor", [0.5, -0.9])
def test_where_attention_multiplies_the_eigenvalue_is_the_factor(factor: float) -> None:
    """For keys 1 and -1 with values f k, attention of q gives f tanh(q), nearly f q.

    An update predicts from what is attended, so that the second transition multiplies by f^2: the operator of both has
    their mean, weighted by the squares of 1 and f where they start.
    """
    k = np.asarray([1.0, -1.0]).reshape(1, 1, 2, 1)
    q = np.asarray([0.004, 0.008, -0.006]).reshape(1, 1, 3, 1)
    given = {"kernel": "linear", "fit": "stein(ridge=1e-11)", "jitter": 1e-8, "perturbation": "identity(epsilon=0.0)"}
    first, second = spectrum(q, k, factor * k, updates=3, **given).eigenvalues
    np.testing.assert_allclose(first[..., 0], factor, rtol=1e-3)
    np.testing.assert_allclose(second[..., 0], (factor + factor**4) / (1.0 + factor**2), rtol=1e-3)
    assert np.max(np.abs(second[..., 1])) < 1e-9


def test_a_query_that_sees_nothing_has_no_spectrum() -> None:
    q, k, v = designed(4, 4, 2, seed=2)
    mask = np.ones((4, 4), bool)
    mask[1] = False
    found = spectrum(q, k, v, mask=mask, **GIVEN)
    assert all(np.all(np.isnan(values[0, 0, 1])) for values in found.eigenvalues)
    assert np.all(np.isfinite(found.eigenvalues[-1][0, 0, [0, 2, 3]]))
    queries = found.to_json()["updates"][0]["queries"]
    assert [len(query["eigenvalues"]) for query in queries] == [1, 0, 1, 1]
    assert "of 3" in table(found)


def test_a_single_update_fits_no_operator() -> None:
    with pytest.raises(ValueError, match=r"updates: got 1, needs at least 2: the first one fits no operator"):
        spectrum(*designed(3, 5, 2, seed=1), updates=1)


def test_the_command(tmp_path: Path) -> None:
    done = command("spectrum", "--queries", "5", "--updates", "3", "--tau", "1", "--causal", "--keys", "5",
                   "--out", str(tmp_path))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0].startswith("update  transitions")
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((tmp_path / "spectrum.json").read_text())
    assert data["options"]["fit"] == "stein(ridge=0.01, tau=1)"
    assert [len(query["eigenvalues"]) for query in data["updates"][1]["queries"]] == [2] * 5
    assert np.shape(data["trajectory"]) == (1, 1, 5, 4, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ridge", "0"], "ridge: got 0.0, needs finite numbers above 0"),
        (["--fit", "ridge"], "fit: got 'ridge(ridge=0.01, tau=0)', needs one of stein, separable"),
        (["--tau", "2"], "tau"),
        (["--updates", "1"], "updates"),
    ],
)
def test_a_command_that_is_wrong(words: list[str], message: str, tmp_path: Path) -> None:
    done = command("spectrum", *words, "--out", str(tmp_path))
    assert done.exit_code == 2
    assert message in done.output


def test_the_spectrum_of_a_call_that_has_run() -> None:
    q, k, v = designed(4, 6, 2, seed=3)
    _, saved = ra.koopman.forward(q, k, v, implementation="dense", **GIVEN)
    for one, other in zip(spectrum_of(saved).eigenvalues, spectrum(q, k, v, **GIVEN).eigenvalues, strict=True):
        np.testing.assert_array_equal(one, other)
    _, saved = ra.koopman.forward(q, k, v, updates=1, implementation="dense")
    with pytest.raises(ValueError, match="and 1 updates, needs a dense call of at least two"):
        spectrum_of(saved)
    shared = ra.koopman.forward(q, k, v, fit="separable", implementation="shared", **GIVEN)[1]
    with pytest.raises(ValueError, match='got implementation="shared"'):
        spectrum_of(shared)
