"""``refattn verify --init``: an adapter to begin with."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

import click

from refattn.cli.arguments import Problem
from refattn.files import reason, write_output

INITS = ("torch", "jax", "numpy", "triton", "pallas", "fla", "c")
"""Whose adapters there are: that of fla is of delta, the others are of attention."""


def begin(kind: str, mechanism: str) -> None:
    """Write an adapter into the working directory, and say how it is run."""
    if kind == "fla" and mechanism != "delta":
        raise Problem(f"--init: got fla for {mechanism}, needs delta")
    path = Path("attend.c" if kind == "c" else f"attend_{kind}.py")
    if path.exists():
        raise Problem(f"--init: got {kind}, and there is {path}, needs a folder without it")
    template = resources.files("refattn.verify.adapters").joinpath("templates", f"{kind}.txt").read_text("utf-8")
    try:
        write_output(path, template.replace("MECHANISM", mechanism).replace("ADAPTER", path.name).encode())
    except OSError as error:
        raise Problem(f"--init: {path} cannot be written ({reason(error)})") from error
    call = f"refattn verify {mechanism} --impl {path}:{'Attend' if kind == 'numpy' else 'attend'} --grad"
    if kind == "c":
        call = f"cc -O2 -o attend {path} -lm && refattn verify {mechanism} --exec ./attend --dtype float32"
    what = "its gated delta rule" if kind == "fla" else "plain attention"
    click.echo(f"wrote {path}: {what}, to be replaced by your kernel; {call}", file=sys.stdout)
