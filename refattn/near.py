"""The name that was meant where there is none of the name that was given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def meant(name: Any, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" for the known name that is closest, "" where none is close.

    >>> from refattn.near import meant
    >>> meant("softmx", ["softmax", "delta"]), meant("x", ["softmax"])
    (' (did you mean softmax?)', '')
    """
    from difflib import get_close_matches  # only for a mistake: it takes longer to load than the rest

    close = get_close_matches(name, list(known), 1, 0.75) if isinstance(name, str) else []
    return f" (did you mean {close[0]}?)" if close else ""
