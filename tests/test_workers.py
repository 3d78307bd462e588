"""Processes end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

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
