"""The mutants of the linear recurrences that verification cannot catch, and why, by storage type."""

from __future__ import annotations

SURVIVORS: dict[str, dict[str, str]] = {
    "float32": {
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {},
}
