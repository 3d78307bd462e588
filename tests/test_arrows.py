"""What may import what: the arrows of the design page, read from the text of every file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import refattn as ra

ROOT = Path(__file__).parents[1]

BASE = {"xp", "tree", "equations", "counter", "backends", "checked"}
RECORDS = {"mechanisms.registry", "mechanisms.record", "mechanisms.context", "mechanisms.paper", "mechanisms.wrong"}

# Part of refattn -> the parts that it may import, beside itself.
ARROWS: dict[str, set[str]] = {
    "backends": set(),
    "counter": set(),
    "files": set(),
    "checked": {"files", "backends", "xp", "tree"},
    "xp": {"backends"},
    "tree": {"xp"},
    "equations": {"xp", "backends", "checked"},
    "ops": BASE,
    "mechanisms": BASE | {"ops"},
    "model": BASE | {"ops", "mechanisms"},
    "train": BASE | {"files", "ops", "model", "mechanisms.arguments"} | RECORDS,
    "analysis": BASE | {"files", "ops", "mechanisms", "instruments"},
    "golden": BASE | {"files"} | RECORDS,
    "campaign": {"backends", "files"},
    "verify": BASE | RECORDS | {"campaign", "files", "ops", "golden", "instruments", "shards"},
    "bridges": BASE | RECORDS | {"instruments"},
    "shards": BASE | RECORDS,
    "instruments": BASE,
    "explorer": BASE | RECORDS | {"verify"},
    "cli": BASE
    | RECORDS
    | {
        "campaign",
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

# Room -> the room whose definition and forms it uses: growing attention is softmax attention whose weights can grow.
ROOMS = {"growing": "softmax", "sympformer": "softmax"}

# Library -> the files that may import it, as paths under refattn/ (a folder stands for all in it), and whether at the
# top of the file. What is not listed may be imported nowhere.
TRAINING = tuple(f"train/{name}.py" for name in ("baselines", "checkpoint", "data", "loop", "sample"))
HOST = (
    "counter.py",
    "golden/",
    "verify/",
    "explorer/",
    "instruments/",
    "shards/",
    *TRAINING,
    "bridges.py",
    "cli/analyse/stack.py",
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
    "onnx": (("verify/exported.py",), False),
    "onnxruntime": (("verify/exported.py",), False),
    "matplotlib": (("analysis/", "train/plot.py"), False),
    "safetensors": (("golden/", "train/checkpoint.py", "cli/"), True),
    "threadpoolctl": (("backends/",), False),
    "click": (("cli/",), True),
    "distributed": (("campaign.py",), False),
    "rich": (("cli/", "verify/show/"), True),
}


@dataclass(frozen=True)
class Import:
    file: str  # under refattn/
    line: int
    module: str
    inside: bool  # a function
    typing: bool  # under `if TYPE_CHECKING`

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def part_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def imports_of(file: str, tree: ast.Module, modules: set[str]) -> Iterator[Import]:
    """All imports of a file; `from package import module` counts as the module where there is one."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    typing = {id(node) for guard in guards for statement in guard.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else str(node.module) for name in within]
        else:
            continue
        for name in names:
            yield Import(file, node.lineno, name, id(node) in inside, id(node) in typing)


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
    if part in ("campaign", "cli", "train") and not target:
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


def modules() -> set[str]:
    names = {f"refattn.{name.removesuffix('.py').replace('/', '.')}" for name in files()}
    return {name.removesuffix(".__init__") for name in names}


def test_arrows() -> None:
    assert len(files()) > 30
    known = modules()
    found = [item for name, tree in files().items() for item in imports_of(name, tree, known)]
    assert [problem for item in found if (problem := violation(item, ra.list_mechanisms()))] == []
    assert {item.module for item in found if item.module.startswith("refattn")} <= known


def test_every_part_has_its_arrows() -> None:
    assert {part_of(name) for name in files()} <= {*ARROWS, "__init__"}


