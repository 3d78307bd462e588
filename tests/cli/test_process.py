"""Commands as processes: streams that end, are full or a terminal, and interpreters that leave docstrings out."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refattn.cli import output, stdio
from tests.cli.command import ROOT, SMALL, process, terminal
from tests.processes import marked


def test_a_reader_that_stops_reading_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = process("list", stdout=writing)
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "streams", "code"),
    [
        ("list", ">/dev/full", 2),  # what was asked for is lost
        ("--help", ">/dev/full", 2),
        ("--help", "1>&-", 0),  # nobody wants it
        ("--version", "1>&- 2>&-", 0),
        ("nothing", "2>/dev/full", 2),
        ("nothing", "0<&- 1>&- 2>&-", 2),
    ],
)
def test_streams_that_are_full_or_closed(words: str, streams: str, code: int) -> None:
    command = [f'"$0" -m refattn {words} {streams}', sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(["sh", "-c", *command], capture_output=True, text=True, timeout=120, env=env)
    full = streams == ">/dev/full"
    assert result.stderr == ("refattn: error: standard output: No space left on device\n" if full else "")
    assert (result.returncode, result.stdout) == (code, "")


def test_a_pipe_that_is_full_and_does_not_block_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text, got = b"x" * 200_000, bytearray()

    def read() -> None:
        while part := os.read(reading, 4096):
            got.extend(part)

    reader = threading.Timer(0.05, read)
    reader.start()
    with io.BufferedWriter(stdio.Stream(writing, "wb")) as stream:
        stream.write(text)
    reader.join()
    os.close(reading)
    assert got == text and stream.raw.failure is None


def test_text_that_the_encoding_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}.items():
        monkeypatch.setenv(name, value)
    kernel, page = tmp_path / "käse.py", tmp_path / "käse.html"
    kernel.write_text(
        "import refattn\n\n\ndef attend(q, k, v, **options):\n"
        "    print('d\u00e9j\u00e0')\n    return refattn.Decline('pas \u00e7a \x1b[31m')\n",
        encoding="utf-8",
    )
    result = process("verify", "softmax", "--impl", f"{kernel}:attend", *SMALL, "--html", page)
    assert result.returncode == 3, result.stderr
    assert "pas \\xe7a \\x1b[31m" in result.stdout and "d\\xe9j\\xe0" in result.stderr
    assert "pas ça" in page.read_text(encoding="utf-8")
    assert r"cannot import k\udcc3\udca4se" in process("verify", "softmax", "--impl", "käse:attend.py").stderr


@pytest.mark.parametrize("plain", [False, True])
def test_on_a_terminal(plain: bool, kernels: Callable[[str], str]) -> None:
    words = ("verify", "softmax", "--impl", kernels("attend"), *SMALL)
    code, text = terminal(*words, COLUMNS="100", **({"NO_COLOR": "1"} if plain else {}))
    assert code == 0
    assert ("\x1b" in text) is not plain
    assert bool(re.search(r"verify softmax: (\d+) of \1 cases", text)) is plain
    report = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", text[text.rindex("against") :])
    assert max(map(len, report.splitlines())) <= 100


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.parametrize("command", ["check", "verify", "golden"])
def test_a_signal_ends_the_command_and_all_its_processes(command: str, number: int, code: int, tmp_path: Path) -> None:
    kernel, kept = tmp_path / "kernel.py", tmp_path / "kept"
    kernel.write_text(
        "import subprocess, time\nimport refattn\n\ndef attend(q, k, v, **options):\n"
        "    subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "    time.sleep(300.0 * (q.shape[2] == 29))\n    return refattn.softmax.forward(q, k, v, **options)[0]\n"
    )
    words = {
        "check": ["check", "softmax", "--full"],
        "verify": ["verify", "softmax", "--impl", f"{kernel}:attend"],
        "golden": ["golden", "check"],
    }[command]
    mark = f"REFATTN_TEST=signals-{os.getpid()}-{number}-{command}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "REFATTN_TEST": mark.partition("=")[2]}
    asked = [sys.executable, "-m", "refattn", *words, "-j", "2", "--keep", str(kept)]
    with subprocess.Popen(asked, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        end = time.monotonic() + 120.0
        while len(marked(mark)) < (8 if command == "verify" else 4):  # with its guard and workers, and theirs
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        begun = time.monotonic()
        assert process.wait(10.0) == code
        while left := marked(mark):
            # Two seconds, on a machine that has nothing else to do.
            assert time.monotonic() < begun + 4.0, left
            time.sleep(0.02)
        said = process.stderr.read().decode()
    assert {130: "refattn: interrupted", 143: "refattn: terminated"}.get(code, "") in said
    assert "Traceback" not in said


# Sends SIGTERM to a command at the Nth time that its main thread comes to a place, in a file sitecustomize.py.
HOOK = """
import atexit, os, signal, subprocess, sys, threading, time, weakref

