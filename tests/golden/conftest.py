"""A set of golden vectors, and a copy to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.verify.test_freeze import written


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "set"
    written(folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "set"))
