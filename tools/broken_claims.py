"""Which rows of the claims say more than their tests hold: the line that a row is about is broken, and its tests run.

    python -m tools.broken_claims                  # every row that names a line; those that stay green are printed
    python -m tools.broken_claims koopman -v       # those of a mechanism, and which test was red
    python -m tools.broken_claims --row 185        # one row, counted from 1 over all mechanisms

`broken` in `testing/claims.toml` says what is broken: an equation, whose value is halved ("SM.1 * 2": doubled) wherever
it is computed, in the definition and in the general code at once, so that no two of them tell it; or a text of a file
and what takes its place, "FILE: OLD => NEW". It happens in a copy of the tracked files, on NumPy alone.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import tempfile
from pathlib import Path

import click

import refattn as ra
from refattn import equations
from refattn.mechanisms.record import Claim, Mechanism
from refattn.verify.traced import file_of
from tools.broken_lines import ROOT, copy, red


def rows() -> list[tuple[str, Claim]]:
    """Return all claims, each with the name of its mechanism, in the order of the page."""
    return [(name, claim) for name in ra.list_mechanisms() for claim in ra.mechanism(name).claims]


def broken_files(mechanism: Mechanism, broken: str, root: Path = ROOT) -> dict[str, str]:
    """Return the files that a row breaks, by path, with the broken text; ValueError where there is no such line."""
    file, colon, change = broken.partition(": ")
    if not colon:
        return _scaled(mechanism, broken)
    old, arrow, new = change.partition(" => ")
    path = root / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not arrow or text.count(old) != 1:
        raise ValueError(
            f"{broken}: needs 'FILE: OLD => NEW', and OLD {text.count(old)} times in {file}, needs it once"
        )
    return {file: text.replace(old, new)}


def _scaled(mechanism: Mechanism, broken: str) -> dict[str, str]:
    id, _, factor = broken.partition(" * ")
    own = () if mechanism.definition is None else (mechanism.definition,)
    found = {}
    for module in dict.fromkeys((*own, *mechanism.equation_modules, *mechanism.extra_modules)):
        lines = {tag.line: tag for tag in equations.tags(module) if tag.claims and tag.id == id}
        text = inspect.getsource(module)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign | ast.AnnAssign)]
        for node in sorted(nodes, key=lambda node: -node.lineno):
            if tag := lines.get(node.lineno):
                text = _with_factor(text, node, tag, factor or "0.5")
        if lines:
            found[file_of(module)] = text
    if not found:
        raise ValueError(f"{id}: no module of {mechanism.name} computes it")
    return found


def _with_factor(text: str, node: ast.Assign | ast.AnnAssign, tag: equations.Tag, factor: str) -> str:
    """Return a module with another value of an equation: within the assignment, or after one of several names."""
    lines, value = text.splitlines(), node.value
    assert value is not None and value.end_lineno is not None and value.end_col_offset is not None
    if tag.position is not None and isinstance(value, ast.Tuple):
        value = value.elts[tag.position]
    elif tag.position is not None:
        last = next(n for n in range(node.lineno, len(lines) + 1) if f"[{tag.id}]" in lines[n - 1])
        lines.insert(last, f"{' ' * node.col_offset}{tag.name} = {factor} * {tag.name}")
        return "\n".join(lines) + "\n"
    assert value.end_lineno is not None and value.end_col_offset is not None
    for line, column, part in (
        (value.end_lineno, value.end_col_offset, ")"),
        (value.lineno, value.col_offset, f"{factor} * ("),
    ):
        whole = lines[line - 1].encode()
        lines[line - 1] = (whole[:column] + part.encode() + whole[column:]).decode()
    return "\n".join(lines) + "\n"


def test_that_is_red(mechanism: str, claim: Claim, folder: Path) -> str | None:
    """Break the line of a row in a copy of the files; return which of its tests is red, None where none is."""
    found = broken_files(ra.mechanism(mechanism), claim.broken)
    whole = {file: (folder / file).read_bytes() for file in found}
    try:
        for file, text in found.items():
            (folder / file).write_text(text, encoding="utf-8")
        return red(folder, claim.tests)
    finally:
        for file, before in whole.items():
            (folder / file).write_bytes(before)


@click.command()
@click.argument("mechanisms", nargs=-1, type=click.Choice(ra.list_mechanisms()), metavar="[MECHANISM]...")
@click.option("--row", "numbers", multiple=True, type=int, help="Only this row; may be given repeatedly.")
@click.option("-v", "--verbose", is_flag=True, help="Say of each row which test was red.")
def main(mechanisms: tuple[str, ...], numbers: tuple[int, ...], verbose: bool) -> None:
    """Print the rows whose tests stay green while the line that they are about is broken."""
    os.environ["REFATTN_TEST_BACKENDS"] = "numpy"
    asked = [
        (n, name, claim)
        for n, (name, claim) in enumerate(rows(), 1)
        if claim.broken and (not mechanisms or name in mechanisms) and (not numbers or n in numbers)
    ]
    green = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        copy(ROOT, folder)
        if name := red(folder, tuple(dict.fromkeys(test for _, _, claim in asked for test in claim.tests))):
            raise click.ClickException(f"red before anything is broken: {name}")
        for n, mechanism, claim in asked:
            name = test_that_is_red(mechanism, claim, folder)
            green += name is None
            if name is None or verbose:
                click.echo(f"{n} {mechanism}: {claim.claim}: {claim.broken}: {name or 'GREEN'}")
    click.echo(f"{len(asked) - green} of {len(asked)} rows see their line broken")
    sys.exit(1 if green else 0)


if __name__ == "__main__":
    main()
