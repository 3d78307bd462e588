"""The process that valgrind counts in: each benchmark in a fork of its own, without instrumentation until then.

    valgrind --tool=callgrind --instr-atstart=no ... python -m asv_benchmarks.counter 0 < benchmarks

The process imports everything and then forks for each benchmark, so that a count does not depend on what else is
counted. A fork makes its benchmark, calls it until CPython has specialised it, and is counted from then on: first calls
of nothing, then its own, one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import mmap
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

WARM, CALLS = 18, 5
"""Calls before the counted ones, and calls that are counted, each alone. CPython specialises code that ran some times.

What it could not specialise it tries again after twice as many calls each time, for most functions in the calls 7, 11,
18 and 33: these have up to 10 % more instructions, their neighbours up to 1 %. What is counted lies between, and the
median leaves out such a call.
"""

STEPS = 2, 3
"""The same for training steps, in which most functions are called several times."""

REQUEST = bytes.fromhex("4889f0 4889fa 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
"""A function f(0, arguments) of x86-64 that asks valgrind: rotations of rdi that do nothing elsewhere (valgrind.h)."""

ZERO, DUMP, START = (ord("C") << 24 | ord("T") << 16 | n for n in (1, 0, 4))
"""Requests to callgrind: count from 0, write down what was counted, begin to count (callgrind.h)."""


def asker() -> Callable[[int], Any]:
    """Return what sends valgrind a request; outside of valgrind it does nothing.

    Raises
    ------
    NotImplementedError
        On another processor.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise NotImplementedError(f"counts are asked for on x86-64, this is {platform.machine()}")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(REQUEST)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)(at)
    arguments = (ctypes.c_uint64 * 6)()

    def ask(request: int, keep: Any = page) -> Any:
        arguments[0] = request
        return function(0, arguments)

    return ask


def plan(name: str) -> tuple[int, int]:
    """Return how many calls of a benchmark come before those that are counted, and how many these are."""
    return STEPS if name.startswith("language.") else (WARM, CALLS)


def repeat(call: Callable[[], Any], times: int) -> None:
    """Call so many times."""
    for _ in range(times):
        call()


def longer(call: Callable[[], Any], loops: int) -> Callable[[], Any]:
    """Return the call with so many empty loops before it: a change whose size is known."""

    def work() -> Any:
        for _ in itertools.repeat(None, loops):  # whose rounds are all alike; those of range make numbers
            pass
        return call()

    return work


def counted(ask: Callable[[int], Any], name: str, params: list[Any], loops: int | None = None) -> dict[str, Any]:
    """Count a benchmark; return the process whose counts they are, or why there are none."""
    from asv_benchmarks.suite import prepare

    warm, calls = plan(name)
    try:
        call = prepare(name, params)
        call = call if loops is None else longer(call, loops)
        repeat(call, warm)
    except Exception as error:  # a version may raise anything, and that is a result
        missing = isinstance(error, NotImplementedError | ImportError)
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0], "missing": missing}
    gc.collect()
    gc.freeze()
    gc.disable()
    ask(START)
    for each in (nothing, call):
        repeat(each, 1)
        for _ in range(calls):
            ask(ZERO)
            repeat(each, 1)
            ask(DUMP)
    return {"process": os.getpid()}


def nothing() -> None:
    """Return at once: what counting itself takes."""


def main() -> None:
    """Count the benchmarks of standard input, one JSON list [name, parameters] a line; answer with a line for each.

    A third element is a number of loops that are planted into the call. The program's argument is how many texts lie in
    memory before everything else.
    """
    before = [f"text {n}" for n in range(int(sys.argv[1]))]
    ask = asker()
    asked = [json.loads(line) for line in sys.stdin]
    for module in sorted({name.partition(".")[0] for name, *_ in asked}):
        with contextlib.suppress(Exception):  # the forks say what a version cannot import
            importlib.import_module(f"asv_benchmarks.benchmarks.{module}")
    for name, params, *loops in asked:
        one = os.fork()
        if one == 0:
            print(json.dumps(counted(ask, name, params, *loops)), flush=True)
            os._exit(0)
        _, status = os.waitpid(one, 0)
        if status:
            print(json.dumps({"error": f"its process ended with status {status}", "missing": False}), flush=True)
    del before


if __name__ == "__main__":
    main()
