"""What a row of the claims says, for the tests that hold its numbers."""

from __future__ import annotations

import refattn as ra
from refattn.mechanisms.record import Claim


def holds(mechanism: str, claim: str) -> str:
    """Return what holds of the claim with these words."""
    return claimed(mechanism, claim).holds


def claimed(mechanism: str, words: str) -> Claim:
    """Return the row whose claim has these words; ValueError where there is none, or are several."""
    (found,) = [one for one in ra.mechanism(mechanism).claims if words in one.claim]
    return found
