"""What a change can have touched: a benchmark whose imports have no file that differs measures the same twice.

Imports are read from the text of both versions, those inside functions included. A mechanism is looked up by its name
at run time, so a benchmark of it is given all files of its folder, and likewise the backend that it names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from asv_benchmarks.suite import Benchmark
from refattn.mechanisms.registry import list_mechanisms
from tools.imports import imports

SUITE = "asv_benchmarks.benchmarks"


def sources(home: Path) -> dict[str, Path]:
    """Return by the name of each module of a version its file; backends/ is imported as refattn.backends."""
    found = {}
    for folder, package in (("refattn", "refattn"), ("backends", "refattn.backends"), (SUITE.replace(".", "/"), SUITE)):
        for file in sorted((home / folder).rglob("*.py")):
            parts = file.relative_to(home / folder).with_suffix("").parts
            if package == "refattn" and parts[0] == "backends":
                continue
            found[".".join([package, *parts]).removesuffix(".__init__")] = file
    return found


def differing(homes: tuple[Path, Path]) -> set[str]:
    """Return the modules whose text differs, or that one of the versions has not."""
    base, head = ({name: file.read_bytes() for name, file in sources(home).items()} for home in homes)
    return {name for name in base.keys() | head.keys() if base.get(name) != head.get(name)}


def graph(homes: tuple[Path, Path], different: set[str]) -> dict[str, set[str]]:
    """Return by module what it imports in one of the versions, the packages that it lies in included."""
    base, head = map(sources, homes)
    found = {name: _imported(name, file, head) for name, file in head.items()}
    for name in different & base.keys():
        found[name] = found.get(name, set()) | _imported(name, base[name], base)
    return found


def _imported(name: str, file: Path, files: Mapping[str, Path]) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    package = name if file.stem == "__init__" else name.rpartition(".")[0]
    found = {one.module for one in imports(tree, files, package) if not one.typing}
    found |= {name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)}
    if name.startswith(SUITE):  # which looks modules up whose room depends on the version
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and "import_module" in ast.unparse(n.func)]
        for text in [one.value for call in calls for one in ast.walk(call) if isinstance(one, ast.Constant)]:
            found |= {module for module in files if module.startswith(str(text)) and str(text).startswith("refattn.")}
    return found & files.keys()


def reached(modules: Iterable[str], edges: Mapping[str, set[str]]) -> set[str]:
    """Return the modules and all that they import, directly or not."""
    found: set[str] = set()
    ahead = [name for name in modules if name in edges]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += edges[name]
    return found


def mechanism_of(benchmark: Benchmark) -> str:
    """Return the mechanism that a benchmark is of, or ""."""
    first = str(benchmark.params[0]).partition(".")[0] if benchmark.params else ""
    return first if first in list_mechanisms() else ""


def touched(homes: tuple[Path, Path], chosen: Sequence[Benchmark]) -> dict[Benchmark, set[str]]:
    """Return the benchmarks that import what differs between two versions, with these modules."""
    different = differing(homes)
    edges = graph(homes, different) if different else {}
    found: dict[Benchmark, set[str]] = {}
    seen: dict[tuple[str, ...], set[str]] = {}
    for benchmark in chosen:
        words = [str(param) for param in benchmark.params]
        rooms = [f"refattn.mechanisms.{mechanism_of(benchmark)}"] if mechanism_of(benchmark) else []
        named = (f"{SUITE}.{benchmark.name.partition('.')[0]}", *words, *(f"refattn.backends.{word}" for word in words))
        key = (*rooms, *named)
        if key not in seen:
            whole = [*named, *(name for name in edges for room in rooms if within(name, room))]
            seen[key] = different & reached(whole, edges)
        if seen[key]:
            found[benchmark] = seen[key]
    return found


def within(module: str, room: str) -> bool:
    """Tell whether a module is a package or lies in it."""
    return module == room or module.startswith(f"{room}.")


def reason(found: Mapping[Benchmark, set[str]]) -> str:
    """Return in one line what is measured and why."""
    modules = sorted({name for names in found.values() for name in names})
    if not modules:
        return "nothing is measured: no file that a benchmark imports differs"
    mechanisms = [name for name in list_mechanisms() if any(mechanism_of(one) == name for one in found)]
    which = "all mechanisms" if len(mechanisms) == len(list_mechanisms()) else ", ".join(mechanisms) or "imports alone"
    some = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    return f"measured: {which}, which may run what differs ({some}), by imports"
