"""The folder of a run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, and at the end ``result.json``,
``sample.txt`` and ``loss.png``.

What the folder says is compared with what is asked for, so that a run goes on as it began or not at all. Host side.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import refattn
from refattn import backends
from refattn.train import checkpoint
from refattn.train.data import Text
from refattn.train.settings import Settings, differences


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


def stored_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a folder, or None where there is none.

    Raises
    ------
    RunError
        Where ``config.json`` cannot be understood.
    """
    file = Folder(path).config
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        settings = json.loads(text)["settings"]
        if not isinstance(settings, dict):
            raise TypeError("settings is no object")
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{file}: is no configuration of a run ({error})") from error
    return settings


def begin(path: Path, settings: Settings, text: Text, *, resume: bool, warn: Callable[[str], None]) -> Folder:
    """Return the folder of a new run, or with `resume` that of the run which goes on; ``config.json`` is written.

    Raises
    ------
    RunError
        Where the folder holds a run and `resume` is false, something else, or a run with other settings or another
        text.
    OSError
        Where the folder cannot be written.
    """
    folder = Folder(path)
    config = {
        "settings": settings.to_json(),
        "text": {"source": text.source, "fingerprint": text.fingerprint, "files": vars(text.files)}
        | {"train_bytes": len(text.train), "heldout_bytes": len(text.heldout)},
        "versions": versions(settings.backend),
    }
    known = stored_settings(path)
    if known is None:
        if path.is_dir() and any(path.iterdir()):
            raise RunError(f"out: {path} holds files that are no run; needs a new or an empty folder")
    elif not resume:
        raise RunError(f"out: {path} holds a run already; --resume goes on with it, or give another folder")
    else:
        stored = json.loads(folder.config.read_text(encoding="utf-8"))
        _compare(f"the run in {path}", known, config["settings"])
        if stored.get("text", {}).get("fingerprint") != text.fingerprint:
            raise RunError(
                f"data: the text {text.source!r} is not the one that the run in {path} began with (another version of "
                "Python, or changed files): it cannot go on as it began"
            )
        for name, version in config["versions"].items():
            if (old := stored.get("versions", {}).get(name)) != version:
                warn(f"{name} was {old} and is {version}: from here on last bits may differ")
        return folder
    path.mkdir(parents=True, exist_ok=True)
    folder.write_json("config.json", config)
    return folder


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
    if names := differences(stored, wanted):
        told = "; ".join(f"{n}: got {_value(wanted, n)}, {what} has {_value(stored, n)}" for n in names)
        raise RunError(f"{told}. A run goes on as it began; give another folder for a new one")


def _value(settings: Mapping[str, Any], name: str) -> Any:
    head, _, option = name.partition(".")
    found = settings.get(head, {}).get(option) if option else settings.get(name)
    return repr(found)
