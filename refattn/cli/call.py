"""``refattn verify --call``: a function that needs no adapter, and ``--adapt``, which finds how it is called."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from refattn.cli.arguments import Problem
from refattn.files import reason, write_output

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism
    from refattn.verify.adapters.find_words import Found

ADAPTER = '''"""{title} as an adapter for `refattn verify`. How it is called was found by trial.

    refattn verify {mechanism} --impl {file}:attend

{how}
"""

from refattn.verify import adapt, load

WORDS = (
{words}
)

attend = adapt.call(load({spec!r}), " ".join(WORDS))
'''


def called(
    record: Mechanism, function: str | None, words: tuple[str, ...], impl: str | None, *, adapt: bool
) -> str | None:
    """Return what names the kernel: that of --impl, or the function of --call with its words."""
    if function is None:
        if words:
            raise Problem(f"got {words[0]!r}, needs --call MODULE_OR_FILE:FUNCTION before words, or --impl without any")
        if adapt:
            raise Problem("--adapt: needs --call MODULE_OR_FILE:FUNCTION beside it")
        return impl
    if impl is not None:
        raise Problem("--call: got --impl, too, needs one of the two")
    if "" not in sys.path:
        sys.path.append("")  # as for --impl
    if not adapt:
        return f"{function} {shlex.join(words) or 'layout=bhnd'}"
    return f"{function} {_found(record, function, words).text}"


def _found(record: Mechanism, function: str, words: tuple[str, ...]) -> Found:
    """Find the words of a function, print them, and write an adapter."""
    from refattn.verify.adapt import WordError
    from refattn.verify.adapters.adapter import LoadError
    from refattn.verify.adapters.find_words import NotFoundError, find

    file = Path(f"attend_{re.sub(r'[^0-9A-Za-z_]', '_', function.rpartition(':')[2])}.py")
    if file.exists():
        raise Problem(f"--adapt: there is {file}, needs a folder without it, or --impl {file}:attend")
    try:
        found = find(function, record, given=words)
    except (LoadError, NotFoundError, WordError) as error:
        raise Problem(f"--adapt: {str(error).removeprefix('--impl ')}") from error
    lines = "\n".join(found.lines)
    text = ADAPTER.format(
        spec=function,
        title=_in_docstring(function),
        mechanism=record.address,
        file=file,
        how=_in_docstring(lines),  # with messages of the function, which must not become code
        words="\n".join(f"    {shlex.quote(word)!r}," for word in found.words),
    )
    try:
        write_output(file, text.encode())
    except OSError as error:
        raise Problem(f"--adapt: {file} cannot be written ({reason(error)})") from error
    click.echo(f"{lines}\nwrote {file}; the same as --call {function} {found.text}\n", err=True)
    return found


def _in_docstring(text: str) -> str:
    """Return a text that ends no docstring and escapes nothing in it."""
    return text.replace("\\", "/").replace('"', "'")
