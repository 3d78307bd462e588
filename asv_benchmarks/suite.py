"""The benchmarks of `asv_benchmarks/benchmarks` one by one, under the names that asv gives them.

asv runs whole suites; comparing two commits, and the tests, need a single benchmark with single parameters.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

KINDS = {"time": "time", "peakmem": "memory", "track": ""}
"""Prefix of a benchmark's name -> what it measures; of a "track" benchmark its class says that, in `kind`."""

MACHINE = "start.Machine"
"""The benchmarks that refattn has no part in: NumPy alone."""

PROFILES = {
    "short": r"^(?!.*'(cupy|torch|jax)')(?!instructions)(accuracy|(?!.*'float64'))",
    "full": "",
    "quick": (
        r"^(start\.Machine|(?!.*'(cupy|torch|jax|float64)')(?!.*\.(dense|recurrent)')("
        r"(core\.Core|block\.Block)\.time_both\(.* 64, 64,|language\.Train|work.*operations\(.* 64, 64,))"
    ),
}
"""Which benchmarks a run takes, as regular expressions, as asv reads them: short is NumPy, float32 but for accuracy,
without valgrind, which is slow; quick is what a minute is enough for."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark with one choice of its parameters.

    Attributes
    ----------
    name
        asv's name: module, class and method.
    params
        The parameters.
    kind
        "time", "memory", "share", "rate", "work" or "instructions".
    factor
        What the ratio of a difference must exceed; None: what is usual for the kind.
    """

    name: str
    params: tuple[Any, ...]
    kind: str
    factor: float | None = None

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.params))})"


def modules(*, forgive: bool = False) -> Iterator[Any]:
    """Yield the modules with benchmarks; `forgive` passes over those that refattn lacks something for."""
    package = importlib.import_module("asv_benchmarks.benchmarks")
    for found in pkgutil.iter_modules(package.__path__):
        try:
            yield importlib.import_module(f"{package.__name__}.{found.name}")
        except (ImportError, AttributeError) as error:
            if not forgive:
                raise
            print(f"{found.name} is left out: {error}", file=sys.stderr)


def benchmarks(pattern: str = "", *, forgive: bool = False) -> list[Benchmark]:
    """Return all benchmarks, or those whose name with parameters has a match of the regular expression."""
    found: list[Benchmark] = []
    for module in modules(forgive=forgive):
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__:
                found += _of_class(kind, module.__name__.rpartition(".")[2])
    return [benchmark for benchmark in found if re.search(pattern, str(benchmark))]


def _of_class(described: Any, module: str) -> Iterator[Benchmark]:
    for method in vars(described):
        prefix, _, rest = method.partition("_")
        if prefix in KINDS and rest:
            kind = described.kind if prefix == "track" else KINDS[prefix]
            for params in itertools.product(*described.params):
                name = f"{module}.{described.__name__}.{method}"
                yield Benchmark(name, params, kind, getattr(described, "factor", None))


def prepare(name: str, params: list[Any]) -> Callable[[], Any]:
    """Set a benchmark up; return the call that it measures. This is a factory of a side."""
    place, method = name.rsplit(".", 1)
    module, _, kind = place.partition(".")
    instance = getattr(importlib.import_module(f"asv_benchmarks.benchmarks.{module}"), kind)()
    if hasattr(instance, "setup"):
        instance.setup(*params)

    def run() -> Any:
        return getattr(instance, method)(*params)

    run.clock = "wall" if getattr(instance, "timer", None) is time.perf_counter else "cpu"  # type: ignore[attr-defined]
    return run


def main() -> None:
    """Print the benchmarks that a version of refattn, perhaps an old one, can run: one JSON object a line."""
    for each in benchmarks(sys.argv[1] if sys.argv[1:] else "", forgive=True):
        print(json.dumps({"name": each.name, "params": each.params, "kind": each.kind, "factor": each.factor}))


if __name__ == "__main__":
    main()
