"""What kernels of many libraries agree with: each in an environment of its own, and a page of the documentation.

    python -m tools.kernels                      # those that have not run yet, and the page; hours of one core for all
    python -m tools.kernels --only jax           # those with this in their name
    python -m tools.kernels --only nothing       # the page alone
    python -m tools.kernels --only mlx --version 0.30.0    # another version: since which one is it right?

`examples/kernels/kernels.toml` lists them with what is to say of each, and `requirements/` beside it what is installed.
A kernel that has ended is kept in `results.json` there, until its adapter, its requirements or what is asked of it
change; so a run that was cut goes on. Environments, and the whole reports, lie in a folder outside (`--folder`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

import refattn as ra
from refattn.files import write_atomically
from refattn.verify.outcome import share_text

ROOT = Path(__file__).parents[1]
HOME = ROOT / "examples" / "kernels"
RESULTS, PAGE = HOME / "results.json", ROOT / "docs" / "kernels.md"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refattn" / "kernels"
TYPES = ("float32", "float16", "bfloat16")
RUN = ("agrees", "disagrees", "raises")
LARGEST = 9999.0


@dataclass(frozen=True)
class Kernel:
    """An entry of kernels.toml.

    Attributes
    ----------
    name
        In words.
    adapter
        Its file beside kernels.toml, with the function.
    environment
        The name of its list in `requirements/`.
    package
        The one in this list that it is of; the environment's name if absent.
    mechanism, types, gradients, quick
        What is verified: every case if not `quick`.
    differs
        Why it disagrees where it does.
    other
        A version to run in place of the one in the list.
    """

    name: str
    adapter: str
    environment: str
    package: str = ""
    mechanism: str = "softmax"
    types: tuple[str, ...] = TYPES
    gradients: bool = False
    quick: bool = False
    differs: str = ""
    other: str = ""

    @property
    def requirements(self) -> Path:
        """The list of what is installed."""
        return HOME / "requirements" / f"{self.environment}.txt"

    @property
    def version(self) -> str:
        """The package with the version that is installed."""
        package = self.package or self.environment
        (pin,) = re.findall(self._pin, self.requirements.read_text("utf-8"), re.M)
        return f"{package} {self.other or pin[1]}"

    @property
    def installed(self) -> str:
        """The list of what is installed, with the version that is run."""
        text = self.requirements.read_text("utf-8")
        return re.sub(self._pin, rf"\g<1>{self.other}", text, flags=re.M) if self.other else text

    @property
    def _pin(self) -> str:
        return rf"^({re.escape(self.package or self.environment)}(?:\[\w+\])?==)(\S+)$"

    @property
    def arguments(self) -> list[str]:
        """What `refattn` is told."""
        place, _, name = self.adapter.partition(":")
        told = ["verify", self.mechanism, "--impl", f"{(HOME / place).resolve()}:{name}", "--in-process"]
        told += [f"--dtype={x}" for x in self.types]
        return told + ["--grad"] * self.gradients + ["--quick"] * self.quick

    @property
    def digest(self) -> str:
        """It changes with what is run."""
        files = (HOME / self.adapter.partition(":")[0], self.requirements)
        asked = self.adapter, self.mechanism, self.types, self.gradients, self.quick
        text = "".join([*(file.read_text("utf-8") for file in files), str(asked)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def listed() -> tuple[list[Kernel], list[dict[str, str]]]:
    """Return the kernels of kernels.toml, and what cannot be run, each with its reason."""
    found = tomllib.loads((HOME / "kernels.toml").read_text("utf-8"))
    kernels = [Kernel(**{**one, "types": tuple(one.get("types", TYPES))}) for one in found["kernel"]]
    return kernels, found["absent"]


def interpreter_of(kernel: Kernel, folder: Path) -> Path:
    """Return the Python of a kernel's environment, which is made if it is not there or has an older list."""
    home = folder / "environments" / "-".join(filter(None, (kernel.environment, kernel.other)))
    python, done, wanted = home / "bin" / "python", home / "requirements.txt", home / "wanted.txt"
    asked = kernel.installed
    if not done.exists() or done.read_text("utf-8") != asked:
        venv.create(home, clear=True, with_pip=True)
        wanted.write_text(asked, "utf-8")
        command = [str(x) for x in (python, "-m", "pip", "install", "-q", "-r", wanted, "-e", ROOT)]
        subprocess.run(command, check=True)
        done.write_text(asked, "utf-8")
    return python


