"""`refattn verify --init asv` in a repository of a user's: asv shows which commit is wrong, and which is slow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import refattn as ra

KERNEL = """
import numpy as np


def attention(q, k, v, causal=False):
    for _ in range(REPEATS):
        scores = np.einsum("bhid,bhjd->bhij", q, k) / SCALE(q.shape[3])
        if causal:
            queries, keys = scores.shape[2:]
            scores = np.where(np.tri(queries, keys, keys - queries, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = np.einsum("bhij,bhjd->bhid", weights / weights.sum(axis=-1, keepdims=True), v)
    return out.astype(q.dtype)
"""
COMMITS = {"right": ("1", "np.sqrt"), "wrong": ("1", "np.cbrt"), "slow": ("20", "np.sqrt")}


@pytest.mark.slow
def test_shares_tell_the_wrong_commit_and_times_the_slow_one(tmp_path: Path) -> None:
    if find_spec("asv") is None or shutil.which("git") is None:
        pytest.skip('needs git, and asv: pip install -e ".[bench]"')
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    # asv keeps what it knows of the machine in the home folder, and gives a benchmark the path that ASV_PYTHONPATH has.
    path = f"{tmp_path}{os.pathsep}{Path(str(ra.__file__)).parents[1]}"
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {**os.environ, **identity, **single, "HOME": str(tmp_path)}
    environment |= {"PYTHONPATH": path, "ASV_PYTHONPATH": path}

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    asv = (sys.executable, "-m", "asv")
    run("git", "init", "-q")
    assert "asv run ALL" in run(sys.executable, "-m", "refattn", "verify", "softmax", "--init", "asv")
    benchmarks = tmp_path / "benchmarks" / "attention.py"
    smaller = benchmarks.read_text("utf-8").replace("n=256,d=64", "n=64,d=16").replace("nk=256,d=64", "nk=96,d=16")
    benchmarks.write_text(smaller, "utf-8")
    run(*asv, "machine", "--yes")
    hashes = {}
    for n, (name, (repeats, scale)) in enumerate(COMMITS.items()):
        (tmp_path / "my_kernel.py").write_text(KERNEL.replace("REPEATS", repeats).replace("SCALE", scale), "utf-8")
        run("git", "add", "my_kernel.py", "benchmarks", "asv.conf.json")
        environment["GIT_AUTHOR_DATE"] = environment["GIT_COMMITTER_DATE"] = f"2026-01-0{n + 1}T00:00:00"
        run("git", "commit", "-q", "-m", name)
        hashes[name] = run("git", "rev-parse", "HEAD")
        # The environment that is there: one for each commit would need an index of packages.
        few = ("-a", "repeat=3", "-a", "sample_time=0.002", "-a", "warmup_time=0", "-a", "rounds=1")
        bench = ("--bench", "track_share|time_forward")
        run(*asv, "run", "--python=same", "--set-commit-hash", hashes[name], *bench, *few)
    run(*asv, "publish")
    site = tmp_path / ".asv" / "html"
    index = json.loads((site / "index.json").read_text("utf-8"))
    commits = {commit: int(n) for n, commit in index["revision_to_hash"].items()}

    def curve(benchmark: str) -> dict[int, list[float]]:
        (file,) = site.glob(f"graphs/arch*/**/attention.Kernel.{benchmark}.json")
        return dict(json.loads(file.read_text("utf-8")))

    shares, times = curve("track_share"), curve("time_forward")
    right, wrong, slow = (commits[hashes[name]] for name in ("right", "wrong", "slow"))
    assert right < wrong < slow and {*shares} == {*times} == {right, wrong, slow}
    assert max(*shares[right], *shares[slow]) <= 1.0 < 10.0 < min(shares[wrong])
    for first, second, third in zip(times[right], times[wrong], times[slow], strict=True):
        assert third > 4.0 * max(first, second)
    assert "track_share" in run(*asv, "compare", hashes["right"], hashes["wrong"])
