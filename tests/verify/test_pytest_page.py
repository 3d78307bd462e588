"""The page on pytest: its files and commands run as they stand, on a right kernel and on a wrong one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.verify.test_plugin import environment, loaded

PAGE = (Path(__file__).parents[2] / "docs" / "verifying" / "pytest.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]

KERNEL = """
import refattn as ra


def my_attention(q, k, v, *, causal=False, scale=None, tile=32):
    if causal == "top_left":
        return ra.Decline("it aligns its mask in one way")
    return ra.softmax.forward(q, k, v, causal=CAUSAL if causal else False, scale=scale)[0]
"""


def write(folder: Path, causal: str) -> None:
    """Write what a reader of the page has: a package, a marker and the tests."""
    (folder / "my_package.py").write_text(KERNEL.replace("CAUSAL", causal))
    for name, text in BLOCKS:
        (folder / name).write_text(text)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    python, dash, module, *words = shlex.split(command)
    assert (python, dash, module) == ("python3", "-m", "pytest")
    if "-n" in words and find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist")
    plain = () if "--lf" in words else ("-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, *plain, *loaded(), "--rootdir", str(folder), "-rfs"],
        cwd=folder, capture_output=True, text=True, env=environment(), timeout=600, check=False,
    )  # fmt: skip


def test_every_block_and_command_is_here() -> None:
    """A block without the name of its file, or another language, would not be run."""
    fences = re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)
    assert len(BLOCKS) == fences.count("python") + fences.count("toml") == 5
    assert {*fences} == {"python", "toml", "sh", "text"} and len(COMMANDS) == 9


@pytest.mark.parametrize(
    "command",
    [
        # Half a minute each.
        pytest.param(each, marks=pytest.mark.slow if re.search(r"slow|pytest$|-n 2|junit|-rs", each) else ())
        for each in dict.fromkeys(COMMANDS)
    ],
)
def test_a_command_of_the_page_passes_for_a_right_kernel(command: str, tmp_path: Path) -> None:
    write(tmp_path, "True")
    found = run(command, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"\d+ tests collected" if "--co" in command else r"\d+ passed", found.stdout)
    assert ("--junitxml" in command) == (tmp_path / "report.xml").exists()


def test_the_files_of_the_page_name_what_is_wrong(tmp_path: Path) -> None:
    """All but the slow tests, with a mask that is aligned at the top left."""
    write(tmp_path, '"top_left"')
    found = run("python3 -m pytest -k 'causal or shapes or tiles or sdpa'", tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    (line,) = re.findall(r"^```text\n(.*)\n```$", PAGE, re.MULTILINE)
    assert line in found.stdout.splitlines(), found.stdout
