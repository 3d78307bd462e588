"""Independent tiles on a pool of threads, with BLAS held to one thread in each.

A `run` goes on in lanes: the caller's thread is one, threads of a shared pool are the others, and each lane takes the
next task as soon as it has finished one. Tasks are taken in order, so when one fails, all before it were started, and
the error of the first one in order is the one that a plain loop would have raised. A task that calls `run` itself gets
a plain loop.

BLAS is held to one thread even where there is one lane: with more threads it may return other last bits, and results
must not depend on the number of workers.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token, copy_context
from typing import Any

from refattn.backends import blas

# A choice holds in the context that made it: two threads may choose different numbers.
_chosen: ContextVar[int | None] = ContextVar("refattn.workers", default=None)
_in_order: ContextVar[bool] = ContextVar("refattn.in_order", default=False)
_inside: ContextVar[bool] = ContextVar("refattn.inside_a_task", default=False)


class use_workers:  # noqa: N801 (it is called as a function)
    """Work with `n` threads in the ``with`` block, in the thread that entered it. Results do not depend on it.

    A call whose ``with`` is missing changes nothing, and warns.
    """

    def __init__(self, n: int) -> None:
        self.entered = True  # where n is refused there is nothing to warn of
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"workers: got {n!r} of type {type(n).__name__}, needs a whole number")
        if n < 1:
            raise ValueError(f"workers: got {n}, needs at least 1")
        self.n, self.entered = n, False
        self.tokens: list[Token[int | None]] = []

    def __enter__(self) -> None:
        self.entered = True
        self.tokens.append(_chosen.set(self.n))

    def __exit__(self, *error: object) -> None:
        _chosen.reset(self.tokens.pop())

    def __del__(self) -> None:
        if not self.entered:
            text = f"use_workers({self.n}) changed nothing: it holds in a block, with use_workers({self.n}): ..."
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def workers() -> int:
    """Return how many threads to work with: `use_workers`, else REFATTN_WORKERS, else the CPUs this process may use."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    text = os.environ.get("REFATTN_WORKERS", "").strip()
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"REFATTN_WORKERS: got {text!r}, needs a whole number from 1")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def in_order() -> Iterator[None]:
    """Do the tasks of every `run` in the ``with`` block one after the other in its thread, whatever `workers` says."""
    token = _in_order.set(True)
    try:
        yield
    finally:
        _in_order.reset(token)


def inside() -> bool:
    """Tell whether this is a task of `run`."""
    return _inside.get()


def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> list[Any]:
    """Return ``[function(task) for task in tasks]``, computed by up to `workers` threads.

    Each call sees a copy of the caller's context variables, so NumPy's error state and the like hold there too.
    """
    waiting = list(tasks)
    if not waiting or inside():
        return [copy_context().run(function, task) for task in waiting]
    return _Run(function, waiting).run(1 if _in_order.get() else min(workers(), len(waiting)))


class _Run:
    def __init__(self, function: Callable[[Any], Any], tasks: list[Any]) -> None:
        self.function = function
        self.waiting = enumerate(tasks)
        self.results: list[Any] = [None] * len(tasks)
        self.errors: dict[int, BaseException] = {}
        self.stopped = False
        self.lock = threading.Lock()
        self.context = copy_context()
        self.context.run(_inside.set, True)

    def run(self, lanes: int) -> list[Any]:
        futures: list[Any] = []
        try:
            if lanes > 1:
                with blas.uninterrupted():
                    futures += _pool.submit(self.lane, lanes - 1)
            self.lane()
        finally:
            self.stopped = True  # also where an interrupt by the user ended this lane
            if futures:
                # A second interrupt that came where a future has just taken its lock would leave it taken, and its
                # thread waiting for ever.
                with blas.uninterrupted():
                    for future in futures:
                        if not future.cancel():
                            future.result()
        try:
            if self.errors:
                raise self.errors[min(self.errors)]
        finally:
            self.errors.clear()  # an error that leads to itself would keep its arrays alive
        return self.results

    def lane(self) -> None:
        with blas.one_thread():
            while True:
                with self.lock:
                    item = None if self.stopped else next(self.waiting, None)
                if item is None:
                    return
                index, task = item
                try:
                    # A context can be entered once at a time, hence a copy for each task.
                    self.results[index] = self.context.copy().run(self.function, task)
                except BaseException as error:
                    with self.lock:
                        self.errors[index] = error
                        self.stopped = True


class _Pool:
    """One executor, made when it is first needed and replaced by a larger one when that is asked for.

    Its threads end when the interpreter does.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.executor: Any = None
        self.size = 0

    def submit(self, lane: Callable[[], None], count: int) -> list[Any]:
        from concurrent.futures import ThreadPoolExecutor

        futures: list[Any] = []
        with self.lock:
            if self.size < count:
                if self.executor is not None:
                    self.executor.shutdown(wait=False)  # what it was given is still done
                self.executor, self.size = ThreadPoolExecutor(count, thread_name_prefix="refattn"), count
            try:
                while len(futures) < count:
                    futures.append(self.executor.submit(lane))
            except RuntimeError:
                pass  # no thread can be started, or no more at exit: the lanes that there are do the work
        return futures


_pool = _Pool()


def _after_fork() -> None:
    """Start anew: a forked child has none of the pool's threads, and the lock may be held by one that it has not."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
