"""`map` over independent tiles: the same results, errors and settings with any number of workers."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from refattn import backends
from refattn.backends import blas as blas_of_the_backends
from refattn.backends import use_workers, workers
from tests.processes import python

USABLE = [name for name in backends.BUILT_IN if backends.get(name).why_unavailable() is None]
BLAS = threadpoolctl.ThreadpoolController().select(user_api="blas")
pool_map = backends.get("numpy").map
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")


def blas_threads() -> list[int]:
    return [library["num_threads"] for library in BLAS.info()]


@pytest.fixture
def two_blas_threads() -> Any:
    """BLAS with more than one thread, also on a machine with one core."""
    with BLAS.limit(limits=2):
        if 2 not in blas_threads():
            pytest.skip("this BLAS has no threads")
        yield


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("name", USABLE)
def test_results_are_in_order(name: str, n: int) -> None:
    def task(i: int) -> int:
        time.sleep(0.001 * (7 - i % 7))
        return i * i

    with use_workers(n):
        assert backends.get(name).map(task, iter(range(20))) == [i * i for i in range(20)]
        assert backends.get(name).map(task, []) == []
        assert backends.get(name).map(task, [3]) == [9]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", USABLE)
def test_the_first_error_in_order_is_raised(name: str, n: int) -> None:
    def task(i: int) -> int:
        if i == 2:
            time.sleep(0.02)  # later than the others in time, yet first in order
        if i >= 2:
            raise ValueError(f"tile {i}")
        return i

    with use_workers(n), pytest.raises(ValueError, match="^tile 2$"):
        backends.get(name).map(task, range(30))


def test_no_task_is_started_after_an_error() -> None:
    started = []

    def task(i: int) -> None:
        started.append(i)
        time.sleep(0.001)
        if i == 0:
            raise KeyboardInterrupt

    with use_workers(2), pytest.raises(KeyboardInterrupt):
        pool_map(task, range(1000))
    assert len(started) < 100


@pytest.mark.parametrize("n", [1, 2, 4])
def test_nested_maps_run_in_their_worker(n: int) -> None:
    def inner(j: int) -> tuple[int, str]:
        return j, threading.current_thread().name

    def outer(i: int) -> list[tuple[int, int]]:
        here = threading.current_thread().name
        pairs = pool_map(inner, range(3))
        assert {name for _, name in pairs} == {here}
        return [(i, j) for j, _ in pairs]

    with use_workers(n):
        assert pool_map(outer, range(6)) == [[(i, j) for j in range(3)] for i in range(6)]


@pytest.mark.parametrize("n", [1, 3])
def test_tasks_see_the_callers_context_and_leave_it_alone(n: int) -> None:
    def task(i: int) -> tuple[str, str]:
        seen = variable.get()
        variable.set(f"task {i}")
        return seen, np.geterr()["over"]

    token = variable.set("caller")
    try:
        with use_workers(n), np.errstate(over="raise"):
            assert pool_map(task, range(9)) == [("caller", "raise")] * 9
            assert pool_map(task, range(1)) == [("caller", "raise")]
        assert variable.get() == "caller"
    finally:
        variable.reset(token)


@pytest.mark.parametrize("tasks", [1, 6])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_blas_has_one_thread_inside_and_is_restored(n: int, tasks: int, two_blas_threads: None) -> None:
    before = blas_threads()
    with use_workers(n):
        assert pool_map(lambda i: set(blas_threads()), range(tasks)) == [{1}] * tasks
    assert blas_threads() == before


def test_maps_of_several_threads_at_once(two_blas_threads: None) -> None:
    """The one that leaves last restores BLAS, whichever came first."""
    before = blas_threads()
    bad: list[str] = []

    def caller(seed: int) -> None:
        for i in range(40):
            with use_workers(1 + (seed + i) % 3):
                results = pool_map(lambda j: (j, max(blas_threads())), range(1 + (seed * i) % 7))
            if results != [(j, 1) for j in range(len(results))]:
                bad.append(str(results))

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    assert blas_threads() == before


def test_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFATTN_WORKERS", raising=False)
    assert workers() == (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    monkeypatch.setenv("REFATTN_WORKERS", " 7 ")
    assert workers() == 7
    with use_workers(3):
        assert workers() == 3
        with use_workers(2):
            assert workers() == 2
        assert workers() == 3
        seen: list[int] = []
        other = threading.Thread(target=lambda: seen.append(workers()), **fresh_context())
        other.start()
        other.join()
        assert seen == [7]
    assert workers() == 7


def fresh_context() -> dict[str, Any]:
    """Without this a thread of a free-threaded Python 3.14 starts with the context of the thread that made it."""
    return {"context": contextvars.Context()} if sys.version_info >= (3, 14) else {}


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_bad_environment_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFATTN_WORKERS", text)
    with pytest.raises(ValueError, match=f"REFATTN_WORKERS: got '{text}', needs a whole number from 1"):
        pool_map(abs, [1, 2])


def script(body: str) -> str:
    """Run a script that has `m = NumPy's map` and return what it prints; it must end by itself."""
    head = "import os, sys, warnings\nfrom refattn import backends\nfrom refattn.backends import use_workers\n"
    return python("-W", "ignore", "-c", f"{head}m = backends.get('numpy').map\n{body}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    body = """
