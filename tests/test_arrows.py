"""What may import what: the arrows of the design page, read from the text of every file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import refattn as ra
from tools import imports

ROOT = Path(__file__).parents[1]

BASE = {"xp", "tree", "equations", "philox", "backends", "args", "messages"}
FOR_TOOLS = ("registry", "record", "case_features", "context", "use_definition", "wrong")
RECORDS = {f"mechanisms.{name}" for name in FOR_TOOLS}

# Part of refattn -> the parts that it may import, beside itself.
ARROWS: dict[str, set[str]] = {
    "backends": {"entry_points", "messages"},
    "entry_points": set(),
    "philox": {"args"},
    "interrupts": set(),
    "files": {"args", "interrupts"},
    "args": {"backends", "xp", "tree", "messages"},
    "messages": set(),
    "xp": {"backends"},
    "tree": {"xp", "messages"},
    "equations": {"xp", "backends", "args", "messages"},
    "ops": BASE,
    "mechanisms": BASE | {"entry_points", "ops"},
    "model": BASE | {"ops", "mechanisms"},
    "train": BASE | {"files", "interrupts", "ops", "model"} | RECORDS,
    "analysis": BASE | {"files", "ops", "mechanisms", "instruments"},
    "golden": BASE | {"files", "interrupts"} | RECORDS,
    "guard": set(),
    "workers": {"guard", "interrupts", "messages"},
    "many_runs": {"args", "backends", "files", "workers"},
    "verify": BASE | RECORDS | {"many_runs", "workers", "files", "ops", "golden", "instruments", "shards"},
    "bridges": BASE | RECORDS | {"instruments"},
    "shards": BASE | RECORDS,
    "instruments": BASE,
    "explorer": BASE | RECORDS | {"files", "golden", "verify"},
    "cli": BASE
    | RECORDS
    | {
        "interrupts",
        "many_runs",
        "files",
        "ops",
        "model",
        "train",
        "analysis",
        "golden",
        "verify",
        "bridges",
        "shards",
        "explorer",
    },
    "__main__": {"cli"},
}

# Room -> the room whose definition and implementations it uses: growing attention is softmax attention whose weights
# can grow.
ROOMS = {"growing": "softmax", "sympformer": "softmax"}

# Library -> the files that may import it, as paths under refattn/ (a folder stands for all in it), and whether at the
# top of the file. What is not listed may be imported nowhere.
TRAINING = tuple(f"train/{name}.py" for name in ("baselines", "checkpoint", "data", "loop", "sample"))
HOST = (
    "philox.py",
    "golden/",
    "verify/",
    "explorer/",
    "instruments/",
    "shards/",
    *TRAINING,
    "bridges.py",
    "cli/analyse/stack.py",
    "mechanisms/scalar_autodiff.py",
    "*meetings.py",
    "*loops.py",
)
LIBRARIES: dict[str, tuple[tuple[str, ...], bool]] = {
    "numpy": (("backends/", "analysis/", *HOST), True),
    "torch": (("backends/torch.py", "verify/", "bridges.py"), False),
    "jax": (("backends/jax.py", "verify/", "bridges.py", "shards/"), False),
    "cupy": (("backends/cupy.py",), False),
    "cupyx": (("backends/cupy.py",), False),
    "array_api_compat": (("xp.py", "backends/"), True),
    "array_api_strict": (("backends/strict.py",), False),
    "scipy": (("backends/", "analysis/", "ops/solve.py"), True),
    "pytest": (("verify/plugin.py",), True),
    "mpmath": (("verify/",), False),
    "ml_dtypes": (("verify/adapters/triton_cpu.py",), False),
    "triton": (("verify/adapters/triton_cpu.py",), False),
    "onnx": (("verify/onnx_export.py", "verify/adapters/onnx_model.py"), False),
    "onnxruntime": (("verify/onnx_export.py", "verify/adapters/onnx_model.py"), False),
    "matplotlib": (("analysis/", "train/plot.py"), False),
    "safetensors": (("golden/", "train/checkpoint.py", "cli/"), True),
    "threadpoolctl": (("backends/",), False),
    "click": (("cli/",), True),
    "distributed": (("many_runs.py",), False),
    "rich": (("cli/", "verify/report/"), True),
}


@dataclass(frozen=True)
class Import(imports.Import):
    file: str  # under refattn/

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def part_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def imports_of(file: str, modules: Container[str]) -> Iterator[Import]:
    """All imports of a file, none of which is relative."""
    for found in imports.imports(files()[file], modules):
        yield Import(found.line, found.module, found.inside, found.typing, file)


def violation(found: Import, rooms: tuple[str, ...]) -> str | None:
    """Say what is wrong with an import, or None."""
    root, _, target = found.module.partition(".")
    if root in sys.stdlib_module_names:
        return None
    if root != "refattn":
        if root not in LIBRARIES:
            return f"{found}: a library that refattn does not list"
        places, top = LIBRARIES[root]
        if not any(_in(found.file, place) for place in places):
            return f"{found}: not in {', '.join(places)}"
        return None if top or found.inside or found.typing else f"{found}: only inside a function"
    part, target_part = part_of(found.file), target.partition(".")[0]
    if part in ("many_runs", "cli", "train") and not target:
        return None  # the public face, like any user
    if part == "__init__":
        light = target == "mechanisms.registry"  # a list of names, and nothing behind it
        return None if found.inside or found.typing or light else f"{found}: the public face is lazy"
    own_room = found.file.split("/")[1] if found.file.startswith("mechanisms/") else ""
    for room in rooms if part != "analysis" else ():  # a study is of one mechanism, and knows its room
        if target.split(".")[:2] == ["mechanisms", room] and room not in (own_room, ROOMS.get(own_room)):
            return f"{found}: tools know a mechanism by its record"
    own = target_part == part and target_part
    allowed = any(target == name or target.startswith(f"{name}.") for name in ARROWS.get(part, set()))
    return None if own or allowed else f"{found}: {part} may import {', '.join(sorted(ARROWS.get(part, set())))}"


def _in(file: str, place: str) -> bool:
    if place.startswith("*"):
        return file.endswith(place[1:])
    return file.startswith(place) if place.endswith("/") else file == place


@cache
def files() -> dict[str, ast.Module]:
    """Path under refattn/ -> what it says, for the library and for backends/, which is imported as refattn.backends."""
    found = {}
    for top, prefix in ((ROOT / "refattn", ""), (ROOT / "backends", "backends/")):
        for path in sorted(top.rglob("*.py")):
            name = path.relative_to(top).as_posix()
            if not (prefix == "" and name.startswith("backends/")):
                found[prefix + name] = ast.parse(path.read_text())
    return found


def modules() -> dict[str, str]:
    """The name of each module -> its file."""
    names = {f"refattn.{file.removesuffix('.py').replace('/', '.')}": file for file in files()}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def test_arrows() -> None:
    assert len(files()) > 30
    known = modules()
    found = [item for file in files() for item in imports_of(file, known)]
    assert [problem for item in found if (problem := violation(item, ra.list_mechanisms()))] == []
    assert {item.module for item in found if item.module.startswith("refattn")} <= known.keys()


def test_every_part_has_its_arrows() -> None:
    assert {part_of(name) for name in files()} <= {*ARROWS, "__init__"}


def test_no_import_comes_back_to_its_file() -> None:
    """The imports have no circle, those inside functions included."""
    known = modules()
    imported = {name: {item.module for item in imports_of(file, known)} for name, file in known.items()}
    edges = {name: (found & known.keys()) - {name} for name, found in imported.items()}  # docstrings' examples
    assert len(edges) > 300 and sum(map(len, edges.values())) > 1000
    TopologicalSorter(edges).prepare()  # a CycleError names the circle


def test_only_tests_import_tests() -> None:
    tops = [
        path
        for top in ("refattn", "backends", "asv_benchmarks", "docs", "examples", "tools")
        for path in (ROOT / top).rglob("*.py")
    ]
    assert len(tops) > 400
    for path in tops:
        if "tests." in (text := path.read_text(encoding="utf-8")):
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
            names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
            assert not [name for name in names if name.partition(".")[0] == "tests"], path
            assert 'import_module(f"tests.' not in text and 'import_module("tests.' not in text, path
