"""An implementation in a process of its own: one that hangs or crashes fails its case, and the rest still runs.

The two processes exchange messages over pipes: a JSON header and plain arrays, of which nothing is ever unpickled. What
foreign code prints, in C too, ends up in `Isolated.said` and in no report.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from refattn.verify.foreign.adapter import CallError, LoadError, call, load
from refattn.verify.outcome import Decline, Result

SAID = 4000
"""Characters that are kept of what an implementation prints: the last ones."""

SLICE = 0.2
"""Seconds that a time limit is counted in."""

_SERVE = "from refattn.verify.foreign import isolate; isolate.serve()"
_SIZES = struct.Struct("<QQ")  # of header and arrays

Arrays = Mapping[str, NDArray[Any]]


class Isolated:
    """An implementation, given as ``MODULE:NAME`` or ``FILE.py:NAME``, in a process of its own.

    The process is started at once, and again for the case after one that ended it. Close it, or use it as a context.

    Parameters
    ----------
    spec
        What `refattn.verify.foreign.adapter.load` takes.
    seconds
        How long each call, with its gradients, may take.
    loading
        How long loading it may take.

    Raises
    ------
    LoadError
        Where it cannot be loaded.
    """

    def __init__(self, spec: str, seconds: float = 60.0, loading: float = 60.0) -> None:
        self.spec, self.seconds, self.loading = spec, seconds, loading
        self.said = ""
        self.roundings: Any = ()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except CallError as error:
            raise LoadError(f"--impl {spec}: loading it: {error}") from error

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call_case(
        self,
        inputs: Arrays,
        options: Mapping[str, Any],
        dtype: str,
        upstream: NDArray[Any] | None,
        outputs: tuple[str, ...],
    ) -> Result | Decline:
        """Do what `refattn.verify.foreign.adapter.call` does, over there."""
        if self._process is None:
            try:
                self._start()
            except LoadError as error:
                raise CallError(f"cannot be started again: {error}") from error
        arrays = dict(inputs) if upstream is None else {**inputs, "d_out": upstream}
        about = {"options": dict(options), "dtype": dtype, "grad": upstream is not None, "outputs": outputs}
        answer, found = self._ask(about, arrays, self.seconds)
        if "error" in answer:
            self._say(answer["trace"])
            raise CallError(answer["error"])
        if "decline" in answer:
            return Decline(answer["decline"])
        return Result(found, answer["dtypes"], answer["declined"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # it ends by itself when nobody asks any more
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)
            _kill(self._process)
            self._ended()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {_SERVE}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a signal to it reaches what it has started, and Ctrl-C is ours alone
        )
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()
        answer, _ = self._ask({"load": self.spec}, {}, self.loading)
        if "error" in answer:
            self.close()
            raise LoadError(answer["error"]) from RuntimeError(f"over there:\n{answer['trace']}")
        declared = answer["roundings"]
        self.roundings = tuple(declared) if isinstance(declared, list) else declared

    def _ask(
        self, about: Mapping[str, Any], arrays: Arrays, seconds: float
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Send a message and wait for the answer, no longer than the time limit."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        done, late = threading.Event(), threading.Event()
        threading.Thread(target=_watch, args=(process, seconds, done, late), daemon=True).start()
        try:
            _send(process.stdin, about, arrays)
            return _receive(process.stdout)
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)  # its own end comes first: it may be about to say its exit code
            _kill(process)
            code = self._ended()
            if late.is_set():
                raise CallError(f"did not end within {seconds:g} s") from None
            raise CallError(self._end_of(code)) from None
        except BaseException:  # an answer that is none, or the user's interrupt
            _kill(process)
            self._ended()
            raise
        finally:
            done.set()

    def _ended(self) -> int:
        """Clean up after a process that has ended; return its exit code."""
        process, self._process = self._process, None
        assert process is not None
        code = process.wait()
        self._listener.join(1.0)  # no longer: something that it started may hold the pipe
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what could not be sent any more
                if stream is not None:
                    stream.close()
        return code

    def _listen(self, stream: IO[bytes]) -> None:
        with stream:
            while part := os.read(stream.fileno(), 65536):
                self._say(part.decode(errors="replace"))

    def _say(self, text: str) -> None:
        self.said = (self.said + text)[-SAID:]

    def _end_of(self, code: int) -> str:
        """Return how its process ended, in words."""
        if code < 0:
            known = -code in {each.value for each in signal.Signals}
            return f"ended its process by {signal.Signals(-code).name if known else f'signal {-code}'}"
        words = [line.strip() for line in self.said.splitlines() if line.strip()]
        last = f"its last words: {words[-1][:300]}" if words else "it said nothing"
        return f"ended its process with exit code {code}; {last}"


def _watch(process: subprocess.Popen[bytes], seconds: float, done: threading.Event, late: threading.Event) -> None:
    """Kill a process that is not done in time; time in which this process is stopped, too, counts as one slice."""
    while seconds > 0.0:
        if done.wait(min(seconds, SLICE)):
            return
        seconds -= SLICE
    late.set()
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _send(stream: IO[bytes], about: Mapping[str, Any], arrays: Arrays) -> None:
    header, body = json.dumps({**about, "arrays": list(arrays)}).encode(), io.BytesIO()
    for x in arrays.values():
        np.save(body, x, allow_pickle=False)
    stream.write(_SIZES.pack(len(header), body.tell()) + header + body.getvalue())
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    def exactly(count: int) -> bytes:
        data = stream.read(count)
        if len(data) < count:
            raise EOFError
        return data

    sizes = _SIZES.unpack(exactly(_SIZES.size))
    about, body = json.loads(exactly(sizes[0])), io.BytesIO(exactly(sizes[1]))
    return about, {name: np.load(body, allow_pickle=False) for name in about.pop("arrays")}


def serve() -> None:
    """Load an implementation and answer for it until nobody asks any more: the other process."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed, in C too, must not come among the answers
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (sys.stdout, sys.stderr):  # whatever the locale is, what is printed is no error
        cast(io.TextIOWrapper, stream).reconfigure(encoding="utf-8", errors="backslashreplace")
    faulthandler.enable()
    about, _ = _receive(questions)
    try:
        implementation = load(about["load"])
        owner = getattr(implementation, "forward", implementation)
        declared = getattr(owner, "roundings", ())
        plain = list(declared) if isinstance(declared, (tuple, list)) else repr(declared)
        _send(answers, {"roundings": plain}, {})
    except LoadError as error:
        _send(answers, {"error": str(error), "trace": _trace(error)}, {})
    while True:
        try:
            about, arrays = _receive(questions)
        except EOFError:
            return
        _send(answers, *_answer(implementation, about, arrays))
        sys.stdout.flush()


def _answer(
    implementation: Any, about: dict[str, Any], arrays: dict[str, NDArray[Any]]
) -> tuple[dict[str, Any], Arrays]:
    upstream = arrays.pop("d_out") if about["grad"] else None
    try:
        found = call(implementation, arrays, about["options"], about["dtype"], upstream, tuple(about["outputs"]))
    except CallError as error:
        return {"error": str(error), "trace": _trace(error)}, {}
    if isinstance(found, Decline):
        return {"decline": str(found.reason)}, {}
    return {"dtypes": found.dtypes, "declined": found.declined}, found.tensors


def _trace(error: Exception) -> str:
    """Return the traceback of what foreign code raised; nothing where the error is not its own."""
    cause = error.__cause__
    return "".join(traceback.format_exception(cause)) if cause is not None else ""
