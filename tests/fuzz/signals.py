"""A fuzzer of ends: ``python -m tests.fuzz.signals [--signals N] [--seed S]``.

Commands that start processes, or compute with threads, get Ctrl-C, SIGTERM or SIGKILL at a random moment, alone or with
their whole group, as a terminal does it. What comes of it is counted:

- ended: with the exit code of the signal, 130 or 143 (or by the signal, where Python itself had not begun to listen)
- done: it was ready before
- hung: it has not ended 10 s later
- left: 3 s after its end a process that it has started is there
- other: another exit code, or a traceback of anything but an interrupt while modules were imported
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.command import Bad, Totals, command
from tests.processes import ROOT, marked
from tests.train.runs import ENVIRONMENT, arguments, write_text

KERNEL = """
import ctypes, subprocess, time
import refattn

def attend(q, k, v, **options):
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    time.sleep(0.01)
    return refattn.softmax.forward(q, k, v, **options)[0]

def holds(q, k, v, **options):  # the interpreter, so that no thread of its process can do anything
    ctypes.PyDLL(None).sleep(300)
"""

CODES = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM), signal.SIGKILL: (-9,)}

MARK = "MARK"
"""What stands in words of commands for the mark of their processes."""

LONGEST = 6.0
"""Seconds until the last moment of a signal."""


def commands(home: Path) -> dict[str, list[str]]:
    """Return the command lines by name."""
    kernel = home / "kernel.py"
    kernel.write_text(KERNEL)
    impl, run = f"{kernel}:attend", [sys.executable, "-m", "refattn"]
    program = f"{sys.executable} -c 'import time; time.sleep(300)  # {MARK}'"
    others = f"sleep 300 & setsid sleep 300 & {program}"
    return {
        "check": [*run, "check", "softmax", "--full", "-j", "2", "--keep", str(home / "check")],
        "verify": [*run, "verify", "softmax", "--impl", impl, "--grad"],
        "verify in parts": [*run, "verify", "softmax", "--impl", impl, "-j", "2", "--keep", str(home / "verify")],
        "kernel that holds": [*run, "verify", "softmax", "--impl", f"{kernel}:holds"],
        "program": [*run, "verify", "softmax", "--exec", program],
        "program without an environment": [*run, "verify", "softmax", "--exec", f"env -i {program}"],
        "golden": [*run, "golden", "check", "-j", "2", "--keep", str(home / "golden")],
        "golden write": [*run, "golden", "write", str(home / "set"), "growing", "--replace"],
        "program with others": [*run, "verify", "softmax", "--exec", f"sh -c {shlex.quote(others)}"],
        "asv": [sys.executable, "-m", "asv_benchmarks", "compare", ".", ".", "--quick"],
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
            counts[outcome] += 1
            if outcome not in ("ended", "done"):
                who = "group" if group else "process"
                bad.append(
                    f"signal {n}, {kind}, {number.name} to the {who} at {moment:.2f} s, {outcome}: {told[-300:]}"
                )
    return counts, bad


def one(line: list[str], number: signal.Signals, moment: float, group: bool, mark: str) -> tuple[str, str]:
    """Run a command and send a signal; return what came of it, and what it said."""
    line = [word.replace(MARK, mark) for word in line]
    env, null = {**ENVIRONMENT, "REFATTN_TEST": mark}, subprocess.DEVNULL
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(line, env=env, cwd=ROOT, stdout=null, stderr=errors, start_new_session=True)
        try:
            try:
                code = process.wait(moment)
                errors.seek(0)
                return ("done" if code in (0, 1) else "other"), f"{code}: {errors.read().decode(errors='replace')}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, number) if group else process.send_signal(number)
            try:
                code = process.wait(10.0)
            except subprocess.TimeoutExpired:
                return "hung", ""
            end = time.monotonic() + 3.0
            while left := marked(mark):
                if time.monotonic() > end:
                    return "left", ", ".join(map(words_of, left))
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


def words_of(process: str) -> str:
    """Return the command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-80:]
    return process


if __name__ == "__main__":
    command("signals", "signals", 30, run)
