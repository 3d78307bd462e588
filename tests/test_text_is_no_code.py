"""No text of a file or of an option runs code: every option, from every way in, with text that names a module.

The working directory has a module that would leave a mark, and Python's library some that nobody has imported yet.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import model
from refattn.golden import vectors
from refattn.golden.tensors import encode
from refattn.mechanisms import registry
from refattn.model.params import OWN
from refattn.train import checkpoint, loop, plot, settings
from refattn.train.folder import RunError
from tests.cli.command import process, refused, run
from tests.fuzz.files import signed_manifest
from tests.mechanisms.graph_energy.test_couplings import HALF, SINE
from tests.mechanisms.koopman.test_draws import LAW
from tests.mechanisms.koopman.test_own import KERNEL
from tests.train.runs import Stopping, remains, train, write_text

TEXTS = ("evil:record", "evil.record", "evil", "this:s", "antigravity:fly", "__import__('evil')", "evil:record(x=1)")
"""What would import a module: the one of the working directory, or one of Python's that has an effect when it is."""

BLOCKS = [
    (name, field.name)
    for name in ra.list_mechanisms()
    for field in dataclasses.fields(ra.mechanism(name).block.Config)
    if field.name not in OWN
]
CORES = [(name, option) for name in ra.list_mechanisms() for option in ra.mechanism(name).defaults]

