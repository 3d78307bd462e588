"""The commit since which a benchmark costs more: each candidate beside the good version, in alternating rounds.

git says which commit halves what is left; nothing is checked out in the working tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asv_benchmarks.compare import PARTS, STARTS, VersionError, check_out, listed, measure
from asv_benchmarks.judge import EXACT, Verdict
from asv_benchmarks.machine import git
from asv_benchmarks.suite import PROFILES, Benchmark

SMALLEST = 1.02
"""No difference between the two ends that is smaller is looked for, but of what has no noise."""


@dataclass
class Culprit:
    """What a search found.

    Attributes
    ----------
    commits
        The commit; several where some in between cannot be measured.
    whole
        Bad beside good.
    step
        The commit beside its first parent, measured once more; None where there are several.
    """

    commits: list[str]
    whole: Verdict
    step: Verdict | None = None
    looks: list[tuple[str, str]] = field(default_factory=list)


def chosen(home: Path, text: str) -> Benchmark:
    """Return the one benchmark of a version with this name, or that this regular expression matches, on NumPy at least.

    Raises
    ------
    VersionError
        Where there is none, or there are several.
    """
    known = listed(home, "")
    try:
        matched = [one for one in known if re.search(text, str(one))]
    except re.error as error:
        raise VersionError(f"benchmark: got {text!r}, needs a name or a regular expression ({error})") from error
    short = [one for one in matched if re.search(PROFILES["short"], str(one))]
    found = [one for one in known if str(one) == text] or (matched if len(matched) == 1 else short)
    if len(found) != 1:
        names = "".join(f"\n  {one}" for one in found[:8]) + "\n  ..." * (len(found) > 8)
        raise VersionError(f"benchmark: got {text!r}, needs a name or expression of one, not of {len(found)}:{names}")
    return found[0]


def search(good: str, bad: str, text: str, place: Path, tell: Callable[[str], None]) -> Culprit:
    """Return the first commit after `good`, up to `bad`, that has the difference between the two.

    Parameters
    ----------
    good, bad
        What git calls them; `good` is an ancestor of `bad`.
    text
        The benchmark; see `chosen`.
    place
        A folder for the versions.
    tell
        Gets a line for each commit that was measured.

    Raises
    ------
    VersionError
        Where there is no such version or benchmark, or no difference that could be told from noise.
    """
    for name, version in (("good", good), ("bad", bad)):
        if not git("rev-parse", "--verify", f"{version}^{{commit}}"):
            raise VersionError(f"{name}: got {version!r}, needs a commit")
    homes = {version: check_out(version, place / name) for name, version in (("good", good), ("bad", bad))}
    if git("merge-base", good, bad) != git("rev-parse", f"{good}^{{commit}}"):
        raise VersionError(f"good: got {good!r}, needs an ancestor of {bad!r}")
    benchmark = chosen(homes[bad], text)
    starts = 1 if benchmark.kind in EXACT else STARTS
    whole = measure(benchmark, (homes[good], homes[bad]), starts)
    if not _differs(whole):
        ratio = f"{whole.ratio[1]:.3f} [{whole.ratio[0]:.3f}, {whole.ratio[2]:.3f}]" if whole.ratio else whole.detail
        raise VersionError(f"{benchmark}: no difference between {good} and {bad} ({ratio})")
    tell(f"{good} -> {bad}: {_text(whole)}")
    known_good, first_bad = [good], git("rev-list", "-1", bad, "--", *PARTS)
    skipped: list[str] = []
    found = Culprit([], whole)
    while True:
        left = _left(first_bad, known_good)
        candidates = [commit for commit in left if commit not in (first_bad, *skipped)]
        if not candidates:
            break
        commit = candidates[0]
        verdict = measure(benchmark, (homes[good], check_out(commit, place / commit)), starts)
        word = _word(verdict, whole)
        tell(f"{commit[:10]}: {word}, {_text(verdict)}; {len(left) - 1} left")
        found.looks.append((commit, word))
        if word == "good":
            known_good.append(commit)
        elif word == "bad":
            first_bad = commit
        else:
            skipped.append(commit)
    found.commits = [first_bad, *(commit for commit in _left(first_bad, known_good) if commit in skipped)]
    if len(found.commits) == 1:
        homes_of_step = check_out(f"{first_bad}^", place / "before"), check_out(first_bad, place / "after")
        found.step = measure(benchmark, homes_of_step, starts)
    return found


def _left(bad: str, good: list[str]) -> list[str]:
    """Return the commits that may be the first bad one, those first that halve them best."""
    lines = git("rev-list", "--bisect-all", bad, *(f"^{commit}" for commit in good), "--", *PARTS).splitlines()
    return [line.split()[0] for line in lines]


def _differs(whole: Verdict) -> bool:
    if whole.ratio is None:
        return whole.word == "fails"
    low, middle, high = whole.ratio
    if whole.benchmark.kind in EXACT:
        return middle != 1.0
    clear = middle > 0.0 and abs(math.log(middle)) > math.log(SMALLEST) and not low <= 1.0 <= high
    return bool(whole.word) or clear


def _word(verdict: Verdict, whole: Verdict) -> str:
    """Tell on which side of the middle between the two ends a commit lies; "skipped" where it cannot be measured."""
    if whole.ratio is None:
        return "bad" if verdict.word == "fails" else "good"
    if verdict.ratio is None:
        return "skipped"
    middle, own = (math.log(min(max(one.ratio[1], 1e-300), 1e300)) for one in (whole, verdict) if one.ratio)
    return "bad" if own / middle > 0.5 else "good"


def _text(verdict: Verdict) -> str:
    if verdict.ratio is None:
        return f"{verdict.word} {verdict.detail}".strip()
    low, middle, high = verdict.ratio
    return f"{middle:.3g}" + ("" if low == high else f" [{low:.3g}, {high:.3g}]")
