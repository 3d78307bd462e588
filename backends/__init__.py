"""The array libraries that refattn runs on, one file each; none is imported before it is used.

Other packages add theirs through the entry-point group ``refattn.backends``, as a subclass of
`refattn.backends.base.Backend`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TypedDict
from weakref import WeakKeyDictionary

from refattn import entry_points
from refattn.backends.base import Backend
from refattn.backends.pool import use_workers, workers
from refattn.messages import meant

__all__ = [
    "Backend",
    "Description",
    "check_precision",
    "describe",
    "get",
    "names",
    "of",
    "usable",
    "use_workers",
    "workers",
]

GROUP = "refattn.backends"
BUILT_IN = ("numpy", "cupy", "torch", "jax", "strict")

_loaded: dict[str, Backend] = {}
_owners: WeakKeyDictionary[type, Backend] = WeakKeyDictionary()


class Description(TypedDict):
    """One row of the table that ``refattn backends`` prints."""

    name: str
    available: bool
    why_unavailable: str | None
    version: str | None
    devices: tuple[str, ...]
    float64: bool
    note: str


def names() -> tuple[str, ...]:
    """Return the names of all backends, usable or not: the built-in ones, then those of other packages."""
    return (*BUILT_IN, *(name for name in entry_points.names(GROUP) if name not in BUILT_IN))


def get(name: str) -> Backend:
    """Return the backend called `name`. Its library is not imported yet: ask its `why_unavailable` first.

    Raises
    ------
    ValueError
        Where there is none of that name, or several packages claim it.
    ImportError, TypeError
        Where the package that offers it cannot be imported, or what it offers is no backend.
    """
    if not isinstance(name, str) or name not in (*BUILT_IN, *_loaded) and name not in names():
        raise ValueError(f"backend: got {name!r}{meant(name, names())}, needs one of {', '.join(names())}")
    if name not in _loaded:
        built_in = name in BUILT_IN
        _loaded[name] = (
            importlib.import_module(f"{__name__}.{name}").backend
            if built_in
            else entry_points.load(GROUP, "backend", name, Backend)
        )
    return _loaded[name]


def usable(name: str) -> Backend:
    """Return the backend called `name`, whose library can be used.

    Raises
    ------
    ValueError, TypeError
        As `get`.
    ImportError
        Where it cannot be used; the message says why, and what to do about it.
    """
    backend = get(name)
    if (reason := backend.why_unavailable()) is not None:
        raise ImportError(f"backend: {name} cannot be used: {reason}")
    return backend


def of(x: object) -> Backend:
    """Return the backend whose array `x` is.

    Raises
    ------
    TypeError
        Where no backend knows the type of `x`.
    """
    kind = type(x)
    owner = _owners.get(kind)
    if owner is None:
        owner = _owners[kind] = _find_owner(x)
    return owner


def changes_meaning(kind: type) -> bool:
    """Tell whether arrays of a class compute with another meaning than those of the library that it is derived from.

    Of NumPy's subclasses only memory-mapped arrays are as plain as arrays are; a masked array would lose its mask on
    the way, and a matrix multiplies where others take elements.
    """
    numpy, maps = sys.modules["numpy"].ndarray, sys.modules["numpy"].memmap
    if issubclass(kind, numpy):
        return kind not in (numpy, maps)
    return kind.__name__ in ("MaskedTensor", "NestedTensor") and kind.__module__.startswith("torch")


def check_precision(x: object) -> None:
    """Raise RuntimeError where the library of an array is set to compute with fewer digits than the array has.

    A reference that rounds products to bfloat16 or TF32 is none.
    """
    backend = of(x)
    if (why := backend.precision_lost(x)) is not None:
        raise RuntimeError(
            f'{why}, needs all digits: with refattn.backends.get("{backend.name}").full_precision(): ...'
        )


def describe() -> list[Description]:
    """Return one row for each backend. This imports every library that is installed."""
    return [_describe(name) for name in names()]


def _describe(name: str) -> Description:
    try:
        backend = get(name)
        reason = backend.why_unavailable()
    except (ImportError, TypeError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        return Description(
            name=name, available=False, why_unavailable=reason, version=None, devices=(), float64=False, note=""
        )
    return Description(
        name=name,
        available=True,
        why_unavailable=None,
        version=backend.version(),
        devices=backend.devices(),
        float64=backend.float64(),
        note=backend.note(),
    )


def _find_owner(x: object) -> Backend:
    for name in BUILT_IN:
        if get(name).owns(x):
            return get(name)
    broken = []
    for name in names()[len(BUILT_IN) :]:
        try:
            if get(name).owns(x):
                return get(name)
        except (ImportError, TypeError, ValueError) as error:
            broken.append(f"; {error}")
    raise TypeError(f"got {type(x).__name__}, needs an array of one of {', '.join(names())}{''.join(broken)}")
