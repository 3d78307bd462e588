"""The folder of a run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, and at the end ``result.json``,
``sample.txt`` and ``loss.png``.

What the folder says is compared with what is asked for, so that a run goes on as it began or not at all. Host side.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import refattn
from refattn import backends
from refattn.train import checkpoint
from refattn.train.data import Text
from refattn.train.settings import Settings, completed, differences, from_json


class RunError(Exception):
    """A run cannot begin or go on; the message says why and what to do."""


@dataclass(frozen=True)
class Folder:
    """The paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write a JSON file, all of it or nothing."""
        checkpoint.write_atomically(self.path / name, (json.dumps(facts, indent=1) + "\n").encode())


def stored_config(path: Path) -> dict[str, Any] | None:
    """Return what ``config.json`` says of the run in a folder, or None where there is none.

    Raises
    ------
    RunError
        Where the file cannot be understood.
    OSError
        Where it cannot be read.
    """
    file = Folder(path).config
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        config: dict[str, Any] = json.loads(data)
        from_json(config["settings"])
        config["text"]["fingerprint"], dict(config["versions"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{file}: is no configuration of a run that this version reads ({why})") from error
    return config


@contextmanager
def hold(path: Path) -> Iterator[Folder]:
    """Give the folder, which is made where it is missing, and keep other processes from working in it meanwhile.

    The system lets go of it when the process ends, however that happens.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunError(f"out: got {path}, but {error.filename} is a file; needs a folder") from error
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"out: another process works in {path}; wait for it, or give another folder") from None
        except OSError:  # a file system without locks
            pass
        yield Folder(path)
    finally:
        os.close(handle)


def check_place(path: Path, text: Text) -> None:
    """Raise RunError where the folder lies in that of the text: the text would change with the run."""
    source = Path(text.source)
    if text.source != "stdlib" and source.is_dir() and path.resolve().is_relative_to(source.resolve()):
        raise RunError(
            f"out: {path} lies in the folder of the text, {text.source}, so the run would change its own text; "
            "give a folder elsewhere"
        )


def begin(folder: Folder, settings: Settings, text: Text, *, resume: bool, warn: Callable[[str], None]) -> bool:
    """Write ``config.json`` of a new run, or with `resume` compare it; return whether there was a run.

    Raises
    ------
    RunError
        Where the folder holds a run and `resume` is false, something else, or a run with other settings or another
        text.
    OSError
        Where the folder cannot be written.
    """
    path = folder.path
    config = {
        "settings": settings.to_json(),
        "text": {"source": text.source, "fingerprint": text.fingerprint, "files": vars(text.files)}
        | {"train_bytes": len(text.train), "heldout_bytes": len(text.heldout)},
        "versions": versions(settings.backend),
    }
    stored = stored_config(path)
    if stored is None:
        # A process that was killed while it wrote its configuration leaves a part of that.
        if any(entry.name != "config.json.part" for entry in path.iterdir()):
            raise RunError(f"out: {path} holds files that are no run; needs a new or an empty folder")
        folder.write_json("config.json", config)
        return False
    if not resume:
        raise RunError(f"out: {path} holds a run already; --resume goes on with it, or give another folder")
    _compare(f"the run in {path}", stored["settings"], config["settings"])
    if stored["text"]["fingerprint"] != text.fingerprint:
        raise RunError(
            f"data: the text {text.source!r} is not the one that the run in {path} began with (another version of "
            "Python, or changed files): it cannot go on as it began"
        )
    for name, version in config["versions"].items():
        if (old := stored["versions"].get(name)) != version:
            warn(f"{name} was {old} and is {version}: from here on last bits may differ")
    return True


def compare_with_checkpoint(found: checkpoint.Checkpoint, settings: Settings) -> None:
    """Raise RunError where a checkpoint is from a run with other settings."""
    _compare(f"the checkpoint of step {found.step}", found.facts.get("settings", {}), settings.to_json())


def versions(backend: str) -> dict[str, str]:
    """Return the versions that results may depend on."""
    library = backends.get(backend)
    return {
        "refattn": refattn.__version__,
        "python": platform.python_version(),
        "numpy": backends.get("numpy").version(),
        library.name: library.version(),
    }


def _compare(what: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    # A setting that came later had its default all along. Where the text lies may change; that it is the same is told
    # by its fingerprint.
    stored = completed(stored)
    if names := [name for name in differences(stored, wanted) if name != "data"]:
        told = "; ".join(f"{n}: got {_value(wanted, n)}, {what} has {_value(stored, n)}" for n in names)
        raise RunError(f"{told}. A run goes on as it began; give another folder for a new one")


def _value(settings: Mapping[str, Any], name: str) -> Any:
    head, _, option = name.partition(".")
    found = settings.get(head, {}).get(option) if option else settings.get(name)
    return repr(found)
