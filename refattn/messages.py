"""What messages share: text of others, fit to be printed, and the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NO_PICTURE = 'needs matplotlib: pip install "refattn[plots]"'
"""What is said where there is nothing to draw with."""


class BoundWarning(UserWarning):
    """Says that a number of a call is beyond a bound; each call has its own bound, and a training shows the least."""

    def __init__(self, text: str, bound: float) -> None:
        super().__init__(text, bound)
        self.bound = bound

    def __str__(self) -> str:
        """Return the text alone."""
        return str(self.args[0])


MOST = 2000
"""Characters that are kept of what a kernel or a program says at once."""


def shown(said: object, most: int = MOST) -> str:
    """Return what foreign code said as a text of at most so many characters that every file and terminal takes.

    >>> from refattn.messages import shown
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


def html_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table for a notebook; without a header it has none.

    >>> from refattn.messages import html_table
    >>> html_table(["a"], [["<"]])
    '<table><tr><th>a</th></tr><tr><td>&lt;</td></tr></table>'
    """
    from html import escape

    def line(cells: Iterable[str], tag: str) -> str:
        made = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{made}</tr>" if made else ""

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


EXTRAS = {"cupy": "cupy", "distributed": "dask", "jax": "jax", "matplotlib": "plots", "onnx": "onnx"}
EXTRAS |= {"onnxruntime": "onnx", "torch": "torch", "triton": "triton"}
"""Library -> the extra that installs it."""


def install(error: ImportError) -> str:
    """Return ': pip install "refattn[EXTRA]"' for a library that is missing and that an extra brings, "" for others.

    >>> from refattn.messages import install
    >>> install(ImportError(name="torch")), install(ImportError(name="fla")), install(ImportError(name="mine"))
    (': pip install "refattn[torch]"', ': pip install fla-core packaging', '')
    """
    library = (error.name or "").partition(".")[0]
    if library == "fla":  # its package has another name, and does not say that it needs the other one
        return ": pip install fla-core packaging"
    return f': pip install "refattn[{EXTRAS[library]}]"' if library in EXTRAS else ""


_OTHER_NAMES = {"fp64": "float64", "double": "float64", "fp32": "float32", "single": "float32", "float": "float32"}
_OTHER_NAMES |= {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def meant(name: Any, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" for the known name that is closest, "" where none is close.

    >>> from refattn.messages import meant
    >>> meant("softmx", ["softmax", "delta"]), meant("x", ["softmax"])
    (' (did you mean softmax?)', '')
    >>> meant("bf16", ["float32", "bfloat16"])
    ' (did you mean bfloat16?)'
    """
    from difflib import get_close_matches  # only for a mistake: it takes longer to load than the rest

    if not isinstance(name, str):
        return ""
    known, other = list(known), _OTHER_NAMES.get(name.lower())
    close = [other] if other in known else get_close_matches(name, known, 1, 0.75)
    return f" (did you mean {close[0]}?)" if close else ""
