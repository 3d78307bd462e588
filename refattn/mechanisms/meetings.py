"""Rows of a table in which features meet: few calls that have every pair, and every triple of what kernels combine.

Kernels are specialised for features, and fail where two or three of them meet. A kernel declines what it has no option
for, so that it sees no row with another one: a `Table` lists the sets of options that kernels have, and each set is
covered by rows that have no others. `rows` draws many rows and takes again and again the one that has most of what is
missing for its cost (Chvatal 1979, A greedy heuristic for the set-covering problem).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import philox

Row = dict[str, str]
"""A class for each size, and for each option that is given what it is given as."""

Rows = Mapping[str, NDArray[np.str_]]
"""Many rows: for each size and option what it is in each row, "" where a row does not have it."""

Feature = tuple[str, str]
"""A size or an option, and its class; "" for an option that is given as anything."""

DRAWN = 5
"""Rows that are drawn for each pair of classes of the sizes and options of a set."""


@dataclass(frozen=True)
class Table:
    """What calls may have.

    Attributes
    ----------
    sizes, options
        The classes of each size, and what each option may be given as.
    excludes
        Which rows are no calls, or hide one of their features.
    cost
        About what each row costs, in any unit.
    kernels
        Sets of options that kernels have, each with how many features at once its rows have to hold.
    most
        How many options a row has at most.
    """

    sizes: Mapping[str, Sequence[str]]
    options: Mapping[str, Sequence[str]]
    excludes: Callable[[Rows], NDArray[np.bool_]]
    cost: Callable[[Rows], NDArray[np.float64]]
    kernels: Sequence[tuple[int, Collection[str]]]
    most: int


def given(table: Table, row: Row) -> list[str]:
    """Return the options that a row has."""
    return [name for name in table.options if name in row]


def meetings(table: Table, names: Collection[str], strength: int) -> list[tuple[Feature, ...]]:
    """Return the sets of features that should meet: so many sizes and options of these names, the classes of each size.

    Where these are all options, each class of an option meets each class of a size, too.
    """
    sizes = [[(name, each) for each in classes] for name, classes in table.sizes.items()]
    options = [(name, "") for name in table.options if name in names]
    found = [each for some in combinations((*sizes, *([one] for one in options)), strength) for each in product(*some)]
    if {*names} == {*table.options}:
        values = [(name, each) for name, classes in table.options.items() for each in classes]
        found += [pair for size in sizes for pair in product(size, values)]
    return found


def columns(table: Table, some: Sequence[Row]) -> Rows:
    """Return rows as columns."""
    return {name: np.asarray([row.get(name, "") for row in some], str) for name in (*table.sizes, *table.options)}


def how_many(table: Table, some: Rows) -> NDArray[np.int64]:
    """Return how many options each row has."""
    return np.sum([some[name] != "" for name in table.options], axis=0)


def held(some: Rows, wanted: Sequence[tuple[Feature, ...]]) -> NDArray[np.bool_]:
    """Return which rows hold which sets of features, (set, row)."""
    features = sorted({feature for those in wanted for feature in those})
    has = np.asarray([some[name] == value if value else some[name] != "" for name, value in features])
    number = {feature: n for n, feature in enumerate(features)}
    found = np.ones((len(wanted), has.shape[1]), bool)
    for which, those in zip(found, wanted, strict=True):
        for feature in those:
            which &= has[number[feature]]
    return found


def drawn(table: Table, names: Collection[str], seed: int = 0) -> Rows:
    """Return rows of no other options than these, drawn at random: more of many options than of few."""
    options = [name for name in table.options if name in names]
    every = {**table.sizes, **{name: table.options[name] for name in options}}
    shape = (DRAWN * sum(map(len, every.values())) ** 2, 1 + len(options) + len(every))
    chances = philox.uniform(shape, seed=seed, purpose=f"meetings.{'.'.join(options)}")
    most = (chances[:, :1] ** 0.5 * (min(table.most, len(options)) + 1)).astype(int)
    absent = chances[:, 1 : 1 + len(options)].argsort(axis=1).argsort(axis=1) >= most
    numbers = (chances[:, 1 + len(options) :] * [len(classes) for classes in every.values()]).astype(int)
    numbers[:, len(table.sizes) :][absent] = -1
    one_number = np.ravel_multi_index((numbers + 1).T, [len(classes) + 1 for classes in every.values()])
    numbers = numbers[np.sort(np.unique(one_number, return_index=True)[1])]  # each row once
    none = {name: np.full(len(numbers), "") for name in table.options}
    found = {name: np.asarray([*classes, ""])[numbers[:, n]] for n, (name, classes) in enumerate(every.items())}
    return taken(none | found, ~table.excludes(none | found))


def taken(some: Rows, which: Any) -> Rows:
    """Return some of the rows: those of a number, of numbers, or where it is true."""
    return {name: values[which] for name, values in some.items()}


def rows(table: Table) -> list[Row]:
    """Return rows in which all meets that meets in any row, for each set of options that kernels have."""
    found: list[Row] = []
    for strength, names in table.kernels:
        pool, wanted = drawn(table, names), meetings(table, names, strength)
        costs = table.cost(pool)
        missing = held(pool, wanted)  # (set, row): what a row would add
        own = [row for row in found if {*given(table, row)} <= {*names}]
        missing[held(columns(table, own), wanted).any(axis=1)] = False
        gains = missing.sum(axis=0)
        while gains.any():
            best = int(np.argmax(gains / costs))
            added = missing[:, best].copy()
            gains -= missing[added].sum(axis=0)
            missing[added] = False
            found.append({name: str(value) for name, value in taken(pool, best).items() if value})
    return found
