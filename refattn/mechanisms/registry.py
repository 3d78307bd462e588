"""The only place that lists mechanisms: name -> record.

Mechanisms of other packages come in by entry points of the group ``refattn.mechanisms``, or by MODULE:NAME. Both run
code of others, so that they are loaded only where a user names one: `mechanism` is for what a user says, and `listed`,
which knows the library alone, for what a file says.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from refattn import entry_points
from refattn.messages import meant

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism

_NAMES = ("softmax", "higher_order", "sympformer", "graph_energy", "koopman", "growing", "delta")

GROUP = "refattn.mechanisms"
"""The group of entry points by which packages declare their records."""


def list_mechanisms() -> tuple[str, ...]:
    """Return the names of all mechanisms of the library; `declared` has those of other packages.

    >>> import refattn as ra
    >>> ra.list_mechanisms()[:2]
    ('softmax', 'higher_order')
    """
    return _NAMES


def declared() -> tuple[str, ...]:
    """Return the names of the mechanisms that installed packages declare; none of them is loaded."""
    return entry_points.names(GROUP)


def room(name: str) -> ModuleType:
    """Return the package of a mechanism of the library: its public functions.

    Raises
    ------
    ValueError
        Where there is no mechanism of this name.
    """
    if not isinstance(name, str) or name not in _NAMES:
        needs = f"one of {', '.join(_NAMES)}; of another package the record itself"
        raise ValueError(f"mechanism: got {name!r}{meant(name, _NAMES)}, needs {needs}")
    package = importlib.import_module(f"refattn.mechanisms.{name}")

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"module {package.__name__!r} has no attribute {attribute!r}{meant(attribute, dir(package))}"
        )

    package.__dict__.setdefault("__getattr__", missing)
    return package


def listed(name: str) -> Mechanism:
    """Return the record of a mechanism of the library: a name that comes from a file loads nothing else.

    Raises
    ------
    ValueError
        Where the library has no mechanism of this name.
    """
    record: Mechanism = room(name).record
    return record


def mechanism(name: str) -> Mechanism:
    """Return the record of a mechanism.

    Parameters
    ----------
    name
        The name of a mechanism of the library or of an installed package, or MODULE:NAME, which is imported.

    Raises
    ------
    ValueError
        Where there is no mechanism of this name, or the record has the name of one of the library.
    ImportError, TypeError
        Where a package or a module cannot be imported, or what is there is no record.

    Examples
    --------
    >>> import refattn as ra
    >>> record = ra.mechanism("softmax")
    >>> record.title, record.implementations
    ('Softmax attention', ('dense', 'tiled'))
    >>> ra.mechanism("refattn.mechanisms.softmax:record") is record
    True
    """
    if isinstance(name, str) and name not in _NAMES:
        if ":" in name:
            return _imported(name)
        if name in declared():
            return _of_package(name)
        known = tuple(dict.fromkeys((*_NAMES, *declared())))
        raise ValueError(
            f"mechanism: got {name!r}{meant(name, known)}, needs one of {', '.join(known)}, or MODULE:NAME; "
            "a package's own name is known once it is installed: pip install -e ."
        )
    return listed(name)


def of_packages() -> dict[str, Mechanism | str]:
    """Return what installed packages declare, by name: the record, or why there is none, in a line."""
    found: dict[str, Mechanism | str] = {}
    for name in declared():
        try:
            found[name] = _of_package(name)
        except (ImportError, TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def _of_package(name: str) -> Mechanism:
    from refattn.mechanisms.record import Mechanism

    place = f"mechanism {name!r} of {entry_points.origin(GROUP, name)}"
    if name in _NAMES:
        raise ValueError(f"{place}: the library has a mechanism of this name, which is the one that runs")
    found = entry_points.load(GROUP, "mechanism", name, Mechanism)
    if found.name != name:
        raise ValueError(f"{place}: its record is called {found.name!r}, needs the name of the entry point")
    return _addressed(found, name)


def _imported(text: str) -> Mechanism:
    from refattn.mechanisms.record import Mechanism

    module, _, field = text.partition(":")
    found = entry_points.loaded(
        f"mechanism: got {text!r}, which", lambda: getattr(importlib.import_module(module), field), Mechanism
    )
    return _addressed(found, text)


def _addressed(record: Mechanism, address: str) -> Mechanism:
    """Return the record, which from now on knows what names it to another process."""
    if record.name not in _NAMES:
        vars(record)["address"] = address
    elif record is not listed(record.name):
        raise ValueError(
            f"mechanism: got {address!r}, whose record is called {record.name!r} as one of the library; "
            "needs another name, that of its folder or `name=`"
        )
    return record


def record_of(given: Any, usage: str) -> Mechanism:
    """Return the record that an argument `mechanism` means, which may be a name or the record itself.

    Raises
    ------
    TypeError
        Where it is neither, for instance because arguments are swapped: the message shows their order, `usage`.
    ImportError, ValueError
        Where there is no mechanism of this name, or it cannot be imported.
    """
    from refattn.mechanisms.record import Mechanism

    if isinstance(given, str):
        return mechanism(given)
    if not isinstance(given, Mechanism):
        got = type(given).__name__
        raise TypeError(f"mechanism: got {got}, needs a name such as 'softmax' or a record, as in {usage}")
    return given


def able(field: str) -> str:
    """Return the mechanisms whose record has something in an optional field, listed for a message."""
    return ", ".join(name for name in _NAMES if getattr(listed(name), field) is not None)
