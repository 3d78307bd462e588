"""Forward-mode and second derivatives of others: right ones agree, wrong ones are seen, refusals are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify.outcome import Decline, Outcome
from refattn.verify.run import verify, verify_case

RECORD = ra.mechanism("softmax")


class Plain:
    """Softmax attention and its tangent, written once more."""

    def forward(self, q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False, scale: Any = None) -> Any:
        self.given, self.scale = (q, k, v), q.shape[-1] ** -0.5 if scale is None else scale
        scores = q @ k.mT * np.asarray(self.scale, q.dtype)
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        self.weights = weights / np.sum(weights, axis=-1, keepdims=True)
        return self.weights @ v

    def tangent(self, t: Any) -> Any:
        (q, k, v), w = self.given, self.weights
        moved = (t["q"] @ k.mT + q @ t["k"].mT) * np.asarray(self.scale, q.dtype)
        return w * (moved - np.sum(w * moved, axis=-1, keepdims=True)) @ v + w @ t["v"]


def run(kernel: Any, case: str = "tiny", dtype: str = "float32", *asked: str) -> Outcome:
    wanted = asked or ("tangent",)
    return verify_case(RECORD, kernel, RECORD.case(case), dtype, grad="hessian" in wanted, derivatives=wanted)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", ["tiny", "peaked"])
def test_a_right_tangent_agrees(case: str, dtype: str) -> None:
    found = run(Plain(), case, dtype)
    assert found.status == "agrees" and {v.tensor for v in found.verdicts} == {"out", "t_out"}
    share = next(v.share for v in found.verdicts if v.tensor == "t_out")
    assert 0.05 < share <= 1.0, "neither strict nor generous"


WRONG: dict[str, Callable[[Plain, Any], Any]] = {
    "a factor": lambda plain, t: Plain.tangent(plain, t) * np.float32(1.0 + 1e-5),
    "no normaliser": lambda plain, t: Plain.tangent(plain, t) + np.float32(1e-5),
    "without t_v": lambda plain, t: Plain.tangent(plain, {**t, "v": 0.0 * t["v"]}),
    "half of t_k": lambda plain, t: Plain.tangent(plain, {**t, "k": 0.5 * t["k"]}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tangent_is_seen(wrong: str) -> None:
    kernel: Any = type("Wrong", (Plain,), {"tangent": lambda self, t: WRONG[wrong](self, t)})()
    found = run(kernel)
    assert found.status == "disagrees"
    assert [v.tensor for v in found.verdicts if not v.agrees] == ["t_out"]


def test_what_is_refused_is_told_in_its_own_words() -> None:
    def refuse(self: Any, t: Any) -> Any:
        raise NotImplementedError("forward mode\nis for later")

    assert run(type("Later", (Plain,), {"tangent": refuse})()).detail == (
        "no tangent: NotImplementedError: forward mode is for later"
    )
    never: Any = type("Never", (Plain,), {"tangent": lambda self, t: Decline("never")})()
    assert (run(never).status, run(never).detail) == ("declined", "never")
    found = run(lambda q, k, v: Plain().forward(q, k, v))
    assert (found.status, found.detail) == (
        "declined",
        "no tangent: it has no method of this name, and is no function of torch or jax",
    )
    nothing: Any = type("Nothing", (Plain,), {"tangent": lambda self, t: (None,)})()
    assert (run(nothing).status, run(nothing).detail) == ("raises", "returned no t_out")


@pytest.mark.slow  # torch takes seconds to import what forward mode needs
def test_torch_is_pushed_and_differentiated_twice() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v

    attend.framework = "torch"  # type: ignore[attr-defined]
    found = run(attend, "tiny", "float32", "tangent", "hessian")
    assert found.status == "agrees", found
    assert {v.tensor for v in found.verdicts} == {"out", "t_out", *(f"{x}_{n}" for x in "dh" for n in "qkv")}

    class Once(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1.0

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, d: Any) -> Any:
            return d

    def once(q: Any, k: Any, v: Any) -> Any:
        return Once.apply(attend(q, k, v))

    once.framework = "torch"  # type: ignore[attr-defined]
    found = run(once, "tiny", "float32", "tangent", "hessian")
    assert found.status == "declined" and found.detail.startswith("no tangent: RuntimeError: ")


def test_wrong_use() -> None:
    for given, words in (
        (["--hessian", "--impl", "a:b", "--dtype", "bfloat16"], "--hessian: got --dtype bfloat16, needs float64 or"),
    ):
        result = CliRunner().invoke(cli, ["verify", "softmax", *given])
        assert result.exit_code == 2 and words in result.output, result.output
    with pytest.raises(ValueError, match="grad: got False"):
        verify(RECORD, Plain(), dtypes=["float32"], derivatives=["hessian"])
    with pytest.raises(ValueError, match="dtypes: got float16, needs float64 or float32"):
        verify(RECORD, Plain(), dtypes=["float16"], derivatives=["tangent"])


@pytest.mark.slow(sampled=False)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_unfused_kernel_of_torch_agrees(dtype: str, tmp_path: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    asked = ["--impl", "examples/torch_sdpa.py:attend_math", "--tangent", "--hessian", "--dtype", dtype]
    result = CliRunner().invoke(cli, ["verify", "softmax", *asked, "--json", str(tmp_path / "found.json")])
    assert result.exit_code == 0, result.output
    counts = json.loads((tmp_path / "found.json").read_text())["counts"]["all"]
    assert counts["failed"] == 0 and counts["run"] == counts["agreed"] >= 30
    assert counts["run"] + counts["declined"] == len(ra.mechanism("softmax").cases)
