"""Results over time: asv runs the suite on the files as they are, and its results are compared with the last ones.

Results of one machine over many commits come with the repository: `record` adds to them, `publish` shows them beside
those of this machine. `asv_benchmarks.archive` reads both.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asv_benchmarks import archive, changes
from asv_benchmarks.archive import Samples
from asv_benchmarks.benchmarks.common import EVERY, LIBRARIES
from asv_benchmarks.compare import PARTS, VersionError, check_out, listed
from asv_benchmarks.judge import Verdict, apart
from asv_benchmarks.machine import device, git
from asv_benchmarks.sides import ROOT, STEADY, held_to
from asv_benchmarks.suite import MACHINE, Benchmark, benchmarks
from refattn.workers import Started, lines

FOLDER = ROOT / "asv_benchmarks"
MEASURED = (*PARTS, "asv_benchmarks")
"""What results depend on."""

EACH = frozenset(f"stats_{what}" for what in ("ci_99_a", "ci_99_b", "q_25", "q_75", "number", "repeat")) | {"samples"}
"""Columns of asv's results that have, as "result", an entry for each choice of parameters."""


class RunError(Exception):
    """asv is missing or failed."""


@dataclass
class Found:
    """A run beside the one before it.

    Attributes
    ----------
    before, after
        The short hashes that the results are stored under; None where there was no earlier run.
    verdicts
        On every benchmark that ran.
    moved
        In words, how much faster or slower the machine itself was; "" where that is little.
    stopped
        What interrupted the run; the verdicts are then on what was stored before.
    """

    before: str | None
    after: str
    verdicts: list[Verdict] = field(default_factory=list)
    moved: str = ""
    stopped: KeyboardInterrupt | None = None


def run(pattern: str, tell: Callable[[str], None], *, quick: bool = False) -> Found:
    """Run the benchmarks that match the regular expression; store the results and compare them with the last ones.

    `quick` takes few samples, of processes that are forked from one which has imported everything.

    Raises
    ------
    RunError
        Where asv cannot be imported or fails.
    KeyboardInterrupt
        Where the run is interrupted before anything is stored.
    """
    commit = version()
    if archive.RESULTS.exists() and not os.access(archive.RESULTS, os.W_OK):
        raise RunError(f"results: got the folder {archive.RESULTS}, needs one that can be written")
    before = archive.last()  # read now: a run of the same commit replaces its results
    asv(["machine", "--yes"], lambda line: None)
    chosen = benchmarks(pattern)
    tell(f"{len(chosen)} benchmarks; {'less than a minute on an idle machine' if quick else expected(chosen)}")
    options = ["-E", f"existing:{sys.executable}", "--set-commit-hash", commit, "--record-samples", "--show-stderr"]
    few = ["--launch-method", "forkserver", "-a", "rounds=1", "-a", "repeat=(3, 10, 0.05)", "-a", "warmup_time=0.0"]
    stopped, done = None, []
    try:
        for name in each([*options, *(few if quick else [])], pattern, chosen, tell):
            done.append(name)
    except KeyboardInterrupt as error:
        if not done:
            raise
        stopped = error
    if not archive.files():
        raise RunError("asv stored no results")
    stored = archive.files()[-1]
    last, numbers = before.get(archive.environment(stored), (None, {}))
    mine = [benchmark for benchmark in chosen if benchmark.name in done]
    verdicts = judged(numbers, archive.samples(archive.results(stored)), mine)
    return Found(last, archive.short(stored), verdicts, moved(verdicts), stopped)


def each(
    options: Sequence[str], pattern: str, chosen: Sequence[Benchmark], tell: Callable[[str], None], **how: Any
) -> Iterator[str]:
    """Run the chosen benchmarks, those that match the pattern, one name after the other; yield each name at its end.

    asv stores what it has measured when it ends. So an interrupted run keeps what came before.
    """
    how["env"] = {**libraries(chosen), **how.get("env", {})}
    done = 0
    for name, number in Counter(benchmark.name for benchmark in chosen).items():
        tell(f"{100 * done // len(chosen):>3} %  {name}: {number}")
        done += number
        expression = f"^(?={re.escape(name)}\\()(?=.*?(?:{pattern}))"
        asv(["run", *options, "--bench", expression], Rows(name, tell).read, **how)
        yield name