place, _, n = os.environ.pop("REFATTN_TEST_HOOK", "").rpartition(" ")
main, left = threading.get_ident(), [int(n or 0)]

def send(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100): pass  # bytecodes, between which Python runs handlers

class Dies:
    def __del__(self):
        send()

def come(do=send):
    left[0] -= threading.get_ident() == main
    if left[0] == 0:
        left[0] = -1
        do()

def after(owner, name, do=send):
    original = getattr(owner, name)
    def hooked(*args, **how):
        found = original(*args, **how)
        come(do)
        return found
    setattr(owner, name, hooked)

def reference():
    x = threading.Event()
    kept.append(weakref.ref(x, send))

kept = []
if place == "a thread was made":
    after(threading, "_start_new_thread")
elif place == "a thread's start waits":
    after(threading.Condition, "_release_save")
elif place == "a thread ends":
    original = threading.Thread._delete
    def delete(self):
        if threading.get_ident() != main: left[0] -= 1
        if left[0] == 0: send()
        original(self)
    threading.Thread._delete = delete
elif place:
    do = {"a process was started": send, "a reference's callback": reference, "__del__": Dies,
          "atexit": lambda: atexit.register(send)}[place]
    after(subprocess.Popen, "_execute_child", do)
"""


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
@pytest.mark.parametrize(
    ("words", "place", "n"),
    [
        ("golden check -j 2", "a thread was made", 1),
        ("golden check -j 2", "a thread's start waits", 1),
        ("check softmax -j 1", "a thread was made", 2),
        ("check softmax -j 1", "a thread's start waits", 2),
        ("verify softmax --impl KERNEL --shape b=1,h=2,nq=3,nk=4,d=4 --in-process", "a thread ends", 1),
        *(("golden check -j 2", "a process was started", n) for n in (1, 2, 3)),  # the guard, two workers
        ("verify softmax --impl KERNEL", "a process was started", 2),
        ("golden check -j 2", "a reference's callback", 2),
        ("golden check -j 2", "__del__", 3),
        ("verify softmax --impl KERNEL --shape b=1,h=2,nq=3,nk=4,d=4", "atexit", 2),
    ],
)
def test_a_signal_where_an_exception_would_break_something(words: str, place: str, n: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        "import threading\nimport refattn\n\ndef attend(*qkv, **how):\n    thread = threading.Thread(target=int)\n"
        "    thread.start(), thread.join()\n    return refattn.softmax.forward(*qkv, **how)[0]\n"
    )
    mark = f"hooked-{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "REFATTN_TEST_HOOK": f"{place} {n}", "REFATTN_TEST": mark}
    asked = [sys.executable, "-m", "refattn", *words.replace("KERNEL", f"{kernel}:attend").split()]
    done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=120.0, check=False)
    assert done.returncode == 143, done.stderr
    assert done.stderr.splitlines()[-1] == "refattn: terminated"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    end = time.monotonic() + 4.0
    while left := marked(mark):
        assert time.monotonic() < end, left
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_computation_of_the_command_itself(number: int, code: int, tmp_path: Path) -> None:
    """In two seconds on a machine that has nothing else to do, and without a traceback; Ctrl-C in a debugger too."""
    (tmp_path / "kernel.py").write_text(
        "import os\nimport numpy as np\n\n\ndef attend(q, k, v, **options):\n"
        f"    open({str(tmp_path / 'begun')!r}, 'w').close()\n    while True:\n        np.ones(10**6).sum()\n"
    )
    words = ["verify", "softmax", "--impl", f"{tmp_path / 'kernel.py'}:attend", "--in-process", *SMALL]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "refattn", *words], env=env, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        begun = time.monotonic()
        assert process.wait(10.0) == code
        assert time.monotonic() < begun + 4.0
        assert process.stderr.read().decode().splitlines()[-1] == {130: "refattn: interrupted"}.get(
            code, "refattn: terminated"
        )


def test_progress_waits_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Items that come one after the other are passed on as they come."""

    class Coming:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            for n in range(4):
                made.append(n)
                yield n

    made: list[int] = []
    with output.progress("work", "parts") as wrap:
        for n in wrap(Coming()):
            assert made == list(range(n + 1))
    assert "work: 4 of 4 parts" in capsys.readouterr().err
