"""What the sources of a mechanism claim, and what shows it: `judge/claims.toml` of its room, read when asked for."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from refattn.mechanisms import registry


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes
    ----------
    source
        Who says it, and where: a paper with its equation or section, or code.
    claim
        What is said, in a sentence.
    holds
        "as said", or what is true instead.
    shown
        The call or the command that shows it. Calls know `np`, `ra`, and arrays q, k, v of axes (1, 2, 8, 4).
    tests
        The tests that hold it, each as PATH::NAME.
    """

    source: str
    claim: str
    holds: str
    shown: str
    tests: tuple[str, ...]


def claims_of(mechanism: str) -> tuple[Claim, ...]:
    """Return what the sources of a mechanism claim, in their order; none where its room has no such file.

    Raises
    ------
    ValueError
        Where there is no mechanism of this name.

    Examples
    --------
    >>> from refattn.mechanisms.claims import claims_of
    >>> claims_of("softmax")[0].claim
    'attention is the mean of the values, weighted by the softmax of scaled inner products'
    """
    file = files(registry.room(mechanism)) / "judge" / "claims.toml"
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["claims"] if file.is_file() else []
    return tuple(Claim(**{**row, "tests": tuple(row["tests"])}) for row in rows)