def libraries(chosen: Sequence[Benchmark]) -> dict[str, str]:
    """Return the environment in which asv sees the libraries of these benchmarks, and no others."""
    used = {value for benchmark in chosen for value in benchmark.params} & set(EVERY)
    return {LIBRARIES: ",".join(name for name in EVERY if name in used or name == "numpy")}


def expected(chosen: Sequence[Benchmark]) -> str:
    """Say how long benchmarks will take: as long as they took last, here or where the recorded ones were run."""
    seconds: dict[str, float] = {}
    for file in [*archive.recorded(), *archive.files()]:
        stored = archive.results(file)
        for name in stored.get_all_result_keys():
            values = stored.get_result_value(name, stored.get_result_params(name))
            numbers = sum(x is not None and not math.isnan(x) for x in values)
            if numbers and stored.duration.get(name):
                seconds[name] = stored.duration[name] / numbers
    usual = statistics.median(seconds.values()) if seconds else 1.0
    minutes = sum(seconds.get(benchmark.name, usual) for benchmark in chosen) / 60.0
    return f"about {max(1, math.ceil(minutes))} min, if all exist here"


def record(
    versions: Sequence[str], pattern: str, name: str, tell: Callable[[str], None], *, rounds: int = 1
) -> list[Path]:
    """Run benchmarks of this checkout on commits, add the results to those of the repository, and return their files.

    Parameters
    ----------
    versions
        What git calls the commits. Every round runs all of them in turn, so that what the machine does for a while
        hits all; of several rounds each time and rate is kept as in the best one.
    pattern
        A regular expression of the benchmarks.
    name
        What the machine is called there. Paths of this machine are left out of the files.
    rounds
        How many times.

    Raises
    ------
    RunError
        Where asv cannot be imported or fails, and where the machine cannot be called so, or is another one.
    VersionError
        Where there is no such commit.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RunError(f"machine: got {name!r}, needs letters, digits, _, - and dots, for a folder is called so")
    commits = {
        version: git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{version}^{{commit}}")
        for version in versions
    }
    for version, commit in commits.items():
        if not commit:
            raise VersionError(f"commit: got {version!r}, needs a commit")
    about = {"machine": name, **device()}
    known = archive.RECORDED / name / "machine.json"
    if known.exists() and (other := archive.read(known)) != about | {"version": 1}:
        raise RunError(f"machine: {name} is {other}, this is {about}: needs another name")
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / ".asv-machine.json").write_text(json.dumps({name: about, "version": 1}), encoding="utf-8")
        homes = {commit: check_out(commit, Path(place) / commit) for commit in dict.fromkeys(commits.values())}
        kept = []
        for n in range(rounds):
            for m, (commit, home) in enumerate(homes.items(), start=1):
                tell(f"{commit[:8]}, {m} of {len(homes)}, round {n + 1} of {rounds}")
                file = _recorded(commit, home, pattern, name, tell, again=n > 0)
                kept += [file] if n == 0 else []
    return kept


def _recorded(commit: str, home: Path, pattern: str, name: str, tell: Callable[[str], None], *, again: bool) -> Path:
    """Run benchmarks on one commit, and add the results to its file; return it. Samples stay in the folder of runs."""
    place = home.parent
    results = place / "results"
    conf = _conf(place, results, home / "asv_benchmarks" / "benchmarks")
    own = results / name / f"{commit[:8]}-{_environment()}.json"
    kept = archive.RECORDED / name / f"{commit[:8]}-{_python()}.json"
    if kept.exists() and not again:
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(_as(kept, _environment(), sys.executable), encoding="utf-8")
    options = ["-E", f"existing:{sys.executable}", "--set-commit-hash", commit, "--machine", name]
    options += ["-a", "rounds=1", "--show-stderr", "--record-samples"]
    before = own.read_text(encoding="utf-8") if again else None
    env = {"HOME": str(place), "ASV_PYTHONPATH": str(home)}
    for _ in each(options, pattern, listed(home, pattern), tell, conf=conf, env=env):
        pass
    if not own.exists():
        raise RunError("asv stored no results")
    if before is not None:
        best = best_of(json.loads(before), json.loads(own.read_text(encoding="utf-8")), benchmarks())
        own.write_text(json.dumps(best), encoding="utf-8")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(_as(own, _python(), platform.python_version()), encoding="utf-8")
    shutil.copy(results / name / "machine.json", kept.parent)
    return kept


def best_of(before: dict[str, Any], now: dict[str, Any], known: Sequence[Benchmark]) -> dict[str, Any]:
    """Return the results of a commit in which each time and rate is that of the better of two rounds.

    Both are what asv stores. What else a machine does can only take time, so that the better one is nearer to the code.
    """
    kinds = {benchmark.name: benchmark.kind for benchmark in known}
    columns = [n for n, name in enumerate(now["result_columns"]) if name == "result" or name in EACH]
    for name, later in now["results"].items():
        earlier, kind = before["results"].get(name), kinds.get(name)
        if kind not in ("time", "rate") or earlier is None or earlier[1] != later[1] or None in (earlier[0], later[0]):
            continue
        for n, (old, new) in enumerate(zip(earlier[0], later[0], strict=True)):
            if old is None or math.isnan(old):
                continue
            if new is None or (old < new if kind == "time" else old > new):
                for column in columns:
                    if column < min(len(earlier), len(later)) and None not in (earlier[column], later[column]):
                        later[column][n] = earlier[column][n]
    return now


def steps(
    pattern: str = "", least: float | None = None
) -> dict[tuple[str, str], dict[changes.Series, list[changes.Change]]]:
    """Return by machine and interpreter the series of stored results that match the pattern, and the steps of each.

    Raises
    ------
    ArchiveError
        Where there are no results, or a file of them cannot be read.
    """
    found = {}
    for place, stored in archive.series(benchmarks()).items():
        chosen = [one for one in changes.calibrated(stored) if re.search(pattern, str(one.benchmark))]
        found[place] = {one: changes.changes(one, least) for one in chosen}
    return found


def publish(tell: Callable[[str], None]) -> tuple[Path, Path]:
    """Make web pages of all stored results, those that come with the repository included.

    Returns
    -------
    newest, all
        The page on the newest commit, which opens as a file, and the first one of asv's own site, which needs a server.

    Raises
    ------
    ArchiveError
        Where there are no results, or a file of them cannot be read.
    RunError
        Where asv cannot be imported or fails.
    """
    from asv_benchmarks import page

    stored = archive.series(benchmarks())
    with tempfile.TemporaryDirectory() as place:
        results = Path(place) / "results"
        for folder in (archive.RECORDED, archive.RESULTS):
            if folder.exists():
                shutil.copytree(folder, results, dirs_exist_ok=True)
        conf = _conf(Path(place), results, ROOT / "asv_benchmarks" / "benchmarks")
        env = {"HOME": place, **libraries([one.benchmark for series in stored.values() for one in series])}
        asv(["machine", "--yes"], lambda line: None, env=env)
        # asv runs nothing for this name, but writes what benchmarks there are
        discover = ["run", "-E", f"existing:{sys.executable}", "--bench", "just-discover"]
        asv(discover, lambda line: None, conf=conf, env=env)
        asv(["publish"], tell, conf=conf)
        folder = Path(json.loads(conf.read_text(encoding="utf-8"))["html_dir"])
    newest = folder / "newest.html"
    newest.write_text(page.page(stored), encoding="utf-8")
    return newest, folder / "index.html"


def _conf(place: Path, results: Path, suite: Path) -> Path:
    """Write asv's settings with other folders; return the file."""
    settings = json.loads((FOLDER / "asv.conf.json").read_text(encoding="utf-8"))
    pages = (FOLDER / settings["html_dir"]).resolve()
    folders = {
        "repo": ROOT,
        "results_dir": results,
        "benchmark_dir": suite,
        "html_dir": pages,
        "env_dir": place / "env",
    }
    file = place / "asv.conf.json"
    file.write_text(json.dumps(settings | {name: str(folder) for name, folder in folders.items()}), encoding="utf-8")
    return file


