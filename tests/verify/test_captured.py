"""Dumps: files of a call and of what a kernel returned for it, judged without the kernel."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import refattn as ra
from refattn.cli import cli
from refattn.golden.storage_types import round_to
from refattn.golden.tensors import encode, unpack
from refattn.verify import captured, names

RECORD = ra.mechanism("softmax")

RNG = np.random.default_rng(3)
Q, K, V, D_OUT = (RNG.standard_normal((2, 4, 37, 8)).astype(np.float32) for _ in range(4))
QKV = {"q": Q, "k": K, "v": V}


def attention(arrays: dict[str, Any] = QKV, **options: Any) -> Any:
    return ra.softmax.forward(**arrays, **options)[0]


def dumped(path: Path, **arrays: Any) -> Path:
    np.savez(path, allow_pickle=False, **arrays)
    return path


def verify(file: Path, *arguments: object, mechanism: str = "softmax") -> Result:
    return CliRunner().invoke(cli, ["verify", mechanism, "--inputs", str(file), *map(str, arguments)])


def test_a_dump_is_judged_without_a_kernel(tmp_path: Path) -> None:
    out, saved = ra.softmax.forward(Q, K, V, causal=True)
    gradients = {f"d_{name}": x for name, x in ra.softmax.backward(saved, D_OUT).items()}
    whole = {**QKV, "out": out, "lse": saved.lse, "d_out": D_OUT, **gradients, "causal": True}
    result = verify(dumped(tmp_path / "whole.npz", **whole), "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    assert "judged from one stored call: conventions are not probed" in result.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert {one["tensor"] for one in found["outcomes"][0]["verdicts"]} == {"out", "lse", "d_q", "d_k", "d_v"}
    for name in ("out", "lse", "d_q", "d_k", "d_v"):  # each is judged
        wrong = whole[name].copy()
        wrong[1, 2, 3] += 1.0
        file = dumped(tmp_path / "wrong.npz", **{**whole, name: wrong})
        report = captured.judged(RECORD, captured.readings(RECORD, file), "")[1]
        assert [one.tensor for one in report.outcomes[0].wrong] == [name] and report.exit_code == 1
    without = {name: x for name, x in whole.items() if name not in ("d_q", "d_v")}
    result = verify(dumped(tmp_path / "few.npz", **without))
    assert result.exit_code == 0 and "not in the file: d_q, d_v" in result.stdout
    del without["d_out"]
    result = verify(dumped(tmp_path / "few.npz", **without))
    assert result.exit_code == 0 and "not judged, because the file has no d_out: d_k" in result.stdout
    del without["out"]
    result = verify(dumped(tmp_path / "few.npz", **without))
    assert result.exit_code == 2 and "needs out to be judged, or --impl or --exec" in result.stderr
    result = verify(tmp_path / "whole.npz", "--impl", "refattn.mechanisms.softmax:forward", "--in-process")
    assert "not judged: out, lse, d_q, d_k, d_v of" in result.stdout


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("query", "q"),
        ("model.layers.0.self_attn.key_states", "k"),
        ("attn_output", "out"),
        ("O", "out"),
        ("softmax_lse", "lse"),
        ("dq", "d_q"),
        ("grad_query", "d_q"),
        ("q_grad", "d_q"),
        ("value.grad", "d_v"),
        ("do", "d_out"),
        ("grad_output", "d_out"),
        ("dlse", "d_lse"),
        ("sm_scale", "scale"),
        ("is_causal", "causal"),
        ("attn_bias", "bias"),
        ("dropout_p", ""),
        ("dtype", ""),
        ("window", "window"),
        ("x", ""),
    ],
)
def test_names_of_libraries_are_guessed(theirs: str, ours: str) -> None:
    known = ("q", "k", "v", *RECORD.defaults, "out", *RECORD.outputs)
    assert names.meaning(theirs, known) == ours


def test_what_is_guessed_is_printed_and_what_is_not_known_refused(tmp_path: Path) -> None:
    file = dumped(tmp_path / "mine.npz", query=Q, key=K, value=V, attn_output=attention())
    result = verify(file)
    assert (
        result.exit_code == 0
        and "names were guessed: query as q, key as k, value as v, attn_output as out" in result.stdout
    )
    file = dumped(tmp_path / "mine.npz", queue=Q, k=K, v=V, y=attention(), slopes=np.ones(4))
    result = verify(file)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "got queue, y, slopes, needs arguments of the core" in result.stderr
    assert "--rename queue=NAME says what it is" in result.stderr and "y (2, 4, 37, 8)" in result.stderr
    assert verify(file, "--rename", "queue=q,y=out", "--rename", "slopes=-").exit_code == 0
    for wrong, said in (
        ("queue", "got 'queue', needs THEIRS=OURS"),
        ("quee=q", "got 'quee' (did you mean queue?), needs a name in the file"),
        ("queue=q,y=ouut,slopes=-", "got 'ouut' (did you mean out?)"),
    ):
        result = verify(file, "--rename", wrong)
        assert result.exit_code == 2 and said in result.stderr, result.stderr
    result = verify(dumped(tmp_path / "mine.npz", **QKV, query=Q, out=Q))
    assert result.exit_code == 2 and "got q and query, which may both be q" in result.stderr
    result = verify(dumped(tmp_path / "mine.npz", **QKV, out=Q, sliding_window=8))
    assert result.exit_code == 2 and "--options window=LEFT:RIGHT says it" in result.stderr


def test_options_come_from_the_file_or_the_command(tmp_path: Path) -> None:
    right = attention(causal=True, window=(9, 0), scale=0.3)
    file, typed = tmp_path / "mine.safetensors", {name: ("float32", x) for name, x in {**QKV, "out": right}.items()}
    file.write_bytes(
        encode(typed, {"is_causal": "True", "softmax_scale": "0.3", "window_size": "[9, 0]", "format": "pt"})
    )
    assert verify(file).exit_code == 0
    file.write_bytes(encode(typed, {"options": '{"causal": true, "scale": 0.3, "window": [9, 0]}', "layer": "3"}))
    result = verify(file)
    assert result.exit_code == 0 and "values of the file that are not read: layer" in result.stdout
    file.write_bytes(encode(typed))
    assert verify(file).exit_code == 1
    assert verify(file, "--options", "causal,window=9:0", "--options", "scale=0.3").exit_code == 0
    assert verify(file, "--options", "casual").exit_code == 2
    unbounded = dumped(tmp_path / "flash.npz", **QKV, out=attention(causal=True), causal=True, window_size=[-1, -1])
    assert verify(unbounded).exit_code == 0
    additive = np.where(np.tri(37, dtype=bool), 0.0, -np.inf).astype(np.float32)[None, None]
    result = verify(dumped(tmp_path / "additive.npz", **QKV, out=attention(causal=True), attn_mask=additive))
    assert result.exit_code == 0 and "it is read as bias" in result.stdout
    result = verify(
        dumped(tmp_path / "whole.npz", **QKV, out=attention(causal=True), mask=np.tri(37, dtype=np.uint8)[None, None])
    )
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"causal": True, "window": (9, 0)}, "as if window were (9, None): explains everything"),
        ({"window": (9, 9)}, "as if window were (9, 9): explains everything"),
        ({"softcap": 2.5}, "as if softcap were 2.5: explains everything"),
        ({"scale": 0.3}, "as if scale were 0.3: explains everything"),
        ({"causal": True}, "the kernel is causal whether it is asked for or not: explains everything"),
    ],
)
def test_an_option_that_nobody_asked_for_is_named_with_its_size(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    asked = {name: x for name, x in options.items() if name == "causal" and len(options) > 1}
    result = verify(dumped(tmp_path / "mine.npz", **QKV, out=attention(**options), **asked))
    assert result.exit_code == 1 and said in " ".join(result.stdout.split()), result.stdout


def test_a_window_of_one_query_is_measured_too(tmp_path: Path) -> None:
    k, v = RNG.standard_normal((2, 1, 2, 150, 8)).astype(np.float32)
    arrays = {"q": RNG.standard_normal((1, 4, 1, 8)).astype(np.float32), "k": k, "v": v}
    result = verify(dumped(tmp_path / "mine.npz", **arrays, out=attention(arrays, window=(31, 0))))
    assert "as if window were (31, None): explains everything" in result.stdout


def test_how_arrays_lie(tmp_path: Path) -> None:
    out = attention()
    turned = {name: np.swapaxes(x, 1, 2) for name, x in {**QKV, "out": out}.items()}
    result = verify(dumped(tmp_path / "turned.npz", **turned))
    assert result.exit_code == 0 and "arrays are read as (batch, tokens, heads, width)" in result.stdout
    assert verify(tmp_path / "turned.npz", "--axes", "bnhd").exit_code == 0
    assert verify(tmp_path / "turned.npz", "--axes", "bhnd").exit_code == 1
    for name, other in (
        ("axes 1 and 2 are exchanged", turned["out"]),
        ("its heads are merged", turned["out"].reshape(2, 37, 32)),
    ):
        result = verify(dumped(tmp_path / "other.npz", **QKV, out=other))
        assert result.exit_code == 1 and name in result.stdout and "in the usual order it agrees" in result.stdout
        result = verify(dumped(tmp_path / "other.npz", **QKV, out=1.5 * other))
        assert result.exit_code == 1 and "out has another shape" in result.stdout and "scaled by 1.5" in result.stdout
    few = {**{name: x[:, :, :3] for name, x in turned.items()}}  # three heads of 37 tokens, or 37 heads of 3
    assert verify(dumped(tmp_path / "few.npz", **few, lse=RNG.standard_normal((2, 3, 37)))).exit_code == 1


def test_numbers_of_a_type_of_few_digits_are_judged_in_it(tmp_path: Path) -> None:
    low = {name: round_to(x.astype(float), "bfloat16").astype(np.float32) for name, x in QKV.items()}
    out = round_to(attention({name: x.astype(float) for name, x in low.items()}), "bfloat16").astype(np.float32)
    result = verify(dumped(tmp_path / "low.npz", **low, out=out))
    assert result.exit_code == 0 and "hold bfloat16 numbers: judged in bfloat16" in " ".join(result.stdout.split())
    assert verify(tmp_path / "low.npz", "--dtype", "float32").exit_code == 1
    typed = {name: ("bfloat16", x) for name, x in low.items()}
    (tmp_path / "low.safetensors").write_bytes(encode({**typed, "out": ("float64", out.astype(float))}))
    assert verify(tmp_path / "low.safetensors").exit_code == 0
    assert verify(tmp_path / "low.npz", "--dtype", "float32", "--dtype", "bfloat16").exit_code == 2


def test_a_long_dump_is_looked_at_in_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refattn.verify.tolerance import sampled

    monkeypatch.setattr(sampled, "FULL", 1 << 12)
    monkeypatch.setattr(captured, "PART", 1 << 10)
    arrays = {"q": np.repeat(Q, 2, axis=1), "k": K, "v": V}
    for options, file in (({}, "mine"), ({"causal": True}, "causal")):
        out = attention(arrays, softcap=2.5, **options)
        result = verify(dumped(tmp_path / f"{file}.npz", **arrays, out=out, **options))
        text = " ".join(result.stdout.split())
        assert result.exit_code == 1 and "as if softcap were 2.5: explains everything" in text, result.stdout
        assert "suspects, and where, are of a part: batch" in text


def test_a_file_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(x).bfloat16().requires_grad_() for x in (Q, K, V)]
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    gradients = torch.autograd.grad(out, tensors, torch.tensor(D_OUT).bfloat16())
    file = tmp_path / "mine.pt"
    given = {"inputs": dict(zip("qkv", tensors, strict=True)), "is_causal": True, "out": out.detach()}
    named = {f"d{name}": x for name, x in zip("qkv", gradients, strict=True)}
    torch.save({**given, **named, "do": torch.tensor(D_OUT).bfloat16(), "mask": None}, file)
    result = verify(file)
    assert result.exit_code == 0 and "bfloat16  d_v" in result.stdout, result.output
    whole = file.read_bytes()

    class Runs:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "written"), "w")

    for damaged, said in (
        (Runs(), "torch.load(weights_only=True) refuses it"),
        ({"q": torch.zeros(1).expand(1 << 40)}, "REFATTN_LARGEST="),
        (torch.zeros(3), "got the file, needs arguments of the core"),
        ({"q": {1, 2}}, "mine.pt: "),
    ):
        torch.save(damaged, file)
        result = verify(file)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and said in result.stderr, result.stderr
        assert "--debug" not in result.stderr
    assert not (tmp_path / "written").exists()
    for bytes_ in (whole[:-9], whole[:100], b"PK" + whole[9:], whole.replace(b"data.pkl", b"data.pkm")):
        file.write_bytes(bytes_)
        result = verify(file)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
    with zipfile.ZipFile(io.BytesIO(whole)) as archive, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
        packed.writestr("archive/data/99", b"\0" * (1 << 22))
    monkeypatch.setenv("REFATTN_LARGEST", str(1 << 20))
    result = verify(file)
    assert result.exit_code == 2 and "unpacked got" in result.stderr


def test_other_mechanisms_have_dumps(tmp_path: Path) -> None:
    beta, decay = RNG.random((2, 4, 37)), -RNG.random((2, 4, 37))
    given: dict[str, Any] = {name: x.astype(float) for name, x in QKV.items()} | {"beta": beta, "log_decay": decay}
    out = ra.delta.forward(**given, qk_norm=True)[0]
    file = dumped(tmp_path / "mine.npz", **given, o=out, qk_norm=True)
    assert verify(file, mechanism="delta").exit_code == 0
    turned = {name: np.swapaxes(x, 1, 2) for name, x in {**given, "out": out}.items()}
    assert verify(dumped(tmp_path / "turned.npz", **turned, qk_norm=True), mechanism="delta").exit_code == 0
    result = verify(dumped(tmp_path / "mine.npz", **given, out=out), mechanism="delta")
    assert result.exit_code == 1


def test_the_same_from_python(tmp_path: Path) -> None:
    file = dumped(tmp_path / "mine.npz", query=Q, k=K, v=V, y=attention(softcap=2.5))
    report = ra.verify("softmax", inputs=file, rename={"y": "out"})
    assert not report.passed and report.suspects is not None
    assert report.suspects.ranked[0].kind == "softcap that nobody asked for, as if softcap were 2.5"
    told = report.to_json()["remarks"]
    assert "names were guessed: query as q" in told[0] and "judged from one stored call" in told[-1]
    assert ra.verify("softmax", inputs=file, rename={"y": "out"}, options={"softcap": 2.5}).passed
    assert ra.verify("softmax", attend, inputs=file, rename={"y": "-"}).passed
    assert ra.verify("softmax", attend, shapes=["h=2,n=9,d=8,mask=0.7:b,h,1,k"]).counts()["all"]["run"] == 1
    with pytest.raises(ValueError, match="needs out to be judged, or a kernel"):
        ra.verify("softmax", inputs=file, rename={"y": "-"})
    with pytest.raises(TypeError, match="None needs inputs"):
        ra.verify("softmax")
    with pytest.raises(TypeError, match="axes: got 'bnhd' without inputs"):
        ra.verify("softmax", attend, axes="bnhd")


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ra.softmax.forward(q, k, v, **options)[0]


def test_options_that_belong_to_a_file() -> None:
    for option in ("--rename", "--options", "--axes"):
        result = CliRunner().invoke(cli, ["verify", "softmax", "--impl", "x:y", option, "bhnd"])
        assert result.exit_code == 2 and f"{option}: needs --inputs" in result.stderr
    result = CliRunner().invoke(cli, ["verify", "softmax"])
    assert result.exit_code == 2 and "or a file for --inputs with out in it" in result.stderr


def test_what_is_read_alone() -> None:
    from safetensors.numpy import save

    found, _ = unpack(save({"q_lengths": np.asarray([3], np.int32), "mask": np.ones((1, 1), np.uint8)}))
    assert found["q_lengths"][0] == "int32" and found["mask"][0] == "uint8"
    with pytest.raises(ValueError, match="needs THEIRS=OURS"):
        names.renamed("q")
