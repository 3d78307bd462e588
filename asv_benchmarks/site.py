"""asv's own site, made to say what is so: one curve a machine, no empty panels, costs only, no server of others."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asv_benchmarks.archive import read
from asv_benchmarks.changes import paced
from asv_benchmarks.suite import benchmarks

VENDOR = Path(__file__).parent / "vendor"

COSTS = {"tokens per second": "seconds per token", "share of the peak": "times what the peak would take"}
"""asv takes what is larger for worse. A rate of this unit is shown to it as its reciprocal, in this one."""


Paces = Mapping[tuple[str, str], float]
"""By machine and commit how much longer than usual NumPy alone took there."""


def gather(folders: Iterable[Path], results: Path, paces: Paces | None = None) -> None:
    """Copy results into one folder, mended: see `mend`."""
    known: dict[str, Any] = {}
    for folder in folders:
        if folder.exists():
            shutil.copytree(folder, results, dirs_exist_ok=True)
            for name, described in read(folder / "benchmarks.json").items():
                known[name] = joined(known[name], described) if name in known and name != "version" else described
    mend(results, known, paces or {})


def mend(results: Path, known: dict[str, Any], paces: Paces) -> None:
    """Change copied results so that asv's pages show them as they are meant.

    - The parameters of a machine are those of its machine.json, for every commit: otherwise asv draws a curve for each
      way of telling them. The interpreter counts by its minor version.
    - Benchmarks and parameters without any number are left out, and where there are several commits, benchmarks of one
      alone, since asv draws no line through a point: with them empty panels and rows.
    - Rates become costs: see `COSTS`.
    - What the machine took longer than usual is divided out of times and rates, as everywhere.
    """
    every = benchmarks()
    rates = {benchmark.name for benchmark in every if benchmark.kind == "rate"}
    powers = {benchmark.name: paced(benchmark) for benchmark in every}
    used: dict[str, list[set[str]]] = {}
    commits: dict[str, set[str]] = {}
    for file in results.glob("*/*-*.json"):
        stored = read(file)
        about = read(file.parent / "machine.json")
        python = ".".join(str(stored["python"]).split(".")[:2])
        stored["params"] = {key: value for key, value in about.items() if key != "version"} | {"python": python}
        columns = stored["result_columns"]
        for name, row in stored["results"].items():
            values, params = row[0], row[columns.index("params")]
            if values is None:
                continue
            pace = paces.get((file.parent.name, stored.get("commit_hash", "")), 1.0) ** powers.get(name, 0)
            row[0] = values = [None if x is None else x * pace for x in values]
            if name in rates:
                row[0] = [1.0 / x if x and not math.isnan(x) else x for x in values]
            _note(used.setdefault(name, [set() for _ in params]), values, params)
            if any(x is not None and not math.isnan(x) for x in values):
                commits.setdefault(name, set()).add(file.name.partition("-")[0])
        file.write_text(json.dumps(stored), encoding="utf-8")
    kept = {}
    least = min(2, max(map(len, commits.values()), default=1))
    for name, described in known.items():
        if name == "version":
            kept[name] = described
        elif any(used.get(name, [])) and len(commits.get(name, ())) >= least:
            params = [
                [x for x in axis if x in some] for axis, some in zip(described["params"], used[name], strict=True)
            ]
            unit = COSTS.get(described["unit"], described["unit"])
            kept[name] = described | {"params": params, "unit": unit}
    (results / "benchmarks.json").write_text(json.dumps(kept), encoding="utf-8")


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a benchmark with the parameters of both, those of the old one first."""
    if old["version"] != new["version"] or len(old["params"]) != len(new["params"]):
        return new
    return new | {"params": [list(dict.fromkeys([*a, *b])) for a, b in zip(old["params"], new["params"], strict=True)]}


def _note(used: list[set[str]], values: list[float | None], params: list[list[str]]) -> None:
    """Add the parameters that have a number; the last one runs fastest."""
    for n, value in enumerate(values):
        if value is not None and not math.isnan(value):
            for some, axis in zip(reversed(used), reversed(params), strict=True):
                n, at = divmod(n, len(axis))
                some.add(axis[at])


def offline(folder: Path) -> None:
    """Put what asv's pages load from servers of others beside them."""
    pages = folder / "index.html"
    have = {_key(file.name): file for file in VENDOR.glob("*.*s")}

    def near(found: re.Match[str]) -> str:
        file = have.get(_key(found["url"].rpartition("/")[2]))
        if file is None:  # a newer asv, with other files
            return found[0]
        shutil.copy(file, folder / file.name)
        return f'{found["attribute"]}="{file.name}"'

    text = pages.read_text(encoding="utf-8")
    text = re.sub(r'\s+(integrity|crossorigin|referrerpolicy)="[^"]*"', "", text)
    text = re.sub(r'(?P<attribute>src|href)="(?P<url>https://[^"]+\.(js|css))"', near, text)
    pages.write_text(text, encoding="utf-8")


def _key(name: str) -> str:
    return re.sub(r"-[\d.]*\d|\.min", "", name)
