"""The process that valgrind counts in: many benchmarks, one after the other, without instrumentation until then.

    valgrind --tool=callgrind --instr-atstart=no ... python -m asv_benchmarks.counter < benchmarks

Everything is imported, made and called a few times before valgrind begins to count, since that is fifty times slower
than to run. Then each benchmark is called n times, and 2n times: the difference is n calls and nothing around them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import platform
import sys
from collections.abc import Callable
from typing import Any

WARM = 20
"""Calls before the counted ones: CPython specialises code that ran some times, in several steps."""

CALLS = 2
"""n: n calls are counted, and then 2n."""

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


def repeat(call: Callable[[], Any], times: int) -> None:
    """Call so many times."""
    for _ in range(times):
        call()


def made(name: str, params: list[Any]) -> tuple[Callable[[], Any] | None, dict[str, Any]]:
    """Return a benchmark that ran a few times, or None and why it cannot."""
    from asv_benchmarks.suite import prepare

    try:
        call = prepare(name, params)
        repeat(call, WARM)
    except Exception as error:  # a version may raise anything, and that is a result
        missing = isinstance(error, NotImplementedError | ImportError)
        return None, {"error": f"{type(error).__name__}: {error}".splitlines()[0], "missing": missing}
    return call, {"calls": CALLS}


def main() -> None:
    """Count the benchmarks of standard input, one JSON list [name, parameters] a line; answer with a line for each."""
    ask = asker()
    found = [made(*json.loads(line)) for line in sys.stdin]
    gc.collect()
    gc.freeze()
    gc.disable()
    ask(START)
    for call, answer in found:
        if call is not None:
            repeat(call, 1)  # what follows begins alike, whatever ran before
            for times in (CALLS, 2 * CALLS):
                ask(ZERO)
                repeat(call, times)
                ask(DUMP)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
