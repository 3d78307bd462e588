"""Many runs: units of work that need nothing of each other, in processes of this machine or on a Dask cluster.

A unit is a function of a module with its arguments, and gives what JSON can say; its text is the same wherever it ran,
so that the order in which units end and where they ran change no byte of what is made of them. With a folder each unit
that has ended is a file there, and a campaign that was stopped goes on with the others.

What starts workers, sends units to them, and sends those again whose worker has died is Dask, which is there already:
`Where.scheduler` is its address.
"""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import refattn
from refattn import backends, workers
from refattn.args import One
from refattn.files import (
    MIB,
    HeldFolder,
    HeldPath,
    Place,
    hold_folder,
    read_json,
    reason,
    remove_left_behind,
    source_digest,
    write_atomically,
)

ENDED = "the process that ran it ended, of a lack of memory perhaps"

LARGEST = 64 * MIB
"""The most bytes that the file of a unit may have."""


class CampaignError(RuntimeError):
    """A campaign that cannot begin or go on: no cluster, other versions over there, a unit that ends its process."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of work.

    Attributes
    ----------
    name
        What tells it from all others: two units of one name give the same, with the same versions.
    function
        Of a module that workers can import; it returns what JSON can say.
    arguments
        Its arguments, which can be pickled.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Where:
    """Where units run, and where those that have ended are kept.

    Attributes
    ----------
    jobs
        Processes of this machine; None means one for each CPU that may be used. With 1 all run in this process.
    scheduler
        The address of a Dask scheduler, such as tcp://10.0.0.1:8786; its workers run the units then.
    keep
        The folder of what has ended; None keeps nothing.
    tell
        Takes lines on what happened on the way: units that were there before, workers that have gone.
    """

    jobs: int | None = None
    scheduler: str | None = None
    keep: Path | None = None
    tell: Callable[[str], None] = _say

    @property
    def plain(self) -> bool:
        """Whether all runs in this process and nothing is kept."""
        return self.jobs == 1 and self.scheduler is None and self.keep is None


HERE = Where()
"""On the CPUs of this machine; nothing is kept."""


def run(
    units: Sequence[Unit],
    where: Where,
    *,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    lost: Callable[[Unit], Any] | None = None,
) -> Iterator[tuple[Unit, Any]]:
    """Run units.

    Parameters
    ----------
    units
        What is to do.
    where
        Where, and what is kept.
    progress
        Wraps the sequence of units that end, for a progress bar.
    lost
        Returns what stands for a unit that ended the process it ran in, on a cluster again and again; without it that
        is an error.

    Yields
    ------
    tuple[Unit, Any]
        Each unit with what it gave: those that are kept, then the others as they end.

    Raises
    ------
    CampaignError
        Where there is no cluster, a worker has other versions than this process, or a unit is lost.
    OSError, ValueError
        Where the folder cannot be read or written, or is a link.
    """
    if where.keep is None:
        yield from _run(units, where, {}, progress, lost)
        return
    where.keep.mkdir(parents=True, exist_ok=True)
    with hold_folder(where.keep) as folder:
        remove_left_behind(folder)
        yield from _run(units, where, _files(units, folder), progress, lost)


def _run(
    units: Sequence[Unit],
    where: Where,
    files: dict[Unit, HeldPath],
    progress: Callable[[Sequence[Any]], Iterable[Any]],
    lost: Callable[[Unit], Any] | None,
) -> Iterator[tuple[Unit, Any]]:
    known = {}
    for unit, file in files.items():
        try:
            known[unit] = _kept(file, unit)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            where.tell(f"{reason(error, named=True)}: it is damaged; the unit is run again")
    yield from known.items()
    if known:
        where.tell(f"{len(known)} of {len(units)} units had ended before: {where.keep}")
    todo = [unit for unit in units if unit not in known]
    if not todo:
        return
    if where.scheduler is not None:
        ended = _on_cluster(todo, where.scheduler, where.tell)
    else:
        jobs = min(backends.workers() if where.jobs is None else where.jobs, len(todo))
        ended = _in_processes(todo, jobs) if jobs > 1 else ((unit, call(unit, versions())) for unit in todo)
    for unit, text in progress(_Ended(ended, len(todo))):
        if text is None:
            if lost is None:
                raise CampaignError(f"{unit.name}: {ENDED}")
            yield unit, lost(unit)
            continue
        result = json.loads(text)
        if unit in files:
            kept = {"unit": unit.name, "versions": versions(), "result": result, "sha256": _digest(result)}
            try:
                write_atomically(files[unit], json.dumps(kept).encode())
            except OSError as error:  # of a full disk; what is computed is worth more
                where.tell(f"{reason(error, named=True)}: from here on nothing is kept")
                files = {}
        yield unit, result


def _kept(file: Place, unit: Unit) -> Any:
    """Return the result of a unit that is kept; OSError or ValueError if it is not there as it was written."""
    schema = {"unit": One((unit.name,)), "versions": dict, "result": None, "sha256": str}
    found = read_json(file, LARGEST, schema)
    if found["sha256"] != _digest(found["result"]):
        raise ValueError(f"{file}: was changed after it was written")
    return found["result"]


def _digest(result: Any) -> str:
    return sha256(json.dumps(result).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """Return what results depend on beside their units: versions, and a digest of the source of refattn."""
    found = {each.name: each.version for each in metadata.distributions() if each.name in _LIBRARIES}
    ours = f"{refattn.__version__} (source {source_digest()[:12]})"
    return {"python": platform.python_version(), "refattn": ours} | dict(sorted(found.items()))


_LIBRARIES = ("array-api-compat", "array-api-strict", "jax", "mpmath", "numpy", "scipy", "torch")


_alone = threading.Lock()
"""Workers of Dask may have several threads, and units set what the whole process has: BLAS's threads, tiles."""


