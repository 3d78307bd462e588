"""An implementation in any language: a program that reads a case from a file and writes its results to another."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.tensors import decode, encode
from refattn.verify.foreign.adapter import CallError, LoadError
from refattn.verify.outcome import Decline

DECLINED = 77
"""The exit code of a program that does not do what it was asked, as test suites have it for a test that is skipped."""


class Program:
    """A command as an implementation: it is run as ``COMMAND IN OUT`` for each case, and once more for gradients.

    IN is a safetensors file with the arguments by name in the type of the case, with ``d_out`` where gradients are
    asked. Its metadata has ``dtype``, and ``options`` as JSON. OUT has ``out`` and may have the further outputs, or has
    ``d_q``, ``d_k``, ... It may have values of equations by their ids beside them; `intermediates` holds those.

    Raises
    ------
    LoadError
        Where the command is no command line.
    """

    def __init__(self, command: str, outputs: tuple[str, ...], seconds: float) -> None:
        try:
            self.command = shlex.split(command)
        except ValueError as error:
            raise LoadError(f"--exec: got {command!r}, needs a command line ({error})") from error
        if not self.command:
            raise LoadError("--exec: got '', needs a command line")
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
        stored = {name: ("bool" if x.dtype == np.bool_ else dtype, x) for name, x in arrays.items()}
        about = {"dtype": dtype, "options": json.dumps(dict(options))}
        with tempfile.TemporaryDirectory() as folder:
            given, wanted = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
            given.write_bytes(encode(stored, about))
            try:
                ended = subprocess.run(
                    [*self.command, given, wanted], capture_output=True, timeout=self.seconds, stdin=subprocess.DEVNULL
                )
            except subprocess.TimeoutExpired:
                raise CallError(f"did not end within {self.seconds:g} s") from None
            except OSError as error:
                raise CallError(f"cannot be run: {error.strerror}: {self.command[0]}") from error
            if ended.returncode == DECLINED:
                return Decline(_last_line(ended.stdout) or f"exit code {DECLINED}")
            if ended.returncode:
                raise CallError(f"exit code {ended.returncode}: {_last_line(ended.stderr) or 'it said nothing'}")
            if not wanted.is_file():
                raise CallError("wrote no OUT")
            try:
                return {name: x for name, (_, x) in decode(wanted.read_bytes()).items()}
            except ValueError as error:
                raise CallError(f"OUT: {error}") from error


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