def verified(kernel: Kernel, python: Path | str, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the report on a kernel, as JSON has it; it stays in the folder.

    Raises
    ------
    RuntimeError
        If there is none: the adapter cannot be loaded, or its time is over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{re.sub(r'[^a-z0-9]+', '-', kernel.name.lower())}.json"
    file.unlink(missing_ok=True)
    command = [str(python), "-m", "refattn", *kernel.arguments, "--json", str(file)]
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with file.with_suffix(".log").open("w") as log:
        try:
            subprocess.run(command, env={**os.environ, **single}, stdout=log, stderr=log, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{kernel.name}: got no report in {seconds:.0f} s") from None
    if not file.exists():
        raise RuntimeError(f"{kernel.name}: got no report: {log.name}")
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def row(kernel: Kernel, report: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return what the page needs of a report."""
    types: dict[str, Any] = {}
    classes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for dtype in kernel.types:
        outcomes = [one for one in report["outcomes"] if one["dtype"] == dtype]
        ended = Counter(one["status"] for one in outcomes)
        shares = {one["case"]: _worst(one) for one in outcomes if one["status"] in RUN}
        failed = {one["case"]: shares[one["case"]] for one in outcomes if one["status"] in RUN[1:]}
        types[dtype] = {
            "run": len(shares),
            "declined": ended["declined"],
            "share": max((x for case, x in shares.items() if case not in failed), default=0.0),
            "failed": failed,
        }
        for one in outcomes:
            classes[one["kind"]][one["status"]] += 1
    pulled = any(v["tensor"].startswith("d_") for one in report["outcomes"] for v in one["verdicts"])
    ran = {kind: [found["agrees"], sum(found[x] for x in RUN)] for kind, found in classes.items()}
    told = {"digest": kernel.digest, "version": kernel.version.split()[1], "seconds": round(seconds)}
    told |= {"gradients": pulled, "types": types}
    return {**told, "classes": {kind: found for kind, found in ran.items() if found[1]}}


def _worst(outcome: Mapping[str, Any]) -> float:
    """Return the largest share of a case, at most LARGEST, which stands for NaN and what was raised, too."""
    shares = [LARGEST if one["share"] is None else one["share"] for one in outcome["verdicts"]]
    return round(min(max(shares, default=LARGEST), LARGEST), 3)


def joined(before: Mapping[str, Any], after: Mapping[str, Any], other: bool) -> dict[str, Any]:
    """Return the row of a kernel that has run once more: of another version only how many cases agreed is kept."""
    versions = dict(before.get("versions", {}))
    kept, counted = (before, after) if other else (after, before)
    if "version" in counted:
        versions[counted["version"]] = agreed(counted)
    versions.pop(kept.get("version", ""), None)
    return {**kept, "versions": versions} if versions else dict(kept)


def agreed(found: Mapping[str, Any]) -> list[int]:
    """Return how many cases agreed in all types, and how many ran."""
    run, failed = (sum(count(one) for one in found["types"].values()) for count in (_run, _failed))
    return [run - failed, run]


def _run(found: Mapping[str, Any]) -> int:
    return int(found["run"])


def _failed(found: Mapping[str, Any]) -> int:
    return len(found["failed"])


def since(kernel: Kernel, found: Mapping[str, Any]) -> str:
    """Return since which version a kernel agrees, as far as versions of it have run; a dash if it disagrees."""
    right, run = agreed(found)
    if right < run:
        return "–"
    oldest = kernel.version.split()[1]
    older = {version: counts for version, counts in found.get("versions", {}).items() if _key(version) < _key(oldest)}
    for version in sorted(older, key=_key, reverse=True):
        right, run = older[version]
        if right < run:
            return f"{oldest} ({version}: **{right} of {run}**)"
        oldest = version
    return f"{oldest} or before"


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def stored() -> dict[str, Any]:
    """Return what the page needs of each kernel that has ended."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def write(rows: Mapping[str, Any], kernels: Sequence[Kernel]) -> None:
    """Write the rows, each as a line."""
    lines = [f"{json.dumps(one.name)}: {json.dumps(rows[one.name])}" for one in kernels if one.name in rows]
    write_atomically(RESULTS, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def page(kernels: Sequence[Kernel], absent: Sequence[Mapping[str, str]], rows: Mapping[str, Any]) -> str:
    """Return the page."""
    parts = []
    for mechanism in dict.fromkeys(kernel.mechanism for kernel in kernels):
        ran = {one: rows[one.name] for one in kernels if one.mechanism == mechanism and one.name in rows}
        if ran:
            title = ra.mechanism(mechanism).title
            parts += [f"## {title[0].upper()}{title[1:]}", _table(ran), _reasons(ran), _classes(ran)]
    tried = "\n".join(f"- **{one['name']}**: {one['reason']}" for one in absent)
    waiting = "; ".join(one.name for one in kernels if one.name not in rows)
    later = f"Not run yet: {waiting}." if waiting else ""
    return _PAGE.format(count=len(rows), parts="\n\n".join(filter(None, parts)), tried=tried, later=later)


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(one)} |" for one in (header, ["---"] * len(header), *rows))


def _table(rows: Mapping[Kernel, Any]) -> str:
    lines = []
    for kernel, found in rows.items():
        cells = [_cell(found["types"].get(dtype)) for dtype in TYPES]
        first = next(iter(found["types"].values()))
        cases = f"{first['run'] + first['declined']}{', the quick ones' if kernel.quick else ''}"
        gradients = "yes" if found["gradients"] else "no"
        lines.append([kernel.name, kernel.version, cases, *cells, gradients, since(kernel, found)])
    return _lines(["kernel", "package", "cases", *TYPES, "gradients", "right since"], lines)


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None or not found["run"]:
        return "–"
    run, failed = found["run"], found["failed"]
    if not failed:
        return f"{run}, {share_text(found['share'])}"
    rest = f", others {share_text(found['share'])}" if len(failed) < run else ""
    return f"**{run - len(failed)} of {run}**, {share_text(max(failed.values()))}{rest}"


def _reasons(rows: Mapping[Kernel, Any]) -> str:
    lines = []
    for kernel, found in rows.items():
        cases: defaultdict[str, list[str]] = defaultdict(list)
        for dtype, one in found["types"].items():
            for case in one["failed"]:
                cases[case].append(dtype)
        by_types: defaultdict[str, list[str]] = defaultdict(list)
        for case, dtypes in cases.items():
            by_types["" if len(dtypes) == len(found["types"]) else f" ({', '.join(dtypes)})"].append(f"`{case}`")
        if cases:
            named = "; ".join(f"{', '.join(names)}{dtypes}" for dtypes, names in by_types.items())
            lines.append(f"- **{kernel.name}**: {kernel.differs or 'not explained yet.'} {named}.")
    return "Those that disagree, why, and in which cases:\n\n" + "\n".join(lines) if lines else ""


def _classes(rows: Mapping[Kernel, Any]) -> str:
    record = ra.mechanism(next(iter(rows)).mechanism)
    kinds = dict.fromkeys(case.kind for case in (*record.cases, *record.kernel_sizes))
    ran = [kind for kind in kinds if any(found["classes"].get(kind, [0, 0])[1] for found in rows.values())]

    def cell(agreed: int, run: int) -> str:
        return "–" if not run else str(run) if agreed == run else f"**{agreed} of {run}**"

    lines = [[one.name, *(cell(*found["classes"].get(kind, [0, 0])) for kind in ran)] for one, found in rows.items()]
    return "By class of cases, in all types together:\n\n" + _lines(["kernel", *ran], lines)


_PAGE = """# Kernels side by side

What do the kernels of the field agree with? {count} of them ran on the CPU of one machine, each in an environment of
its own. `refattn verify` judged them on its designed cases, with the adapters of `examples/kernels/`. Kernels for a GPU
in Triton and Pallas, and those for a TPU, run by [their
interpreters](verifying/triton.md). [Found in the wild](wild.md) reproduces the bugs among them, and those of more
packages.

- **cases**: those that it was given, in its sizes if it states these; it declines what it has no option for. The
  number grows as cases are added, so that rows that ran earlier have fewer. *The quick ones* are a few
  that have every feature once, for kernels that are interpreted or compile each shape anew: all cases of JAX's
  `dot_product_attention` took 14 minutes of one core.
- **float32, float16, bfloat16**: the cases that ran, and the largest part of the [allowed error](tolerances.md) that
  one of them used. **Two numbers** say how many agree; then the worst is of all, and *others* of those that agree. A
  dash is a type that it does not have, or that was not run.
- **gradients**: whether those were judged, too.
- **right since**: the oldest version of the package that agreed in every case that it ran, as did all later ones that
  ran. *Or before*: none older has run. In brackets is the next older one, with the cases that agreed. A dash is a
  kernel that disagrees.

{parts}

## What could not run

{tried}

## How this page is made

`python -m tools.kernels` makes an environment for each list of `examples/kernels/requirements/`, runs what
`examples/kernels/kernels.toml` lists, keeps what it got in `examples/kernels/results.json`, and writes this page from
it. It goes on where it was cut. `--only NAME` runs a part, and `--only NAME --version VERSION` another version of the
package, which enters the last column alone. One kernel takes one to five minutes of one core. {later}
"""


@click.command()
@click.option("--only", default="", help="Kernels with this in their name.")
@click.option("--version", "other", default="", help="Another version of the package, in an environment of its own.")
@click.option("--again", is_flag=True, help="Run them although they have ended before.")
@click.option("--seconds", default=1200.0, show_default=True, help="For one kernel.")
@click.option("--folder", type=Path, default=FOLDER, help="Of environments and reports; in the cache folder if absent.")
def main(only: str, other: str, again: bool, seconds: float, folder: Path) -> None:
    """Verify kernels of many libraries, and write the page."""
    kernels, absent = listed()
    failed = []
    for listing in kernels:
        kernel, before = replace(listing, other=other), stored().get(listing.name, {})
        known = other in before.get("versions", {}) if other else before.get("digest") == kernel.digest
        if (known and not again) or only.lower() not in kernel.name.lower() or (other and not before):
            continue
        click.echo(kernel.name, err=True)
        try:
            python, start = interpreter_of(kernel, folder), time.monotonic()
            report = verified(kernel, python, folder / "reports" / other, seconds)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            failed.append(str(error))
            continue
        found = row(kernel, report, time.monotonic() - start)
        write({**stored(), kernel.name: joined(before, found, bool(other))}, kernels)
    write_atomically(PAGE, page(kernels, absent, stored()).encode())
    for line in failed:
        click.echo(line, err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