def _environment() -> str:
    """Return what asv calls this interpreter: its path, in the end."""
    from asv.environment import get_env_name

    return str(get_env_name("existing", sys.executable, {}, {}))


def _python() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _as(file: Path, environment: str, python: str) -> str:
    """Return a file of results under the name of another environment, without samples."""
    stored = archive.read(file)
    stored |= {"env_name": environment, "python": python}
    at = stored["result_columns"].index("samples")
    stored["results"] = {name: [*row[:at], None, *row[at + 1 :]][: len(row)] for name, row in stored["results"].items()}
    stored["params"] |= {"python": python}
    return json.dumps(stored) + "\n"


def asv(
    arguments: Sequence[str],
    tell: Callable[[str], None],
    *,
    conf: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run asv on this checkout, or with other settings; `tell` gets its lines."""
    command = [sys.executable, "-m", "asv", *arguments]
    if arguments[0] != "machine":
        command += ["--config", str(conf or FOLDER / "asv.conf.json")]
    # asv drops PYTHONPATH, and hands this one on.
    # On a terminal as narrow as this it prints tables of one number a row.
    whole = {**held_to(1), **STEADY, "COLUMNS": "20", "ASV_PYTHONPATH": str(ROOT), **(env or {})}
    last: list[str] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    where = conf.parent if conf else FOLDER
    with Started(command, whole, cwd=where, **pipes) as started, started.process.stdout as said:
        for line in lines(said):
            last = [*last[-20:], line.rstrip()]
            tell(line.rstrip())
        code = started.process.wait()
    # 2 says that some benchmark failed, which the comparison tells one by one
    if code not in (0, 2):
        raise RunError("\n".join(["asv failed:", *last]))


class Rows:
    """Makes of asv's table of a benchmark a line for each number."""

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self._name, self._tell, self._params = name, tell, 0

    def read(self, line: str) -> None:
        """Tell what a line of asv's output says."""
        if failed := re.search(r"(\d+/\d+ )?failed$", line):
            self._tell(f"  {self._name}: {failed[0]}")
        cells = re.split(r"\s{2,}", line.strip())
        if line.startswith(("[", "·")) or set(line) <= set("-= "):
            return
        if self._params == 0:
            self._params = len(cells)  # the names of the parameters
        elif len(cells) == self._params + 1 and cells[-1] != "n/a":
            self._tell(f"  {self._name}({', '.join(cells[:-1])})  {cells[-1]}")


def version() -> str:
    """Return the commit to store results under; where measured files differ, a commit of them that no branch has."""
    head = git("rev-parse", "HEAD")
    if not head:
        raise RunError("there is no git repository, and asv stores results by commit")
    with tempfile.TemporaryDirectory() as place:  # an index of its own, so that new files count and git's stays
        index = {"GIT_INDEX_FILE": f"{place}/index"}
        git("read-tree", "HEAD", env=index)
        git("add", "--all", "--", *MEASURED, env=index)
        tree = git("write-tree", env=index)
    if tree == git("rev-parse", "HEAD^{tree}"):
        return head
    who = ("-c", "user.name=make bench", "-c", "user.email=")
    return git(*who, "commit-tree", tree, "-p", head, "-m", "files that were benchmarked")


def judged(before: Samples, now: Samples, chosen: Sequence[Benchmark]) -> list[Verdict]:
    """Return a verdict on each of the chosen benchmarks; what NumPy alone does, too, is divided out."""
    series = [
        changes.Series(benchmark, ("before", "now"), (statistics.median(before[key]), statistics.median(now[key])))
        for benchmark in chosen
        if before.get(key := str(benchmark)) and now.get(key)
    ]
    paces = changes.paces(series)
    pace = paces.get("now", 1.0) / paces.get("before", 1.0)
    verdicts = []
    for benchmark in chosen:
        old, new = before.get(str(benchmark)), now.get(str(benchmark))
        if new and changes.counts(pace):
            new = [x * pace ** changes.paced(benchmark) for x in new]
        if new is None:
            verdicts.append(Verdict(benchmark, "gone" if old else "n/a"))
        elif not new:
            verdicts.append(Verdict(benchmark, "fails", detail="asv run --show-stderr tells why"))
        elif not old:
            verdicts.append(Verdict(benchmark, "new" if old is None else "works"))
        else:
            verdicts.append(apart(benchmark, old, new))
    return verdicts


def moved(verdicts: Sequence[Verdict]) -> str:
    """Say how much faster or slower the machine itself was, by benchmarks that refattn has no part in."""
    found = [verdict for verdict in verdicts if verdict.benchmark.name.startswith(MACHINE) and verdict.word]
    words = (f"{verdict.benchmark.params[0]} {verdict.ratio[1]:.2f}" for verdict in found if verdict.ratio)
    text = ", ".join(words)
    return f"the machine itself took another time than before ({text})" if text else ""