SMALL: dict[str, Any] = {"context": 8, "width": 8, "heads": 2, "layers": 1, "batch": 2, "steps": 2, "warmup": 1}
SMALL |= {"score_bytes": 64, "sample_bytes": 4, "checkpoint_every": 1}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work beside a module that leaves a mark when it is imported; afterwards nobody has imported it."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nrecord = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` has it
    monkeypatch.setattr(plot, "draw", lambda *arguments: None)
    for name in ("evil", "this", "antigravity"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    assert not {"evil", "this", "antigravity"} & {*sys.modules} and not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each mechanism."""
    home = tmp_path_factory.mktemp("runs")
    text = write_text(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "draw", lambda *arguments: None)
        return {
            name: train(settings.build(name, SMALL | {"data": text}), home / name).folder
            for name in ra.list_mechanisms()
        }


def names(option: str, message: str) -> bool:
    """Whether a message is one line that names an option."""
    return option in message and "\n" not in message


# --- options of blocks


@pytest.mark.parametrize(("name", "option"), BLOCKS)
def test_an_option_of_a_block(name: str, option: str) -> None:
    record = ra.mechanism(name)
    for text in TEXTS:
        with pytest.raises((TypeError, ValueError)) as caught:
            model.Config(name, width=8, heads=2, layers=1, options={option: text})
        assert names(option, str(caught.value)), text
    sizes = {"width": 8, "heads": 2} | ({"layer": 0, "layers": 1} if name == "sympformer" else {})
    known = {field.name for field in dataclasses.fields(record.block.Config)}
    with pytest.raises((TypeError, ValueError), match=option):
        record.block.Config(**{key: x for key, x in sizes.items() if key in known}, **{option: TEXTS[0]})


@pytest.mark.parametrize(("name", "option"), BLOCKS)
def test_an_option_of_a_block_in_a_file_or_in_a_command(
    name: str, option: str, here: Path, runs: dict[str, Path]
) -> None:
    text = TEXTS[0]
    given = ("train", name, "--out", "new")
    lines = [refused(*given, "--set", each) for each in (f"block.{option}={text}", f'block={{"{option}":"{text}"}}')]
    (here / "settings.toml").write_text(f'[block]\n{option} = "{text}"\n')
    lines.append(refused(*given, "--config", "settings.toml"))
    folder = shutil.copytree(runs[name], here / "run")
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["block"] = {option: text}
    (folder / "config.json").write_text(json.dumps(config))
    lines.append(refused("train", name, "--out", folder, "--resume"))
    lines.append(refused("sample", folder, "--prompt", "a"))
    assert all(names(f"block.{option}", line) for line in lines), lines
    assert run("plot", folder, "--out", "runs.png").exit_code == 0  # which reads the metrics alone
    line = refused("analyse", "clusters", name, "--run", folder)
    assert names(f"block.{option}", line) or "mechanism" in line or "core" in line, line


def test_the_mechanism_of_a_run(here: Path, runs: dict[str, Path]) -> None:
    folder = shutil.copytree(runs["softmax"], here / "run")
    config = json.loads((folder / "config.json").read_text())
    for text in TEXTS:
        config["settings"]["mechanism"] = text
        (folder / "config.json").write_text(json.dumps(config))
        for command in (
            ("train", "softmax", "--out", folder, "--resume"),
            ("sample", folder, "--prompt", "a"),
            ("analyse", "clusters", "softmax", "--run", folder),
        ):
            assert names("mechanism: got", refused(*command)), command
    assert names("preset", refused("train", "softmax", "--out", "new", "--set", f"preset={TEXTS[0]}"))


def test_a_growth_of_a_checkpoint(here: Path) -> None:
    """The configurations of blocks that have grown stand in the checkpoint."""
    given = SMALL | {"data": write_text(here), "grow": [1], "growth": {"most": 1}, "backend": "numpy"}
    chosen = settings.build("growing", given)
    folder = train(chosen, here / "run").folder
    for option in ("softcap", "scale"):
        for path in sorted((folder / "checkpoints").glob("*.json")):
            content = json.loads(path.read_text())
            content["facts"]["growth"]["blocks"][0][option] = TEXTS[0]
            del content["digest"]
            path.write_text(json.dumps(content | {"digest": checkpoint._digest(content)}))
        result = run("sample", folder, "--prompt", "a")
        assert result.exit_code == 2 and f"facts.growth.blocks: {option}" in result.stderr


def test_a_program_as_users_run_it(here: Path, runs: dict[str, Path]) -> None:
    """In a process of its own, where the working directory is the first place of modules."""
    folder = shutil.copytree(runs["koopman"], here / "run")
    config = json.loads((folder / "config.json").read_text())
    for text in ("evil:record", "this:s"):
        config["settings"]["block"] = {"kernel": text}
        (folder / "config.json").write_text(json.dumps(config))
        done = process("sample", folder, "--prompt", "a", cwd=here)
        assert (done.returncode, done.stdout) == (2, "") and f"block.kernel: got '{text}'" in done.stderr


def test_the_backend_of_another_package(here: Path, runs: dict[str, Path]) -> None:
    """An entry point is a module by another name: the user gives it, no file does."""
    (here / "evil-1.dist-info").mkdir()
    (here / "evil-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (here / "evil-1.dist-info" / "entry_points.txt").write_text("[refattn.backends]\nevil = evil:record\n")
    folder = shutil.copytree(runs["softmax"], here / "run")
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["backend"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    (here / "settings.toml").write_text('backend = "evil"\n')
    for command in (
        ("train", "softmax", "--out", folder, "--resume"),
        ("sample", folder, "--prompt", "a"),
        ("train", "softmax", "--out", "new", "--config", "settings.toml"),
    ):
        assert "backend: got 'evil', needs one of numpy, cupy" in refused(*command)


def test_the_mechanism_of_another_package(here: Path, runs: dict[str, Path]) -> None:
    """The user names one in a command; no file does, neither by its entry point nor by its module."""
    (here / "evil-1.dist-info").mkdir()
    (here / "evil-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (here / "evil-1.dist-info" / "entry_points.txt").write_text("[refattn.mechanisms]\nevil = evil:record\n")
    assert registry.declared() == ("evil",)
    folder = shutil.copytree(runs["softmax"], here / "run")
    config = json.loads((folder / "config.json").read_text())
    whole = json.loads((vectors.SHIPPED / vectors.MANIFEST).read_text())
    entry = next(entry for entry in whole["cases"] if entry["file"] == "softmax/tiny.safetensors")
    (here / "set" / "evil").mkdir(parents=True)
    shutil.copy(vectors.SHIPPED / entry["file"], here / "set" / "evil" / "tiny.safetensors")
    cases = [entry | {"mechanism": "evil", "file": "evil/tiny.safetensors"}]
    part = whole | {"cases": cases, "count": 1, "sha256": vectors._of_all(cases)}
    part["mechanisms"] = {"evil": whole["mechanisms"]["softmax"]}
    signed_manifest(here / "set" / vectors.MANIFEST, part)
    (here / "results").mkdir()
    for text in ("evil", "evil:record"):
        config["settings"]["mechanism"] = text
        (folder / "config.json").write_text(json.dumps(config))
        (here / "settings.toml").write_text(f'mechanism = "{text}"\n')
        for command in (
            ("train", "softmax", "--out", folder, "--resume"),
            ("sample", folder, "--prompt", "a"),
            ("sample", folder, "--prompt", "a", "--mechanism", "softmax"),
            ("train", "softmax", "--out", "new", "--config", "settings.toml"),
            ("train", "softmax", "--out", "new", "--set", f"mechanism={text}"),
            ("analyse", "clusters", "softmax", "--run", folder),
        ):
            assert "mechanism" in refused(*command), command
        with pytest.raises(ValueError, match=f"mechanism: got '{text}', needs one of softmax"):
            model.Config(text, width=8, heads=2)
    assert names("mechanism", refused("golden", "check", here / "set"))
    assert run("golden", "show", here / "set").exit_code == 0
    run("verify", "softmax", "--outputs", "results", "--vectors", "set")


# --- options of cores


@pytest.mark.parametrize(("name", "option"), CORES)
def test_an_option_of_a_core(name: str, option: str, here: Path) -> None:
    """As Python has it, and as shapes, cases, captured arrays and commands write it."""
    record, text = ra.mechanism(name), TEXTS[0]
    q = np.ones((1, 2, 3, 4))
    for each in TEXTS:
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            record.core.forward(q, q, q, **{option: each})  # type: ignore[union-attr]
        assert names(option, str(caught.value)) or name == "delta", each
    escaped = json.dumps(text).replace(":", "\\u003a")
    (here / "c.json").write_text(json.dumps(["n=4,d=2", {"n": 4, "d": 2, option: text}]))
    (here / "c.jsonl").write_text(json.dumps({"n": 4, "d": 2, option: text}) + "\n" + json.dumps({"n": 3, "d": 2}))
    about = {"options": json.dumps({option: text})}
    (here / "x.safetensors").write_bytes(encode({x: ("float64", q) for x in "qkv"}, about))
    np.savez(here / "x.npz", q=q, k=q, v=q, options=np.asarray(about["options"]))
    kernel = ("verify", name, "--exec", "true")
    for more in (
        ("--shape", f"n=4,d=2,{option}={text}"),
        ("--shape", f"n=4,d=2,{option}={escaped}"),
        ("--cases", "c.json"),
        ("--cases", "c.jsonl"),
        ("--inputs", "x.safetensors"),
        ("--inputs", "x.npz"),
    ):
        line = refused(*kernel, *more)
        assert names(option, line), line
    line = refused("trace", name, "--set", f"{option}={text}")
    assert names(option, line), line


def test_options_of_studies() -> None:
    for option in ("--kernel", "--fit", "--space"):
        assert option[2:] in refused("analyse", "spectrum", option, TEXTS[0])
    for command in ("equilibria", "bifurcation"):
        for option in ("--coupling", "--intrinsic"):
            assert option[2:] in refused("analyse", command, option, TEXTS[0])
    assert "kernel" in refused("analyse", "clusters", "koopman", "--set", f"kernel={TEXTS[0]}")


def test_a_set_of_golden_vectors(here: Path) -> None:
    """Its options are compared, and its mechanisms are names of the library."""
    whole = json.loads((vectors.SHIPPED / vectors.MANIFEST).read_text())
    cases = [
        entry for entry in whole["cases"] if entry["file"] in ("koopman/tiny.safetensors", "koopman/own.safetensors")
    ]
    (here / "set" / "koopman").mkdir(parents=True)
    for entry in cases:
        shutil.copy(vectors.SHIPPED / entry["file"], here / "set" / entry["file"])
    part = whole | {"cases": cases, "count": len(cases), "sha256": vectors._of_all(cases)}
    part["mechanisms"] = {"koopman": whole["mechanisms"]["koopman"]}
    changed = json.loads(json.dumps(part))
    for entry in changed["cases"]:
        entry["options"]["kernel"] = TEXTS[0]
    signed_manifest(here / "set" / vectors.MANIFEST, changed)
    result = run("golden", "check", here / "set", "-j", 1)
    assert result.exit_code == 1 and TEXTS[0] in result.stdout
    (here / "results").mkdir()
    run("verify", "koopman", "--outputs", "results", "--vectors", "set")
    part["mechanisms"] = {TEXTS[0]: whole["mechanisms"]["koopman"]}
    signed_manifest(here / "set" / vectors.MANIFEST, part)
    assert names("mechanism", refused("golden", "check", here / "set"))


# --- functions of one's own


OBJECTS: list[tuple[str, dict[str, Any]]] = [
    ("koopman", {"kernel": KERNEL, "updates": 2, "head_width": 3}),
    ("koopman", {"draws": LAW, "updates": 2}),
    ("graph_energy", {"coupling": HALF, "intrinsic": SINE, "step": 0.1}),
]


OTHERS: dict[str, Any] = {
    "kernel": dataclasses.replace(KERNEL, weight=0.5),
    "draws": dataclasses.replace(LAW, candidates=2),
    "coupling": dataclasses.replace(HALF, name="half"),
    "intrinsic": dataclasses.replace(SINE, name="half"),
}


@pytest.mark.parametrize(("name", "block"), OBJECTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_run_with_functions_of_ones_own_goes_on_from_python_alone(
    name: str, block: dict[str, Any], here: Path
) -> None:
    """To the bit; from text it is refused, and so are other functions in their place."""
    given = SMALL | {"data": write_text(here), "block": block}
    whole = train(settings.build(name, given), here / "whole").folder
    part = train(settings.build(name, given), here / "part", Stopping(1)).folder
    for option in [option for option, x in block.items() if dataclasses.is_dataclass(x)]:
        stored = json.loads((part / "config.json").read_text())["settings"]["block"][option]
        assert stored.startswith("<") and "0x" not in stored
        for command in (
            ("train", name, "--out", part, "--resume"),
            ("sample", part, "--prompt", "a"),
            ("train", name, "--out", part, "--resume", "--set", f"block.{option}={json.dumps(stored)}"),
        ):
            if option == next(iter(block)):  # one is named at a time
                line = refused(*command)
                assert names(f"block.{option}: got ", line) and "from Python" in line, line
        other = given | {"block": block | {option: OTHERS[option]}}
        with pytest.raises(RunError, match=f"block.{option}: got .<.*from Python"):
            train(settings.build(name, other), part, resume=True)
    with pytest.raises(RunError, match="from Python"):
        loop.continued(part, b"a", 3, print)
    assert len(loop.continued(part, b"a", 3, print, own={"block": block})) == 3
    train(settings.build(name, given), part, resume=True)
    assert remains(part) == remains(whole)


def test_an_object_that_has_a_text_is_stored_as_it(here: Path) -> None:
    """And goes on from text."""
    given = SMALL | {"data": write_text(here), "block": {"kernel": ra.koopman.Rbf(2.0), "updates": 2}}
    folder = train(settings.build("koopman", given | {"steps": 1}), here / "run").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["block"] == {"kernel": "rbf(bandwidth=2.0)", "updates": 2}
    assert run("train", "koopman", "--out", folder, "--resume", "--steps", "2").exit_code == 0


def test_a_model_takes_a_record() -> None:
    record = ra.mechanism("softmax").changed(name="mine")
    config = model.Config(record, width=8, heads=2, layers=1, context=4)
    params = model.init(config, like=np.ones(1))
    tokens = np.asarray([[1, 2, 3]])
    same = model.init(dataclasses.replace(config, mechanism="softmax"), like=np.ones(1))
    np.testing.assert_array_equal(model.forward(params, tokens)[0], model.forward(same, tokens)[0])
    with pytest.raises(ValueError, match="options: got 'x', mine has"):
        dataclasses.replace(config, options={"x": 1})
