"""A set of golden vectors: a folder with one safetensors file for each case, and a manifest that vouches for all.

The manifest, manifest.json, has the hash of each file, of all of them together, and of itself; it is written last. A
set that is empty, incomplete, changed or cut off is never read as a whole one. What stands in files and manifest is
specified in docs/vectors.md.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from refattn import interrupts
from refattn.args import SHA256, Each, Matching, Real, Whole, check_json, checked
from refattn.files import (
    LEFT_BEHIND,
    MIB,
    HeldFolder,
    HeldPath,
    create,
    exchange,
    fresh_name,
    hold_folder,
    left_behind,
    lock,
    parse_json,
    read_regular,
    remove,
    rename,
    write_atomically,
)
from refattn.golden.tensors import decode
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism

FORMAT = 1
"""Version of the format: it goes up where a reader of the last one would misread."""

MANIFEST = "manifest.json"

LARGEST = {"manifest": 64 * MIB, "case": 1024 * MIB}
"""The most bytes that a file of either kind may have."""

_NAME = Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a name of letters, digits, '.', '_' and '-'")

_CASE = {
    "mechanism": _NAME,
    "case": _NAME,
    "kind": str,
    "purpose": str,
    "options": dict,
    "inputs": Each(
        {"shape": [Whole()], "design": str, "numbers": Each(Real()), "stream": str, "seed": Whole()},
    ),
    "dtypes": [str],
    "equations": Each({"noise": Real(0.0, infinite=True), "differs": Real(0.0, infinite=True)}),
    "results": Each(
        {
            "noise": Real(0.0, infinite=True),
            "stored": Each(str),
            "bias": Each(Real(0.0, infinite=True)),
            "exact": [str],
        }
    ),
    "file": str,
    "bytes": Whole(0, LARGEST["case"]),
    "sha256": SHA256,
}

_SCHEMA = {
    "size": str,
    "producer": Each(str),
    "generator": str,
    "inputs": str,
    "truth": str,
    "limits": Each(Real(0.0)),
    "conventions": Each(str),
    "mechanisms": Each({"title": str, "source": str, "defaults": dict, "outputs": [str], "equations": Each(dict)}),
    "count": Whole(),
    "sha256": SHA256,
    "cases": [_CASE],
    "manifest_sha256": SHA256,
}

SHIPPED = Path(__file__).with_name("frozen")
"""The set that comes with the package."""


def shipped(mechanism: Mechanism) -> Path:
    """Return the folder of the golden vectors that come with a mechanism: of another package `golden` beside its files.

    >>> import refattn as ra
    >>> from refattn.golden import vectors
    >>> vectors.shipped(ra.mechanism("softmax")) == vectors.SHIPPED
    True
    """
    file = getattr(mechanism.definition, "__file__", None)
    own = mechanism.name not in registry.list_mechanisms()
    return Path(file).with_name("golden") if own and file else SHIPPED


def without_vector(found: GoldenSet, mechanism: Mechanism) -> str:
    """Return in words that designed cases of a mechanism are in no file of a set, "" where all are."""
    stored = {entry["case"] for entry in found.cases if entry["mechanism"] == mechanism.name}
    if not (names := [case.name for case in mechanism.cases if case.name not in stored]):
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    count = "1 designed case has" if len(names) == 1 else f"{len(names)} designed cases have"
    return f"{count} no vector ({', '.join(names[:3])}{more}): refattn golden write --replace"


class SetError(ValueError):
    """A folder that is no whole set; `empty` where it holds nothing at all."""

    def __init__(self, message: str, *, empty: bool = False) -> None:
        super().__init__(message)
        self.empty = empty


@dataclass(frozen=True)
class GoldenSet:
    """A set whose manifest, and whose files, were found to be what the manifest says.

    Attributes
    ----------
    folder
        Where it is.
    manifest
        As docs/vectors.md specifies it; ``manifest["cases"]`` is a list with an entry for each case.
    """

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def cases(self) -> list[dict[str, Any]]:
        """The entries of all cases."""
        return list(self.manifest["cases"])

    def arrays(self, entry: Mapping[str, Any]) -> dict[str, tuple[str, NDArray[Any]]]:
        """Return the arrays of a case by name, with the name of the type that each is stored in.

        Raises SetError, which names the file, where it was changed or is no safetensors file.
        """
        data = _checked(self.folder, entry)
        try:
            return decode(data)
        except ValueError as error:
            raise SetError(f"{self.folder / entry['file']}: {error}") from error


def write(
    folder: Path, about: Mapping[str, Any], cases: Iterable[tuple[dict[str, Any], bytes]], *, replace: bool = False
) -> dict[str, Any]:
    """Write a set into a folder that is new or empty, or in the place of a whole set; return its manifest.

    `about` is what the manifest says of all cases, `cases` gives of each its entry and the bytes of its file: the entry
    has at least ``mechanism`` and ``case``, and is given ``file``, ``bytes`` and ``sha256``.

    The set is made in a folder of its own beside that one and comes to its place when it is whole, so that a process
    that is killed leaves the set that was there, or the new one. An empty folder that is a mount is written to as it
    is, the manifest last. What writers that were killed have left beside the place is removed.

    Raises
    ------
    SetError
        If the folder is a link or holds something; with `replace`, something else than a whole set, or is a mount.
    """
    if folder.is_symlink():
        raise SetError(f"{folder}: is a link, needs the folder itself")
    place = folder.resolve()
    if os.path.ismount(place):
        if _is_taken(folder, replace):
            raise SetError(f"{folder}: got a set at the root of a mount, needs another folder to replace it")
        with hold_folder(place) as own, interrupts.undo(partial(_empty, own)):
            try:
                return _write(own, about, cases)
            except BaseException:
                with suppress(OSError):
                    _empty(own)
                raise
    place.parent.mkdir(parents=True, exist_ok=True)
    with hold_folder(place.parent) as home:
        _put_back(home / place.name)
        taken = _is_taken(folder, replace)
        for left in left_behind(home, folders=True):
            with suppress(OSError):  # of another user, perhaps
                _remove(left)
        with _new_part(home) as own:
            part = home / own.path.name
            manifest = _write(own, about, cases)
            if taken:
                _replace(part, home / place.name)
            else:
                rename(part, home / place.name)
    return manifest


def _is_taken(folder: Path, replace: bool) -> bool:
    """Tell whether a set is there, which may be replaced; SetError if it may not, or is something else."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    if not replace:
        raise SetError(f"{folder}: got a folder with something in it, needs a new or an empty one")
    _vouch_for(folder)
    return True


