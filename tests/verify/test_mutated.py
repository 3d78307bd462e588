"""Wrong kernels served to a suite: the function that stands in for torch's, and the score."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from refattn.cli import cli
from refattn.verify import mutated
from refattn.verify.bugs.fault import faults

SHELL = 'echo "called wrong" >> "$REFATTN_SHIM_LOG"; test "$REFATTN_SHIM_FAULT" != MaskIgnored'


def attention(fault: str, log: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in ((mutated.FAULT, fault), (mutated.SIZES, "64,64"), (mutated.LOG, str(log))):
        monkeypatch.setenv(name, value)
    return mutated.served(lambda *given, **options: "dropout")


def test_the_function_is_torchs_with_a_fault_forward_and_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    log, right = tmp_path / "log", torch.nn.functional.scaled_dot_product_attention
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.rand(2, 1, 5, 5) < 0.7
    mask[..., 0] = True
    calls: tuple[dict[str, Any], ...] = (
        {"is_causal": True, "enable_gqa": True},
        {"attn_mask": mask, "enable_gqa": True},
        {"attn_mask": torch.randn(5, 5, dtype=torch.float64), "scale": 0.3, "enable_gqa": True},
    )
    served = attention(mutated.NONE, log, monkeypatch)
    for given in calls:
        got, needs = served(q, k, v, **given), right(q, k, v, **given)
        torch.testing.assert_close(got, needs)
        pairs = zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, needs)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)
    torch.testing.assert_close(served(q[0, 0], k[0, 0], v[0, 0]), right(q[0, 0], k[0, 0], v[0, 0]))
    assert {*log.read_text().split()} == {"called"} and served(q, k, v, dropout_p=0.5) == "dropout"
    wrong = attention("MaskIgnored", log, monkeypatch)
    torch.testing.assert_close(wrong(q, k, v, **calls[1]), right(q, k, v, enable_gqa=True))
    assert "wrong" in log.read_text()


def test_survivors_are_told_and_counted() -> None:
    found = CliRunner().invoke(cli, ["mutants", "softmax", "--suite", SHELL, "--only", "MaskI", "--json", "-"])
    data = json.loads(found.stdout)
    statuses = {row["name"]: row["status"] for row in data["kernels"]}
    assert found.exit_code == 1 and (data["killed"], data["wrong"]) == (1, len(statuses))
    assert statuses == {"MaskIgnored": "killed", "MaskIgnoredWithCausal": "survived", "MaskInverted": "survived"}
    assert "mutation score 33.3 %: 1 of 3 wrong kernels rejected" in found.stderr


@pytest.mark.parametrize(("suite", "code"), [("false", 2), ("true", 2), (SHELL, 3)])
def test_what_is_no_suite_has_its_exit_code(suite: str, code: int) -> None:
    mechanism = "koopman" if code == 3 else "softmax"
    assert CliRunner().invoke(cli, ["mutants", mechanism, "--suite", suite]).exit_code == code


def test_faults_of_options_that_the_function_has_not_are_left_out() -> None:
    names = {one.name for one in mutated.chosen("softmax")}
    assert {"AccumulatorNotRescaled", "CausalIgnored", "BiasIgnored", "KeyGradientWithoutScale"} <= names
    assert not {"WindowIgnored", "SinkTwice", "SoftcapDropped", "LseToBase2"} & names and len(names) > 70
    assert len(mutated.chosen("softmax", every=10)) == -(-len(names) // 10) and len(names) < len(faults())


@pytest.mark.slow
def test_a_suite_in_a_process_of_its_own_is_served(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    suite = tmp_path / "suite.py"
    suite.write_text(
        "import torch\nfrom torch.nn.functional import scaled_dot_product_attention as f\n"
        "x = torch.eye(3)[None, None]\nassert f(x, x, x, is_causal=True)[0, 0, 0, 1] == 0\n"
    )
    kernels = [one for one in faults() if one.name in ("CausalIgnored", "ScaleLeftOut")]
    fates = mutated.score(f"{sys.executable} {suite}", kernels)
    assert {fate.fault.name: fate.status for fate in fates} == {"CausalIgnored": "killed", "ScaleLeftOut": "survived"}
