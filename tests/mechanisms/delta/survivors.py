"""The mutants of the linear recurrences that verification cannot catch, and why, by storage type."""

from __future__ import annotations

SURVIVORS: dict[str, dict[str, str]] = {"float32": {}, "bfloat16": {}}
