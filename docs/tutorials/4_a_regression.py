"""
A regression, caught before it lands
====================================

A change makes things a little slower, and nobody notices until there are ten of them. This tutorial compares two
versions in alternating rounds, so that any other load of the machine hits both.
"""

# %%
# A slow commit
# -------------
# In this clone the dense implementation of softmax attention computes its exponentials nine times. All tests would
# pass.

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import refattn

root = Path(refattn.__file__).resolve().parents[1]
clone = Path(tempfile.mkdtemp()) / "refattn"


def git(*words: str) -> str:
    author = ["-c", "user.name=a reader", "-c", "user.email=reader@example.org"]
    done = subprocess.run(["git", *author, *words], cwd=clone, capture_output=True, text=True, check=True)
    return done.stdout.strip()


can = (root / ".git").exists() and importlib.util.find_spec("asv") is not None
if can:
    subprocess.run(["git", "clone", "--quiet", "--local", str(root), str(clone)], check=True)
    definition = clone / "refattn" / "mechanisms" / "softmax" / "dense.py"
    text = definition.read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("exponentials = "))
    indent = line[: len(line) - len(line.lstrip())]
    again = f"{indent}for _ in range(8):\n{indent}    xp.exp(scores)\n"
    definition.write_text(text.replace(line, again + line))
    git("commit", "--quiet", "--all", "--message", "A harmless change")
    print(git("log", "-1", "--stat", "--format=%s"))

# %%
# The comparison
# --------------
# ``make bench-compare BASE=HEAD~1 HEAD=HEAD`` runs every benchmark that imports a file that differs; ``--bench`` runs
# only those that match. Each ratio has its interval. The exit code says whether something got slower, needs more memory
# or became less exact.

if can:
    benchmark = r"core.Core.time_both\('softmax.dense', 1024, 16, 'float32', 'numpy'"
    command = [sys.executable, "-m", "asv_benchmarks", "compare", "HEAD~1", "HEAD", "--bench", benchmark]
    result = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    print("$ python -m asv_benchmarks compare HEAD~1 HEAD --bench ...")
    print(result.stdout)
    assert result.returncode == 1 and "slower" in result.stdout, result.stderr
    shutil.rmtree(clone.parent)

# %%
# Accuracy is a benchmark like time: the same table reports a change with a larger error / tolerance as "less exact".
# :doc:`/performance` says how small a change is still found, and how asv keeps a history of many commits.