def call(unit: Unit, wanted: dict[str, str]) -> str:
    """Run a unit here, where the versions have to be these; return what it gives as JSON."""
    here = versions()
    if differ := sorted(name for name in {*here, *wanted} if here.get(name) != wanted.get(name)):
        theirs, ours = (", ".join(f"{name} {of.get(name, 'missing')}" for name in differ) for of in (here, wanted))
        raise CampaignError(f"versions: the worker on {platform.node()} has {theirs}; the client has {ours}")
    with _alone:
        return json.dumps(unit.function(*unit.arguments))


def _files(units: Sequence[Unit], folder: HeldFolder) -> dict[Unit, HeldPath]:
    """Return where each unit is kept."""
    about = json.dumps(versions())
    return {unit: folder / f"{sha256(f'{unit.name} {about}'.encode()).hexdigest()[:32]}.json" for unit in units}


class _Ended(Sequence[Any]):
    """Units in the order in which they end, as a sequence whose length is known."""

    def __init__(self, ended: Iterable[tuple[Unit, str | None]], size: int) -> None:
        self.ended, self.size = ended, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ended)

    def __getitem__(self, at: Any) -> Any:
        raise TypeError("units come in the order in which they end")


def _in_processes(units: Sequence[Unit], jobs: int) -> Iterator[tuple[Unit, str | None]]:
    main = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m tools.rates`, whose units are its own
    name = "" if main is None or main.name.endswith("__main__") else main.name
    questions = [pickle.dumps((name, pickle.dumps((unit, versions())))) for unit in units]
    for n, found in workers.each(f"{__name__}:answer", questions, jobs):
        text, error = (None, None) if found is None else pickle.loads(found)
        if error is not None:
            raise error
        yield units[n], text


def answer(question: bytes) -> bytes:
    """Run a unit in another process: return its text, or what it raised."""
    main, asked = pickle.loads(question)
    if main:
        sys.modules["__main__"] = importlib.import_module(main)
    try:
        return pickle.dumps((call(*pickle.loads(asked)), None))
    except Exception as error:
        try:
            pickle.loads(found := pickle.dumps((None, error)))
        except Exception:  # an error that cannot be sent as it is
            found = pickle.dumps((None, CampaignError(f"{type(error).__name__}: {error}")))
        return found


def _on_cluster(units: Sequence[Unit], address: str, tell: Callable[[str], None]) -> Iterator[tuple[Unit, str | None]]:
    try:
        import distributed
    except ImportError as error:
        raise CampaignError(f"--scheduler: needs Dask: pip install 'refattn[dask]' ({error})") from error
    try:
        client = distributed.Client(address, set_as_default=False)
    except Exception as error:  # of what listens there and is no scheduler, anything
        raise CampaignError(f"--scheduler: got {address!r}, needs the address of a Dask scheduler ({error})") from error
    with client:
        if not client.scheduler_info()["workers"]:
            tell(f"{address} has no workers yet; they are waited for")
        running = {client.submit(call, unit, versions(), pure=False): unit for unit in units}
        names = {future.key for future in running}
        try:
            for future in distributed.as_completed(running, loop=client.loop):
                unit = running.pop(future)  # a result that nobody holds is not computed again where its worker dies
                try:
                    yield unit, future.result()
                except distributed.KilledWorker:
                    yield unit, None
        except CancelledError as error:
            raise CampaignError(f"--scheduler: {address} has gone") from error
        for _, event in client.get_events("all"):
            again = names.intersection((*event.get("processing-tasks", ()), *event.get("lost-computed-tasks", ())))
            if event.get("action") == "remove-worker" and again:
                tell(f"the worker {event['worker']} has gone; {len(again)} units that it had were run again")
