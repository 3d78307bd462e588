"""Cases of the user's own: shapes, files of them, captured arrays, and the sizes that an adapter states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import refattn as ra
from refattn.cli import cli
from refattn.golden.inputs import make, make_upstream
from refattn.golden.tensors import encode
from refattn.mechanisms.record import Case
from refattn.verify import user_cases
from refattn.verify.run import verify_case

RECORD = ra.mechanism("softmax")

KERNELS = """
import refattn as ra

def attend(q, k, v, *, dtype=None, **options):
    return ra.softmax.forward(q, k, v, **options)[0]

def lost(q, k, v, **options):
    k = k.copy()
    k[:, :, 9:] = 0
    return ra.softmax.forward(q, k, v, **options)[0]

def strict(q, k, v, *, causal=False):
    if q.shape[3] not in (64, 128) or q.shape[2] % 128 or k.shape[2] % 128:
        return ra.Decline("d is 64 or 128, n a multiple of 128")
    return ra.softmax.forward(q, k, v, causal=causal)[0]

def stated(q, k, v, *, causal=False):
    return strict(q, k, v, causal=causal)

stated.supports = {"d": [64, 128], "n": {"multiple_of": 128}, "h": 1, "g": 1, "b": 1, "options": ["causal"]}
stated.supports["dtypes"] = "float32"
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    return file


def verify(spec: str, *arguments: object) -> Result:
    return CliRunner().invoke(cli, ["verify", "softmax", "--in-process", "--impl", spec, *map(str, arguments)])


def sizes(case: Case) -> tuple[int, ...]:
    (b, h, rows, d), (_, g, columns, _) = case.inputs["q"].shape, case.inputs["k"].shape
    return b, h, g, rows, columns, d, case.inputs["v"].shape[3]


def test_a_shape() -> None:
    case = user_cases.from_text(
        RECORD, "b=2, h=6,g=3,nq=5,nk=9,d=8,e=4,causal,window=3:,scale=0.3,mask=0.5,k_lengths=9:4"
    )
    assert sizes(case) == (2, 6, 3, 5, 9, 8, 4)
    assert case.options == {"causal": True, "window": (3, None), "scale": 0.3}
    assert case.inputs["mask"].shape == (1, 1, 5, 9) and case.inputs["k_lengths"].numbers == {"0": 9, "1": 4}
    assert sizes(user_cases.from_text(RECORD, "n=7")) == (1, 1, 1, 7, 7, 64, 64)
    assert "beta" in user_cases.from_text(ra.mechanism("delta"), "n=7,d=4").inputs  # what a mechanism cannot do without


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b=2", "needs n"),
        ("n=4,h=3,g=2", "divisor of h"),
        ("n=4,d=x", "d: got 'x'"),
        ("n=4,n=5", "each name once"),
        ("n=4,windows=3", "'windows', needs one of b, h"),
        ("n=4,k_lengths=5", "needs 1 numbers up to 4"),
        ("n=4,mask", "the part of the pairs"),
    ],
)
def test_what_is_no_shape(text: str, said: str) -> None:
    with pytest.raises(user_cases.UserCaseError) as error:
        user_cases.from_text(RECORD, text)
    assert said in str(error.value)


