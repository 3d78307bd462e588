"""Kernels that others wrote, and plain PyTorch, on the designed cases: which agree, and what differs by a
convention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import refattn as ra
from refattn.mechanisms.record import Case
from refattn.verify.adapters.adapter import load
from refattn.verify.outcome import Outcome
from refattn.verify.run import verify_case

EXAMPLES = Path(__file__).parents[2] / "examples"
DTYPES = ("float64", "float32", "float16", "bfloat16")
CASES = ra.mechanism("softmax").cases
SAMPLED = "REFATTN_SLOW_SAMPLE" in os.environ
TYPES = ("float32",) if SAMPLED else DTYPES

# Rows that may attend nothing: refattn gives 0 and an lse of -inf, JAX the mean of all values and a large number.
JAX_EMPTY = {"causal-head", "empty-rows"}

PLAIN = {"sympformer": 13, "graph_energy": 10, "growing": 19, "koopman": 26}
"""Mechanisms in plain PyTorch, and how many cases each does."""


def found(mechanism: str, spec: str, cases: Any, dtypes: Any, grad: bool = True) -> Iterator[tuple[Case, Outcome]]:
    pytest.importorskip({"jax": "jax", "onn": "onnxruntime"}.get(spec[:3], "torch"))
    kernel = load(f"{EXAMPLES / spec}")
    for dtype in dtypes:
        for case in cases:
            yield case, verify_case(ra.mechanism(mechanism), kernel, case, dtype, grad=grad)


def _usual(case: Case) -> bool:
    """Tell whether a case has options alone that every library has, or declines as a whole."""
    return {*case.options} <= {"causal", "scale", "softcap"} and {*case.inputs} <= {"q", "k", "v", "mask"}


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES if d != "float32")]
)
@pytest.mark.parametrize(
    ("kernel", "agree"),
    [
        ("onnxruntime_attention.py:attend", {"float64": 33, "float32": 61, "float16": 61, "bfloat16": 0}),
        ("torch_sdpa.py:attend", dict.fromkeys(DTYPES, 45)),
        ("torch_sdpa.py:attend_math", dict.fromkeys(DTYPES, 45)),
        ("torch_sdpa.py:attend_flash", dict.fromkeys(DTYPES, 31)),
    ],
)
def test_kernels_agree_or_decline(kernel: str, agree: dict[str, int], dtype: str) -> None:
    outcomes = [outcome for _, outcome in found("softmax", kernel, CASES, [dtype], grad="torch" in kernel)]
    assert [outcome for outcome in outcomes if outcome.status not in ("agrees", "declined")] == []
    assert sum(outcome.status == "agrees" for outcome in outcomes) >= agree[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_agrees_but_for_rows_that_may_attend_nothing(dtype: str) -> None:
    sample = {"float32": "empty-rows", "bfloat16": "grouped"}  # each case is compiled, which takes seconds
    cases = [case for case in CASES if not SAMPLED or case.name == sample[dtype]]
    for case, outcome in found("softmax", "jax_attention.py:attend", cases, [dtype]):
        sizes = {n for x in case.inputs.values() for n in x.shape}
        unequal = case.inputs["q"].shape[3] != case.inputs["v"].shape[3]
        if "softcap" in case.options or unequal or 0 in sizes:
            assert outcome.status == "declined"
            continue
        if not _usual(case) and outcome.status == "declined":
            continue
        assert outcome.status == ("disagrees" if case.name in JAX_EMPTY else "agrees"), outcome
        if case.name in JAX_EMPTY:
            wrong = {verdict.tensor: verdict for verdict in outcome.verdicts if not verdict.agrees}
            assert set(wrong) == {"out", "d_v"} | ({"lse"} if dtype == "float32" else set())
            assert wrong["out"].expected == "0"
            assert "lse" not in wrong or (wrong["lse"].expected == "-inf" and float(wrong["lse"].got) < -1e38)


def test_jax_declines_float64() -> None:
    for _, outcome in found("softmax", "jax_attention.py:attend", CASES[:1], ["float64"]):
        assert (outcome.status, outcome.detail) == ("declined", "its softmax is float32 for float64, too")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_plain_pytorch_agrees_in_every_type(name: str) -> None:
    cases = ra.mechanism(name).cases[:: 5 if SAMPLED else 1]
    outcomes = [outcome for _, outcome in found(name, f"torch_mechanisms.py:{name}", cases, TYPES)]
    statuses = {status: sum(outcome.status == status for outcome in outcomes) for status in ("agrees", "declined")}
    assert sum(statuses.values()) == len(outcomes), outcomes
    assert statuses["agrees"] >= (1 if SAMPLED else 4 * PLAIN[name])


@pytest.mark.parametrize(
    ("name", "case"),
    [("sympformer", "grouped"), ("graph_energy", "rk4"), ("growing", "causal-tail"), ("koopman", "causal-tail")],
)
def test_plain_pytorch_agrees_and_a_wrong_line_is_seen(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    record = ra.mechanism(name)
    ((_, right),) = found(name, f"torch_mechanisms.py:{name}", [record.case(case)], ["float32"])
    assert right.status == "agrees" and "d_k" in {verdict.tensor for verdict in right.verdicts}
    tril, softmax = torch.Tensor.tril, torch.softmax
    monkeypatch.setattr(torch.Tensor, "tril", lambda x, diagonal=0: tril(x, diagonal - 1))
    monkeypatch.setattr(torch, "softmax", lambda x, dim: softmax(x * 1.001, dim=dim))
    ((_, wrong),) = found(name, f"torch_mechanisms.py:{name}", [record.case(case)], ["float32"])
    assert wrong.status == "disagrees"


@pytest.mark.parametrize("options", [{}, {"causal": True, "updates": 3}])
def test_plain_koopman_agrees_where_jitter_and_perturbation_are_left_out(options: dict[str, Any]) -> None:
    case = replace(ra.mechanism("koopman").case("tiny"), options=options)
    ((_, outcome),) = found("koopman", "torch_mechanisms.py:koopman", [case], ["float64"])
    assert outcome.status == "agrees", outcome


@pytest.mark.parametrize(
    ("right", "wrong", "case"),
    [
        ("second * torch.exp(", "torch.exp(", "grouped"),
        ("jitter) * (second + 1.0)", "jitter) * second", "causal"),
        ("return section(x, k[:, :, None]) * seen[..., None, :]", "return section(x, k[:, :, None])", "mask-keys"),
        ("dual = torch.linalg.solve(gram, starts.mT).mT", "dual = starts", "tiny"),
        ("ridge * torch.eye(system", "ridge / 2.0 * torch.eye(system", "tiny"),
        ("ridge * torch.eye(inner", "ridge / 2.0 * torch.eye(inner", "separable"),
        (" - tau * starts", "", "toward-identity"),
        (" + b * found @ starts.mT @ modes", "", "tiny"),
        ("at(attended, lifted, dual)  #", "at(attended, modes, dual)  #", "shift"),
        ("best - look(best)[1]", "best + 0.0 * look(best)[1]", "tiny"),
    ],
)
def test_a_wrong_line_of_plain_koopman_is_seen(right: str, wrong: str, case: str, tmp_path: Path) -> None:
    """The last of them leaves the output as it is, and every gradient wrong."""
    source = (EXAMPLES / "torch_mechanisms.py").read_text()
    assert source.count(right) == 1
    (tmp_path / "wrong.py").write_text(source.replace(right, wrong))
    ((_, outcome),) = found(
        "koopman", f"{tmp_path}/wrong.py:koopman", [ra.mechanism("koopman").case(case)], ["float64"]
    )
    assert outcome.status == "disagrees", outcome
    agreeing = {verdict.tensor for verdict in outcome.verdicts if verdict.agrees}
    assert agreeing == ({"out"} if "look" in right else set())


ORT, GQA, FLEX = "onnxruntime_attention.py", "onnxruntime_grouped.py", "torch_flex.py"


@pytest.mark.parametrize(
    ("place", "cases"),
    [
        (f"{ORT}:attend", "window-head window-far bias-softcap lengths-causal causal-head"),
        pytest.param(f"{ORT}:attend_25", "window-mask bias-grouped", marks=pytest.mark.slow),
        pytest.param(f"{ORT}:attend_raw", "softcap bias", marks=pytest.mark.slow),
        pytest.param(f"{ORT}:attend_capped", "softcap bias", marks=pytest.mark.slow),
        (f"{ORT}:attend_masked", "softcap-mask lengths-keys"),
        (f"{ORT}:attend_weights", "empty-rows window-tail"),
        (f"{GQA}:attend", "sink-window causal-tail one-query bias-heads"),
        pytest.param(f"{FLEX}:attend", "window-head offset-batch bias-softcap lengths-causal", marks=pytest.mark.slow),
        ("torch_sdpa.py:attend_math", "bias bias-row alibi-tail"),
    ],
)
def test_kernels_agree_where_they_have_an_option(place: str, cases: str) -> None:
    """Windows, places, biases, lengths and sinks, and the scores or weights that come beside an output."""
    pytest.importorskip("torch" if place.startswith("torch") else "onnxruntime")
    kernel = load(f"{EXAMPLES / place}")
    gradients = "sdpa" in place
    for name in cases.split():
        case = ra.mechanism("softmax").case(name)
        outcome = verify_case(ra.mechanism("softmax"), kernel, case, "float32", grad=gradients)
        assert outcome.status == "agrees", (name, outcome)
        beside = {verdict.tensor for verdict in outcome.verdicts} - {"out", "lse"}
        equation = {"raw": "SM.1", "capped": "SM.capped", "masked": "SM.2", "weights": "SM.4"}.get(place.split("_")[-1])
        assert beside == ({equation} if equation else {"d_q", "d_k", "d_v", "d_bias"} if gradients else set())
