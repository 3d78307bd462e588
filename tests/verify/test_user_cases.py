"""Cases of the user's own: shapes, files of them, captured arrays, and the sizes that an adapter states."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import refattn as ra
from refattn.cli import cli
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import round_to
from refattn.golden.tensors import encode
from refattn.mechanisms.record import Case
from refattn.verify import captured, user_cases
from refattn.verify.run import verify_case
from refattn.verify.selfcheck.samples import sizes_of
from refattn.verify.tolerance import sampled

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

def narrow(q, k, v, *, causal=False):
    return ra.Decline("d is 7") if q.shape[3] != 7 else strict(q, k, v, causal=causal)

def bare(q, k, v):
    return ra.softmax.forward(q, k, v)[0]

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
        ("n=4,windows=3", "'windows' (did you mean window?), needs one of b, h"),
        ("n=4,k_lengths=5", "needs 1 numbers up to 4"),
        ("n=4,logits=:::", "logits: got list, needs a finite number"),
        ("n=4,softcap=[1]", "softcap: got tuple, needs a finite number"),
        ("n=4,window=\ud800", "window: got '\\ud800', needs a tuple"),
        ("n=4,scale=NaN", "scale: got nan"),
        ("n=2000000000,d=64", "REFATTN_LARGEST="),
        ("n=4,mask", "mask: got True, needs a finite number from 0 to 1"),
    ],
)
def test_what_is_no_shape(text: str, said: str) -> None:
    with pytest.raises(user_cases.UserCaseError) as error:
        user_cases.from_text(RECORD, text)
    assert said in str(error.value)


@pytest.mark.parametrize("given", ["3", "1e400", "x"])
def test_lengths_that_are_no_list(given: str) -> None:
    with pytest.raises(user_cases.UserCaseError, match="lengths: got .*, needs a tuple of whole numbers"):
        user_cases.from_text(ra.mechanism("delta"), f"n=4,d=2,state,lengths={given}")


def test_a_file_of_shapes(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(
        json.dumps(["n=4", {"n": 5, "causal": True, "window": [2, None]}, {"name": "mine", "nq": 1, "nk": 9}])
    )
    cases = user_cases.from_file(RECORD, file)
    assert [case.name for case in cases][::2] == ["n=4", "mine"]
    assert cases[1].options == {"causal": True, "window": (2, None)}
    file.write_text('"n=4"\n"n=4"\n"n=4"')
    assert [case.name for case in user_cases.from_file(RECORD, file)] == ["n=4", "n=4 (2)", "n=4 (3)"]
    for text in ("", "{", "[]", "[3]", '[{"n": 4, "x": 1}]', '[{"n": 4, "name": 3}]'):
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
    read = captured.readings(RECORD, file)[0]
    found, dtype = read.case, read.dtype
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
            captured.readings(RECORD, file)[0]
    for dtype in (int, bool, "U1"):
        np.savez(file, q=x.astype(dtype), k=x, v=x)
        with pytest.raises(user_cases.UserCaseError, match=r"mine\.npz: q: got dtype .*, needs one of float64"):
            captured.readings(RECORD, file)[0]
    for name in ("none.npz", "none.safetensors"):
        with pytest.raises(user_cases.UserCaseError):
            captured.readings(RECORD, tmp_path / name)[0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("option", ["--inputs", "--cases"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to itself", "vast", "cut off", "renamed", "nested"])
def test_files_that_are_something_else(kind: str, option: str, kernels: Path, tmp_path: Path) -> None:
    file, x = tmp_path / "mine.npz", np.ones((1, 2, 3, 4), np.float32)
    whole = encode({name: ("float32", x) for name in "qkv"})
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind in ("device", "link to itself"):
        file.symlink_to("/dev/zero" if kind == "device" else file)
    elif kind == "vast":
        with open(file, "wb") as stream:
            stream.truncate(8 << 30)
    else:
        file.write_bytes({"cut off": whole[:-9], "renamed": b"PK" + whole, "nested": b"[" * 100_000}[kind])
    result = verify(f"{kernels}:attend", option, file)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and str(file) in result.stderr, result.stderr
    assert "--debug" not in result.stderr
    assert kind != "vast" or "REFATTN_LARGEST=8589934592 raises the limit" in result.stderr


def test_captured_arrays_that_the_core_does_not_take(kernels: Path, tmp_path: Path) -> None:
    file, x = tmp_path / "mine.npz", np.ones((1, 2, 3, 4), np.float32)
    np.savez(file, q=x, k=x, v=x, mask=np.ones((5, 7), bool))
    result = verify(f"{kernels}:attend", "--inputs", file)
    assert (
        result.exit_code == 2 and "--inputs: mask: got shape (5, 7)" in result.stderr and "debug" not in result.stderr
    )


def test_an_archive_is_not_unpacked_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, x = tmp_path / "mine.npz", np.zeros((1, 1, 1 << 14, 16))
    np.savez_compressed(file, q=x, k=x, v=x)
    assert file.stat().st_size < 1 << 16
    monkeypatch.setenv("REFATTN_LARGEST", str(1 << 20))
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *given: pytest.fail("it was unpacked"))
    with pytest.raises(
        user_cases.UserCaseError, match="unpacked got 6291840 bytes, needs at most 1048576; REFATTN_LAR"
    ):
        captured.readings(RECORD, file)[0]
    monkeypatch.undo()
    assert captured.readings(RECORD, file)[0].case.inputs["q"].shape == x.shape
    with zipfile.ZipFile(file, "w") as archive, archive.open("q.npy", "w") as stream:  # a header that lies
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    with pytest.raises(user_cases.UserCaseError, match="q: got 0 bytes for the shape"):
        captured.readings(RECORD, file)[0]


@pytest.mark.parametrize("name", ["mine.npz", "mine.safetensors", "mine"])
def test_what_a_file_of_arrays_is_its_bytes_say(name: str, tmp_path: Path) -> None:
    file, x = tmp_path / name, np.asfortranarray(np.arange(24.0).reshape(1, 2, 3, 4))
    with open(file, "wb") as stream:
        np.savez(stream, q=x, k=x, v=x)
    assert np.array_equal(captured.readings(RECORD, file)[0].case.given["q"], x)
    file.write_bytes(encode({name: ("float64", x) for name in "qkv"}))
    assert np.array_equal(captured.readings(RECORD, file)[0].case.given["q"], x)


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
    assert result.exit_code == 0 and "4 cases run with this in the adapter, 0 without (found by trial)" in result.stdout
    assert "'n': {'multiple_of': 128}, 'd': [64, 128]" in result.stdout
    result = verify(f"{kernels}:narrow", "--dtype", "float32")  # in sizes that are not tried
    assert result.exit_code == 3
    assert "The cases that come nearest" in result.stdout and "tiny: q (1, 2, 4, 2)" in result.stdout
    assert "an adapter states the sizes" in result.stdout
    (kernels.parent / "other.py").write_text("def attend(query, key, value):\n    return query\n")
    result = verify(f"{kernels.parent}/other.py:attend", "--dtype", "float32")
    assert "it takes no q, k, v, and is called by name" in result.stdout and result.exit_code == 3
    assert "The cases that come nearest" in result.stdout and "an adapter states the sizes" not in result.stdout
    result = verify(f"{kernels}:stated")
    assert result.exit_code == 0 and "float16" not in result.stdout and "4 cases run, 0 declined" in result.stdout


def test_nothing_is_offered_to_an_adapter_that_lacks_options_alone(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [RECORD.case(name) for name in ("tiny", "causal", "softcap", "bias", "sink", "mask-keys")]
    monkeypatch.setattr("refattn.mechanisms.softmax.record", replace(RECORD, cases=tuple(few), kernel_sizes=()))
    result = verify(f"{kernels}:bare", "--dtype", "float32")
    assert "found by trial" not in result.stdout and "it takes no softcap" in result.stdout
    assert "1 case run, 5 declined, 0 failed" in result.stdout


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


SHAPES = {
    "softmax": "b=2,h=4,g=2,nq=7,nk=30,d=8,e=6,causal,sink,bias,keep,mask=0.7,k_lengths=30:5,offset=23:3,softcap=5",
    "delta": "b=2,h=4,g=2,n=70,d=32,e=4,log_decay,state,key_mask=0.5",
    "higher_order": "h=2,n=20,d=8,causal,normaliser=signed",
    "sympformer": "n=20,d=8,kinetic",
    "graph_energy": "n=20,d=8,bias,start",
    "koopman": "n=20,d=8",
    "growing": "h=3,n=20,d=8,sink,bias",
}


@pytest.mark.parametrize(("name", "text"), SHAPES.items(), ids=list(SHAPES))
def test_a_shape_of_every_mechanism_has_what_is_asked_for_and_nothing_else(name: str, text: str) -> None:
    record = ra.mechanism(name)
    case = user_cases.from_text(record, text)
    asked = {part.partition("=")[0] for part in text.split(",")} - {*"bhgnde", "nq", "nk"}
    needed = {"jitter", "perturbation"} if name == "koopman" else set()
    assert {*case.inputs, *case.options} == asked | {*"qkv"} | needed

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        assert record.core is not None
        return record.core.forward(q, k, v, **options)[0]

    assert verify_case(record, attend, case, "float32").status == "agrees"


def test_the_rule_of_a_recurrence_is_what_its_shape_names() -> None:
    delta = ra.mechanism("delta")
    usual, linear = user_cases.from_text(delta, "n=5,d=8"), user_cases.from_text(delta, "n=5,d=8,beta=false")
    assert {*usual.inputs} == {*"qkv", "beta", "log_decay"} and {*linear.inputs} == {*"qkv"}
    assert not usual.options  # neither chunks nor a norm that nobody asked for
    moving = user_cases.from_text(delta, "h=2,n=9,d=8,beta,log_decay,log_momentum,state,lengths=4:5")
    assert moving.inputs["state"].shape == (2, 2, 2, 8, 8)
    with pytest.raises(user_cases.UserCaseError, match="scale: got no value, needs one: scale="):
        user_cases.from_text(delta, "n=5,scale")
    with pytest.raises(user_cases.UserCaseError, match="offset: got .*, needs 1 whole numbers"):
        user_cases.from_text(RECORD, "n=5,offset=1:2")


def test_a_shape_in_float8() -> None:
    def attend(q: Any, k: Any, v: Any, *, dtype: str, descale: Any) -> Any:
        q, k, v = (x * factor[:, :, None, None] for x, factor in zip((q, k, v), descale, strict=True))
        return round_to(ra.softmax.forward(q, k, v)[0].astype(float), "bfloat16").astype(np.float32)

    assert verify_case(RECORD, attend, user_cases.from_text(RECORD, "n=20,d=8"), "float8_e4m3fn").status == "agrees"
    with pytest.raises(sampled.TooLargeError, match="more than 1048576 scores"):
        verify_case(RECORD, attend, user_cases.from_text(RECORD, "n=1100,d=8"), "float8_e4m3fn")


def test_supports_relates_sizes() -> None:
    record = ra.mechanism("softmax")
    cases = user_cases.fitted(record.cases, {"n": {"multiple_of": 16}, "where": ["nq = nk", "h=g", "e=d"]})
    assert len(cases) > 25
    for b, h, g, rows, columns, d, e in map(sizes, cases):
        assert (rows, h, d, rows % 16) == (columns, g, e, 0) and b
    assert {"causal", "mask", "window", "sink"} <= {name for case in cases for name in (*case.options, *case.inputs)}
    with_both = user_cases.fitted(record.cases, {"d": 64, "where": ["nq=nk"]})
    assert {
        (case.inputs["q"].shape[3], case.inputs["q"].shape[2] == case.inputs["k"].shape[2]) for case in with_both
    } == {(64, True)}
    every = (*record.cases, *record.kernel_sizes)  # values that are wider do not widen what is stated
    for stated in ({"d": 64}, {"e": 64}, {"d": [64], "e": {"multiple_of": 16}}):
        assert {sizes(case)[5:] for case in user_cases.fitted(every, {**stated, "where": ["e=d"]})} == {(64, 64)}
    assert user_cases.fitted(every, {"d": 64, "e": 128, "where": ["e=d"]}) == []
    for wrong in ("nq > nk", "n % 16 = 0"):
        with pytest.raises(user_cases.UserCaseError, match=f"got '{wrong}', needs equal sizes such as nq = nk"):
            user_cases.fitted(record.cases, {"where": [wrong]})


def test_cases_whose_inputs_have_axes_are_fitted_too() -> None:
    record = ra.mechanism("delta")
    cases = (*record.cases, *record.kernel_sizes)
    fitted = user_cases.fitted(cases, {"n": {"multiple_of": 16}, "where": ["h = g", "e = d"]})
    assert len(fitted) > 0.9 * len(cases)
    for case in fitted:
        sizes = sizes_of(case)
        assert sizes["h"] == sizes["g"] == sizes["f"] and sizes["e"] == sizes["d"] and sizes["n"] % 16 == 0
        assert sum(case.options.get("lengths", [sizes["n"]])) == sizes["n"]
    wide = next(case for case in user_cases.fitted([record.case("gated-delta")], {"d": 64}))
    assert 0.5 < np.linalg.norm(make("delta", wide, "float32")["k"], axis=-1).mean() < 2.0
    assert user_cases.fitted([record.case("gated-delta")], {"n": 21, "h": 2}) == [record.case("gated-delta")]


FIXED = """
import refattn as ra

