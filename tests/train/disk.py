"""What a process does to the disk, call by call, so that a test can end it at any of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from refattn import files


def watch(patches: pytest.MonkeyPatch, before: Callable[..., None]) -> None:
    """Have `before` called with the name and arguments of each call; of a write in its middle."""

    class File:
        """Writes in two halves."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = open(*arguments, **options)

        def write(self, data: bytes) -> int:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            before("write")
            self.file.write(data[len(data) // 2 :])
            return len(data)

        def flush(self) -> None:
            before("flush")
            self.file.flush()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

    def told(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            before(name, *arguments)
            return function(*arguments, **options)

        return call

    patches.setattr(files, "open", told("open", File), raising=False)
    for name in ("open", "fsync", "replace", "rename", "listdir", "unlink", "rmdir", "mkdir"):
        patches.setattr(os, name, told(f"os.{name}", getattr(os, name)))
