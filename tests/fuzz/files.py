"""A fuzzer of files that others may have changed: ``python -m tests.fuzz.files [--calls N] [--seed S]``.

Each call changes one file of a golden set, of a run, of a campaign, or of the user's own (bytes, or a field of its JSON
with the sums made anew), or puts something else in its place (a pipe, a folder, a link, a device, a file of 8 GiB, an
archive that unpacks to one, another file), and has it read. What comes of it is counted:

- refused: one error of the kind that readers promise, which names the file
- the same: nothing that is read has changed
- other: a file without a sum of its own (config.json, metrics.jsonl), or one whose sum was made anew, is read with
  other values that are valid
- obscure: another error, or one that does not name the file
- wrong: something else is read where a sum should have told, or a module was imported that a text names
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import refattn as ra
from refattn import many_runs, philox
from refattn.analysis.graphs import read_graph
from refattn.golden import vectors
from refattn.golden.tensors import encode
from refattn.train import checkpoint, folder, metrics
from refattn.train.folder import RunError
from refattn.train.settings import build, read_toml
from refattn.verify import captured, user_cases
from tests.fuzz.command import Bad, Totals, command
from tests.train.runs import SMALL, small, train, write_text

UNSIGNED = ("config", "block", "metrics", "npz", "safetensors", "toml", "json", "jsonl", "graph")
"""Files without a sum of their own."""

PLAIN = (*UNSIGNED, "part")
"""Files whose readers raise OSError or ValueError."""

NAMED = (vectors.SetError, RunError, checkpoint.CheckpointError, user_cases.UserCaseError)
"""Errors that readers promise."""

PLANTED = "planted_by_the_fuzzer"
"""A module beside the files, which nothing that is read may import."""

STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    2**80,
    "",
    "x",
    "../x",
    [],
    [[]],
    {},
    {"x": {}},
    [None] * 3,
    "\0",
    "é" * 50,
    f"{PLANTED}:x",
    f"{PLANTED}:x(y=1)",
]

Read = Callable[[Path], Any]


def make(home: Path) -> dict[str, tuple[Path, str, Read]]:
    """Write a set and a run; return by kind of file its path, what an error has to name, and its reader."""
    shutil.copytree(vectors.SHIPPED / "growing", home / "set" / "growing")
    manifest = json.loads((vectors.SHIPPED / vectors.MANIFEST).read_text())
    cases = [entry for entry in manifest["cases"] if entry["mechanism"] == "growing"]
    manifest |= {"cases": cases, "count": len(cases), "sha256": vectors._of_all(cases)}
    signed_manifest(home / "set" / vectors.MANIFEST, manifest)
    text = write_text(home)
    train(small(text, steps=2, checkpoint_every=1), home / "run")
    block = {"coupling": "tanh", "intrinsic": "anchor", "step": 0.1}
    train(build("graph_energy", SMALL | {"data": text, "steps": 1, "block": block}), home / "forces")
    held = home / "run" / "checkpoints"
    unit = many_runs.Unit("part", float, (0.1,))
    assert list(many_runs.run([unit], many_runs.Where(jobs=1, keep=home / "kept"))) == [(unit, 0.1)]
    part = next((home / "kept").iterdir())
    return {
        "manifest": (home / "set" / vectors.MANIFEST, "set", lambda path: vectors.read(path.parent).manifest),
        "case": (home / "set" / cases[0]["file"], "set", case_of),
        "config": (
            home / "run" / "config.json",
            "config.json",
            lambda path: folder.stored_config(path.parent),
        ),
        "block": (home / "forces" / "config.json", "config.json", lambda path: folder.stored_config(path.parent)),
        "metrics": (home / "run" / "metrics.jsonl", "metrics.jsonl", metrics.read),
        "part": (part, part.name, lambda path: many_runs._kept(path, unit)),
        "checkpoint": (held / "step-00000002.json", "step-00000002.", newest),
        "arrays": (held / "step-00000002.safetensors", "step-00000002.", newest),
        **users(home),
    }


def users(home: Path) -> dict[str, tuple[Path, str, Read]]:
    """Write files of the user's: arrays in two formats, settings, and shapes in two."""
    softmax, place = ra.mechanism("softmax"), home / "users"
    place.mkdir()
    x = philox.normal((1, 2, 3, 4), seed=0, purpose="users")
    np.savez_compressed(place / "x.npz", q=x, k=x, v=x, options=np.asarray('{"causal": true}'))
    typed = {name: ("float64", x) for name in "qkv"}
    (place / "x.safetensors").write_bytes(encode(typed, {"options": '{"causal": true, "scale": 0.5}'}))
    (place / "x.toml").write_text("steps = 3\nwidth = 8\n[block]\nheads = 2\n")
    shapes = ["n=4,d=2", {"n": 5, "causal": True, "window": [2, None]}, {"name": "mine", "nq": 1, "nk": 9}]
    (place / "x.json").write_text(json.dumps(shapes))
    (place / "x.jsonl").write_text("\n".join(json.dumps(each) for each in shapes))
    (place / "graph.txt").write_text("0 1 0.5\n1 2\n")
    listed = {kind: (place / f"x.{kind}", f"x.{kind}") for kind in ("json", "jsonl")}
    of_arrays = {kind: (place / f"x.{kind}", f"x.{kind}") for kind in ("npz", "safetensors")}

    def arrays(path: Path) -> Any:
        found = captured.readings(softmax, path)[0]
        return found.dtype, repr(found.case), {name: x.tobytes() for name, x in found.case.given.items()}

    return {
        **{kind: (*where, lambda path: repr(user_cases.from_file(softmax, path))) for kind, where in listed.items()},
        **{kind: (*where, arrays) for kind, where in of_arrays.items()},
        "toml": (place / "x.toml", "x.toml", read_toml),
        "graph": (place / "graph.txt", "graph.txt", lambda path: read_graph(path).tobytes()),
    }


