"""The process of one side: it makes what is to be timed, and runs it when it is told to.

`asv_benchmarks.sides` starts it and sends one JSON object a line; each gets one line in answer. Whatever the side
itself prints goes to standard error, so that it cannot be taken for an answer.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[], Any]

LIBRARIES = ("refattn", "numpy", "scipy", "torch", "jax", "cupy", "array_api_compat", "onnxruntime")

_made: Call | None = None


def make(target: str, params: dict[str, Any]) -> dict[str, Any]:
    """Make what is to be timed: the target "module:function" is called with the parameters."""
    global _made
    module, _, name = target.partition(":")
    _made = getattr(importlib.import_module(module), name)(**params)
    before = _high_water()
    call()()
    return {"first_call": _high_water() - before, "clock": getattr(_made, "clock", "cpu"), **facts()}


def call() -> Call:
    """Return what `make` made."""
    assert _made is not None
    return _made


def warm(seconds: float) -> dict[str, Any]:
    """Call until `seconds` have passed and at least twice; return the time of the fastest call."""
    fastest, stop, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 2 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()()
        fastest, calls = min(fastest, time.perf_counter() - start), calls + 1
    return {"wall": fastest}


def round(calls: int) -> dict[str, Any]:  # noqa: A001 (the name of the command)
    """Return the wall time and the CPU time that a call takes on average.

    CPU time is that of all threads of the process, and of all processes that it started and waited for.
    """
    run = call()
    gc.collect()
    gc.disable()
    try:
        wall, cpu = time.perf_counter(), _cpu()
        for _ in range(calls):
            run()
        wall, cpu = time.perf_counter() - wall, _cpu() - cpu
    finally:
        gc.enable()
    return {"wall": wall / calls, "cpu": cpu / calls}


def memory() -> dict[str, Any]:
    """Return by how many bytes a call lifts the peak of the resident memory over what is resident before it."""
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim  # what earlier calls freed goes back to the system, and counts anew
    except AttributeError:
        return {"bytes": None}
    trim(0)
    try:
        # The peak starts again from what is resident now.
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return {"bytes": None}
    before = _status("VmRSS")
    result = call()()
    peak = _status("VmHWM")
    del result
    return {"bytes": max(0, peak - before)}


def result(file: str) -> dict[str, Any]:
    """Save the arrays that a call returns, in their order."""
    import numpy as np

    from refattn import backends, tree

    arrays = [backends.of(x).to_numpy(x) for x in tree.flatten({"result": call()()}).values()]
    with open(file, "wb") as target:
        np.savez(target, *arrays)
    return {}


def value() -> dict[str, Any]:
    """Return the number that a call returns."""
    return {"value": float(call()())}


def facts() -> dict[str, Any]:
    """Return what is loaded: versions, and the libraries that do matrix products with their kernels and threads."""
    from threadpoolctl import threadpool_info

    loaded = {name: sys.modules[name] for name in LIBRARIES if name in sys.modules}
    versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in loaded.items()}
    keys = ("internal_api", "version", "architecture", "num_threads")
    pools = {" ".join(str(pool[key]) for key in keys if pool.get(key) is not None) for pool in threadpool_info()}
    return {"versions": versions, "threads": sorted(pools), "refattn": os.fspath(_home("refattn"))}


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _home(package: str) -> Path:
    return Path(str(importlib.import_module(package).__file__)).resolve().parent


def _high_water() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {f.__name__: f for f in (make, warm, round, memory, result, value)}


def main() -> None:
    """Answer until there are no more commands."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = COMMANDS[command.pop("do")](**command)
        except Exception as error:  # a side may raise anything, and that is a result
            traceback.print_exc()
            missing = isinstance(error, NotImplementedError | ImportError)
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, ModuleNotFoundError) and error.name:
                error = ImportError(f"{error.name} is not installed")
            answer = {"error": str(error) if missing and str(error) else what, "missing": missing}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