@contextmanager
def _new_part(home: HeldFolder) -> Iterator[HeldFolder]:
    """Give a new folder, which is locked, so that no other process removes it; it is removed if the block raises."""
    with ExitStack() as opened:
        while True:
            part = home / fresh_name()
            with suppress(FileNotFoundError):  # one who removes what is left behind was quicker
                own = opened.enter_context(hold_folder(part, make=True))
                if lock(part, own.handle):
                    break

        def undo() -> None:
            with suppress(OSError):
                if own.is_at(part):
                    _remove(part)

        try:
            with interrupts.undo(undo):
                yield own
        except BaseException:
            undo()
            raise


def _replace(part: HeldPath, place: HeldPath) -> None:
    """Bring a set to the place of another, which is removed."""
    with hold_folder(place) as old:
        if not lock(place, old.handle):
            raise SetError(f"{place}: got a set that another process replaces at this moment")
        _vouch_for(old.path)  # again: time has passed
        changed = SetError(f"{place}: another folder came to its place meanwhile, which stays")
        if exchange(part, place):
            aside = part
            if not old.is_at(aside):
                exchange(part, place)
                raise changed
        else:
            aside = place.folder / f"{fresh_name().removesuffix('part')}old-{place.name}"
            rename(place, aside)
            try:
                if not old.is_at(aside):
                    raise changed
                rename(part, place)
            except BaseException:
                rename(aside, place)
                raise
        if not _remove(aside):
            raise SetError(f"{place}: is written; {aside}, which was there before, holds other files and stays")


def _put_back(place: HeldPath) -> None:
    """Put back the set that a process had set aside when it was killed; remove it if its place is taken."""
    names = re.compile(rf"\.refattn-[0-9a-f]{{16}}\.old-{re.escape(place.name)}")
    for aside in left_behind(place.folder, names, folders=True):
        with suppress(OSError):
            with hold_folder(aside) as folder:
                removed = MANIFEST not in folder.names()  # which goes first
            if removed or place.name in place.folder.names():
                _remove(aside)
            else:
                rename(aside, place)


def _remove(place: HeldPath) -> bool:
    """Remove the folder of a set, or a part of one; False if it has anything else in it: then it stays as it is."""
    with hold_folder(place) as folder:
        if emptied := _empty(folder):
            os.rmdir(place.name, dir_fd=place.folder.handle)
    return emptied


def _empty(folder: HeldFolder) -> bool:
    """Remove all that is in the folder of a set, the manifest first; False if it has anything else in it."""
    with ExitStack() as opened:
        inner: list[HeldFolder] = []
        files: list[HeldPath] = []
        for name in folder.names():
            if _is(folder / name, stat.S_ISREG) and (name == MANIFEST or LEFT_BEHIND.fullmatch(name)):
                files.append(folder / name)
            elif _is(folder / name, stat.S_ISDIR) and re.fullmatch(_NAME.pattern, name):
                inner.append(opened.enter_context(hold_folder(folder / name)))
            else:
                return False
        for own in inner:
            for name in own.names():
                if not _is(own / name, stat.S_ISREG) or not re.fullmatch(rf"{_NAME.pattern}\.safetensors", name):
                    return False
                files.append(own / name)
        for file in files:
            remove(file)
        for own in inner:
            os.rmdir(own.path.name, dir_fd=folder.handle)
    return True


def _is(place: HeldPath, kind: Callable[[int], bool]) -> bool:
    return kind(os.stat(place.name, dir_fd=place.folder.handle, follow_symlinks=False).st_mode)


