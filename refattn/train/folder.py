"""The folder of a run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, and at the end ``result.json``,
``sample.txt`` and ``loss.png``.

What the folder says is compared with what is asked for, so that a run goes on as it began or not at all. A run holds
its folder, so that it touches nothing else, whatever becomes of the name; links in it are refused. Host side.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refattn import backends
from refattn.args import SHA256, Each, Maybe
from refattn.backends import blas
from refattn.files import (
    LEFT_BEHIND,
    MIB,
    HeldFolder,
    HeldPath,
    hold_folder,
    is_link,
    read_json,
    remove_left_behind,
    source_digest,
    write_atomically,
)
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.train import checkpoint
from refattn.train.data import Text
from refattn.train.settings import Settings, completed, differences, flat, from_json


class RunError(Exception):
    """A run cannot begin or go on; the message says why and what to do."""


LARGEST = 4 * MIB
"""The most bytes that ``config.json`` may have."""

_SCHEMA = {
    "settings": {"mechanism": str},
    "text": {"fingerprint": SHA256},
    "versions": Each(str),
    "machine": Maybe(Each(str)),
    "also": Maybe([Each(str)]),
}


FILES = ("config.json", "metrics.jsonl", "checkpoints", "result.json", "sample.txt", "loss.png")
"""What a run has in its folder."""


@dataclass
class Folder:
    """The folder of a run that `hold` has opened."""

    held: HeldFolder
    _opened: ExitStack
    _checkpoints: HeldFolder | None = None

    @property
    def path(self) -> Path:
        """The name that it had when it was opened."""
        return self.held.path

    @property
    def metrics(self) -> HeldPath:
        """The record of its steps."""
        return self.held / "metrics.jsonl"

    @property
    def checkpoints(self) -> HeldFolder:
        """The folder of its checkpoints, made where there is none, and the same from then on."""
        if self._checkpoints is None or "checkpoints" not in self.held.names():
            self._checkpoints = self._opened.enter_context(hold_folder(self.held / "checkpoints", make=True))
        return self._checkpoints

    def check_place(self) -> None:
        """Raise RunError where the folder, or that of its checkpoints, is no longer what has its name."""
        for folder, place in ((self.held, self.path), (self._checkpoints, self.held / "checkpoints")):
            if folder is not None and not folder.is_at(place):
                raise RunError(
                    f"out: {place} was moved or removed while the run worked in it; what is saved is where it is now, "
                    "and --resume goes on from there"
                )

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write a JSON file, all of it or nothing."""
        self.write(name, (json.dumps(facts, indent=1) + "\n").encode())

    def write(self, name: str, data: bytes) -> None:
        """Write a file, all of it or nothing."""
        write_atomically(self.held / name, data)