import threading, threadpoolctl
blas = threadpoolctl.ThreadpoolController().select(user_api="blas")
threads = lambda: [lib["num_threads"] for lib in blas.info()]
before = threads()
inside, go = threading.Event(), threading.Event()
with use_workers(3):
    m(abs, range(9))
    other = threading.Thread(target=lambda: m(lambda i: inside.set() or go.wait(30), [0, 1]))
    other.start()
    inside.wait(30)  # the child is made while another thread holds BLAS
    child = os.fork()
    if child == 0:
        ok = threads() == before
        together = threading.Barrier(3, timeout=10)  # passed only where three lanes are at work
        ok = ok and sorted(m(lambda i: together.wait(), range(3))) == [0, 1, 2]
        os._exit(0 if ok and threads() == before else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    go.set()
    other.join()
    print(m(abs, [-1, -2]), threads() == before)
"""
    assert script(body).splitlines() == ["0", "[1, 2] True"]


def test_a_choice_without_its_block_is_told() -> None:
    before = workers()
    with pytest.warns(RuntimeWarning, match=r"use_workers\(3\) changed nothing: it holds in a block"):
        use_workers(3)
        gc.collect()
    assert workers() == before
    with use_workers(3), use_workers(2):
        assert workers() == 2
    chosen = use_workers(3)
    with chosen, chosen:
        assert workers() == 3
    assert workers() == before
    with pytest.raises(ValueError, match="workers: got 0"):
        use_workers(0)  # nothing is left to warn of


# --- interrupts by the user


def test_an_interrupt_waits_for_the_end_of_a_block_and_then_comes() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), blas_of_the_backends.uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done == [1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), blas_of_the_backends.uninterrupted():
        with blas_of_the_backends.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(2)
        done.append(3)
    assert done == [1, 2, 3] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_at_any_time_leave_blas_as_it_was() -> None:
    """200 signals at random moments into maps of several workers; every process ends, and with its threads."""
    code = """
import os, random, signal, sys, threading, time
import numpy, threadpoolctl
from refattn.backends import pool, use_workers
blas = threadpoolctl.ThreadpoolController().select(user_api="blas")
before = [lib["num_threads"] for lib in blas.info()]
draw, came, left, stop = random.Random(int(sys.argv[1])), 0, 0, threading.Event()
x = numpy.ones((40, 40))
def handle(*_):
    global left
    if left:
        left -= 1
        raise KeyboardInterrupt
def send():
    while not stop.wait(draw.random() * 0.004):
        os.kill(os.getpid(), signal.SIGINT)
for _ in range(2):
    pool.run(lambda i: x @ x, range(4))
signal.signal(signal.SIGINT, handle)
sender = threading.Thread(target=send)
sender.start()
end = time.monotonic() + 60.0
while came < 100 and time.monotonic() < end:
    try:
        try:
            left = 2  # the second may meet what the first is ending; none is left outside of the outer block
            with use_workers(1 + came % 3):
                while True:
                    pool.run(lambda i: x @ x, range(6))
        except KeyboardInterrupt:
            came += 1
        left = 0
    except KeyboardInterrupt:  # the second
        pass
signal.signal(signal.SIGINT, signal.SIG_IGN)
stop.set()
sender.join()
with use_workers(3):
    assert len(pool.run(lambda i: x @ x, range(6))) == 6
end = time.monotonic() + 20.0  # a lane that an interrupt left alone may be about to end
while [lib["num_threads"] for lib in blas.info()] != before:
    assert time.monotonic() < end, "held"
    time.sleep(0.01)
print(came)
"""
    for seed in "12":
        assert int(python("-c", code, seed, OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="2")) > 20


def test_a_block_that_an_interrupt_kept_from_its_end_is_left_by_the_next(
    two_blas_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(block: Any) -> None:
        raise KeyboardInterrupt

    came: list[type] = []
    with monkeypatch.context() as patch:  # as where one comes as `__exit__` begins, and one more as `__del__` does
        patch.setattr(blas_of_the_backends.one_thread, "_leave", interrupted)
        patch.setattr(sys, "unraisablehook", lambda told: came.append(told.exc_type))
        try:
            with blas_of_the_backends.one_thread():
                pass
        except KeyboardInterrupt as error:  # `pytest.raises` would keep the block
            came.append(type(error))
        gc.collect()
    assert came == [KeyboardInterrupt, KeyboardInterrupt]
    assert set(blas_threads()) == {1}
    with blas_of_the_backends.one_thread():
        assert set(blas_threads()) == {1}
    assert set(blas_threads()) == {2}


def test_an_interrupt_as_a_lane_is_waited_for_comes_when_the_lane_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a future it could leave the future's lock taken, for which its thread then waits at the end of the process."""
    ended, plain = [], Future.result

    def result(future: Future[Any], timeout: float | None = None) -> Any:
        signal.raise_signal(signal.SIGINT)
        found = plain(future, timeout)
        ended.append(future)
        return found

    monkeypatch.setattr(Future, "result", result)
    with use_workers(2), pytest.raises(KeyboardInterrupt):
        pool_map(lambda i: time.sleep(0.05), range(4))
    assert len(ended) == 1


def test_workers_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=30)
    with use_workers(3):
        names = pool_map(lambda i: together.wait() and threading.current_thread().name, range(3))
    assert len(names) == 3


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-2, ValueError), (True, TypeError), (2.0, TypeError)])
def test_a_bad_number_of_workers_is_named(n: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"workers: got {n}"), use_workers(n):
        pass
