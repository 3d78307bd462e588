"""A third-party package adds a backend by an entry point alone; a broken one is named and disturbs nobody."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from refattn import backends
from tests.processes import python

MODULE = '''
"""NumPy arrays of a class of their own."""
import numpy as np
from refattn.backends.base import Backend

class TinyArray:
    def __init__(self, values):
        self.values = values

class TinyBackend(Backend):
    name = "tiny"
    package = "refattn_tiny"
    array_type = "TinyArray"
    install = "pip install refattn-tiny"

    def namespace(self):
        return np

    def version(self):
        return "1.2"

    def from_numpy(self, x, device=None):
        self.check_device(device)
        return TinyArray(x.copy())

    def to_numpy(self, x):
        return x.values

backend = TinyBackend()
'''

USE = """
import numpy as np
from refattn import backends

assert backends.names() == ("numpy", "cupy", "torch", "jax", "strict", "tiny"), backends.names()
tiny = backends.get("tiny")
x = tiny.from_numpy(np.arange(3.0))
assert isinstance(tiny, backends.Backend) and backends.of(x) is tiny
assert tiny.to_numpy(x).tolist() == [0.0, 1.0, 2.0]
assert tiny.map(abs, [-1, 2]) == [1, 2] and tiny.concrete(1) is True and tiny.peak_memory() is None
print([row for row in backends.describe() if row["name"] == "tiny"])
"""


def pretend(folder: Path, distribution: str, name: str, value: str, module: str = "") -> None:
    """Put on disk what an installed package with one entry point looks like."""
    info = folder / f"{distribution}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[refattn.backends]\n{name} = {value}\n")
    if module:
        (folder / f"{value.partition(':')[0]}.py").write_text(module)


def test_an_installed_package_adds_a_backend(tmp_path: Path) -> None:
    pretend(tmp_path, "refattn_tiny", "tiny", "refattn_tiny:backend", MODULE)
    row = python("-c", USE, path=tmp_path)
    assert "'available': True" in row and "'version': '1.2'" in row


@pytest.mark.parametrize(
    ("value", "module", "error", "text"),
    [
        ("absent_module:backend", "", ImportError, "cannot be loaded: No module named 'absent_module'"),
        ("raises_module:backend", "1 / 0", ImportError, "cannot be loaded: division by zero"),
        ("empty_module:backend", "x = 1", ImportError, "cannot be loaded: module 'empty_module' has no attribute"),
        ("number_module:backend", "backend = 3", TypeError, " is 3, needs an object of a Backend"),
        (
            "class_module:Class",
            "from refattn.backends.numpy import NumpyBackend as Class",
            TypeError,
            "needs an object",
        ),
    ],
)
def test_a_broken_plug_in_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    module: str,
    error: type[Exception],
    text: str,
) -> None:
    pretend(tmp_path, "broken_dist", "broken", value, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, value.partition(":")[0], raising=False)
    assert "broken" in backends.names()
    with pytest.raises(error) as caught:
        backends.get("broken")
    assert f"backend 'broken' of broken_dist 0.1 (entry point {value})" in str(caught.value)
    assert text in str(caught.value)
    row = next(row for row in backends.describe() if row["name"] == "broken")
    assert not row["available"]
    assert row["why_unavailable"] == str(caught.value)
    with pytest.raises(TypeError, match="got list, needs an array .*broken_dist 0.1"):
        backends.of([])


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, "first_dist", "twice", "first:backend")
    pretend(tmp_path, "second_dist", "twice", "second:backend")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'twice' is offered by (first|second)_dist 0.1 .* and by .*; remove one"):
        backends.get("twice")


def test_built_in_names_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, "thief_dist", "numpy", "thief:backend")
    monkeypatch.syspath_prepend(tmp_path)
    assert backends.names().count("numpy") == 1
    assert type(backends.get("numpy")).__module__ == "refattn.backends.numpy"
