"""Ctrl-C and SIGTERM at the places where an exception out of a handler does harm, or is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, marked

HEAD = """
import atexit, os, signal, sys, threading, time, weakref
from refattn import interrupts
number = getattr(signal, sys.argv[1])

def send():
    os.kill(os.getpid(), number)
    for _ in range(100): pass  # bytecodes, between which Python runs the handler

def wait():
    while True:
        interrupts.check()
        time.sleep(0.01)

class Dies:
    def __del__(self):
        send()

interrupts.listen("x: ")
try:
    BODY
except BaseException as error:
    assert type(error) is interrupts.Interrupted, repr(error)
    print(f"x: {error.word}", file=sys.stderr)
    sys.exit(interrupts.finish(error.code))
sys.exit(interrupts.finish(0))
"""

PLACES = {
    "nowhere": "send(); wait()",
    "a thread was made": """
    original = threading._start_new_thread
    threading._start_new_thread = lambda *args: (original(*args), send())
    threading.Thread(target=print).start()
    wait()""",
    "a thread's start waits": """
    original = threading.Condition._release_save
    threading.Condition._release_save = lambda self: (original(self), send())[0]
    threading.Thread(target=print).start()
    wait()""",
    "a thread's start is slow": """
    release, notify = threading.Condition._release_save, threading.Condition.notify_all
    threading.Condition._release_save = lambda self: (release(self), time.sleep(0.02), send())[0]
    threading.Condition.notify_all = lambda self: (time.sleep(0.05), notify(self))
    threading.Thread(target=print).start()
    wait()""",
    "a thread ends": """
    original = threading.Thread._delete
    threading.Thread._delete = lambda self: (send(), original(self))
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    wait()""",
    "a thread is joined": """
    thread = threading.Thread(target=lambda: (time.sleep(0.1), send()))
    thread.start()
    thread.join()
    wait()""",
    "a weak reference's callback": """
    x = threading.Event()
    reference = weakref.ref(x, lambda _: send())
    del x
    wait()""",
    "__del__": "Dies(); wait()",
    "atexit": "atexit.register(send)",
    "the last atexit": "atexit.register(lambda: (send(), time.sleep(0.0)))",
    "the end, after all checks": "send()",
    "a computation": "send()\n    while True: pass",
    "a computation of C": "send()\n    import numpy as np\n    while True: np.ones(10**7).sum()",
    "an event that never comes": "threading.Timer(0.1, send).start(); threading.Event().wait()",
    "a map of BLAS": """
    from refattn.backends import numpy, use_workers
    import numpy as np, refattn
    x = np.ones((1, 4, 600, 8))
    with use_workers(2):
        threading.Timer(0.05, send).start()
        for _ in range(100): refattn.softmax.forward(x, x, x)
    wait()""",
}


def run(body: str, number: signal.Signals, *words: str) -> tuple[int, str, float]:
    """Return the exit code of a script that listens, what it said, and how long it took."""
    begun = time.monotonic()
    command = [sys.executable, "-c", HEAD.replace("BODY", body.strip("\n ")), number.name, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60.0, check=False)
    return done.returncode, done.stderr, time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", PLACES)
def test_no_signal_breaks_anything_or_is_lost(place: str, number: signal.Signals) -> None:
    code, said, _ = run(PLACES[place], number)
    assert (code, said) == (128 + number, f"x: {'interrupted' if number == signal.SIGINT else 'terminated'}\n")


def test_a_computation_is_ended_in_two_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    body = """
    from refattn import files, workers
    child = workers.Process(["sleep", "300"], environment={"REFATTN_TEST": sys.argv[2]})
    with files.temporary_folder() as folder, interrupts.undo(lambda: 1 / 0):
        (folder / "x").mkdir()
        print(folder, end="", file=open(sys.argv[2], "w"), flush=True)
        send()
        while True: pass"""
    begun = time.monotonic()
    code, said, _ = run(body, signal.SIGTERM, str(tmp_path / "told"))
    assert (code, said) == (143, "x: terminated\n")
    assert not Path((tmp_path / "told").read_text()).exists()
    assert not marked(str(tmp_path / "told"))
    # The tidy end takes one second of these; the others are the start of Python on a busy machine.
    assert time.monotonic() - begun < 10.0


def test_a_second_signal_ends_what_hangs_while_it_unwinds() -> None:
    body = """
    threading.Timer(1.0, send).start()
    try:
        send()
        wait()
    finally:
        time.sleep(300.0)"""
    assert run(body, signal.SIGINT)[:2] == (130, "x: interrupted\n")


@pytest.mark.parametrize("raised", [False, True])
def test_a_report_is_finished_first(raised: bool) -> None:
    body = """
    try:
        if sys.argv[2] == "True":
            send()
            wait()
    finally:
        interrupts.whole(lambda: (send(), time.sleep(1.5 * interrupts.COMPUTES), print("x: whole", file=sys.stderr)))"""
    code, said, _ = run(body, signal.SIGTERM, str(raised))
    assert (code, said) == (143, "x: whole\nx: terminated\n")


def test_what_undoes_may_hang() -> None:
    body = "with interrupts.undo(lambda: time.sleep(300.0)):\n        send()\n        while True: pass"
    code, _, seconds = run(body, signal.SIGTERM)
    assert code == 143 and seconds < 10.0


def test_the_signals_of_a_forked_child_are_its_own() -> None:
    body = """
    child = os.fork()
    if child == 0:
        time.sleep(300.0)
    time.sleep(0.2)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    time.sleep(0.2)
    interrupts.check()"""
    assert run(body, signal.SIGTERM)[:2] == (0, "")


def test_a_signal_that_is_ignored_stays_so() -> None:
    script = HEAD.replace("BODY", "send(); time.sleep(0.2); interrupts.check()")
    script = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{script}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, "SIGINT"], env=env, capture_output=True, timeout=60.0)
    assert (done.returncode, done.stderr) == (0, b"")
