"""Other languages make the inputs of golden vectors from their descriptions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import refattn as ra
from refattn.golden import vectors
from refattn.golden.inputs import DESIGNS
from refattn.verify import freeze
from refattn.verify.selfcheck.samples import shrunk
from tests.golden.test_vectors import header

EXAMPLES = Path(__file__).parents[2] / "examples"

READ = (
    *("tiny", "mask-full", "softcap", "ties", "long-tail", "exact", "exact-pairs", "offset-batch", "bias-row"),
    *("bias-infinite", "alibi-tail", "exact-bias", "sink-large", "sink-several", "dropout-much", "exact-sink"),
)
DRAWN = ("tiny", "burst", "reset", "one-key")
NUMBERS: dict[str, dict[str, float]] = {
    "normal": {"scale": 1.0},
    "shifted": {"scale": 1.0, "shift": 0.0, "every": 1, "first": 0},
    "repeated": {"scale": 1.0, "period": 1},
    "integers": {"low": 0, "high": 0},
    "powers": {"low": 0, "high": 0},
    "ranks": {"step": 0.0, "ties": 1},
    "uniform": {"low": 0.0, "high": 0.0},
    "burst": {"low": 0.0, "value": 0.0, "at": 0},
    "resets": {"low": 0.0, "every": 1},
    "units": {"step": 0, "period": 1},
    "mask": {"keep": 0.0},
    "band": {"before": 0, "after": 0},
    "counts": {},
    "list": {},
    "dropout": {"p": 0.0},
    "biased": {"scale": 1.0, "hidden": 0.0},
    "alibi": {"offset": 0, "step": 0.0},
}
"""The numbers of each design in order, at what they are where absent; none where they are as many as there are."""

UNDRAWN = ("band", "ranks", "units", "counts", "list", "alibi")
"""Designs that are drawn from no stream."""


@pytest.mark.parametrize(
    ("source", "compiler"),
    [("read_vectors.c", ["cc", "-O1", "-Wall", "-Werror"]), ("read_vectors.rs", ["rustc", "--edition", "2021"])],
)
def test_other_languages_make_the_same_inputs(source: str, compiler: list[str], whole: Path, tmp_path: Path) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not installed")
    assert len((EXAMPLES / source).read_text().splitlines()) <= 120
    program = tmp_path / "read_vectors"
    library = ["-lm"] if compiler[0] == "cc" else []
    subprocess.run([*compiler, "-o", program, EXAMPLES / source, *library], check=True)
    cases = {"delta": DRAWN, "graph_energy": ("window",)}
    drawn = {ra.mechanism(name): names for name, names in cases.items()}
    frozen = [freeze.freeze(record, shrunk(record.case(name))) for record, names in drawn.items() for name in names]
    vectors.write(tmp_path / "drawn", freeze.about([*drawn], "small", "0"), frozen)
    chosen = ((vectors.SHIPPED, "softmax", READ), *((tmp_path / "drawn", name, of) for name, of in cases.items()))
    tried = set()
    for name, given, file in (
        (name, given, folder / entry["file"])
        for folder, mechanism, cases in chosen
        for entry in vectors.read(folder).cases
        if entry["mechanism"] == mechanism and entry["case"] in cases
        for name, given in entry["inputs"].items()
    ):
        numbers = NUMBERS[given["design"]] | given["numbers"]
        assert list(numbers) == (list(NUMBERS[given["design"]]) or [str(n) for n in range(len(numbers))])
        call = [program, file, name, given["design"], ",".join(map(repr, numbers.values()))]
        right = subprocess.run([*call, given["stream"]], capture_output=True, text=True)
        assert right.returncode == 0 and "every bit the same" in right.stdout, right
        wrong = subprocess.run([*call, given["stream"] + "x"], capture_output=True, text=True)
        assert wrong.returncode == (0 if given["design"] in UNDRAWN else 1), wrong
        tried.add(given["design"])
    assert tried == set(NUMBERS) == set(DESIGNS)
    call = [program, whole / "softmax" / "tiny.safetensors", "nothing", "normal", "1", "softmax.tiny.q"]
    assert subprocess.run(call, capture_output=True).returncode == 2
    lying = tmp_path / "lying.safetensors"
    for data in (header("", length=2**62), header('{"float64/q":{"data_offsets":[0,4096]}}')):
        lying.write_bytes(data)
        assert subprocess.run([program, lying, "q", "normal", "1", "x"], capture_output=True).returncode == 2