def test_only_the_registry_names_a_mechanism() -> None:
    allowed: dict[str, Sequence[str]] = {"mechanisms/registry.py": ra.list_mechanisms()}
    allowed["mechanisms/sympformer/layer/config.py"] = ("softmax",)  # a function, of which an oracle is made
    allowed["verify/museum/fault.py"] = ("softmax", "growing", "delta", "higher_order")  # whose kernels are emulated
    an_option = ("__init__", "options", "dense", "forms/common", "forms/state", "layer/block")
    allowed |= {f"mechanisms/higher_order/{name}.py": ("delta",) for name in an_option}
    allowed["verify/museum/features.py"] = ("delta",)  # the same option
    allowed["explorer/mathml.py"] = ("delta",)  # a letter
    found = []
    for name, tree in files().items():
        for node in ast.walk(tree):
            own = name.split("/")[1] if name.startswith("mechanisms/") else ""
            if isinstance(node, ast.Constant) and node.value in ra.list_mechanisms():
                if node.value != own and node.value not in allowed.get(name, ()):
                    found.append(f"{name}:{node.lineno}: {node.value!r}")
    assert found == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("xp.py", "from refattn import tree", "xp may import backends"),
        ("xp.py", "from refattn import backends", None),
        ("tree.py", "from refattn.xp import Array", None),
        ("counter.py", "import refattn.xp", "counter may import"),
        ("ops/heads.py", "from refattn.mechanisms.context import Context", "ops may import"),
        ("ops/heads.py", "from refattn.ops import linear", None),
        ("ops/heads.py", "def f():\n    import numpy", "not in backends/"),
        ("ops/heads.py", "import scipy.linalg", "not in backends/, analysis/"),
        ("mechanisms/registry.py", "from refattn.mechanisms import softmax", "by its record"),
        ("mechanisms/softmax/core.py", "from refattn.mechanisms.softmax import dense", None),
        ("mechanisms/growing/core.py", "from refattn.mechanisms.softmax import core", None),
        ("mechanisms/growing/layer/block.py", "import refattn.mechanisms.softmax.dense", None),
        ("mechanisms/softmax/core.py", "from refattn.mechanisms.growing import core", "by its record"),
        ("mechanisms/koopman/core.py", "from refattn.mechanisms.softmax import core", "by its record"),
        ("mechanisms/softmax/judge/loops.py", "import numpy as np", None),
        ("mechanisms/graph_energy/judge/flow_loops.py", "import numpy as np", None),
        ("mechanisms/softmax/dense.py", "import numpy as np", "not in backends/"),
        ("mechanisms/softmax/dense.py", "def f():\n    import torch", "not in backends/torch.py"),
        ("mechanisms/softmax/layer/block.py", "from refattn.verify import budget", "mechanisms may import"),
        ("golden/inputs.py", "from refattn.mechanisms.softmax.judge.cases import CASES", "by its record"),
        ("golden/inputs.py", "from refattn.mechanisms.arguments import check_mask", "golden may import"),
        ("golden/inputs.py", "from refattn.mechanisms.record import Case", None),
        ("analysis/study.py", "from refattn.mechanisms import softmax", None),
        ("analysis/study.py", "import numpy as np", None),
        ("analysis/study.py", "import matplotlib", "only inside a function"),
        ("analysis/study.py", "from refattn.train import loop", "analysis may import"),
        ("verify/run.py", "import torch", "only inside a function"),
        ("verify/run.py", "def f():\n    import torch", None),
        ("verify/run.py", "from refattn import cli", "verify may import"),
        ("cli/trace.py", "from refattn.verify import run", None),
        ("instruments/counting.py", "import refattn.xp", None),
        ("instruments/counting.py", "from refattn.ops import heads", "instruments may import"),
        ("mechanisms/softmax/core.py", "from refattn.instruments import counting", "mechanisms may import"),
        ("verify/large.py", "from refattn.instruments import counting", None),
        ("train/loop.py", "from refattn.instruments import counting", "train may import"),
        ("cli/trace.py", "from refattn.mechanisms.softmax import core", "by its record"),
        ("cli/trace.py", "import pandas", "does not list"),
        ("backends/numpy.py", "from refattn.xp import Array", "backends may import"),
        ("backends/numpy.py", "from refattn.backends import pool", None),
        ("__init__.py", "from refattn.equations import trace", "the public face is lazy"),
        ("__init__.py", "if TYPE_CHECKING:\n    from refattn.mechanisms import softmax", None),
    ],
)
def test_a_wrong_arrow_is_found(file: str, text: str, problem: str | None) -> None:
    (item,) = imports_of(file, ast.parse(text), modules())
    found = violation(item, ("softmax", "growing"))
    assert found is None if problem is None else found is not None and problem in found
