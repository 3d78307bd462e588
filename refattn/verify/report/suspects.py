"""Where the error is, as lines of text with their indentation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from refattn.verify.diagnose.localise import in_words
from refattn.verify.outcome import Suspect, Suspects

NOTHING = "nothing known explains it"
"""What is said where no error is found that explains enough."""

NAMED = 0.75
"""An error of an equation that explains less of the squared error tells of its place, and its words are left out."""


def lines(found: Suspects) -> Iterator[tuple[int, str]]:
    """Yield the lines on the suspects of a verification: columns of indentation, and the text."""
    yield 0, f"Suspects (from {found.dtype}, cases {', '.join(found.cases)})"
    agree = f"; {', '.join(found.right)} {_verb('agree', found.right)}" if found.right else ""
    yield 2, f"{', '.join(found.wrong)} {_verb('disagree', found.wrong)}{agree}"
    if found.places:
        yield 2, f"where: {in_words(found.places)}"
    if found.which:
        yield 2, found.which
    yield 2, narrowed(found)
    if found.departure:
        yield from _departed(found)
    for number, suspect in enumerate(found.ranked, start=1):
        yield 2, f"{number}. {told(suspect)}"
        if suspect.link:
            yield 6, f"modelled on {suspect.link}"
        for line in suspect.equations:
            yield 6, f"{line.id}  {line.formula}"
            yield 10, f"{line.place}: {line.code}"
    if not found.ranked:
        yield 2, nothing(found)


def _departed(found: Suspects) -> Iterator[tuple[int, str]]:
    """Yield what the values that were given for equations say."""
    assert found.departure is not None
    verdict = found.departure.verdict
    by = f"{verdict.share:.3g} of the allowed error" if math.isfinite(verdict.share) else verdict.statistic
    yield 2, f"given {', '.join(found.departure.given)}: the first that does not follow from those before it is"
    yield (2, f"{verdict.place}: got {verdict.got}, follows {verdict.expected} ({by}, case {found.departure.case})")
    yield 2, "what computes it from them:"
    for line in found.between:
        yield 6, f"{line.id}  {line.formula}"
        yield 10, f"{line.place}: {line.code}"


def told(suspect: Suspect) -> str:
    """Return in a line what a suspect is, and how near it comes."""
    if suspect.sort != "equation":
        return f"{suspect.kind}: {explains(suspect)}"
    *first, last = suspect.ids or ("",)
    who = f"{', '.join(first)} or {last} (they give the same here)" if first else last
    if suspect.share <= 1.0:
        named = f"{who}: {suspect.kind}" if who else suspect.kind
        return f"{named}: {suspect.share:.2f} of the allowed error away from what was got"
    near, together = f"{_percent(suspect.explained)} of the squared error", _percent(suspect.together)
    if suspect.explained < NAMED:
        return f"the place may be {who}: one error there explains {near}, all that are known {together}"
    return f"{who}: {suspect.kind} explains {near}, with other errors of this equation {together}"


def explains(suspect: Suspect) -> str:
    """Return how much of what was got an error with a name explains."""
    count = len(suspect.cases)
    part = "everything" if count == suspect.failing else f"{count} of {suspect.failing} failing cases"
    return f"explains {part}" if suspect.whole == count else f"explains the outputs of {part}"


def nothing(found: Suspects) -> str:
    """Return what is said where no error explains enough: the equations that come nearest, if there are some."""
    return f"{NOTHING}; the place may be {' or '.join(found.near)}" if found.near else NOTHING


def narrowed(found: Suspects) -> str:
    """Return in a line which equations can be wrong."""
    these = "it" if len(found.wrong) == 1 else "all of them"
    if not found.possible:
        return f"none of the {found.count} equations can disturb {these}: there may be several errors"
    if found.narrow and found.right:
        return f"of {found.count} equations these can disturb {these} and nothing else: {', '.join(found.narrow)}"
    return f"of {found.count} equations these can disturb {these}: {', '.join(found.possible)}"


def _verb(verb: str, names: tuple[str, ...]) -> str:
    return f"{verb}s" if len(names) == 1 else verb


def _percent(part: float) -> str:
    """Return a part in percent, below 100 where it is below 1."""
    return f"{min(100.0 * part, 99.9):.0f} %" if part < 0.995 else f"{min(100.0 * part, 99.9):.1f} %"
