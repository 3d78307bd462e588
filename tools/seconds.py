"""How long the commands take that everybody runs: in a clean clone of the last commit, one after the other.

    python -m tools.seconds         # make check, installation included; make test after it
    python -m tools.seconds --ci    # .ci/run

What is published was measured on a machine that did nothing else. Downloads count: run it twice.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]


@click.command()
@click.option("--ci", is_flag=True, help="All that CI does, instead.")
def main(ci: bool) -> None:
    """Print the seconds that each command takes, and the code that it ends with where that is not 0."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        for command in [".ci/run"] if ci else ["make check", "make test"]:
            began = time.monotonic()
            done = subprocess.run(command.split(), cwd=folder, env=environment, check=False)
            failed = f", exit code {done.returncode}" if done.returncode else ""
            click.echo(f"{command}: {time.monotonic() - began:.0f} s{failed}")


if __name__ == "__main__":
    main()