def case_of(path: Path) -> Any:
    """Read a set with the arrays of its first case."""
    found = vectors.read(path.parents[1])
    arrays = found.arrays(found.cases[0])
    return found.manifest, {name: (dtype, x.shape, x.tobytes()) for name, (dtype, x) in arrays.items()}


def newest(path: Path) -> Any:
    """Read the newest checkpoint; that it is passed over is a refusal."""
    lines: list[str] = []
    found = checkpoint.newest(path.parent, lines.append)
    if lines:
        raise RunError(lines[0])
    assert found is not None
    return found.step, found.facts, {name: (x.dtype.name, x.shape, x.tobytes()) for name, x in found.arrays.items()}


def signed_manifest(path: Path, content: Any) -> None:
    """Write a manifest with its own sum made anew."""
    if isinstance(content, dict):
        content["manifest_sha256"] = vectors._of_manifest(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def change(kind: str, path: Path, draw: random.Random) -> bool:
    """Change a file; return whether its sums, if it has any, were made anew."""
    data = path.read_bytes()
    if kind in ("manifest", "config", "block", "checkpoint", "json", "part") and draw.random() < 0.6:
        content = json.loads(data)
        if kind == "block":  # of all that a configuration has
            content["settings"]["block"] = altered(content["settings"]["block"], draw)
        else:
            content = altered(content, draw)
        if kind == "manifest":
            signed_manifest(path, content)
            return True
        if kind == "checkpoint" and isinstance(content, dict):
            content.pop("digest", None)
            content["digest"] = checkpoint._digest(content)
        path.write_text(json.dumps(content), encoding="utf-8")
        return kind != "part"
    way = draw.randrange(6)
    place = draw.randrange(len(data))
    if way == 0:
        data = data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    elif way == 1:
        data = data[:place]
    elif way == 2:
        data = data[:place] + draw.randbytes(draw.randrange(1, 40)) + data[place:]
    elif way == 3:
        data = data[:place] + data[place + draw.randrange(1, 40) :]
    elif way == 4:
        data = draw.choice([b"", b"[" * 10**5, b"\xef\xbb\xbf" + data, data * 2, b'{"a":1,"a":1}', b"\0" * 100])
    else:
        data = (
            data.decode("latin-1").encode("utf-16")
            if kind not in ("case", "arrays", "npz", "safetensors")
            else draw.randbytes(len(data))
        )
    path.write_bytes(data)
    return kind in UNSIGNED


def exchange(path: Path, others: list[Path], draw: random.Random) -> None:
    """Put something else in the place of a file."""
    way = draw.randrange(8)
    path.unlink()
    if way == 0:
        shutil.copy(draw.choice(others), path)
    elif way == 1:
        os.mkfifo(path)
    elif way == 2:
        path.mkdir()
    elif way == 3:
        path.symlink_to(path.name)
    elif way == 4:
        path.symlink_to("/dev/zero")
    elif way == 5:
        with open(path, "wb") as file:
            file.truncate(8 << 30)
    elif way == 6:
        shutil.copy(path.parents[1] / "bomb.npz", path)
    elif way == 7:
        path.symlink_to(draw.choice(others))


def bomb(path: Path) -> None:
    """Write an archive that says that it unpacks to 8 GiB of zeros, and does so for its first 16 MiB."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("q.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f8", "fortran_order": False, "shape": (1, 1, 1 << 20, 1 << 10)}
        )
        file.write(bytes(1 << 24))
    data = path.read_bytes()
    size = (1 << 24) + 128
    assert data.count(size.to_bytes(4, "little")) >= 1
    path.write_bytes(data.replace(size.to_bytes(4, "little"), (0xFFFFFFF0).to_bytes(4, "little")))


def altered(content: Any, draw: random.Random) -> Any:
    """Return JSON with one field at any depth removed, or another value or type in its place."""
    content = copy.deepcopy(content)
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw.choice(list(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            place = inner
            continue
        if draw.random() < 0.25 and isinstance(place, dict):
            del place[key]
        else:
            place[key] = draw.choice(STRANGE)
        return content


def run(calls: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return how often what came, and a line for each call that came to an obscure or a wrong end."""
    draw = random.Random(seed)
    counts: Counter[str] = Totals("files")
    bad: list[str] = Bad()
    with tempfile.TemporaryDirectory() as name, mock.patch.object(sys, "path", [name, *sys.path]):
        home = Path(name)
        (home / f"{PLANTED}.py").touch()
        kinds = make(home)
        whole = {kind: path.read_bytes() for kind, (path, _, _) in kinds.items()}
        bomb(home / "bomb.npz")
        for folder_of in {path.parents[1] for path, _, _ in kinds.values()} - {home}:
            shutil.copy(home / "bomb.npz", folder_of)
        right = {kind: read(path) for kind, (path, _, read) in kinds.items()}
        for n in range(calls):
            kind = draw.choice(list(kinds))
            path, named, read = kinds[kind]
            others = [each for each, _, _ in kinds.values() if each != path]
            signed = kind in UNSIGNED
            if draw.random() < 0.15:
                exchange(path, others, draw)
            else:
                signed = change(kind, path, draw)
            try:
                found = read(path)
            except (*NAMED, OSError, ValueError) as error:
                plain = type(error) in NAMED or kind in PLAIN and isinstance(error, OSError | ValueError)
                plain &= len(str(error)) < 1000
                outcome = "refused" if plain and named in str(error) else "obscure"
                told = f"{type(error).__name__}: {error}"
            except Exception as error:
                outcome, told = "obscure", f"{type(error).__name__}: {error}"
            else:
                told = "read"
                outcome = "the same" if found == right[kind] else "other" if signed else "wrong"
            if sys.modules.pop(PLANTED, None) is not None:
                outcome, told = "wrong", f"imported {PLANTED}"
            counts[outcome] += 1
            if outcome in ("obscure", "wrong"):
                bad.append(f"call {n}, {kind}: {told[:200]}")
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(whole[kind])
    return counts, bad


if __name__ == "__main__":
    command("files", "calls", 1000, run)