def _write(
    folder: HeldFolder, about: Mapping[str, Any], cases: Iterable[tuple[dict[str, Any], bytes]]
) -> dict[str, Any]:
    entries = []
    for entry, data in cases:
        for key in ("mechanism", "case"):
            check_json(entry[key], _NAME, key)
        name = f"{entry['mechanism']}/{entry['case']}.safetensors"
        with hold_folder(folder / entry["mechanism"], make=True) as own:
            with create(own / os.path.basename(name)) as file:  # a case that is there twice is an error
                file.write(data)
        entries.append({**entry, "file": name, "bytes": len(data), "sha256": sha256(data).hexdigest()})
    manifest = {"format": FORMAT, **about, "count": len(entries), "sha256": _of_all(entries), "cases": entries}
    manifest["manifest_sha256"] = _of_manifest(manifest)
    write_atomically(folder / MANIFEST, _text(manifest).encode())  # by which it is whole
    return manifest


def _text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON with a line for each case: indented, a quarter of it would be blanks."""
    lines = ",\n".join(f"  {json.dumps(entry, allow_nan=False)}" for entry in manifest["cases"])
    around = json.dumps({**manifest, "cases": []}, indent=1, allow_nan=False)
    before, here, after = around.partition('\n "cases": [')
    return f"{before}{here}\n{lines}\n {after}\n"


def _vouch_for(folder: Path) -> None:
    """Raise SetError if a folder holds no whole set, or anything else beside it."""
    try:
        files = [*(entry["file"] for entry in read(folder).cases), MANIFEST]
    except SetError as error:
        raise SetError(f"{error}; only a whole set is replaced, so remove the folder yourself") from error
    folders = {os.path.dirname(name) for name in files}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or name not in (folders if path.is_dir() else files):
            raise SetError(f"{folder}: holds {name}, which is no part of the set, so that the set is not replaced")


@checked(folder=Path)
def read(folder: Path) -> GoldenSet:
    """Return the set in a folder, after every file was compared with its hash.

    Raises
    ------
    SetError
        Where there is no set, or where it is not whole; the message names the first file or field that is wrong.
    """
    path = folder / MANIFEST
    try:
        if not folder.is_dir() or not any(folder.iterdir()):
            raise SetError(f"{folder}: got no vectors, needs the folder of a set", empty=True)
        manifest = parse_json(read_regular(path, LARGEST["manifest"]))
    except FileNotFoundError:
        raise SetError(f"{folder}: got no {MANIFEST}, needs one: the set was not written to its end") from None
    except SetError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SetError(f"{path}: {why}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise SetError(f"{path}: got format {got!r}, needs {FORMAT}")
    try:
        _check(folder, manifest)
    except OSError as error:  # a folder within that cannot be read, or that is replaced meanwhile
        raise SetError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    return GoldenSet(folder, manifest)


def _check(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise where the manifest was changed, or where files are missing, changed or unknown."""
    if manifest.get("manifest_sha256") != _of_manifest(manifest):
        raise SetError(f"{folder / MANIFEST}: was changed after it was written")
    if manifest.get("cases") == []:
        raise SetError(f"{folder}: got a set of no cases, needs one at least", empty=True)
    try:
        check_json(manifest, _SCHEMA)
    except ValueError as error:
        raise SetError(f"{folder / MANIFEST}: {error}") from error
    entries = manifest["cases"]
    if len(entries) != manifest["count"] or manifest["sha256"] != _of_all(entries):
        raise SetError(f"{folder / MANIFEST}: lists {len(entries)} cases, needs the {manifest['count']} of the set")
    known: set[str] = set()
    for n, entry in enumerate(entries):
        if entry["file"] != f"{entry['mechanism']}/{entry['case']}.safetensors" or entry["file"] in known:
            raise SetError(
                f"{folder / MANIFEST}: cases[{n}].file: got {entry['file']!r}, needs MECHANISM/CASE.safetensors of the "
                "entry, each once: a file in the folder"
            )
        known.add(entry["file"])
        _checked(folder, entry)
    unknown = sorted(set(_files(folder)) - known)
    if unknown:
        raise SetError(f"{folder}: got {unknown[0]}, which {MANIFEST} does not know")


def _files(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))


def _checked(folder: Path, entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of a case's file, which are those that were written."""
    path = folder / entry["file"]
    try:
        data = read_regular(path, entry["bytes"])
    except OSError as error:
        raise SetError(
            f"{path}: cannot be read ({error.strerror}); the set has {entry['bytes']} bytes there"
        ) from error
    if len(data) != entry["bytes"]:
        raise SetError(f"{path}: got {len(data)} bytes, needs {entry['bytes']}")
    if sha256(data).hexdigest() != entry["sha256"]:
        raise SetError(f"{path}: was changed after it was written")
    return data


def _of_all(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the hash of the set: that of a line ``sha256  file`` for each case, sorted by file."""
    lines = [f"{entry['sha256']}  {entry['file']}\n" for entry in sorted(entries, key=lambda entry: entry["file"])]
    return sha256("".join(lines).encode()).hexdigest()


def _of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of the manifest without its own: of its JSON with sorted keys and no blanks."""
    rest = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
