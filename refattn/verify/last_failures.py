"""Which cases failed last time, kept in the cache folder: the next run of the same kernel begins with them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from refattn.files import read_json, write_atomically
from refattn.verify.outcome import Report

LARGEST = 1 << 20
"""Bytes of such a file at most."""


def _file(mechanism: str, kernel: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(f"{mechanism} {kernel}".encode(errors="surrogatepass")).hexdigest()
    return Path(base) / "refattn" / "failed" / f"{digest[:32]}.json"


def recall(mechanism: str, kernel: str) -> frozenset[tuple[str, str]]:
    """Return the cases that failed when a kernel of this name was last run, each with its type; none if not known."""
    try:
        found = read_json(_file(mechanism, kernel), LARGEST)
        return frozenset((str(case), str(dtype)) for case, dtype in found)
    except (OSError, RuntimeError, ValueError, TypeError):
        return frozenset()


def remember(mechanism: str, kernel: str, report: Report, before: Iterable[tuple[str, str]]) -> None:
    """Keep which cases fail, if the folder can be written; what failed `before` and was not run again stays."""
    ran = {(one.case, one.dtype) for one in report.outcomes}
    failed = sorted({*before} - ran | {(one.case, one.dtype) for one in report.failed})
    with contextlib.suppress(OSError, RuntimeError):
        file = _file(mechanism, kernel)
        if failed:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(failed).encode())
        else:
            file.unlink(missing_ok=True)
