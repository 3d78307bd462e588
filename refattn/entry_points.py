"""What other packages declare as entry points of a group; nothing of theirs is imported before it is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages declare, sorted; none of them is loaded."""
    return tuple(sorted({entry.name for entry in _declared(group)}))


def load(group: str, noun: str, name: str, kind: type[T]) -> T:
    """Return the object that a package declares under a name, which has to be of a class.

    Raises
    ------
    ValueError
        If no package declares the name, or several do.
    ImportError, TypeError
        If the package cannot be imported, or the object is of another class.
    """
    found = {entry.value: entry for entry in _declared(group) if entry.name == name}
    if len(found) != 1:
        by = " and by ".join(map(_origin, found.values()))
        raise ValueError(
            f"{noun}: {name!r} is offered by {by or 'no package'}; {'remove one' if by else 'install one'}"
        )
    (entry,) = found.values()
    return loaded(f"{noun} {name!r} of {_origin(entry)}", entry.load, kind)


def loaded(place: str, load: Callable[[], Any], kind: type[T]) -> T:
    """Return what a package of others has, which has to be of a class; `place` begins the message of an error.

    Raises
    ------
    ImportError, TypeError
        If it cannot be imported, or is of another class.
    """
    try:
        found = load()
    except (Exception, SystemExit) as error:  # another package's import may do anything
        why = " ".join(str(error).split()) or type(error).__name__
        raise ImportError(f"{place} cannot be loaded: {why}") from error
    if not isinstance(found, kind):
        got = " ".join(repr(found).split())
        raise TypeError(f"{place} is {got}, needs an object of a {kind.__name__}")
    return found


def origin(group: str, name: str) -> str:
    """Return which packages declare a name, each with its version and what the entry point names."""
    return " and ".join(_origin(entry) for entry in _declared(group) if entry.name == name)


def _origin(entry: Any) -> str:
    return f"{entry.dist.name} {entry.dist.version} (entry point {entry.value})"


def _declared(group: str) -> Any:
    from importlib.metadata import entry_points  # slow to import, and needed only for names that are not built in

    return entry_points(group=group)
