"""The only place that lists mechanisms: name -> record."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from refattn.messages import meant

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism

_NAMES = ("softmax", "higher_order", "sympformer", "graph_energy", "koopman", "growing", "delta")


def list_mechanisms() -> tuple[str, ...]:
    """Return the names of all mechanisms.

    >>> import refattn as ra
    >>> ra.list_mechanisms()[:2]
    ('softmax', 'higher_order')
    """
    return _NAMES


def room(name: str) -> ModuleType:
    """Return the package of a mechanism: its public functions.

    Raises
    ------
    ValueError
        Where there is no mechanism of this name.
    """
    if not isinstance(name, str) or name not in _NAMES:
        raise ValueError(f"mechanism: got {name!r}{meant(name, _NAMES)}, needs one of {', '.join(_NAMES)}")
    return importlib.import_module(f"refattn.mechanisms.{name}")


def mechanism(name: str) -> Mechanism:
    """Return the record of a mechanism.

    Raises
    ------
    ValueError
        Where there is no mechanism of this name.

    Examples
    --------
    >>> import refattn as ra
    >>> record = ra.mechanism("softmax")
    >>> record.title, record.implementations
    ('Softmax attention', ('dense', 'tiled'))
    """
    record: Mechanism = room(name).record
    return record


def record_of(given: Any, usage: str) -> Mechanism:
    """Return the record that an argument `mechanism` means, which may be a name or the record itself.

    Raises
    ------
    TypeError
        Where it is neither, for instance because arguments are swapped: the message shows their order, `usage`.
    ValueError
        Where there is no mechanism of this name.
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
    return ", ".join(name for name in _NAMES if getattr(mechanism(name), field) is not None)
