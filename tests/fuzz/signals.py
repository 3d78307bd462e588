"""A fuzzer of ends: ``python -m tests.fuzz.signals [--signals N] [--seed S]``.

Commands that start processes, or compute with threads, get Ctrl-C, SIGTERM or SIGKILL at a random moment, alone or with
their whole group, as a terminal does it. What comes of it is counted:

- ended: with the exit code of the signal, 130 or 143 (or by the signal, where Python itself had not begun to listen)
- done: it was ready before
- hung: it has not ended 10 s later
- left: 3 s after its end a process that it has started is there
- orphan: the same of a program or a suite, after SIGKILL, which nobody can answer: that they end is not promised
- other: another exit code, or a traceback of anything but an interrupt while modules were imported
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.command import Bad, Totals, command
from tests.processes import marked
from tests.train.runs import ENVIRONMENT, arguments, write_text

KERNEL = """
import subprocess, time
import refattn

def attend(q, k, v, **options):
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    time.sleep(0.01)
    return refattn.softmax.forward(q, k, v, **options)[0]
"""

CODES = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM), signal.SIGKILL: (-9,)}

LONGEST = 6.0
"""Seconds until the last moment of a signal."""


def commands(home: Path) -> dict[str, list[str]]:
    """Return the command lines by name."""
    kernel = home / "kernel.py"
    kernel.write_text(KERNEL)
    impl, run = f"{kernel}:attend", [sys.executable, "-m", "refattn"]
    program = f"{sys.executable} -c 'import time; time.sleep(300)'"
    suite = f"{sys.executable} -c 'import time; time.sleep(300)'"
    return {
        "check": [*run, "check", "softmax", "--full", "-j", "2", "--keep", str(home / "check")],
        "verify": [*run, "verify", "softmax", "--impl", impl, "--grad"],
        "verify in parts": [*run, "verify", "softmax", "--impl", impl, "-j", "2", "--keep", str(home / "verify")],
        "program": [*run, "verify", "softmax", "--exec", program],
        "golden": [*run, "golden", "check", "-j", "2", "--keep", str(home / "golden")],
        "mutants": [*run, "mutants", "softmax", "--suite", suite],
        "train": [*run, *arguments(write_text(home), home / "run", "--resume", steps=10_000, checkpoint_every=50)],
    }


def run(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return how often what came, and a line for each that came to a bad end."""
    draw = random.Random(seed)
    counts: Counter[str] = Totals("signals")
    bad: list[str] = Bad()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        lines = commands(Path(name))
        for n in range(count):
            kind, number = draw.choice(list(lines)), draw.choice(list(CODES))
            moment, group = draw.uniform(0.3, LONGEST), draw.random() < 0.5
            outcome, told = one(lines[kind], number, moment, group, f"signals-{os.getpid()}-{n}-")
            if outcome == "left" and number is signal.SIGKILL and kind in ("program", "mutants"):
                outcome = "orphan"
            counts[outcome] += 1
            if outcome not in ("ended", "done", "orphan"):
                who = "group" if group else "process"
                bad.append(
                    f"signal {n}, {kind}, {number.name} to the {who} at {moment:.2f} s, {outcome}: {told[-300:]}"
                )
    return counts, bad


def one(line: list[str], number: signal.Signals, moment: float, group: bool, mark: str) -> tuple[str, str]:
    """Run a command and send a signal; return what came of it, and what it said."""
    env = {**ENVIRONMENT, "REFATTN_TEST": mark}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            try:
                process.wait(moment)
                return "done", ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, number) if group else process.send_signal(number)
            try:
                code = process.wait(10.0)
            except subprocess.TimeoutExpired:
                return "hung", ""
            end = time.monotonic() + 3.0
            while left := marked(mark):
                if time.monotonic() > end:
                    return "left", ", ".join(left)
                time.sleep(0.02)
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            early = "refattn/cli/__init__.py" not in said and said.rstrip().endswith("KeyboardInterrupt")
            fine = code in CODES[number] and ("Traceback" not in said or early or code < 0)
            return ("ended" if fine else "other"), f"{code}: {said}"
        finally:
            for each in marked(mark):
                os.kill(int(each), signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    command("signals", "signals", 30, run)
