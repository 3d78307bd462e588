"""What a test reads and sets of the double: the work and the waits that were counted, and the number of devices."""

from __future__ import annotations

import sys
from collections import Counter

tally: Counter[str] = Counter()
"""Since `reset`: "launches" of kernels, "waits" of the host for the device, "uploads" and "downloads" of arrays; in
bytes "copies" of operands that a product wants in another order, and all new "bytes"."""

places: Counter[tuple[str, str]] = Counter()
"""What waited, or sent an array to the device: its kind, and the line of the first caller outside of libraries."""

devices = 1
"""How many devices there are. They do not see each other's memory."""

current = [0]
"""Numbers of the devices that were made the current one, the last one last."""

held = {"now": 0, "most": 0}
"""Bytes of arrays that exist."""


def reset() -> None:
    """Count from here."""
    tally.clear()
    places.clear()
    held["most"] = held["now"]


def note(kind: str, what: str) -> None:
    """Count a wait, an upload or a download, and where it came from."""
    tally[kind] += 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    places[kind, f"{what} at {frame.f_code.co_filename}:{frame.f_lineno}"] += 1


def _is_library(name: str) -> bool:
    own = ("backends/cupy.py", "backends/base.py", "refattn/xp.py")
    return "/double/cupy" in name or "array_api_compat" in name or name.endswith(own)
