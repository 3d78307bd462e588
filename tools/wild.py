"""Bugs of published packages that `refattn verify` found: their reproductions are run, and a page is written of them.

    python -m tools.wild              # run those whose package is installed in this version, and write docs/wild.md
    python -m tools.wild --only fla   # those of packages with this in their name

`examples/wild/wild.toml` lists them. What a reproduction printed is kept in `printed.json` beside it until it is run
again. Kernels for a GPU are interpreted, here alone: the reproductions do not need refattn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import click

from refattn.files import write_atomically

Bug = Mapping[str, str]

ROOT = Path(__file__).parents[1]
HOME = ROOT / "examples" / "wild"
PRINTED, PAGE = HOME / "printed.json", ROOT / "docs" / "wild.md"

INTERPRETED = """
import sys
from refattn.verify.adapters import interpreted
interpreted.start(sys.argv[1])
with interpreted.world():
    exec(compile(sys.stdin.read(), "reproduction", "exec"), {"__name__": "__main__"})
"""


def listed() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the bugs and the conventions of wild.toml."""
    found = tomllib.loads((HOME / "wild.toml").read_text("utf-8"))
    return found["bug"], found["convention"]


def is_installed(bug: Bug) -> bool:
    """Tell whether the package of a bug is installed in its version."""
    package, version = bug["package"].split()
    try:
        return metadata.version(package).partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def printed_by(bug: Bug) -> str:
    """Run a reproduction, with the same random numbers each time, and return what it printed or how it ended."""
    code = ("import torch\ntorch.manual_seed(0)\n" if "torch.randn" in bug["code"] else "") + bug["code"]
    start = [INTERPRETED, bug["interpret"]] if "interpret" in bug else ["import sys; exec(sys.stdin.read())"]
    # JAX as whoever reads the page has it, without float64
    single = {
        "OMP_NUM_THREADS": "1",
        "JAX_ENABLE_X64": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", *start],
        input=code,
        env={**os.environ, **single},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if ran.returncode < 0:
        return f"killed by {signal.Signals(-ran.returncode).name}"
    last = "" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1]
    if last and "interpret" in bug:  # the line of the interpreter names a configuration; the error stands before it
        errors = [line for line in ran.stderr.splitlines() if "Error" in line.partition(":")[0]]
        last = errors[-1] if errors else last
    lines = [line for line in ran.stdout.strip().splitlines() if not line.startswith("DEBUG: ")]  # of aule, with a path
    return "\n".join(filter(None, [*lines, last]))


def stored() -> dict[str, str]:
    """Return what the reproductions printed, by their code."""
    return json.loads(PRINTED.read_text("utf-8")) if PRINTED.exists() else {}


def page(
    bugs: Sequence[Mapping[str, str]], conventions: Sequence[Mapping[str, str]], printed: Mapping[str, str]
) -> str:
    """Return the page."""
    table = ["| | package | where | wrong |", "| --- | --- | --- | --- |"]
    parts = []
    for number, bug in enumerate(bugs, 1):
        table.append(f"| [{number}](#bug-{number}) | {bug['package']} | {bug['rows']} | {bug['wrong']} |")
        link = f"\n\nReported: [{bug['about']}]({bug['report']})." if "report" in bug else ""
        shown = f"```text\n{printed[bug['code']]}\n```" if bug["code"] in printed else "Not run yet."
        parts.append(
            f"(bug-{number})=\n### {number}. {bug['package']}\n\n{bug['wrong']}{link}\n\n"
            f"```sh\n{bug['command']}\n```\n\n```python\n{bug['code'].strip()}\n```\n\n{shown}"
        )
    kept = ["| what | who | why | discussion |", "| --- | --- | --- | --- |"]
    for one in conventions:
        link = f"[link]({one['report']})" if "report" in one else "–"
        kept.append(f"| {one['what']} | {one['who']} | {one['why']} | {link} |")
    return _PAGE.format(
        count=len(bugs),
        packages=len({bug["package"] for bug in bugs}),
        table="\n".join(table),
        conventions="\n".join(kept),
        parts="\n\n".join(parts),
    )


_PAGE = """# Found in the wild

`refattn verify` found {count} bugs in {packages} published packages. Each has a command that shows it, and a
reproduction that does not need refattn, with its output. Links are to reports of the same or a related bug; a bug
without one may have been reported, too.

{table}

## Conventions that are no bugs

`verify` reports these, too, since a kernel that replaces another has to share them.

{conventions}

## How to report one upstream

1. Run `refattn verify` with the case that fails, and copy the smallest case that it found: an error in two keys and one
   head is understood within a minute.
2. Write it down without refattn, as below: q, k and v in one line, the call, and the plain formula or the package's
   own slow path beside it, with both numbers.
3. Say what the documentation promises for this call, for a convention that differs is no bug.
4. Add the versions of the package and of its array library, the storage type and the device.
5. Search the tracker for the option and for its value first (`is_causal` and "cache", not "wrong output"), and link
   what you find.

## The bugs

The commands run in a clone of refattn, in an environment with the package. The reproductions draw their random numbers
after `torch.manual_seed(0)`. Kernels for a GPU in Triton ran in its interpreter, those in Pallas with `interpret=True`.

{parts}

## How this page is made

`python -m tools.wild` runs the reproductions of `examples/wild/wild.toml` whose packages are installed, keeps what they
print in `examples/wild/printed.json`, and writes this page.
"""


@click.command()
@click.option("--only", default="", help="Packages with this in their name.")
def main(only: str) -> None:
    """Run the reproductions whose package is installed, and write the page."""
    bugs, conventions = listed()
    printed = {code: text for code, text in stored().items() if code in {bug["code"] for bug in bugs}}
    for bug in bugs:
        if only.lower() in bug["package"].lower() and is_installed(bug):
            click.echo(bug["package"], err=True)
            printed[bug["code"]] = printed_by(bug)
    write_atomically(PRINTED, (json.dumps(printed, indent=1) + "\n").encode())
    write_atomically(PAGE, page(bugs, conventions, printed).encode())


if __name__ == "__main__":
    main()
