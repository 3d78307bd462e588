"""Breaks the line that a row of the claims is about, to see one of its tests red.

`broken` in `testing/claims.toml` says what is broken: an equation, whose value is halved ("SM.1 * 2": doubled) wherever
it is computed, in the definition and in the general code at once, so that no two of them tell it; or a text of a file
and what takes its place, "FILE: OLD => NEW". It happens in a copy of the tracked files, on NumPy alone.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import refattn as ra
from refattn import equations
from refattn.mechanisms.record import Claim, Mechanism
from refattn.verify.traced import file_of
from tools.broken_lines import ROOT, red


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


def red_test(mechanism: str, claim: Claim, folder: Path) -> str | None:
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
