"""Calls of the core with the numbers of its families by their own names: ``forward(q, k, v, ridge=0.2, tau=1.0)``."""

from __future__ import annotations

from typing import Any

import refattn as ra

RECORD = ra.mechanism("koopman")


def options_of(**given: Any) -> dict[str, Any]:
    """The options of the core: each number in the family that has it."""
    own = {name: x for name, x in given.items() if name in RECORD.defaults}
    numbers = {name: x for name, x in given.items() if name not in own and x is not None}
    found = RECORD.with_numbers(own, numbers)
    whole = {**RECORD.defaults, **found}
    has = {name for family in RECORD.families for name in vars(RECORD.families[family](whole[family]))}
    assert set(numbers) <= has, f"no family has {set(numbers) - has}"
    return found


def forward(q: Any, k: Any, v: Any, **given: Any) -> Any:
    return ra.koopman.forward(q, k, v, **options_of(**given))
