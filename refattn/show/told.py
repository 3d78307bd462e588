"""What a definition says of itself, without what it says of other choices than those of the page.

An equation stays if its id stands on the page. Of remarks behind equations, and of sentences, those go that name a
choice in quotes, such as "query", which is none of the page's.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator

from refattn.show.layout import WIDTH

LINE = re.compile(r"    \[([\w.]+)\]  ")
NAMED = re.compile(r'"(\w+)"')


def told(docstring: str, code: str, chosen: Collection[str]) -> str:
    """Return a docstring for a page with this code, on which these texts are chosen."""
    head, *blocks = docstring.rstrip().split("\n\n")
    found = [head]
    for block in blocks:
        kept = "\n".join(_equations(block, code, chosen)) if block.startswith("    ") else _prose(block, code, chosen)
        if not kept and found[-1].endswith("::") and block.startswith("    "):
            found.pop()
        found += [kept] if kept else []
    return "\n\n".join(found)


def _equations(block: str, code: str, chosen: Collection[str]) -> Iterator[str]:
    here = True
    for line in block.splitlines():
        known = LINE.match(line)
        here = f"[{known[1]}]" in code if known else here
        if here:
            start = known.end() if known else 4
            formula, gap, remark = re.fullmatch(r"(\S.*?)(?:( {2,})(.*))?", line[start:].strip(), re.S).groups()  # type: ignore[union-attr]
            parts = [part for part in re.split(r"; ", remark or "") if part and not _others(part, chosen)]
            yield (line[:start] + formula + (gap + "; ".join(parts) if parts else "")).rstrip()


def _prose(block: str, code: str, chosen: Collection[str]) -> str:
    sentences = re.split(r'(?<=[.])(?<! [A-Z][.])\s+(?=[A-Z"`])', block)  # not after initials
    kept = [text for text in sentences if not _others(text, chosen) and not _absent(text, code)]
    if len(kept) == len(sentences):
        return block
    return textwrap.fill(" ".join(" ".join(kept).split()), WIDTH)


def _others(text: str, chosen: Collection[str]) -> bool:
    """Tell whether a text is about another choice."""
    return any(name not in chosen for name in NAMED.findall(text))


def _absent(text: str, code: str) -> bool:
    """Tell whether a sentence begins with a symbol of code that the page does not have."""
    known = re.match(r"`(\w+)`", text)
    return known is not None and known[1] not in code
