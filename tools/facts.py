"""The published figures of docs/facts.toml: run their commands again, and say which have moved.

    python -m tools.facts                  # all; make facts does the same
    python -m tools.facts mutants          # some, by id
    python -m tools.facts --update         # writes the new values, here and on the pages (needs refattn[docs])

Exit codes: 0 every figure holds, 1 one has moved or could not be measured, 2 bad usage.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "facts.toml"


@dataclass(frozen=True)
class Fact:
    """One figure; docs/facts.toml says what the fields mean."""

    about: str
    command: str
    pattern: str
    value: str
    tolerance: float
    pages: tuple[tuple[str, str], ...]  # file, pattern
    date: datetime.date
    machine: str

    def holds(self, now: str) -> bool:
        """Tell whether a measured value is the published one, within the tolerance."""
        return abs(float(now) - float(self.value)) <= self.tolerance


def load(file: Path = FILE) -> dict[str, Fact]:
    """Return all figures by id."""
    found = {}
    for id, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
        pages = tuple((page["file"], page.get("pattern", entry["pattern"])) for page in entry.pop("pages"))
        found[id] = Fact(**entry, pages=pages)
    return found


def problems(facts: dict[str, Fact], root: Path = ROOT) -> Iterator[str]:
    """Say where a page shows another value than the published one, or none."""
    for id, fact in facts.items():
        for file, pattern in fact.pages:
            shown = re.findall(pattern, (root / file).read_text(encoding="utf-8"))
            if not shown:
                yield f"{id}: nothing in {file} matches {pattern}"
            for value in shown:
                if value != fact.value:
                    yield f"{id}: {file} shows {value}, docs/facts.toml has {fact.value}"


def measure(fact: Fact, output: str) -> str | None:
    """Return the value that a command printed; None where there is none, or several that differ."""
    found = set(re.findall(fact.pattern, output))
    return found.pop() if len(found) == 1 else None


def run(command: str) -> str:
    """Return all that a command prints, run from the root of the repository with this Python and this refattn."""
    words = shlex.split(command)
    start = {"refattn": [sys.executable, "-m", "refattn"], "python": [sys.executable]}.get(words[0], words[:1])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [*start, *words[1:]], cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    return done.stdout + done.stderr


def machine() -> str:
    """Describe this machine in a line: what figures depend on."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists() and (
        name := re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))
    ):
        cpu = name[1]
    return f"{cpu}, {os.cpu_count()} CPUs, {platform.system()}, Python {platform.python_version()}"


def update(measured: dict[str, str], facts: dict[str, Fact], root: Path = ROOT) -> None:
    """Write measured values to docs/facts.toml, and to the pages in place of the published ones."""
    import tomlkit

    file = root / "docs" / "facts.toml"
    document = tomlkit.parse(file.read_text(encoding="utf-8"))
    for id, now in measured.items():
        document[id].update({"value": now, "date": datetime.date.today(), "machine": machine()})
        for name, pattern in facts[id].pages:
            page = root / name
            replace = functools.partial(_with, value=now)
            page.write_text(re.sub(pattern, replace, page.read_text(encoding="utf-8")), encoding="utf-8")
    file.write_text(tomlkit.dumps(document), encoding="utf-8")


def _with(match: re.Match[str], value: str) -> str:
    """Return the text of a match with another first group."""
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return match[0][:start] + value + match[0][end:]


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--update", "write", is_flag=True, help="Write what was measured, also to the pages.")
def main(ids: tuple[str, ...], write: bool) -> None:
    """Measure the published figures of docs/facts.toml again, all or those named."""
    facts = load()
    if unknown := [id for id in ids if id not in facts]:
        raise click.UsageError(f"got {', '.join(unknown)}, needs some of {', '.join(facts)}")
    asked = {id: facts[id] for id in ids or facts}
    errors = Console(stderr=True)
    outputs = {}
    for command in dict.fromkeys(fact.command for fact in asked.values()):
        with errors.status(command):
            outputs[command] = run(command)
        errors.print(f"ran {command}", highlight=False)
    table = Table("figure", "published", "now", "tolerance", "verdict", box=None, pad_edge=False)
    measured: dict[str, str] = {}
    bad = 0
    for id, fact in asked.items():
        now = measure(fact, outputs[fact.command])
        verdict = "not measured" if now is None else "holds" if fact.holds(now) else "moved"
        bad += verdict != "holds"
        measured |= {} if now is None else {id: now}
        table.add_row(id, fact.value, now or "", f"{fact.tolerance:g}", verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if write:
        update(measured, facts)
        bad = len(asked) - len(measured)
    elif wrong := list(problems(facts)):
        click.echo("\n".join(wrong))
        bad += len(wrong)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
