"""A set of golden vectors: a folder with one safetensors file for each case, and a manifest that vouches for all.

The manifest, manifest.json, has the hash of each file, of all of them together, and of itself; it is written last. A
set that is empty, incomplete, changed or cut off is never read as a whole one. What stands in files and manifest is
specified in docs/vectors.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from refattn.golden.tensors import decode

FORMAT = 1
"""Version of the format: it goes up where a reader of the last one would misread."""

MANIFEST = "manifest.json"

SHIPPED = Path(__file__).with_name("frozen")
"""The set that comes with the package."""


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
        """Return the arrays of a case by name, with the name of the type that each is stored in."""
        return decode(_checked(self.folder, entry))


def write(folder: Path, about: Mapping[str, Any], cases: Iterable[tuple[dict[str, Any], bytes]]) -> dict[str, Any]:
    """Write a set into a folder that is new or empty; return its manifest.

    `about` is what the manifest says of all cases, `cases` gives of each its entry and the bytes of its file: the entry
    has at least ``mechanism`` and ``case``, and is given ``file``, ``bytes`` and ``sha256``.

    Raises
    ------
    SetError
        Where the folder holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SetError(f"{folder}: got a folder with something in it, needs a new or an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for entry, data in cases:
        name = f"{entry['mechanism']}/{entry['case']}.safetensors"
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        entries.append({**entry, "file": name, "bytes": len(data), "sha256": sha256(data).hexdigest()})
    manifest = {"format": FORMAT, **about, "count": len(entries), "sha256": _of_all(entries), "cases": entries}
    manifest["manifest_sha256"] = _of_manifest(manifest)
    part = folder / f"{MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(folder / MANIFEST)
    return manifest


def read(folder: Path) -> GoldenSet:
    """Return the set in a folder, after every file was compared with its hash.

    Raises
    ------
    SetError
        Where there is no set, or where it is not whole; the message names the first file that is wrong.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise SetError(f"{folder}: got no vectors, needs the folder of a set", empty=True)
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise SetError(f"{folder}: got no {MANIFEST}, needs one: the set was not written to its end") from None
    except (ValueError, RecursionError) as error:
        raise SetError(f"{folder / MANIFEST}: is no JSON, or cut off: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise SetError(f"{folder / MANIFEST}: got format {got!r}, needs {FORMAT}")
    _check(folder, manifest)
    return GoldenSet(folder, manifest)


def _check(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise where the manifest was changed, or where files are missing, changed or unknown."""
    if manifest.get("manifest_sha256") != _of_manifest(manifest):
        raise SetError(f"{folder / MANIFEST}: was changed after it was written")
    entries = manifest["cases"]
    if not entries:
        raise SetError(f"{folder}: got a set of no cases, needs one at least", empty=True)
    if len(entries) != manifest["count"] or manifest["sha256"] != _of_all(entries):
        raise SetError(f"{folder / MANIFEST}: lists {len(entries)} cases, needs the {manifest['count']} of the set")
    for entry in entries:
        _checked(folder, entry)
    known = {entry["file"] for entry in entries}
    unknown = sorted(set(_files(folder)) - known)
    if unknown:
        raise SetError(f"{folder}: got {unknown[0]}, which {MANIFEST} does not know")


def _files(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))


def _checked(folder: Path, entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of a case's file, which are those that were written."""
    path = folder / entry["file"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SetError(f"{folder / MANIFEST}: got the file {entry['file']!r}, needs one in the folder")
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size == entry["bytes"] else b""
    except OSError as error:
        raise SetError(
            f"{path}: cannot be read ({error.strerror}); the set has {entry['bytes']} bytes there"
        ) from error
    if size != entry["bytes"]:
        raise SetError(f"{path}: got {size} bytes, needs {entry['bytes']}")
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
