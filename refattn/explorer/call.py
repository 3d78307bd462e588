"""The page that steps through a call of one's own, for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from refattn import backends
from refattn.explorer import page
from refattn.explorer.tour import build
from refattn.files import write_output
from refattn.golden.inputs import make
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify import traced
from refattn.verify.in_python import on_arrays


@dataclass(frozen=True, repr=False)
class Page:
    """A page for a browser, which a notebook shows in the cell."""

    html: str

    def __repr__(self) -> str:
        return f"<Page of {len(self.html)} characters: shown in a notebook; to_html(path) writes it>"

    def _repr_html_(self) -> str:
        return f'<iframe width="100%" height="800" style="border: 0" srcdoc="{escape(self.html)}"></iframe>'

    def to_html(self, path: str | Path) -> None:
        """Write the page to a file."""
        write_output(str(path), self.html.encode("utf-8"))


def explore(
    mechanism: str | Mechanism, q: Any, k: Any, v: Any, *, tokens: Sequence[str] | None = None, **options: Any
) -> Page:
    """Return the page that steps through one call, forward and backward, equation by equation, on one's own arrays.

    If the definition covers the call, it is a tour: a card for each equation beside a picture, numbers that show what
    they are made of, and knobs. Otherwise it is a table of all values. Arrays are of any library and small: a tour
    shows one head of at most 12 tokens, a table some thousand numbers.

    Parameters
    ----------
    mechanism
        Its name or its record.
    q, k, v
        Arrays (batch, heads, tokens, width).
    tokens
        Names of the tokens, for a tour.
    **options
        The other arguments of the call.

    Raises
    ------
    TypeError, ValueError
        Where arguments are none of the mechanism, do not fit each other, or are too large for a page.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 4, 2))
    >>> page = ra.explore("softmax", q, k, v, tokens=["a", "b", "c", "d"], causal=True)
    >>> page.html.startswith("<!doctype html>")
    True
    """
    record = registry.record_of(mechanism, "explore(mechanism, q, k, v)")
    named, _ = on_arrays(record, {"q": q, "k": k, "v": v}, options)
    given, plain = make(named.name, named.cases[0], "float64"), named.cases[0].options
    arrays = given["q"], given["k"], given["v"]
    others = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    tour = build.taken(record, {**others, **plain}, arrays, tokens)
    if not isinstance(tour, str):
        return Page(build.page(record, *tour))
    library = backends.get("numpy")
    run = traced.read_run(named, named.cases[0].name, "float64", library)
    return Page(page.page(named, run, traced.record(named, run, library), tour))
