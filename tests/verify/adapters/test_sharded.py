"""Kernels over devices of JAX and ranks of torch.distributed: what they are given, and that they are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify import load
from refattn.verify.adapters import sharded
from refattn.verify.adapters.adapter import LoadError
from refattn.verify.run import verify
from refattn.verify.selfcheck.samples import fitted

EXAMPLES = Path(__file__).parents[3] / "examples"
SOFTMAX = ra.mechanism("softmax")


@pytest.mark.parametrize("layout", sharded.LAYOUTS)
def test_every_token_has_one_rank(layout: str) -> None:
    parts = [sharded.places(layout, rank, 3, 12) for rank in range(3)]
    assert sorted(np.concatenate(parts)) == list(range(12))
    assert [*parts[1]] == ([4, 5, 6, 7] if layout == "contiguous" else [2, 3, 8, 9])


def test_what_a_rank_is_given_and_gives() -> None:
    torch = pytest.importorskip("torch")

    def attend(q: Any, k: Any, v: Any) -> Any:
        raise AssertionError("it runs in other processes")

    attend.layout = "zigzag"  # type: ignore[attr-defined]
    ranks = sharded.Ranks(attend, 2, "")
    q, mask = torch.arange(8.0).reshape(1, 1, 8, 1), torch.arange(8).reshape(8, 1) * torch.ones(1, 12)
    ranks._given = {"q": q, "k": q, "v": q, "mask": mask, "scale": 0.5}
    shards = [ranks._shards(rank, q) for rank in range(2)]
    assert shards[0]["q"].ravel().tolist() == shards[0]["mask"][:, 0].tolist() == [0, 1, 6, 7]
    assert shards[1]["d_out"].ravel().tolist() == [2, 3, 4, 5] and shards[0]["mask"].shape == (4, 12)
    assert torch.equal(ranks._gathered([{"out": x["q"]} for x in shards], {"out": "q"})["out"], q)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("math:sqrt@tokens=2", 'framework = None, needs "jax" or "torch"'),
        ("math:sqrt@rows=2", "needs sizes such as heads=2,tokens=4"),
    ],
)
def test_what_cannot_run_on_a_mesh(spec: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load(spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "softmax", "--impl", "a.py:f", "--mesh", "tokens"], "needs sizes such as heads=2,tokens=4"),
        (["check", "softmax", "--devices", "2"], "got the backend numpy, needs --backend jax"),
        (["check", "softmax", "--backend", "jax", "--devices", "3", "--mesh", "tokens=2"], "whose product is 3"),
    ],
)
def test_what_the_commands_refuse(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_cases_that_fit_a_mesh() -> None:
    sizes = {"heads": 2, "tokens": 4}
    grown = [fitted(case, sizes, 2) for record in (SOFTMAX, ra.mechanism("delta")) for case in record.cases]
    kept = [case for case in grown if case is not None]
    assert len(kept) > 0.85 * len(grown)
    for case in kept:
        shapes = {name: x.shape for name, x in case.inputs.items()}
        assert not any(shapes[name][1] % 2 or shapes[name][2] % 8 for name in "qkv")
        assert shapes["q"][1] % shapes["k"][1] == 0 or shapes["k"][1] % shapes["q"][1] == 0


def judged(spec: str, *names: str) -> dict[str, str]:
    cases = [fitted(SOFTMAX.case(name), {"tokens": 2}, 2) for name in names]
    record = replace(SOFTMAX, cases=tuple(case for case in cases if case is not None))
    kernel = load(f"{spec}@tokens=2")
    try:
        found = verify(record, kernel, dtypes=["float32"], grad=True)
    finally:
        getattr(kernel, "close", lambda: None)()
    return {outcome.case: outcome.status for outcome in found.outcomes}


@pytest.mark.slow(sampled=True)
@pytest.mark.parametrize("spec", ["jax_ring.py:ring", "torch_ring.py:ring", "torch_ring.py:zigzag"])
def test_rings_agree(spec: str) -> None:
    pytest.importorskip(spec[: spec.index("_")])
    found = judged(f"{EXAMPLES / spec}", "causal", "grouped", "mask-full", "bias")
    expected = dict.fromkeys(("causal", "grouped", "mask-full"), "agrees") | {"bias": "declined"}
    assert found == (expected if "torch" in spec else {**expected, "mask-full": "declined"})


@pytest.mark.slow
def test_a_ring_with_the_wrong_tokens_is_found(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "wrong.py"
    file.write_text((EXAMPLES / "torch_ring.py").read_text() + '\nring.layout = "zigzag"\n')
    assert judged(f"{file}:ring", "tiny", "causal") == {"tiny": "agrees", "causal": "disagrees"}


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "raises.py"
    lines = [
        "import torch.distributed as dist",
        "def ring(q, k, v):",
        "    if dist.get_rank(): raise OSError('no ring')",
    ]
    file.write_text("\n".join([*lines, "    dist.barrier()", "    return q", "ring.framework = 'torch'"]))
    assert judged(f"{file}:ring", "tiny") == {"tiny": "raises"}
