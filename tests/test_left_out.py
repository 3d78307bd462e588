"""What is left out of a second run does not depend on the libraries that came between."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import _dependent

FILE = """
torch = pytest.importorskip("torch")
FEW = [1, 2]

@pytest.mark.skipif(FEW, reason="sphinx")
def test_decorated(): pass
def helper(): return torch.ones(1)
def other(): return torchlight
def test_through_others(): helper()
def test_alone(x=FEW): other()
"""


def test_a_test_depends_on_what_it_names_and_what_it_uses(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(FILE)
    found = _dependent(tmp_path / "file.py", ("torch", "sphinx"))
    assert found == {"torch", "helper", "test_decorated", "test_through_others"}
