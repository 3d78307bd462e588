"""Laws at a size without a truth: honest kernels keep them all, and each is broken by a kernel with that fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.golden.storage_types import round_to, stored
from refattn.verify.large import properties_of, verify_large

RECORD = ra.mechanism("softmax")
TOKENS = 300
LAWS = (
    *("permutation", "query_permutation", "linear_in_v", "constant_value", "key_shift", "split_and_merge", "padding"),
    *("causal", "truncation", "independent", "rows"),
)


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: Any = False,
    scale: float | None = None,
    scores: Callable[[Any], Any] = lambda s: s,
    weights: Callable[[Any], Any] = lambda w: w,
    hidden: float = -np.inf,
    ahead: int = 0,
) -> Any:
    """Plain NumPy, whose steps can be given faults."""
    n, m = q.shape[2], k.shape[2]
    s = scores(q @ k.swapaxes(2, 3) * q.dtype.type(q.shape[3] ** -0.5 if scale is None else scale))
    allowed = np.tri(n, m, m - n + ahead, dtype=bool) if causal else np.ones((n, m), bool)
    s = np.where(allowed if mask is None else allowed & mask, s, q.dtype.type(hidden))
    top = s.max(axis=-1, keepdims=True)
    w = weights(np.exp(s - top))
    total = w.sum(axis=-1, keepdims=True)
    return (w @ v / total).astype(q.dtype), (top + np.log(total))[..., 0].astype(q.dtype)


def _last_key_lost(w: Any) -> Any:
    return w * (np.arange(w.shape[-1]) < w.shape[-1] - 1)


def _last_rows_rough(q: Any, k: Any, v: Any, **o: Any) -> Any:
    """The last tile of queries leaves out a few keys, as one with a wrong bound does."""
    whole, lse = attend(q, k, v, **o)
    part, _ = attend(q, k, v, weights=lambda w: w * (np.arange(w.shape[-1]) % 64 > 0), **o)
    return np.where(np.arange(q.shape[2])[:, None] >= 256, part, whole), lse


FAULTS: dict[str, Callable[..., Any]] = {
    "permutation": lambda q, k, v, **o: attend(q, k, v, weights=_last_key_lost, **o),
    "query_permutation": _last_rows_rough,
    "linear_in_v": lambda q, k, v, **o: attend(q, k, np.clip(v, -2.0, 2.0), **o),
    "constant_value": lambda q, k, v, **o: (attend(q, k, v, **o)[0] * q.dtype.type(1.0001), attend(q, k, v, **o)[1]),
    "key_shift": lambda q, k, v, **o: attend(q, k, v, scores=lambda s: np.minimum(s, 3.0), **o),
    "split_and_merge": lambda q, k, v, **o: (
        attend(q, k, v, **o)[0],
        attend(q, k, v, **o)[1] / np.float32(np.log(2.0)),
    ),
    "padding": lambda q, k, v, **o: attend(q, k, v, hidden=-10.0, **o),
    "causal": lambda q, k, v, **o: attend(q, k, v, ahead=1, **o),
    "truncation": lambda q, k, v, **o: attend(q, k, v, scores=lambda s: s * np.float32(np.log(s.shape[-1])), **o),
    "independent": lambda q, k, v, **o: attend(
        q, k, v, weights=lambda w: w + np.float32(1e-3) * np.flip(w, axis=1), **o
    ),
    "rows": lambda q, k, v, **o: attend(q, k, v, scores=lambda s: s * np.float32(1.0 + 1e-4 * s.shape[-2]), **o),
}


class Ours:
    """The tiled implementation of a mechanism."""

    def __init__(self, name: str) -> None:
        self.core, self.record = ra.mechanism(name).core, ra.mechanism(name)

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        out, self.saved = self.core.forward(q, k, v, **options)  # type: ignore[union-attr]
        return out, *(getattr(self.saved, name) for name in self.record.outputs)

    def backward(self, d_out: Any) -> Any:
        found = self.core.backward(self.saved, d_out)  # type: ignore[union-attr]
        return {name: found[name] for name in "qkv"}


def status(report: Any) -> dict[str, str]:
    return {row.name: row.status for row in report.rows}


def test_every_law_that_can_be_checked_is() -> None:
    assert tuple(properties_of(RECORD)) == LAWS == tuple(FAULTS)
    assert "rows" not in properties_of(ra.mechanism("graph_energy"))


def test_an_honest_kernel_keeps_them_all() -> None:
    report = verify_large(RECORD, attend, TOKENS)
    assert status(report) == dict.fromkeys(LAWS, "agrees") and report.exit_code == 0
    assert all(row.share is not None and row.share < 0.5 for row in report.rows)
    assert verify_large(RECORD, attend, 20, dtype="float64").exit_code == 0


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_types_of_few_digits(dtype: str) -> None:
    """A kernel that computes in float32 keeps all laws; one that cuts its scores off does not."""

    def low(rounds: Callable[[Any], Any] = lambda s: s) -> Any:
        def kernel(q: Any, k: Any, v: Any, *, dtype: str, **options: Any) -> Any:
            q, k, v = (x.astype(np.float32) for x in (q, k, v))

            def weights(w: Any) -> Any:
                return round_to(w.astype(np.float64), dtype).astype(np.float32)

            out, lse = attend(q, k, v, weights=weights, scores=rounds, **options)
            return stored(out.astype(np.float64), dtype), lse

        return kernel

    report = verify_large(RECORD, low(), 80, dtype=dtype, width=24, heads=1)
    assert status(report) == dict.fromkeys(LAWS, "agrees")
    assert 0.02 < max(row.share for row in report.rows if row.share is not None) < 0.7
    assert verify_large(RECORD, low(lambda s: np.minimum(s, 2.0)), 80, dtype=dtype, heads=1).exit_code == 1


@pytest.mark.parametrize("law", LAWS)
def test_each_fault_is_seen_by_its_law(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = properties_of(RECORD)
    monkeypatch.setattr("refattn.verify.large.properties_of", lambda mechanism: {law: known[law]})

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return tuple(x.astype(q.dtype) for x in FAULTS[law](q, k, v, **options))

    found = verify_large(RECORD, kernel, TOKENS)
    (row,) = found.rows
    assert (row.name, row.status, row.detail) == (law, "disagrees", f"{TOKENS} tokens") and found.exit_code == 1


@pytest.mark.parametrize(
    "name", ["softmax", "sympformer", *(pytest.param(n, marks=pytest.mark.slow) for n in ("higher_order", "growing"))]
)
def test_ours_with_gradients(name: str) -> None:
    report = verify_large(ra.mechanism(name), Ours(name), 80, grad=True)
    assert set(status(report).values()) == {"agrees"}

    class Wrong(Ours):
        def backward(self, d_out: Any) -> Any:
            found = super().backward(d_out)
            late = np.arange(d_out.shape[2])[:, None] == d_out.shape[2] - 1  # the last token is lost
            return found | {"q": np.where(late, 0.0, found["q"]).astype(d_out.dtype)}

    found = status(verify_large(ra.mechanism(name), Wrong(name), 80, grad=True))
    assert "disagrees" in (found.get("query_permutation"), found.get("token_permutation"))


def test_what_is_declined_or_missing_is_not_run_and_what_is_wrong_is_said() -> None:
    def out_alone(q: Any, k: Any, v: Any, *, mask: Any = None, scale: Any = None, causal: Any = False) -> Any:
        return ra.Decline("no causal masks") if causal else attend(q, k, v, mask=mask, scale=scale)[0]

    report = verify_large(RECORD, out_alone, 64)
    assert {row.name: row.detail for row in report.rows if row.status == "not run"} == {
        "split_and_merge": "it returns no lse",
        "causal": "declined: no causal masks",
        "truncation": "declined: no causal masks",
    }
    assert report.exit_code == 0
    report = verify_large(RECORD, lambda q, k, v, **options: q[..., :-1], 64)
    assert {row.detail for row in report.rows} == {"out has shape (1, 2, 64, 15), needs (1, 2, 64, 16)"}
    report = verify_large(RECORD, lambda q, k, v, **options: q.astype(np.float64), 64)
    assert {row.detail for row in report.rows} == {"out is float64, needs float32"} and report.exit_code == 1
    report = verify_large(RECORD, attend, 64, grad=True)
    assert report.exit_code == 3 and "no gradients" in report.rows[0].detail


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(cli, ["verify", "softmax", "--in-process", *map(str, arguments)])

    file = tmp_path / "kernel.py"
    file.write_text(
        "import refattn\n\ndef attend(q, k, v, **o):\n    return refattn.softmax.forward(q, k, v, **o)[0]\n"
    )
    found = run("--impl", f"{file}:attend", "--large", "100", "--json", "-")
    data = json.loads(found.stdout)
    assert found.exit_code == 0 and data["counts"] == {"agrees": 10, "disagrees": 0, "not run": 1}
    assert f"softmax on {file}:attend: agrees: 10 checks agree" in found.stderr
    for wrong, words in {
        ("--dtype", "mxfp8"): "--dtype: got mxfp8, whose numbers have factors, needs --impl on designed cases",
        ("--shape", "b=2"): "--large: got --shape 'b=2', needs the number of heads and the width",
    }.items():
        found = run("--impl", f"{file}:attend", "--large", "100", *wrong)
        assert found.exit_code == 2 and words in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "higher_order"])
def test_ours_with_4096_tokens(name: str) -> None:
    report = verify_large(ra.mechanism(name), Ours(name), 4096)
    assert set(status(report).values()) == {"agrees"}