def test_a_file_of_shapes(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(
        json.dumps(["n=4", {"n": 5, "causal": True, "window": [2, None]}, {"name": "mine", "nq": 1, "nk": 9}])
    )
    cases = user_cases.from_file(RECORD, file)
    assert [case.name for case in cases][::2] == ["n=4", "mine"]
    assert cases[1].options == {"causal": True, "window": (2, None)}
    line = {"definition": "gqa_paged_decode_h32_kv8_d128_ps1"}
    lines = [{**line, "workload": {"axes": {"batch_size": 4, "num_kv_indices": 83, "num_pages": 90}}}]
    lines.append(
        {
            "definition": "gqa_ragged_prefill_causal_h8_kv2_d64",
            "workload": {"axes": {"len_indptr": 3, "total_q": 20, "total_kv": 40}},
        }
    )
    file.write_text("\n".join(map(json.dumps, lines)))
    decode, prefill = user_cases.from_file(RECORD, file)
    assert sizes(decode) == (4, 32, 8, 1, 21, 128, 128) and not decode.options
    assert sizes(prefill) == (2, 8, 2, 10, 20, 64, 64) and prefill.options == {"causal": True}
    for text in ("", "{", "[]", "[3]", '[{"n": 4, "x": 1}]', '[{"workload": {}}]'):
        file.write_text(text)
        with pytest.raises(user_cases.UserCaseError):
            user_cases.from_file(RECORD, file)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_captured_arrays_are_what_it_is_given(kind: str, tmp_path: Path) -> None:
    case = user_cases.from_text(RECORD, "b=2,h=4,g=2,nq=3,nk=5,d=8,mask=0.8")
    arrays = make("softmax", case, "bfloat16", seed=7)
    arrays["d_out"] = make_upstream("softmax", case, "out", (2, 4, 3, 8), "bfloat16", seed=7)
    options, file = {"causal": True, "scale": 0.25}, tmp_path / f"mine.{kind}"
    if kind == "npz":
        np.savez(file, allow_pickle=False, **{**arrays, "options": np.asarray(json.dumps(options))})
    else:
        typed = {name: ("bool" if x.dtype == bool else "bfloat16", x) for name, x in arrays.items()}
        file.write_bytes(encode(typed, {"options": json.dumps(options)}))
    found, dtype = user_cases.captured(RECORD, file)
    assert (found.name, found.options, dtype) == ("mine", options, "float32" if kind == "npz" else "bfloat16")
    given: dict[str, Any] = {}

    class Kernel:
        def forward(self, **arguments: Any) -> Any:
            given.update(arguments)
            out, self.saved = ra.softmax.forward(**{n: x for n, x in arguments.items() if n != "dtype"})
            return out

        def backward(self, d_out: Any) -> Any:
            given["d_out"] = d_out
            return ra.softmax.backward(self.saved, d_out)

    assert verify_case(RECORD, Kernel(), found, "float32", grad=True).status == "agrees"
    for name, x in (*arrays.items(), *options.items()):
        np.testing.assert_array_equal(given[name], x)


def test_what_are_no_captured_arrays(tmp_path: Path) -> None:
    file, x = tmp_path / "mine.npz", np.ones((1, 2, 3, 4), np.float32)
    wrong: list[dict[str, Any]] = [{"q": x}, {"q": x, "k": x, "v": x, "queue": x}, {"q": x, "k": x[..., 1:], "v": x}]
    for arrays in wrong:
        np.savez(file, **arrays)
        with pytest.raises(user_cases.UserCaseError):
            user_cases.captured(RECORD, file)
    for name in ("none.npz", "none.safetensors"):
        with pytest.raises(user_cases.UserCaseError):
            user_cases.captured(RECORD, tmp_path / name)


def test_from_the_command_line(kernels: Path, tmp_path: Path) -> None:
    shapes = ("--shape", "h=2,nq=5,nk=9,d=8", "--shape", "n=12,d=8,causal", "--dtype", "float32")
    result = verify(f"{kernels}:attend", *shapes, "--seed", 5)
    assert result.exit_code == 0 and "seed 5" in result.stdout and "2 cases run" in result.stdout
    result = verify(f"{kernels}:lost", *shapes)
    assert result.exit_code == 1 and "1 of 2 cases fail" in result.stdout and "case n=12,d=8,causal" in result.stdout
    assert (
        verify(f"{kernels}:attend", *shapes[:2], "--seed", "random", "--json", tmp_path / "found.json").exit_code == 0
    )
    assert json.loads((tmp_path / "found.json").read_text())["seed"] > 0
    for wrong in (("--shape", "x=1"), ("--seed", "one"), ("--cases", "none.json"), ("--shape", "n=8", "--large", 64)):
        assert verify(f"{kernels}:attend", *wrong).exit_code == 2


def test_what_an_adapter_can_run_is_run(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [RECORD.case(name) for name in ("tiny", "causal", "softcap", "one-query", "unequal")]
    monkeypatch.setattr("refattn.mechanisms.softmax.record", replace(RECORD, cases=tuple(few), kernel_sizes=()))
    result = verify(f"{kernels}:strict", "--dtype", "float32")
    assert result.exit_code == 3
    assert "The cases that come nearest" in result.stdout and "tiny: q (1, 2, 4, 2)" in result.stdout
    result = verify(f"{kernels}:stated")
    assert result.exit_code == 0 and "float16" not in result.stdout and "4 cases run, 0 declined" in result.stdout


def test_designed_cases_in_other_sizes() -> None:
    cases = user_cases.fitted(
        RECORD.cases, {"d": [64, 128], "nk": {"multiple_of": 64, "at_most": 192}, "nq": [1, 64, 128]}
    )
    for b, h, g, rows, columns, d, e in map(sizes, cases):
        assert d in (64, 128) and columns in (64, 128, 192) and rows in (1, 64, 128) and h % g == 0 and b and e
    named = {case.name: case for case in cases}
    assert sizes(named["causal-tail"])[3:5] == (1, 64)  # fewer queries than keys stay fewer
    assert not named["exact"].exact and "no-key" not in {n for n, c in named.items() if not c.inputs["k"].shape[2]}
    assert [
        case.name
        for case in user_cases.fitted(RECORD.cases, {"options": ["causal"]})
        if case.options.keys() - {"causal"}
    ] == []
    for wrong in ({"x": 1}, {"d": "64"}, {"n": {"times": 2}}):
        with pytest.raises(user_cases.UserCaseError):
            user_cases.fitted(RECORD.cases, wrong)
