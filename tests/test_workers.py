"""Processes end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from refattn import workers
from tests.processes import ROOT, marked

START = """
import os, sys, time
from refattn import workers
started = workers.Process(["sh", "-c", sys.argv[2]])
worker = workers.Worker("tests.test_workers:hold")
worker.send(b"")
time.sleep(0.5)
if int(sys.argv[1]):
    os.kill(os.getpid(), int(sys.argv[1]))
"""


def echo(question: bytes) -> bytes:
    """Answer what was asked."""
    return question


def prints(question: bytes) -> bytes:
    """Print more than a pipe holds, on both streams, and answer as much."""
    for n in (1, 2):
        os.write(n, bytes(1 << 20))
    return question * 1000


def hold(question: bytes) -> bytes:
    """Hold the interpreter, so that no thread of this process can do anything."""
    ctypes.PyDLL(None).sleep(300)
    return question


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_what_was_started_ends_with_its_parent(number: int) -> None:
    """Children in sessions of their own, or without an environment, too; nothing was closed, and a worker computes."""
    mark = f"300.{os.getpid()}{time.monotonic_ns()}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "REFATTN_TEST": mark}
    command = f"sleep 300 & setsid sleep 300 & env -i sleep {mark} & exec env -i sleep {mark}"
    done = subprocess.run([sys.executable, "-c", START, str(int(number)), command], env=env, timeout=60.0, check=False)
    assert done.returncode == -number
    end = time.monotonic() + 4.0
    while left := marked(mark):
        assert time.monotonic() < end, left
        time.sleep(0.02)


def test_there_are_no_threads_and_no_pipe_is_ever_full() -> None:
    """Several workers at once, with questions and answers that are larger than what a socket holds."""
    before = threading.enumerate()
    pipes = workers.Pipes()
    several = [workers.Worker("tests.test_workers:prints", pipes) for _ in range(2)]
    questions = [bytes([n]) * 3000 for n in range(2)]
    for worker, question in zip(several, questions, strict=True):
        worker.send(question)
    answers = dict(pipes.next() for _ in several)
    assert threading.enumerate() == before
    assert [answers[worker] for worker in several] == [question * 1000 for question in questions]
    assert [worker.err.count for worker in several] == [2 << 20] * 2  # output goes where errors go
    for worker in several:
        assert worker.close() == worker.close() == -signal.SIGKILL
    assert not pipes.events
    with workers.Worker("tests.test_workers:echo") as worker:
        assert worker.ask(bytes(10 << 20), 60.0) == bytes(10 << 20)


def test_a_worker_that_takes_no_question_is_not_waited_for_longer_than_asked() -> None:
    with workers.Worker("tests.test_workers:echo") as worker:
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(workers.EndedError, match="did not end within 0.2 s"):
            worker.ask(bytes(10 << 20), 0.2)


def test_a_worker_imports_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a file of the same name that stands before it, in the working directory for instance."""
    (tmp_path / "refattn.py").write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with workers.Worker("tests.test_workers:echo") as worker:
        assert worker.ask(b"x", 60.0) == b"x"


def test_lines_of_a_pipe_come_one_by_one() -> None:
    with workers.Started(["sh", "-c", "printf 'a\\nb'; sleep 0.2; printf 'c\\n\\nd'"], stdout=subprocess.PIPE) as one:
        assert list(workers.lines(one.process.stdout)) == ["a", "bc", "", "d"]
        one.process.stdout.close()
