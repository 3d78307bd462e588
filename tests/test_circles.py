"""No file imports itself by way of others: the imports of refattn have no circle, those inside functions included."""

from __future__ import annotations

from graphlib import TopologicalSorter

from tests.test_arrows import imports_of, modules


def test_no_import_comes_back_to_its_file() -> None:
    known = modules()
    imported = {name: {item.module for item in imports_of(file, known)} for name, file in known.items()}
    edges = {name: (found & known.keys()) - {name} for name, found in imported.items()}  # docstrings' examples
    assert len(edges) > 300 and sum(map(len, edges.values())) > 1000
    TopologicalSorter(edges).prepare()  # a CycleError names the circle
