"""A kernel in a process of its own: one that hangs or crashes fails its case, and the rest still runs.

The two processes exchange messages over pipes: a JSON header and plain arrays, of which nothing is ever unpickled. A
message begins with a mark and the number of the question, has bounded sizes, and goes over descriptors that are high,
that no program inherits and that a forked process closes, so that nothing else is taken for one. What foreign code
prints, in C too, ends up in `Isolated.said` and in no report.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import inspect
import io
import json
import os
import resource
import secrets
import signal
import struct
import sys
import traceback
from collections.abc import Mapping
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from refattn.files import parse_json
from refattn.verify.adapters.adapter import CallError, LoadError, attribute, call, own_keep, pulls
from refattn.verify.adapters.meshed import load
from refattn.verify.adapters.processes import LARGEST, Process, Tail
from refattn.verify.adapters.pushed import joined, split
from refattn.verify.outcome import Decline, Result

SAID = 4000
"""Characters that are kept of what a kernel prints: the last ones."""

_SERVE = "from refattn.verify.adapters import isolate; isolate.serve()"
_HEAD = struct.Struct("<8s16sQQ")  # the mark, the number of the question, sizes of header and arrays
_MARK = b"refattn\n"
_HEADER = 1 << 24  # bytes of JSON at most

Arrays = Mapping[str, NDArray[Any]]


class _GarbledError(Exception):
    """What came over the pipe is no answer."""


class Isolated:
    """A kernel, given as ``MODULE:NAME`` or ``FILE.py:NAME``, in a process of its own.

    The process is started at once, and again for the case after one that ended it. Close it, or use it as a context.

    Parameters
    ----------
    spec
        What `refattn.verify.adapters.meshed.load` takes.
    seconds
        How long each call, with its gradients, may take.
    loading
        How long loading it may take.

    Raises
    ------
    LoadError
        Where it cannot be loaded.

    Examples
    --------
    >>> import pathlib, tempfile, refattn as ra
    >>> from refattn.verify import Isolated, verify_case
    >>> record = ra.mechanism("softmax")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "kernel.py"
    ...     _ = file.write_text("attend = lambda q, k, v: exit('gone')")
    ...     with Isolated(f"{file}:attend") as kernel:
    ...         verify_case(record, kernel, record.case("tiny"), "float32").status
    'raises'
    """

    def __init__(self, spec: str, seconds: float = 60.0, loading: float = 60.0) -> None:
        self.spec, self.seconds, self.loading = spec, seconds, loading
        self.roundings: Any = ()
        self.reference = False  # whether its process has loaded a definition of refattn
        self._said, self._words = Tail(SAID), Tail(SAID)  # in all, and since the last question
        self._process: Process | None = None
        self._answer = _Answer(b"", 0)
        try:
            self._start()
        except CallError as error:
            raise LoadError(f"--impl {spec}: loading it: {error}") from error

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def said(self) -> str:
        """The end of what it has printed, with the tracebacks of what it raised."""
        return self._said.text()

    def call_case(
        self,
        inputs: Arrays,
        options: Mapping[str, Any],
        dtype: str,
        upstream: NDArray[Any] | None,
        outputs: tuple[str, ...],
        further: Mapping[str, NDArray[Any]] | None = None,
        *,
        along: Arrays | None = None,
        asked: tuple[str, ...] = (),
        manner: str = "",
    ) -> Result | Decline:
        """Do what `refattn.verify.adapters.adapter.call` does, over there."""
        if self._process is None:
            try:
                self._start()
            except LoadError as error:
                raise CallError(f"cannot be started again: {error}") from error
        arrays = joined(inputs, along or {})
        arrays |= {} if upstream is None else {"d_out": upstream, **(further or {})}
        about = {
            "options": dict(options),
            "dtype": dtype,
            "grad": upstream is not None,
            "outputs": outputs,
            "further": list(further or {}),
            "asked": asked,
            "manner": manner,
        }
        answer, found = self._ask(about, arrays, self.seconds)
        if "error" in answer:
            self._said(answer["trace"].encode())
            raise CallError(answer["error"])
        self.reference = self.reference or bool(answer["reference"])
        if "decline" in answer:
            return Decline(answer["decline"])
        return Result(found, answer["dtypes"], answer["declined"], tuple(answer["judged"]))

    def close(self) -> None:
        """End the process, and what it has started."""
        if self._process is not None:
            self._process.end_input()  # it ends by itself when nobody asks any more
            self._ended(2.0)

    def _start(self) -> None:
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {_SERVE}"]
        self._process = Process(command, self._hear, self._print)
        answer, _ = self._ask({"load": self.spec}, {}, self.loading)
        if "error" in answer:
            self.close()
            raise LoadError(answer["error"]) from RuntimeError(f"over there:\n{answer['trace']}")
        declared = answer["roundings"]
        self.roundings = tuple(declared) if isinstance(declared, list) else declared
        self.pulls = tuple(answer["pulls"])
        self.slack, self.descale, self.result = answer["slack"], answer["descale"], answer["result"]
        self.supports = answer["supports"]
        self.keep = self._keep if answer["keep"] else None

    def _keep(self, case: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the factors that it draws for a case."""
        answer, found = self._ask({"keep": case, "shape": shape}, {}, self.seconds)
        if "error" in answer:
            self._said(answer["trace"].encode())
            raise CallError(answer["error"])
        return found["keep"]

    def _ask(
        self, about: Mapping[str, Any], arrays: Arrays, seconds: float
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Send a message and wait for the answer, no longer than the time limit."""
        assert self._process is not None
        number, left = secrets.token_bytes(16), seconds
        limit = LARGEST + 64 * sum(x.nbytes for x in arrays.values())
        early = self._answer.data
        self._answer, self._words = _Answer(number, limit), Tail(SAID)
        try:
            if early:
                raise _GarbledError(f"{len(early)} bytes that nobody asked for")
            self._process.send(_message(number, {**about, "limit": limit}, arrays))
            while not self._answer.whole():
                if self._process.code() is not None and not self._answer.whole():
                    raise CallError(self._end_of(self._ended(0.0)))
                if left <= 0.0:
                    raise CallError(f"did not end within {seconds:g} s")
                left = self._process.slice(left)
            self._process.drain()  # what it printed before
            return self._answer.read()
        except _GarbledError as error:
            self._ended(0.0)
            raise CallError(f"wrote to the pipe of its answers: {error}") from None
        except BaseException:  # the user's interrupt, too
            self._ended(0.0)
            raise

    def _hear(self, part: bytes) -> None:
        self._answer.take(part)

    def _print(self, part: bytes) -> None:
        self._said(part)
        self._words(part)

    def _ended(self, seconds: float) -> int:
        """Clean up after a process that has at most these seconds to end by itself; return its exit code."""
        process, self._process = self._process, None
        self._answer = _Answer(b"", 0)
        if process is None:
            return 0
        try:
            while seconds > 0.0 and process.code() is None:
                seconds = process.slice(seconds)
        finally:
            code = process.close()
        return code

    def _end_of(self, code: int) -> str:
        """Return how its process ended, in words."""
        if code < 0:
            known = -code in {each.value for each in signal.Signals}
            return f"ended its process by {signal.Signals(-code).name if known else f'signal {-code}'}"
        words = [line.strip() for line in self._words.text().splitlines() if line.strip()]
        last = f"its last words: {words[-1][:300]}" if words else "it said nothing"
        return f"ended its process with exit code {code}; {last}"


class _Answer:
    """The answer to a question, as far as it has come."""

    def __init__(self, number: bytes, limit: int) -> None:
        self.data = bytearray()
        self._begins, self._limit = _MARK + number, limit

    def take(self, part: bytes) -> None:
        """Take some more; what cannot become an answer is not kept."""
        if len(self.data) <= _HEAD.size + _HEADER + self._limit:
            self.data += part

    def whole(self) -> bool:
        """Tell whether all has come; raises _GarbledError where it is none."""
        begins = bytes(self.data[: len(self._begins)])
        if not self._begins.startswith(begins):
            raise _GarbledError(f"{begins[:16]!r}, which is no answer")
        if len(self.data) < _HEAD.size:
            return False
        _, _, *sizes = _HEAD.unpack_from(self.data)
        if sizes[0] > _HEADER or sizes[1] > self._limit:
            raise _GarbledError(f"{sum(sizes)} bytes, needs at most {self._limit}")
        if len(self.data) > _HEAD.size + sum(sizes):
            raise _GarbledError("more than one answer")
        return len(self.data) == _HEAD.size + sum(sizes)

    def read(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what it says; nothing has come from then on."""
        data, self.data = io.BytesIO(bytes(self.data)), bytearray()
        try:
            return _read(data)
        except Exception as error:  # only what forges the mark and the number comes here
            raise _GarbledError(f"{type(error).__name__}: {error}") from error


def _message(number: bytes, about: Mapping[str, Any], arrays: Arrays) -> bytes:
    header, body = json.dumps({**about, "arrays": list(arrays)}).encode(), io.BytesIO()
    for x in arrays.values():
        np.save(body, x, allow_pickle=False)
    return _HEAD.pack(_MARK, number, len(header), body.tell()) + header + body.getvalue()


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    def exactly(count: int) -> bytes:
        data = stream.read(count)
        if len(data) < count:
            raise EOFError
        return data

    mark, number, *sizes = _HEAD.unpack(exactly(_HEAD.size))
    if mark != _MARK:
        raise ValueError("is no message")
    about, body = parse_json(exactly(sizes[0])), io.BytesIO(exactly(sizes[1]))
    return {**about, "number": number}, {name: np.load(body, allow_pickle=False) for name in about.pop("arrays")}


# --- the other process


class _Private:
    """A copy of a descriptor that foreign code does not meet: high, closed for programs and in forked processes."""

    def __init__(self, of: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        low = 3 if most == resource.RLIM_INFINITY else max(3, min(most, 1024) - 16)
        self.number = fcntl.fcntl(of, fcntl.F_DUPFD_CLOEXEC, low)
        self._is = self._identity()
        os.register_at_fork(after_in_child=lambda: os.close(self.number))

    def _identity(self) -> tuple[int, int]:
        about = os.fstat(self.number)
        return about.st_dev, about.st_ino

    def check(self) -> None:
        """End this process where the descriptor was closed, or is another's by now."""
        with contextlib.suppress(OSError):
            if self._identity() == self._is:
                return
        _end("it closed a descriptor that was not its own")


def serve() -> None:
    """Load a kernel and answer for it until nobody asks any more: the other process."""
    asked, answered, own = _Private(0), _Private(1), os.getpid()
    questions = os.fdopen(asked.number, "rb", closefd=False)
    os.dup2(2, 1)  # what is printed, in C too, must not come among the answers
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (sys.stdout, sys.stderr):  # whatever the locale is, what is printed is no error
        cast(io.TextIOWrapper, stream).reconfigure(encoding="utf-8", errors="backslashreplace")
    faulthandler.enable()
    kernel = None
    while True:
        try:
            about, arrays = _read(questions)
        except EOFError:
            return
        except (OSError, ValueError):
            _end("it read from a descriptor that was not its own")
        try:
            found: Arrays = {}
            if "load" in about:
                kernel, answer = _loaded(about["load"])
            elif "keep" in about:
                answer, found = _kept(kernel, about)
            else:
                answer, found = _answer(kernel, about, arrays)
            message = memoryview(_message(about["number"], answer, found))
        finally:
            if os.getpid() != own:  # foreign code has forked, and this process has come back from it, too
                os._exit(0)
        answered.check()
        while message:
            message = message[os.write(answered.number, message) :]
        with contextlib.suppress(Exception):  # it may be closed, or anything
            sys.stdout.flush()
        asked.check()


def _end(why: str) -> Any:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{why}\n".encode())
    os._exit(1)


def _loaded(spec: str) -> tuple[Any, dict[str, Any]]:
    try:
        kernel = load(spec, interrupts=False)
    except LoadError as error:
        return None, {"error": str(error), "trace": _trace(error)}
    declared = attribute(kernel, "roundings")
    declared = () if declared is None else declared
    plain = isinstance(declared, (tuple, list, dict)) and all(isinstance(id, str) for id in declared)
    told: Any = repr(declared)[:300]
    if plain:
        told = {id: str(type_) for id, type_ in declared.items()} if isinstance(declared, dict) else list(declared)
    return kernel, {
        "roundings": told,
        "pulls": _pulls(kernel),
        "keep": callable(attribute(kernel, "keep")),
        "supports": _plain(attribute(kernel, "supports")),
        **{name: str(attribute(kernel, name) or "") for name in ("slack", "descale", "result")},
    }


def _kept(kernel: Any, about: dict[str, Any]) -> tuple[dict[str, Any], Arrays]:
    try:
        return {}, {"keep": own_keep(kernel, about["keep"], tuple(about["shape"]))}
    except CallError as error:
        return {"error": str(error), "trace": _trace(error)}, {}


def _plain(x: Any) -> Any:
    """Return what an adapter states as JSON has it; its text where that cannot be."""
    try:
        return json.loads(json.dumps(x, default=list))
    except (TypeError, ValueError):
        return repr(x)[:300]


def _pulls(kernel: Any) -> list[str]:
    """Return the outputs whose gradients it takes: those that parameters of its backward and its attributes name."""
    owner = getattr(kernel, "forward", kernel)
    backward = getattr(kernel, "backward", None)
    try:
        named = list(inspect.signature(backward).parameters) if backward is not None else []
    except (TypeError, ValueError):
        named = []
    named += [*vars(owner)] if hasattr(owner, "__dict__") else []
    named += [*dir(kernel)]
    names = dict.fromkeys(name.removeprefix("d_") for name in named if name.startswith("d_"))
    return list(pulls(kernel, names))


def _answer(kernel: Any, about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> tuple[dict[str, Any], Arrays]:
    upstream = arrays.pop("d_out") if about["grad"] else None
    further = {name: arrays.pop(name) for name in about["further"] if name in arrays}
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in about["options"].items()}
    asked = options, about["dtype"], upstream, tuple(about["outputs"])
    inputs, along = split(arrays)
    more: dict[str, Any] = {"along": along, "asked": tuple(about["asked"]), "manner": about["manner"]}
    try:
        found = call(kernel, inputs, *asked, interrupts=False, further=further, **more)
    except CallError as error:
        return {"error": str(error), "trace": _trace(error)}, {}
    if isinstance(found, Decline):
        return {"decline": found.reason, "reference": _reference()}, {}
    size = sum(x.nbytes for x in found.tensors.values())
    if size > about["limit"] - 4096 * len(found.tensors):
        return {"error": f"returned {size} bytes, needs at most {about['limit']}", "trace": ""}, {}
    return {
        "dtypes": found.dtypes,
        "declined": found.declined,
        "judged": list(found.judged),
        "reference": _reference(),
    }, found.tensors


def _reference() -> bool:
    """Tell whether this process, which only calls others, has loaded a definition of refattn."""
    return any(name.startswith("refattn.mechanisms.") and name.endswith(".dense") for name in sys.modules)


def _trace(error: Exception) -> str:
    """Return the end of the traceback of what foreign code raised; nothing where the error is not its own."""
    cause = error.__cause__
    try:
        return "".join(traceback.format_exception(cause))[-SAID:] if cause is not None else ""
    except Exception:  # an error whose own text cannot be had
        return ""
