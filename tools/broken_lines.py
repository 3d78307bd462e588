"""Which lines of a file some tests do not see: each is broken in turn, and the tests run until one is red.

    python -m tools.broken_lines refattn/train/checkpoint.py --tests tests/train/test_checkpoint.py
    python -m tools.broken_lines refattn/ops.py --tests tests/test_ops.py --every 4     # every fourth line
    python -m tools.broken_lines refattn/ops.py --tests tests/test_ops.py --root ../before   # of another checkout

A line is broken once: an operator or a comparison becomes another, a condition its opposite, a call that returns
nothing is left out. It happens in a copy of the tracked files. Before a test is cut and after it this says what was
lost; `tools.rates` says the same of whole verification.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "|": "&", "&": "|",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and",
}  # fmt: skip


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Give a tree's nodes without those of annotations, which nothing runs."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def breaks(source: str) -> Iterator[tuple[int, str, str]]:
    """Give each line that can be broken: its number, how it is broken, and the whole text with it broken."""
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return starts[line - 1] + column

    seen: set[int] = set()
    for node in _nodes(ast.parse(source)):
        start, end, new = 0, 0, b""
        if isinstance(node, ast.BinOp):
            left, right = node.left, node.right
            start, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        elif isinstance(node, ast.Compare):
            left, right = node.left, node.comparators[0]
            start, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        elif isinstance(node, ast.BoolOp):
            left, right = node.values[:2]
            start, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            start, end = at(node.test.lineno, node.test.col_offset), at(node.test.end_lineno, node.test.end_col_offset)
            new = b"not (" + raw[start:end] + b")"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
            new = b"pass"
        if end and not new:
            operator = raw[start:end].decode().strip(" ()\n")
            if operator not in OTHER:
                continue
            new = raw[start:end].replace(operator.encode(), OTHER[operator].encode())
        number = getattr(node, "lineno", 0)
        if end and number not in seen:
            seen.add(number)
            broken = raw[:start] + new + raw[end:]
            yield number, f"{raw[start:end].decode().strip()} -> {new.decode().strip()}", broken.decode()


def red(folder: Path, tests: tuple[str, ...]) -> str | None:
    """Run the tests until one is red; return its name, None where all are green."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=300"]
    environment = os.environ | {"PYTHONPATH": str(folder), "CI": "true", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([*words, *tests], cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    names = [line.split(" ")[1] for line in result.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return names[0] if names else f"exit code {result.returncode}"


def copy(root: Path, folder: Path) -> None:
    """Copy the tracked files of a checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name, follow_symlinks=False)


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--tests", multiple=True, required=True, help="What pytest is told to run; may be given repeatedly.")
@click.option("--every", default=1, help="Only every such line.")
@click.option("--root", default=ROOT, type=Path, help="Another checkout.")
@click.option("-v", "--verbose", is_flag=True, help="Say of each line which test was red.")
def main(files: tuple[str, ...], tests: tuple[str, ...], every: int, root: Path, verbose: bool) -> None:
    """Print the lines of FILE that the tests do not see broken, and how many they see."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)  # tests may act as another user
        copy(root, folder)
        if name := red(folder, tests):
            raise click.ClickException(f"red before anything is broken: {name}")
        for file in files:
            whole = (folder / file).read_text(encoding="utf-8")
            found = list(breaks(whole))[::every]
            began, caught = time.monotonic(), 0
            for number, how, text in found:
                (folder / file).write_text(text, encoding="utf-8")
                name = red(folder, tests)
                caught += name is not None
                if name is None or verbose:
                    click.echo(f"{file}:{number}: {how}: {name or 'NOT SEEN'}")
            (folder / file).write_text(whole, encoding="utf-8")
            click.echo(f"{file}: {caught} of {len(found)} broken lines seen, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