def stored_config(path: Path | HeldFolder, own: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return what ``config.json`` says of the run in a folder, or None where there is none.

    A file never chooses what code runs: what the library does not have, the user's `own` settings have to have, see
    `refattn.train.settings.from_json`.

    Raises
    ------
    RunError
        Where the file cannot be understood, or names what neither has.
    OSError
        Where it cannot be read, or is a link.
    """
    file = (path.path if isinstance(path, HeldFolder) else path) / "config.json"
    try:
        with hold_folder(path, follow=True) as held:
            config: dict[str, Any] = read_json(held / file.name, LARGEST, _SCHEMA)
        from_json(config["settings"], own)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error).removeprefix(f"{file}: ")
        raise RunError(f"{file}: is no configuration of a run that this version reads ({why})") from error
    return config


def of_mechanism(mechanism: str, resume: bool) -> Path:
    """Return runs/MECHANISM, or with the number after the last that there is; with `resume` that last one."""
    pattern = re.compile(rf"{re.escape(mechanism)}(?:-([1-9]\d*))?")
    found = [pattern.fullmatch(path.name) for path in Path("runs").glob(f"{mechanism}*")]
    last = max((int(match[1] or 1) for match in found if match), default=0)
    number = last if resume and last else last + 1
    return Path("runs", mechanism if number == 1 else f"{mechanism}-{number}")


@contextmanager
def hold(path: Path) -> Iterator[Folder]:
    """Give the folder, which is made where it is missing, and keep other processes from working in it meanwhile.

    The system lets go of it when the process ends, however that happens.
    """
    if path.is_symlink():
        raise RunError(f"out: got {path}, a link to {os.readlink(path)}; needs the folder itself")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunError(f"out: got {path}, but {error.filename} is a file; needs a folder") from error
    with ExitStack() as opened:
        held = opened.enter_context(hold_folder(path))
        try:
            fcntl.flock(held.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"out: another process works in {path}; wait for it, or give another folder") from None
        except OSError:  # a file system without locks
            pass
        yield Folder(held, opened)


def check_place(path: Path, text: Text) -> None:
    """Raise RunError where the folder lies in that of the text: the text would change with the run."""
    source = Path(text.source)
    if text.source not in ("stdlib", "repeats") and source.is_dir() and path.resolve().is_relative_to(source.resolve()):
        raise RunError(
            f"out: {path} lies in the folder of the text, {text.source}, so the run would change its own text; "
            "give a folder elsewhere"
        )


def begin(
    folder: Folder,
    settings: Settings,
    text: Text,
    *,
    resume: bool,
    warn: Callable[[str], None],
    exact: bool = False,
) -> bool:
    """Write ``config.json`` of a new run, or with `resume` compare it; return whether there was a run.

    `warn` is told where versions, the code or the machine are not those that the run began with: last bits may differ
    from there on, and the field "also" of the configuration says so. With `exact` that is an error, as it is where a
    part of the run was made with others before. With more steps the run goes on beyond its end, and the field "lengths"
    has all numbers of steps that it had.

    Raises
    ------
    RunError
        Where the folder holds a run and `resume` is false, something else, a link, or a run with other settings or
        another text.
    OSError
        Where the folder cannot be written.
    """
    path = folder.path
    for name in FILES:
        if is_link(folder.held / name):
            raise RunError(f"out: {path / name} is a link; needs the folder of a run that holds its own files")
    config = {
        "settings": settings.to_json(),
        "text": {"source": text.source, "fingerprint": text.fingerprint, "files": vars(text.files)}
        | {"train_bytes": len(text.train), "heldout_bytes": len(text.heldout)},
        "versions": versions(settings.backend),
        "machine": machine() | _source(settings.model.record),
    }
    stored = stored_config(folder.held, vars(settings))
    if stored is None:
        # A process that was killed while it wrote its configuration leaves a part of that.
        if not all(map(LEFT_BEHIND.fullmatch, folder.held.names())):
            raise RunError(f"out: {path} holds files that are no run; needs a new or an empty folder")
        remove_left_behind(folder.held)
        folder.write_json("config.json", config)
        return False
    if not resume:
        raise RunError(f"out: {path} holds a run already; --resume goes on with it, or give another folder")
    _compare(f"the run in {path}", stored["settings"], config["settings"])
    first = stored["settings"]["steps"]
    longer = settings.steps > first
    if longer and exact:
        raise RunError(f"exact: got steps {settings.steps}, needs the {first} that the run in {path} began with")
    if stored["text"]["fingerprint"] != text.fingerprint:
        raise RunError(
            f"data: the text {text.source!r} is not the one that the run in {path} began with (another version of "
            "Python, or changed files): it cannot go on as it began"
        )
    before = stored["versions"] | (stored.get("machine") or {})
    now = config["versions"] | config["machine"]
    changed = {name: x for name, x in now.items() if before.get(name) != x}
    told = [f"{name} was {before.get(name, 'not recorded')} and is {x}" for name, x in changed.items()]
    if told and exact:
        raise RunError(
            f"exact: {'; '.join(told)}, so that last bits may differ; needs what the run in {path} began with"
        )
    also = stored.get("also") or []
    if also and exact:
        others = "; ".join(f"{name} {now}" for each in also for name, now in each.items())
        raise RunError(f"exact: a part of the run in {path} was made with {others}, so that last bits may differ")
    for line in told:
        warn(f"{line}: from here on last bits may differ")
    if longer:
        warn(f"{settings.steps} steps in place of {first}: from here on the learning rate follows the longer schedule")
        lengths = [*stored.get("lengths", [first]), settings.steps]
        stored = {**stored, "settings": config["settings"], "lengths": lengths}
    if changed and changed not in also:
        stored = {**stored, "also": [*also, changed]}
        longer = True
    if longer:
        folder.write_json("config.json", stored)
    remove_left_behind(folder.held)
    return True


def compare_with_checkpoint(found: checkpoint.Checkpoint, settings: Settings) -> None:
    """Raise RunError where a checkpoint is from a run with other settings, or more steps."""
    _compare(f"the checkpoint of step {found.step}", found.facts.get("settings", {}), settings.to_json())


def versions(backend: str) -> dict[str, str]:
    """Return the versions that results may depend on."""
    library = backends.get(backend)
    return {
        "refattn": sys.modules["refattn"].__version__,  # the public face leads here: an import would be a circle
        "python": platform.python_version(),
        "numpy": backends.get("numpy").version(),
        library.name: library.version(),
    }


def machine() -> dict[str, str]:
    """Return what else last bits may depend on: the processor, the kernels of BLAS, and the source of this package."""
    return {"processor": _processor(), "BLAS": ", ".join(blas.kernels()), "source": source_digest()}


def _source(mechanism: Mechanism) -> dict[str, str]:
    """Return the source of the package of a mechanism, if it is another one's."""
    own = mechanism.name in registry.list_mechanisms() or not mechanism.home
    return {} if own else {f"source of {mechanism.name}": source_digest(mechanism.home)}


def _processor() -> str:
    """Return the model of the processor, as Linux tells it; elsewhere its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            found = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        found = []
    return found[0] if found else platform.machine()


def _compare(what: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    # A setting that came later had its default all along. Where the text lies may change; that it is the same is told
    # by its fingerprint.
    stored = completed(stored)
    same = ("data", "steps") if stored["steps"] < wanted["steps"] else ("data",)  # a run may go on beyond its end
    if names := [name for name in differences(stored, wanted) if name not in same]:
        told = "; ".join(f"{n}: got {flat(wanted).get(n)!r}, {what} has {flat(stored).get(n)!r}" for n in names)
        raise RunError(f"{told}. A run goes on as it began; give another folder for a new one")
