"""Text of others, which may hold anything: fit to be printed, kept in a report, and sent."""

from __future__ import annotations

MOST = 2000
"""Characters that are kept of what a kernel or a program says at once."""


def shown(said: object, most: int = MOST) -> str:
    """Return what foreign code said as a text of at most so many characters that every file and terminal takes.

    >>> from refattn.foreign import shown
    >>> shown("red: \\x1b[31m, half a pair: \\ud800")
    'red: \\\\x1b[31m, half a pair: \\\\ud800'
    """
    try:
        text = said if type(said) is str else str(said)
    except Exception:  # even its text may raise
        text = f"a {type(said).__name__} without a text"
    if len(text) > most:
        end = f" ... ({len(text)} characters)"
        text = text[: most - len(end)] + end
    text = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= most else shown(text, most)  # escapes are longer than what they stand for
