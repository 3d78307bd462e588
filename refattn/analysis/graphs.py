"""Graphs to study flows on: named ones, ones from a file, and what a flow has to know of a graph."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csgraph, csr_array, issparse

from refattn.args import Named, Whole, check, checked
from refattn.files import MIB, read_regular

Floats = NDArray[np.float64]

MOST_BYTES = 64 * MIB
"""The most bytes that a file of links may have."""

BALANCED = 1e-10
"""Largest |pi_i w_ij - pi_j w_ji|, relative to the largest of these numbers, in detailed balance."""


@checked(n=Whole(1, 10_000), links=[tuple])
def from_links(n: int, links: list[tuple[int, int]]) -> Floats:
    """Return the symmetric graph (n, n) with links of 1."""
    graph = np.zeros((n, n))
    given: Any = links
    for number, link in enumerate(given):
        if len(link) != 2 or not all(isinstance(node, Integral) and node in range(n) for node in link):
            raise ValueError(f"links[{number}]: got {link!r}, needs two nodes from 0 to {n - 1}")
    for i, j in links:
        graph[i, j] = graph[j, i] = 1.0
    return graph


@checked(n=Whole(1, 10_000))
def path_graph(n: int) -> Floats:
    """Return n nodes in a row."""
    return from_links(n, [(i, i + 1) for i in range(n - 1)])


@checked(n=Whole(1, 10_000))
def cycle_graph(n: int) -> Floats:
    """Return n nodes in a ring."""
    return from_links(n, [(i, (i + 1) % n) for i in range(n)])


@checked(n=Whole(1, 10_000))
def star_graph(n: int) -> Floats:
    """Return a node that is linked to n - 1 others."""
    return from_links(n, [(0, i) for i in range(1, n)])


@checked(n=Whole(1, 10_000))
def complete_graph(n: int) -> Floats:
    """Return n nodes, each linked to each other one."""
    return np.ones((n, n)) - np.eye(n)


GRAPHS = {"path": path_graph, "cycle": cycle_graph, "star": star_graph, "complete": complete_graph}
"""The named graphs, as functions of the number of nodes."""

SMALLEST = {"path": 1, "cycle": 3, "star": 2, "complete": 1}
LARGEST = 200
"""The fewest and the most nodes of a named graph."""


@checked(name=str)
def graph_of(name: str) -> Floats:
    """Return the graph that NAME:N or the path of a file stands for.

    Raises
    ------
    ValueError
        Where it is neither, or has too few or too many nodes.
    """
    kind, _, count = name.partition(":")
    if kind in GRAPHS:
        if not count.isdigit() or not SMALLEST[kind] <= int(count) <= LARGEST:
            raise ValueError(f"graph: got {name!r}, needs {kind}:N with N from {SMALLEST[kind]} to {LARGEST}")
        return GRAPHS[kind](int(count))
    if not Path(name).is_file():
        raise ValueError(f"graph: got {name!r}, needs {', '.join(f'{kind}:N' for kind in GRAPHS)} or a file of links")
    return read_graph(Path(name))


@checked(path=Named)
def read_graph(path: Path) -> Floats:
    """Return the symmetric graph of a text file: a link a line, as two nodes from 0 on and a weight, 1 if not given.

    Empty lines and what follows a # say nothing.
    """
    links: list[tuple[int, int, float]] = []
    try:
        text = read_regular(path, MOST_BYTES).decode()
    except OSError as error:
        raise ValueError(f"graph: got {path}, needs a file of links that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"graph: got {path}, needs UTF-8 ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            i, j = (int(word) for word in words[:2])
            weight = float(words[2]) if len(words) == 3 else 1.0
            if len(words) > 3 or min(i, j) < 0 or max(i, j) >= LARGEST or i == j or not np.isfinite(weight):
                raise ValueError
        except ValueError:
            needs = f"two different nodes from 0 to {LARGEST - 1}, and a weight or nothing"
            raise ValueError(f"graph: got {line[:80]!r} in line {number} of {path}, needs {needs}") from None
        links.append((i, j, weight))
    if not links:
        raise ValueError(f"graph: got {path} without a link, needs at least one")
    n = 1 + max(max(i, j) for i, j, _ in links)
    graph = np.zeros((n, n))
    for i, j, weight in links:
        graph[i, j] = graph[j, i] = weight
    return graph


def component_of(graph: Floats | csr_array) -> NDArray[np.int64]:
    """Return the number of the connected component of each node, (n,); a one-way link connects."""
    if not issparse(graph):
        check("graph", graph, "i i")
    return np.asarray(csgraph.connected_components(graph != 0.0, directed=False)[1], np.int64)


@checked(graph="i i")
def balance_of(graph: Floats) -> Floats | None:
    """Return weights pi (n,) with pi_i w_ij = pi_j w_ji, of mean 1; None where there are none.

    They follow from the links of a spanning tree; all others then hold or not.
    """
    if np.any((graph != 0.0) != (graph.T != 0.0)):
        return None
    log, parts = np.zeros(len(graph)), component_of(graph)
    for first in np.unique(parts, return_index=True)[1]:
        order, before = csgraph.breadth_first_order(graph != 0.0, first)
        for node in order[1:]:
            ratio = graph[before[node], node] / graph[node, before[node]]
            if ratio <= 0.0:
                return None
            log[node] = log[before[node]] + np.log(ratio)
    pi = np.exp(log - np.max(log))
    flux = pi[:, None] * graph
    if np.max(np.abs(flux - flux.T), initial=0.0) > BALANCED * np.max(np.abs(flux), initial=0.0):
        return None
    return np.asarray(pi / np.mean(pi), np.float64)
