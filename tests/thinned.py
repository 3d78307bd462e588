"""Of many variants of one test some in every run, and the others behind ``-m slow``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def thinned(variants: Sequence[Any], every: int) -> list[Any]:
    """Return parameters of which every n-th runs always; of the others CI's sample of slow tests has an eighth."""
    found = []
    for number, variant in enumerate(variants):
        values = variant if isinstance(variant, tuple) else (variant,)
        marks = [pytest.mark.slow(sampled=number % (8 * every) == 1)] if number % every else []
        found.append(pytest.param(*values, marks=marks))
    return found
