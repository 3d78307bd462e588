"""``refattn verify --init``: an adapter to begin with, or benchmarks of one's own kernel for asv."""

from __future__ import annotations

import inspect
import json
import sys
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from refattn.cli.arguments import Problem
from refattn.cli.show import standalone
from refattn.files import reason, write_output

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism

ADAPTERS = ("torch", "jax", "numpy", "triton", "pallas", "fla", "c")
"""Whose adapters there are: that of fla is of delta, that of NumPy of any mechanism, the others are of attention."""

INITS = (*ADAPTERS, "asv")


def begin(kind: str, record: Mechanism) -> None:
    """Write an adapter that agrees into the working directory, and say how it is run.

    For NumPy it comes from the definition of the mechanism, in other libraries it is attention, which no other
    mechanism is.
    """
    from refattn.verify.bugs.fault import flash

    if kind == "asv":
        _begin_history(record)
        return
    mechanism = record.name
    if kind == "fla" and mechanism != "delta":
        raise Problem(f"--init: got fla for {mechanism}, needs delta")
    of_definition = kind == "numpy" and not flash(mechanism)
    if kind != "fla" and not flash(mechanism) and not (of_definition and _runs(record)):
        has = ["numpy"] if _runs(record) else []
        has += ["fla"] if mechanism == "delta" else []
        needs = (
            f"needs {' or '.join(has)}" if has else f"and there is none in others; refattn show {mechanism} prints it"
        )
        raise Problem(f"--init: got {kind}, in which there is no kernel of {mechanism}, {needs}")
    path = Path("attend.c" if kind == "c" else f"attend_{kind}.py")
    if path.exists():
        raise Problem(f"--init: got {kind}, and there is {path}, needs a folder without it")
    folder = resources.files("refattn.verify.adapters").joinpath("templates")
    own = ("allowed" if _hides(record) else "definition") if of_definition else kind
    template = folder.joinpath(f"{own}.txt").read_text("utf-8")
    template = template.replace("MECHANISM", record.address).replace("ADAPTER", path.name)
    try:
        write_output(
            path, ((standalone(record.definition) if of_definition and record.definition else "") + template).encode()
        )
    except OSError as error:
        raise Problem(f"--init: {path} cannot be written ({reason(error)})") from error
    call = f"refattn verify {record.address} --impl {path}:{'Attend' if kind == 'numpy' else 'attend'} --grad"
    if kind == "c":
        call = f"cc -O2 -o attend {path} -lm && refattn verify {record.address} --exec ./attend --dtype float32"
    what = "its gated delta rule" if kind == "fla" else "its definition" if of_definition else "plain attention"
    click.echo(f"wrote {path}: {what}, to be replaced by your kernel; {call}", file=sys.stdout)


def _begin_history(record: Mechanism) -> None:
    """Write a benchmark of asv and its configuration, and say what to change in them."""
    template = resources.files("refattn.verify.adapters").joinpath("templates").joinpath("asv.txt").read_text("utf-8")
    pip = "in-dir={env_dir} python -m pip install"
    # Commits have one version, which pip would take for installed: every commit would be measured as the first.
    install = [f"{pip} {{wheel_file}} {_requirement()}", f"{pip} --force-reinstall --no-deps {{wheel_file}}"]
    settings = {
        "version": 1,
        "project": "attention",
        "repo": ".",
        "branches": ["HEAD"],
        "environment_type": "virtualenv",
        "build_command": ["python -m pip wheel --no-deps -w {build_cache_dir} {build_dir}"],
        "install_command": install,
        "env_dir": ".asv/env",
        "results_dir": ".asv/results",
        "html_dir": ".asv/html",
    }
    files = {
        Path("benchmarks/attention.py"): template.replace("MECHANISM", record.address),
        Path("benchmarks/__init__.py"): "",
        Path("asv.conf.json"): json.dumps(settings, indent=4) + "\n",
    }
    if there := [path for path in files if path.exists()]:
        raise Problem(f"--init: got asv, and there is {there[0]}, needs a folder without it")
    for path, text in files.items():
        try:
            path.parent.mkdir(exist_ok=True)
            write_output(path, text.encode())
        except OSError as error:
            raise Problem(f"--init: {path} cannot be written ({reason(error)})") from error
    click.echo(
        "wrote benchmarks/attention.py, whose function `kernel` is to call yours, and asv.conf.json; commit them, then "
        "asv machine --yes && asv run ALL && asv publish && asv preview",
        file=sys.stdout,
    )


def _requirement() -> str:
    """Return what pip installs this refattn by: the place that it came from, or else its name and version."""
    try:
        found = metadata.distribution("refattn")
    except metadata.PackageNotFoundError as error:
        raise Problem("--init: got asv, needs refattn installed: asv installs it for each commit") from error
    place = json.loads(found.read_text("direct_url.json") or "{}")
    if "vcs_info" in place:
        return "{vcs}+{0}@{commit_id}".format(place["url"], **place["vcs_info"])
    return str(place.get("url", f"refattn=={found.version}"))


def _runs(record: Mechanism) -> bool:
    """Tell whether the definition of a mechanism is a map of q, k and v with the options of some designed case."""
    if record.definition is None:
        return False
    parameters = [*inspect.signature(record.definition.forward).parameters]
    causal = {"causal"} if _hides(record) else set()
    return parameters[:3] == ["q", "k", "v"] and any({*c.options} <= {*parameters} | causal for c in record.cases)


def _hides(record: Mechanism) -> bool:
    """Tell whether the definition is one of three files: what may be attended is its fourth argument."""
    parameters = inspect.signature(record.definition.forward).parameters if record.definition else ()
    return [*parameters][3:4] == ["allowed"]
