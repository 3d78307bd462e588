"""Results that a kernel has written to files, beside the golden vectors that they were computed from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from refattn.files import read_regular
from refattn.golden.storage_types import DTYPES
from refattn.golden.tensors import decode
from refattn.golden.vectors import GoldenSet
from refattn.mechanisms.record import Mechanism
from refattn.verify.adapters.adapter import LARGEST
from refattn.verify.freeze import thaw
from refattn.verify.outcome import Outcome, Report, Result
from refattn.verify.selfcheck.samples import shrunk
from refattn.verify.tolerance.compare import judge


def verify_files(
    mechanism: Mechanism,
    folder: Path,
    golden: GoldenSet,
    *,
    dtypes: Iterable[str] = DTYPES,
    grad: bool = False,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Report:
    """Judge ``CASE.DTYPE.safetensors`` of every case of a mechanism in a set; a file that is not there is declined.

    A file has ``out`` and may have the further outputs; with `grad` it needs the gradients of all inputs, too.
    """
    entries = [entry for entry in golden.cases if entry["mechanism"] == mechanism.name]
    plan = [(entry, dtype) for dtype in dtypes for entry in entries]
    outcomes = [_outcome(folder, golden, entry, dtype, grad) for entry, dtype in progress(plan)]
    return Report(mechanism.name, str(folder), grad, tuple(outcomes), record=mechanism)


def as_stored(mechanism: Mechanism, golden: GoldenSet) -> Mechanism:
    """Return the record with its cases in the size that the set has them in, for the report."""
    if golden.manifest["size"] != "small":
        return mechanism
    return replace(mechanism, cases=tuple(map(shrunk, mechanism.cases)))


def _outcome(folder: Path, golden: GoldenSet, entry: Mapping[str, Any], dtype: str, grad: bool) -> Outcome:
    about = (entry["case"], entry["kind"], dtype)
    if dtype not in entry["dtypes"]:
        return Outcome(*about, "declined", f"{dtype} does not hold the inputs")
    path = folder / f"{entry['case']}.{dtype}.safetensors"
    if not os.path.lexists(path):
        return Outcome(*about, "declined", "there is no file")
    try:
        found = decode(read_regular(path, LARGEST))
    except OSError as error:
        return Outcome(*about, "raises", f"{path.name}: {error.strerror}")
    except ValueError as error:
        return Outcome(*about, "raises", f"{path.name}: {error}")
    needed = ["out", *(f"d_{name}" for name in entry["inputs"] if grad and f"d_{name}" in entry["results"])]
    result = Result({name: x for name, (_, x) in found.items()}, {name: kind for name, (kind, _) in found.items()})
    truth = thaw(entry, golden.arrays(entry), dtype)
    verdicts = judge(result, truth)
    if missing := [name for name in needed if name not in found]:
        return Outcome(*about, "raises", f"{path.name}: has no {', '.join(missing)}", verdicts)
    status = "agrees" if all(v.agrees for v in verdicts) else "disagrees"
    return Outcome(*about, status, "", verdicts, (truth, result))