def attend(q, k, v, *, mask=None):
    return ra.softmax.forward(q, k, v, mask=mask, causal=True, window=(9, None))[0]

attend.supports = {"fixed": {"causal": True, "window": [9, None]}, "options": ["mask"]}

def none(q, k, v):
    return ra.softmax.forward(q, k, v, causal=True)[0]

none.supports = {"fixed": {"casual": True}}

def plain(q, k, v):
    return ra.softmax.forward(q, k, v)[0]
"""


def test_a_kernel_without_a_choice_is_run_with_what_it_always_has(tmp_path: Path) -> None:
    file = tmp_path / "fixed.py"
    file.write_text(FIXED)
    result = verify(
        f"{file}:attend", "--dtype", "float32", "--case", "plain,causal,mask-full,unequal"
    )  # two are one then
    assert result.exit_code == 0 and "3 cases run, 0 declined" in result.stdout, result.output
    result = verify(f"{file}:attend", "--shape", "n=30,d=8", "--dtype", "float32")
    assert result.exit_code == 3 and "it always has causal=True, window=(9, None)" in result.stdout
    assert verify(f"{file}:attend", "--shape", "n=30,d=8,causal,window=9:", "--dtype", "float32").exit_code == 0
    result = verify(f"{file}:none")
    assert result.exit_code == 2 and "supports: fixed: got 'casual', needs some of mask, causal" in result.stderr
    with pytest.raises(user_cases.UserCaseError, match="fixed: got 3, needs a dict"):
        user_cases.check_fixed(RECORD, {"fixed": 3})
    cases = user_cases.fitted(RECORD.cases, {"fixed": {"causal": True}, "options": []})
    assert {tuple(case.options) for case in cases} == {("causal",)} and len(cases) > 3


def test_few_cases_that_ran_do_not_say_that_all_agrees(tmp_path: Path) -> None:
    file = tmp_path / "fixed.py"
    file.write_text(FIXED)
    names = ("plain", "causal", "sink-tiles", "softcap", "window-tiles")
    known = [name for name in names if name in {case.name for case in (*RECORD.cases, *RECORD.kernel_sizes)}]
    result = verify(f"{file}:plain", "--dtype", "float32", "--case", ",".join(known))
    assert result.exit_code == 0 and f"only 1 of {len(known)} cases ran, none with " in result.stdout
    assert "softmax: agrees" not in result.stdout
    asked = ("--dtype", "float32", "--case", ",".join(known), "--require-all")
    assert verify(f"{file}:plain", *asked).exit_code == 3


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("b=2,h=4,nq=5,nk=9,d=8,mask=0.7:b,h,1,k", {"mask": (2, 4, 1, 9)}),
        ("b=2,h=4,nq=5,nk=9,d=8,mask=0.7:1,h,q,k,causal,bias=b,1,1,k", {"mask": (1, 4, 5, 9), "bias": (2, 1, 1, 9)}),
        ("mask=0.7:b,1,i,1,b=2,h=4,nq=5,nk=9,d=8,keep=b,h,q,k", {"mask": (2, 1, 5, 1), "keep": (2, 4, 5, 9)}),
    ],
)
def test_masks_and_biases_of_any_broadcast_shape(text: str, shapes: dict[str, Any]) -> None:
    case = user_cases.from_text(RECORD, text)
    assert {name: x.shape for name, x in case.inputs.items() if name not in "qkv"} == shapes and case.name == text

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ra.softmax.forward(q, k, v, **options)[0]

    assert verify_case(RECORD, attend, case, "float32").status == "agrees"
    made = make("softmax", case, "float32")
    assert {name: made[name].shape for name in shapes} == shapes
    wrong = text.replace("nk=9", "nk=9,mask=0.7:b,b,1,k") if "mask" not in text else text.replace("0.7:", "0.7:2,")
    with pytest.raises(user_cases.UserCaseError):
        user_cases.from_text(RECORD, wrong)


def test_what_a_shape_says_an_object_in_a_file_says_too(tmp_path: Path) -> None:
    file, text = tmp_path / "cases.json", "b=2,h=4,nq=5,nk=9,d=8,mask=0.7:b,h,1,k,causal"
    as_object = {"b": 2, "h": 4, "nq": 5, "nk": 9, "d": 8, "mask": "0.7:b,h,1,k", "causal": True}
    file.write_text(json.dumps([text, as_object]))
    first, second = user_cases.from_file(RECORD, file)
    assert first.inputs == second.inputs and first.options == second.options
    with pytest.raises(user_cases.UserCaseError, match="bias: got 'b,h', needs axes such as b,h,1,k"):
        user_cases.of_sizes(RECORD, {"n": 4, "bias": "b,h"}, "mine")
    with pytest.raises(user_cases.UserCaseError, match="keep: got 0.9 before its axes"):
        user_cases.from_text(RECORD, "n=4,keep=0.9:b,h,q,k")


def test_a_decay_of_every_channel() -> None:
    delta = ra.mechanism("delta")
    for text, axes in (("channel", 4), ("head", 3)):
        case = user_cases.from_text(delta, f"b=2,h=2,n=70,d=16,beta,log_decay={text}")
        assert len(case.inputs["log_decay"].shape) == axes == len(case.inputs["log_decay"].axes)

        def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
            return ra.delta.forward(q, k, v, **options)[0]

        assert verify_case(delta, attend, case, "float32").status == "agrees"
    with pytest.raises(user_cases.UserCaseError, match="log_decay: got"):
        user_cases.from_text(delta, "n=70,d=16,log_decay=chanel")
