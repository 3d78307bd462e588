"""What a row of the claims says, for the tests that hold its numbers."""

from __future__ import annotations

import refattn as ra


def holds(mechanism: str, claim: str) -> str:
    """Return what holds of the claim with these words."""
    (found,) = [one.holds for one in ra.mechanism(mechanism).claims if claim in one.claim]
    return found
