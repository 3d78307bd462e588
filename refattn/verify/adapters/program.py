"""A kernel in any language: a program that reads a case from a file and writes its results to another."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.args import Real, check
from refattn.files import read_regular, temporary_folder
from refattn.golden.storage_types import has_gradient
from refattn.golden.tensors import decode, encode
from refattn.messages import shown
from refattn.verify.adapters.adapter import LARGEST, CallError, LateCallError, LoadError
from refattn.verify.outcome import Decline
from refattn.workers import LateError, Process

DECLINED = 77
"""The exit code of a program that does not do what it was asked, as test suites have it for a test that is skipped."""


class Program:
    """A command as a kernel: it is run as ``COMMAND IN OUT`` for each case, and once more for gradients.

    IN is a safetensors file with the arguments by name in the type of the case, with ``d_out`` where gradients are
    asked. Its metadata has ``dtype``, and ``options`` as JSON. OUT has ``out`` and may have the further outputs, or has
    ``d_q``, ``d_k``, ... It may have values of equations by their ids beside them; `intermediates` holds those.

    When it has ended, what it has started ends too. Of what it prints the last `SAID` bytes are kept, and an OUT of
    more than `refattn.verify.adapters.adapter.LARGEST` and 64 times the size of IN is refused.

    Raises
    ------
    LoadError
        Where the command is no command line.

    Examples
    --------
    >>> import sys, refattn as ra
    >>> from refattn.verify import Program, verify_case
    >>> silent = Program(f'{sys.executable} -c "print(1)"', ("out",), seconds=30.0)
    >>> record = ra.mechanism("softmax")
    >>> outcome = verify_case(record, silent, record.case("tiny"), "float32")
    >>> outcome.status
    'raises'
    """

    def __init__(self, command: str, outputs: tuple[str, ...], seconds: float) -> None:
        check("command", command, str)
        check("outputs", outputs, [str])
        check("seconds", seconds, Real(0.0))
        try:
            self.command = shlex.split(command)
        except ValueError as error:
            raise LoadError(f"--exec: got {command!r}, needs a command line ({error})") from error
        if not self.command:
            raise LoadError("--exec: got '', needs a command line")
        if shutil.which(self.command[0]) is None:
            raise LoadError(f"--exec: got {self.command[0]!r}, needs a program that is there and can be run")
        self.outputs, self.seconds = outputs, seconds
        self.intermediates: dict[str, NDArray[Any]] = {}
        self._last: tuple[dict[str, Any], str, dict[str, Any]] = {}, "", {}

    def forward(self, *, dtype: str, **given: Any) -> tuple[Any, ...] | Decline:
        """Run the program on the arguments of a case."""
        arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
        self._last = arrays, dtype, {name: x for name, x in given.items() if name not in arrays}
        found = self._run(*self._last)
        if isinstance(found, Decline):
            return found
        self.intermediates = {name: x for name, x in found.items() if "." in name}
        return tuple(found.get(name) for name in self.outputs)

    def backward(self, d_out: NDArray[Any]) -> dict[str, Any] | Decline:
        """Run it again, now for gradients."""
        arrays, dtype, options = self._last
        found = self._run({**arrays, "d_out": d_out}, dtype, options)
        if isinstance(found, Decline):
            return found
        self.intermediates |= {name: x for name, x in found.items() if "." in name}
        gradients = {name[2:]: x for name, x in found.items() if name.startswith("d_")}
        return gradients or Decline("no gradients: OUT has no d_q, d_k, ...")

    def _run(
        self, arrays: Mapping[str, NDArray[Any]], dtype: str, options: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]] | Decline:
        stored = {name: (dtype if has_gradient(x) else x.dtype.name, x) for name, x in arrays.items()}
        about = {"dtype": dtype, "options": json.dumps(dict(options))}
        with temporary_folder() as folder:
            given, wanted = folder / "in.safetensors", folder / "out.safetensors"
            given.write_bytes(encode(stored, about))
            limit = LARGEST + 64 * given.stat().st_size
            code, said, complained = _ended([*self.command, given, wanted], self.seconds, wanted, limit)
            if code == DECLINED:
                return Decline(_last_line(said) or f"exit code {DECLINED}")
            if code:
                raise CallError(f"exit code {code}: {_last_line(complained) or 'it said nothing'}")
            try:
                return {name: x for name, (_, x) in decode(read_regular(wanted, limit)).items()}
            except FileNotFoundError:
                raise CallError("wrote no OUT") from None
            except OSError as error:
                raise CallError(f"OUT: {error.strerror}") from error
            except ValueError as error:
                raise CallError(f"OUT: {error}") from error


def _ended(command: Sequence[str | Path], seconds: float, wanted: Path, limit: int) -> tuple[int, str, str]:
    """Run a command to its end; return its exit code and the ends of what it printed to its output and its error."""

    def watch() -> None:
        with contextlib.suppress(OSError):  # there is none yet
            if (size := wanted.stat().st_size) > limit:
                raise CallError(f"OUT: got {size} bytes, needs at most {limit}")

    try:
        with Process(command) as process:
            code = process.wait(seconds, watch)
    except LateError as error:
        raise LateCallError(str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise CallError(f"cannot be run: {text}: {command[0]}") from error
    return code, process.out.text(), process.err.text()


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((shown(line.strip(), 300) for line in reversed(lines) if line.strip()), "")
