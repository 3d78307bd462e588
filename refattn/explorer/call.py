"""The page that steps through a call of one's own, for a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from refattn import backends
from refattn.explorer.page import page
from refattn.files import write_output
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


def explore(mechanism: str | Mechanism, q: Any, k: Any, v: Any, **options: Any) -> Page:
    """Return the page that steps through one call, forward and backward, equation by equation, on one's own arrays.

    It is the page of ``refattn trace --html``: each number is linked with those that it is computed from. Arrays are of
    any library and small: a page shows some thousand numbers.

    Parameters
    ----------
    mechanism
        Its name or its record.
    q, k, v
        Arrays (batch, heads, tokens, width).
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
    >>> page = ra.explore("softmax", q, k, v, causal=True)
    >>> page.html.startswith("<!doctype html>")
    True
    """
    record = registry.mechanism(mechanism) if isinstance(mechanism, str) else mechanism
    record, _ = on_arrays(record, {"q": q, "k": k, "v": v}, options)
    library = backends.get("numpy")
    run = traced.read_run(record, record.cases[0].name, "float64", library)
    return Page(page(record, run, traced.record(record, run, library)))
