"""Units of work: the same bytes wherever they run, kept when they have ended, and what is said where one cannot run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

from refattn import files, many_runs
from refattn.many_runs import CampaignError, Unit, Where

ROOT = Path(__file__).parents[1]

ran: list[int] = []


def third(n: int) -> dict[str, float]:
    """A unit of work: it notes that it ran, and may be interrupted."""
    if n == 3 and 3 not in ran:
        ran.append(n)
        raise KeyboardInterrupt
    ran.append(n)
    return {"third": n / 3.0}


UNITS = [Unit(f"third {n}", third, (n,)) for n in range(5)]
THIRDS = {f"third {n}": {"third": n / 3.0} for n in range(5)}


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


def found(where: Where) -> dict[str, object]:
    return {unit.name: result for unit, result in many_runs.run(UNITS, where)}


def test_a_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    said: list[str] = []
    where = Where(jobs=1, keep=tmp_path / "kept", tell=said.append)
    with pytest.raises(KeyboardInterrupt):
        found(where)
    assert len(list((tmp_path / "kept").iterdir())) == 3
    ran.remove(0)
    assert found(where) == THIRDS and ran == [1, 2, 3, 3, 4]
    assert said == [f"3 of 5 units had ended before: {tmp_path / 'kept'}"]


def test_what_is_kept_is_of_its_versions_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran.append(3)
    where = Where(jobs=1, keep=tmp_path, tell=lambda line: None)
    found(where)
    monkeypatch.setattr(many_runs, "versions", lambda: {"numpy": "1.0"})
    ran[:] = [3]
    assert found(where) == THIRDS and ran == [3, *range(5)]
    monkeypatch.undo()


def test_other_versions_are_an_error_that_names_both() -> None:
    wanted = {**many_runs.versions(), "numpy": "1.0", "torch": "0.1"}
    with pytest.raises(CampaignError, match=r"the worker on .* has numpy \d.*; the client has numpy 1\.0, torch 0\.1"):
        many_runs.call(UNITS[0], wanted)


def test_a_cluster_gives_what_this_process_gives() -> None:
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    ran.append(3)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0"
    ) as cluster:
        assert found(Where(scheduler=cluster.scheduler_address)) == THIRDS


# --- a real scheduler and real workers


@contextmanager
def started(*words: str, path: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, env=env, cwd=path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def until(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 120.0
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


def checked(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "refattn", "check", "growing", *words]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_workers_that_die_and_clients_that_are_killed_change_no_byte(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="distributed is not installed")
    place, kept, local, remote = (tmp_path / name for name in ("scheduler", "kept", "local.json", "remote.json"))
    assert checked("--json", str(local)).returncode == 0
    quiet = ("--no-dashboard", "--scheduler-file", str(place))
    worker = ("distributed.cli.dask_worker", "--no-nanny", "--nthreads", "1", *quiet)
    with ExitStack() as stack:
        stack.enter_context(started("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", *quiet))
        until(place.exists)
        workers = [
            stack.enter_context(started(*worker, "--local-directory", str(tmp_path / str(n)), "--name", str(n)))
            for n in range(2)
        ]
        asked = ("--scheduler", json.loads(place.read_text())["address"], "--keep", str(kept))
        with started("refattn", "check", "growing", *asked) as client:
            until(lambda: kept.exists() and any(kept.glob("*.json")))
            client.kill()
        before = len(list(kept.glob("*.json")))
        files = set(kept.iterdir())
        with started("refattn", "check", "growing", *asked, "--json", str(remote)) as client:
            until(lambda: set(kept.glob("*.json")) - files)
            workers[0].send_signal(signal.SIGKILL)
            assert client.wait() == 0
        assert before > 0 and remote.read_bytes() == local.read_bytes()
        again = checked(*asked[2:], "--json", "-")
        assert again.stdout.encode() == local.read_bytes() and "units had ended before" in again.stderr

        workers[1].kill()
        assert "error: --scheduler: got 'nowhere', needs the address" in checked("--scheduler", "nowhere").stderr
        copytree(ROOT / "refattn", tmp_path / "other" / "refattn", ignore=ignore_patterns("frozen", "__pycache__"))
        (tmp_path / "other" / "refattn" / "mine.py").write_text("")
        stack.enter_context(started(*worker, "--local-directory", str(tmp_path / "2"), path=tmp_path / "other"))
        refused = checked(*asked[:2])
        assert refused.returncode == 2
        assert "refattn: error: versions: the worker on" in refused.stderr
        assert refused.stderr.count("(source ") == 2


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda data: b"",
    lambda data: b"{",
    lambda data: b"\xff" * 99,
    lambda data: data.replace(b'"unit": "', b'"unit": "an'),
    lambda data: data.replace(b'{"third": ', b'{"third": 1'),
    lambda data: data.replace(b"third", b"fourth"),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_part_that_is_damaged_is_run_again_and_told(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    said: list[str] = []
    ran.append(3)
    where = Where(jobs=1, keep=tmp_path, tell=said.append)
    found(where)
    file = min(tmp_path.iterdir())
    kept = file.read_bytes()
    file.write_bytes(damage(kept))
    assert found(where) == THIRDS and len(ran) == 7 and file.read_bytes() == kept
    assert str(file) in said[0] and "is damaged; the unit is run again" in said[0] and "4 of 5 units" in said[1]


def campaign(keep: Path, at: int, do: Callable[[], object], said: list[str]) -> dict[str, object]:
    """Run all units, and do something to the disk when so many have ended."""
    ran.append(3)
    results: dict[str, object] = {}
    for unit, result in many_runs.run(UNITS, Where(jobs=1, keep=keep, tell=said.append)):
        results[unit.name] = result
        if len(results) == at:
            do()
    return results


def test_a_campaign_keeps_to_its_own_folder(tmp_path: Path) -> None:
    """It is moved, and another has its name."""
    kept, other, said = tmp_path / "kept", tmp_path / "other", list[str]()
    other.mkdir()
    (other / files.fresh_name()).write_text("mine")
    before = os.listdir(other)

    def move() -> None:
        kept.rename(tmp_path / "moved")
        other.rename(kept)

    assert campaign(kept, 2, move, said) == THIRDS
    assert os.listdir(kept) == before and len(os.listdir(tmp_path / "moved")) == 5 and said == []


def test_links_of_a_campaign_are_not_followed(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / files.fresh_name()).write_text("mine")
    before = os.listdir(tmp_path / "other")
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(OSError, match="is a link, needs the folder itself") as caught:
        campaign(tmp_path / "link", 9, int, said)
    assert caught.value.filename == str(tmp_path / "link") and os.listdir(tmp_path / "other") == before
    assert campaign(tmp_path / "kept", 9, int, said) == THIRDS
    file = min((tmp_path / "kept").iterdir())
    file.rename(tmp_path / "outside")
    file.symlink_to("../outside")
    kept = (tmp_path / "outside").read_bytes()
    assert campaign(tmp_path / "kept", 9, int, said) == THIRDS
    assert f"{file}" in said[0] and "is a link, needs the file itself" in said[0] and not file.is_symlink()
    assert file.read_bytes() == kept == (tmp_path / "outside").read_bytes()


def test_two_campaigns_in_one_folder_leave_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins, and removes what was left behind, while the other writes."""
    replace, said = os.replace, list[str]()

    def swept(*names: Any, **folders: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        (tmp_path / files.fresh_name()).touch()
        assert list(many_runs.run([], Where(jobs=1, keep=tmp_path))) == []
        replace(*names, **folders)

    monkeypatch.setattr(os, "replace", swept)
    assert campaign(tmp_path, 9, int, said) == THIRDS
    assert said == [] and len(os.listdir(tmp_path)) == 5


def test_a_full_disk_ends_no_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    said: list[str] = []
    ran.append(3)
    monkeypatch.setattr(many_runs, "write_atomically", full)
    assert found(Where(jobs=1, keep=tmp_path, tell=said.append)) == THIRDS
    assert len(said) == 1 and "No space left on device" in said[0] and "from here on nothing is kept" in said[0]
