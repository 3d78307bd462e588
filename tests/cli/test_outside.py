"""Mechanisms of other packages: every command takes one, by MODULE:NAME of its record or by its entry point."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import files, model
from refattn.mechanisms import registry
from refattn.train import settings
from refattn.verify import check
from refattn.verify.parallel import named
from tests.cli.command import process, refused, run

SIGMOID = Path(__file__).parents[2] / "docs" / "tutorials" / "sigmoid"

RECORD = "outsider.sigmoid:record"

KERNELS = """
from outsider.sigmoid import record


def attend(q, k, v, *, implementation="auto", **options):
    return record.core.forward(q, k, v, **options)[0]


def sharp(q, k, v, *, scale=None, **options):
    return record.core.forward(q, k, v, scale=1.01 * (q.shape[3] ** -0.5 if scale is None else scale), **options)[0]
"""

TRAIN = ("--data", "repeats", "--out", "run")
SMALL = {"width": 8, "heads": 2, "layers": 1, "context": 8, "batch": 2, "sample_bytes": 4, "score_bytes": 64}
SET = [word for name, x in SMALL.items() for word in ("--set", f"{name}={x}")]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder far from the checkout, with a package that has the tutorial's mechanism."""
    shutil.copytree(SIGMOID, tmp_path / "outsider" / "sigmoid", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "outsider" / "__init__.py").touch()
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` has it
    yield tmp_path
    forget()


def forget() -> None:
    """Let the next import read the files again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("outsider", "kernels", "broken")]:
        del sys.modules[name]


def declare(folder: Path, entries: str, distribution: str = "outsider") -> None:
    """Install a package that declares mechanisms, as far as Python can tell."""
    info = folder / f"{distribution}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[refattn.mechanisms]\n{entries}\n")


def done(*words: Any) -> str:
    result = run(*words)
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.stdout


# --- every command


def test_what_reads_the_record() -> None:
    assert "Sigmoid attention" in done("list", RECORD)
    own: dict[str, Any] = {}
    exec(done("show", RECORD), own)
    q = np.ones((1, 1, 2, 3))
    assert np.array_equal(own["forward"](q, q, q)[0], ra.mechanism(RECORD).core.forward(q, q, q)[0])  # type: ignore[union-attr]
    done("trace", RECORD, "--html", "page.html")
    printed = done("trace", RECORD)
    assert printed.startswith("Sigmoid attention: the definition, case tiny")
    assert "outsider/sigmoid/definition.py:40: weights = " in printed
    assert "SIG.2" in Path("page.html").read_text(encoding="utf-8")
    block = json.loads(done("trace", RECORD, "--block", "--json", "-"))
    assert block["mechanism"] == "sigmoid" and "SIG.1" in [step["id"] for step in block["forward"]]


def test_what_runs_it() -> None:
    """Also in other processes, which find the record by its name."""
    found = json.loads(done("check", RECORD, "-j", 2, "--json", "-"))["checks"][0]
    assert found["mechanism"] == "sigmoid" and not [row for row in found["rows"] if row["status"] == "disagrees"]
    kernel = ("verify", RECORD, "--dtype", "float32", "--quick", "-j", 2, "--impl")
    done(*kernel, "kernels:attend")
    result = run(*kernel, "kernels:sharp")
    assert result.exit_code == 1 and f'verify_case(ra.mechanism("{RECORD}"), load(' in result.stdout
    done("golden", "write", "set", RECORD)
    assert "8 cases: all agree" in done("golden", "check", "set", RECORD, "-j", 2)


def test_an_adapter_of_its_definition_runs_every_case(here: Path) -> None:
    """As its command is printed: masks, causality and shared heads, in all types."""
    file = here / "outsider" / "sigmoid" / "definition.py"
    file.write_text(file.read_text().replace("allowed: Array | None = None", "allowed: Array | None"))
    line = done("verify", RECORD, "--init", "numpy")
    result = run(*line.rpartition("refattn ")[2].split())
    assert result.exit_code == 0 and "32 cases run, 0 declined, 0 failed" in " ".join(result.stdout.split())


def test_what_trains_it() -> None:
    done("train", RECORD, "--steps", 1, *TRAIN, *SET)
    assert json.loads(Path("run", "config.json").read_text(encoding="utf-8"))["settings"]["mechanism"] == "sigmoid"
    done("train", RECORD, "--steps", 2, "--out", "run", "--resume")
    assert done("sample", "run", "--prompt", "a", "--bytes", 2, "--mechanism", RECORD).startswith("a")
    done("analyse", "clusters", RECORD, "--particles", 3, "--end", 0.5, "--out", "clusters")
    done("analyse", "lyapunov", RECORD, "--run", "run", "--tokens", 3, "--out", "lyapunov")
    for other in ("softmax", "outsider.sigmoid:loops"):
        assert "mechanism: got" in refused("sample", "run", "--prompt", "a", "--mechanism", other)


def test_a_run_remembers_the_source(here: Path) -> None:
    done("train", RECORD, "--steps", 1, *TRAIN, *SET)
    file = here / "outsider" / "sigmoid" / "loops.py"
    file.write_text(file.read_text() + "\n# changed\n")
    files.source_digest.cache_clear()  # as in another process
    line = refused("train", RECORD, "--steps", 1, "--out", "run", "--resume", "--exact")
    assert line.startswith("exact: ") and "source of sigmoid was " in line
    before = named(ra.mechanism(RECORD))
    file.write_text(file.read_text() + "\n# and again\n")
    files.source_digest.cache_clear()
    assert named(ra.mechanism(RECORD)) != before  # so that nothing is taken from what an earlier code gave


def test_in_python() -> None:
    record = ra.mechanism(RECORD)
    assert record is ra.mechanism(RECORD) and record.address == RECORD
    q = np.random.default_rng(0).standard_normal((1, 1, 3, 2))
    assert "SIG.2" in ra.explore(RECORD, q, q, q).html
    ra.verify(RECORD, lambda q, k, v, **options: record.core.forward(q, k, v, **options)[0], dtypes=["float32"])  # type: ignore[union-attr]
    assert record.changed(cases=()).address == RECORD
    chosen = settings.build(record, SMALL | {"steps": 1})
    assert chosen.to_json()["mechanism"] == "sigmoid" and settings.from_json(chosen.to_json(), vars(chosen)) == chosen
    with pytest.raises(ValueError, match="mechanism: got 'outsider.sigmoid:record', .*; of another package the record"):
        model.Config(RECORD)


def test_golden_vectors_beside_the_definition(here: Path) -> None:
    """They are those that `check` compares with, and that results are judged by."""
    done("golden", "write", "outsider/sigmoid/golden", RECORD)
    row = {row.name: row for row in check(ra.mechanism(RECORD)).rows}["every stored case"]
    assert row.status == "agrees"
    Path("results").mkdir()
    assert "nothing was run" in run("verify", RECORD, "--outputs", "results").stdout
    assert "no vector" not in done("golden", "check", "outsider/sigmoid/golden", RECORD) + row.detail
    (file,) = Path("outsider").glob("sigmoid/__init__.py")
    file.write_text(file.read_text().replace('qkv("plain"', 'qkv("new", "plain", "of today"),\n        qkv("plain"'))
    forget()
    says = "1 designed case has no vector (new): refattn golden write --replace"
    row = {row.name: row for row in check(ra.mechanism(RECORD)).rows}["every stored case"]
    assert row.status == "agrees" and row.detail.endswith(says)
    assert f"sigmoid: {says}" in done("golden", "check", "outsider/sigmoid/golden", RECORD)
    file = here / "outsider" / "sigmoid" / "definition.py"
    file.write_text(file.read_text().replace("0.5 * (1.0 +", "0.5001 * (1.0 +"))
    forget()
    row = {row.name: row for row in check(ra.mechanism(RECORD)).rows}["every stored case"]
    assert row.status == "disagrees"


def test_a_set_does_not_load_its_mechanism() -> None:
    done("golden", "write", "set", RECORD)
    assert "of another package the record itself: refattn golden check DIR MECHANISM" in refused(
        "golden", "check", "set"
    )
    assert "MECHANISM: got 'softmax', needs one of the set: sigmoid" in refused("golden", "check", "set", "softmax")
    assert "sigmoid/tiny" in done("golden", "show", "set")


def test_a_program_as_users_run_it(here: Path) -> None:
    """In a process of its own the working directory is where modules are found, too."""
    found = process("trace", RECORD, "--only", "SIG.3", cwd=here)
    assert found.returncode == 0 and "outsider/sigmoid/definition.py" in found.stdout


def test_a_definition_that_lacks_a_call_says_so(here: Path) -> None:
    """Checks pass the call over, and the file that is shown raises the same."""
    file = here / "outsider" / "sigmoid" / "definition.py"
    lacks = '    if q.shape[3] != v.shape[3]:\n        raise Unsupported("v: needs the width of k")\n'
    head, forward, body = file.read_text().partition('    """Return out')
    line, _, rest = body.partition("\n")
    head = head.replace(
        "\nfrom refattn.ops", "\nfrom refattn.mechanisms.record import Unsupported\nfrom refattn.ops", 1
    )
    file.write_text(f"{head}{forward}{line}\n{lacks}{rest}")
    cases = here / "outsider" / "sigmoid" / "__init__.py"
    cases.write_text(cases.read_text().replace(", e=20", ""))
    done("check", RECORD)
    own: dict[str, Any] = {}
    exec(done("show", RECORD), own)
    q, v = np.ones((1, 1, 2, 3)), np.ones((1, 1, 2, 4))
    for forward_of in (own["forward"], ra.mechanism(RECORD).core.forward):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="v: needs the width of k"):
            forward_of(q, q, v)


# --- what cannot be loaded


def test_what_names_no_record(here: Path) -> None:
    (here / "broken.py").write_text("print('loud')\nraise RuntimeError('of two\\nlines')")
    for text, says in {
        "nowhere:record": "cannot be loaded: No module named 'nowhere'",
        "broken:record": "cannot be loaded: of two lines",
        "outsider:record": "cannot be loaded: module 'outsider' has no attribute 'record'",
        "outsider.sigmoid:loops": "needs an object of a Mechanism",
        ":record": "cannot be loaded: Empty module name",
        "outsider.sigmoid:": "cannot be loaded: module 'outsider.sigmoid' has no attribute ''",
    }.items():
        result = run("trace", text)  # what it prints itself goes to the other stream
        line = result.stderr.splitlines()[-1]
        assert (result.exit_code, result.stdout) == (2, "") and f"mechanism: got {text!r}" in line and says in line


def test_a_name_of_the_library_is_taken(here: Path) -> None:
    file = here / "outsider" / "sigmoid" / "__init__.py"
    file.write_text(
        file.read_text()
        .replace("record = mechanism(", "record = mechanism(name='softmax', title=")
        .replace('"Ramapuram', 'source="Ramapuram')
        .replace("    definition,", "    definition=definition,")
        .replace("    loops,", "    loops=loops,")
    )
    assert "whose record is called 'softmax' as one of the library" in refused("check", RECORD)


# --- entry points


def test_an_installed_package_is_listed_and_named(here: Path) -> None:
    declare(here, "sigmoid = outsider.sigmoid:record")
    assert registry.declared() == ("sigmoid",) and "sigmoid" not in registry.list_mechanisms()
    assert "outsider" not in sys.modules
    assert "Sigmoid attention" in done("list") and "sigmoid" not in done("list", "softmax")
    assert done("trace", "sigmoid").startswith("Sigmoid attention: the definition")
    assert ra.mechanism("sigmoid").address == "sigmoid" and "needs one of softmax" in refused("check", "sigmoi")
    assert "did you mean sigmoid?" in refused("check", "sigmoi")


def test_what_cannot_be_loaded_is_listed_with_its_error(here: Path) -> None:
    (here / "broken.py").write_text("print('loud')\nimport sys\nsys.exit('of two\\nlines')")
    names = "\n".join(f"{name} = outsider.sigmoid:record" for name in ("sigmoid", "softmax", "other"))
    declare(here, f"{names}\nbroken = broken:record\nabsent = nowhere:record\nloops = outsider.sigmoid:loops")
    result = run("list", "--json", "-")
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout) if row["name"] not in ("koopman", "softmax")}
    assert rows["sigmoid"]["title"] == "Sigmoid attention"
    lines = [line for line in result.stderr.splitlines() if line.startswith("refattn: warning: ")]
    assert len(lines) == 5
    for name, says in {
        "absent": "cannot be loaded: No module named 'nowhere'",
        "broken": "cannot be loaded: of two lines",
        "loops": "needs an object of a Mechanism",
        "other": "its record is called 'sigmoid', needs the name of the entry point",
        "softmax": "the library has a mechanism of this name, which is the one that runs",
    }.items():
        (line,) = [line for line in lines if f"mechanism {name!r} of outsider 1 (entry point " in line]
        assert says in line
        assert name == "softmax" or says in rows[name]["error"]
    assert ra.mechanism("softmax").title == "Softmax attention"
    assert "cannot be loaded: No module named 'nowhere'" in refused("check", "absent")


def test_two_packages_with_one_name(here: Path) -> None:
    declare(here, "sigmoid = outsider.sigmoid:record")
    declare(here, "sigmoid = another.sigmoid:record", "another")
    assert "'sigmoid' is offered by " in (line := refused("check", "sigmoid")) and "; remove one" in line
