"""The docstrings of refattn as Markdown, and as the text that autodoc expects.

They are plain text: `name` in backquotes is code, an indented block is shown as it stands, and everything else means
itself, so that ``|s_ij|`` and ``h*d`` need no escapes in the source.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_CODE = re.compile(r"(``.+?``|`[^`\n]+`)")

_LEAD = re.compile(r"(Axes|Symbols|Sources?|Costs?|How [^:.]* differ[^:.]*):")
"""What begins a paragraph and is set in bold."""


@dataclass(frozen=True)
class Part:
    """A paragraph of prose, or an indented block of lines."""

    text: str
    indented: bool


def parts(docstring: str | None) -> Iterator[Part]:
    """Yield the paragraphs and the indented blocks of a docstring in order."""
    chunks: list[Part] = []
    for chunk in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        indented = chunk.startswith("  ")
        if indented and chunks and chunks[-1].indented:  # an empty line within a block
            chunks[-1] = Part(f"{chunks[-1].text}\n\n{chunk}", True)
        elif chunk.strip():
            chunks.append(Part(chunk, indented))
    for part in chunks:
        if part.indented:
            yield Part(inspect.cleandoc("\n" + part.text), True)
        else:
            yield Part(re.sub(r"::$", ":", part.text), False)


def markdown(text: str) -> str:
    """Return a paragraph as Markdown: what stands in backquotes is code, all else means itself."""
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    pieces = _CODE.split(text)
    pieces[::2] = [re.sub(r"([\\*_<>\[\]|#$~{}])", r"\\\1", piece) for piece in pieces[::2]]
    made = linked("".join(pieces))
    lead = _LEAD.match(made)
    return f"**{lead[0]}**{made[lead.end() :]}" if lead else made


def linked(text: str) -> str:
    """Return Markdown in which papers on arXiv are links, but for code."""
    pieces = re.split(r"(^```.*?^```|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    for n, piece in enumerate(pieces[::2]):
        pieces[2 * n] = re.sub(r"(?<!\[)\barXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", piece)
    return "".join(pieces)


def summary(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as one line of Markdown."""
    first = next(parts(docstring), Part("", False))
    return " ".join(markdown(first.text).split())


def escape(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keep autodoc from reading markup into prose; blocks and examples stay as they are."""
    block = example = False
    for n, line in enumerate(lines):
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        indented = line.startswith("    ")
        after_marker = n >= 2 and not lines[n - 1].strip() and lines[n - 2].rstrip().endswith("::")
        block = bool(line.strip()) and indented and (block or after_marker)
        if not block and not example:
            pieces = _CODE.split(line)
            pieces[::2] = [re.sub(r"(?<!\\)([*|]|(?<=\w)_(?!\w))", r"\\\1", piece) for piece in pieces[::2]]
            lines[n] = "".join(pieces)


def plain_aliases(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show an alias such as Array by its name, also where autodoc shows the object that stands for it."""
    return _unwrapped(signature), _unwrapped(returned)


def _unwrapped(text: str | None) -> str | None:
    # Sphinx cannot read a default in angle brackets, and then shows all types with their modules. "<factory>" is how
    # dataclasses print one that is made anew.
    if not text:
        return text
    text = re.sub(r"<(?:built-in )?function (?:[\w.]+\.)?(\w+)(?: at \w+)?>", r"\1", text)
    text = re.sub(r"<(?:factory|[\w.]+ object(?: at \w+)?)>", "...", text)
    return re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)
