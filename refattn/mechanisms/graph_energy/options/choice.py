"""The check of a value that is one of a few words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return a value that is one of the choices; raise where it is none."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(choices)}")
    return value
