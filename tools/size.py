"""How much code there is: lines by room, without blank lines, comments and docstrings.

python -m tools.size                  # a row for each part, from the root of the repository
python -m tools.size --since main~1   # and what has changed since a commit
python -m tools.size mechanisms -v    # the files of the parts whose name has this text
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TOPS = ("refattn", "backends", "tests", "tools", "asv_benchmarks", "docs", "examples")

DEEP = ("refattn/mechanisms", "tests/mechanisms")
"""Folders whose folders are parts of their own."""

LIBRARY = ("refattn", "backends")

QUIET = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Return how many lines of a file hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in QUIET:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            for one in body:  # docstrings, and texts that say what the name above them holds
                if isinstance(one, ast.Expr) and isinstance(getattr(one.value, "value", None), str):
                    held.difference_update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return len(held)


def part_of(path: str) -> str:
    """Return the part that a file belongs to."""
    folder = path.rpartition("/")[0]
    depth = 3 if any(folder.startswith(f"{deep}/") for deep in DEEP) else 2
    return "/".join(folder.split("/")[:depth])


def files_now() -> dict[str, str]:
    """Return the source of the files as they are."""
    known = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    paths = [path for path in known.stdout.decode().splitlines() if _counts(path) and (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


def files_of(commit: str) -> dict[str, str]:
    """Return the source of the files of a commit."""
    done = subprocess.run(["git", "archive", commit, *TOPS], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"--since: got {commit!r}: {done.stderr.decode().strip()}")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            held = archive.extractfile(member) if member.isfile() and _counts(member.name) else None
            if held is not None:
                found[member.name] = held.read().decode("utf-8")
    return found


def _counts(path: str) -> bool:
    return path.endswith(".py") and path.partition("/")[0] in TOPS


def sizes(files: Mapping[str, str]) -> dict[str, int]:
    """Return the lines of code of every file."""
    return {path: code_lines(source) for path, source in files.items()}


def by_part(lines: Mapping[str, int]) -> dict[str, int]:
    """Return the lines of code of every part."""
    found: dict[str, int] = {}
    for path, count in lines.items():
        found[part_of(path)] = found.get(part_of(path), 0) + count
    return found


def table(now: Mapping[str, int], before: Mapping[str, int] | None) -> list[str]:
    """Return a row for each part, and for the library, the tests and the rest."""

    def row(name: str, count: int, had: int | None) -> str:
        change = "" if had is None or had == count else f"  {count - had:+7,}"
        return f"{name:34}{count:8,}{change}"

    every = sorted({*now, *(before or {})})
    rows = [row(n, now.get(n, 0), None if before is None else before.get(n, 0)) for n in every]
    for title, tops in (("refattn with backends", LIBRARY), ("tests", ("tests",)), ("the rest", TOPS[3:])):
        total, had = _total(now, tops), None if before is None else _total(before, tops)
        rows.append(row(title, total, had))
    return rows


def _total(parts: Mapping[str, int], tops: Iterable[str]) -> int:
    return sum(count for name, count in parts.items() if name.partition("/")[0] in tops)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="only parts whose name has this text")
    parser.add_argument("--since", metavar="COMMIT", help="print what has changed since this commit, too")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the files of each part")
    given = parser.parse_args()
    now = sizes(files_now())
    before = by_part(sizes(files_of(given.since))) if given.since else None
    rows = table(by_part(now), before)
    for line in rows if not given.part else [line for line in rows if given.part in line]:
        print(line)
        if given.verbose:
            own = {path: count for path, count in now.items() if part_of(path) == line.split()[0]}
            for path, count in sorted(own.items(), key=lambda pair: -pair[1]):
                print(f"    {path:60}{count:6,}")


if __name__ == "__main__":
    main()
