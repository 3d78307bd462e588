"""What a core is called with when it is checked: samples of its arguments, and designed cases in other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from refattn.golden.inputs import make, make_upstream
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.shards.mesh import AXES
from refattn.verify.selfcheck.probe import Values, host


@dataclass(frozen=True)
class Sample:
    """Arguments of a core, on the host in float64: inputs, numbers, and upstream gradients of all outputs."""

    name: str
    inputs: Values
    options: Mapping[str, float]
    upstream: Values
    long: bool = False  # of several tiles


def sample(mechanism: Mechanism, case: Case, *, long: bool = False) -> Sample:
    """Return the arguments of a designed case, with upstream gradients."""
    inputs = make(mechanism.name, case, "float64")
    outputs = host(mechanism).forward(inputs, case.options)[0]
    shapes = {name: outputs[name].shape for name in ("out", *mechanism.pulled)}
    upstream = {f"d_{n}": make_upstream(mechanism.name, case, n, shape, "float64") for n, shape in shapes.items()}
    return Sample(case.name, inputs, case.options, upstream, long)


def property_samples(mechanism: Mechanism, long: tuple[int, int] | None) -> tuple[Sample, ...]:
    """Return samples without and with mask and numbers: two small ones, and two of `long` numbers of queries and keys.

    The first of those has one head, in the other a group has two query heads, which share the rows of a tile. Values
    are as wide as keys where they are in every designed case, and nothing is long where no implementation has tiles.
    """
    given: dict[str, Any] = {"keep": 0.6, "scale": 0.5, "softcap": 2.0}
    small = (2, 4, 2, 11, 17, 8, 6)
    cases = [_property_case(mechanism, "plain", small), _property_case(mechanism, "masked", small, **given)]
    if long is not None and mechanism.tiled:
        cases.append(_property_case(mechanism, "long", (1, 1, 1, *long, 8, 6)))
        cases.append(_property_case(mechanism, "long masked", (1, 2, 1, *long, 8, 6), **given))
    return tuple(sample(mechanism, case, long=n >= 2) for n, case in enumerate(cases))


def _property_case(
    mechanism: Mechanism, name: str, sizes: tuple[int, ...], keep: float | None = None, **numbers: float
) -> Case:
    b, h, g, queries, keys, d, e = sizes
    queries = keys if mechanism.one_sequence else queries
    if all(case.inputs["v"].shape[3] == case.inputs["q"].shape[3] for case in mechanism.cases):
        e = d
    inputs = {"q": Input((b, h, queries, d)), "k": Input((b, g, keys, d)), "v": Input((b, g, keys, e))}
    letters = {"b": b, "h": h, "g": g, "n": keys, "d": d, "e": e}
    arrays = {n: x for n, x in mechanism.sampled.items() if isinstance(x, Input)}
    inputs |= {n: replace(x, shape=tuple(letters[a] for a in x.axes)) for n, x in arrays.items()}
    if keep is not None and "mask" in mechanism.defaults:
        inputs["mask"] = Input((b, h, queries, keys), "mask", {"keep": keep})
    elif keep is not None and "key_mask" in mechanism.defaults:
        inputs["key_mask"] = Input((b, keys), "mask", {"keep": keep})
    known = {n: x for n, x in numbers.items() if n in mechanism.defaults}
    return Case(name, "law", inputs, {n: x for n, x in mechanism.sampled.items() if n not in arrays} | known)


def shrunk(case: Case) -> Case:
    """Return the case with at most 2 x 2 heads, 5 tokens and width 5; what was equal, less or more stays so."""
    if case.inputs["q"].axes:
        return _shrunk_by_axes(case)
    (b, h, queries, d), (_, g, keys, _) = case.inputs["q"].shape, case.inputs["k"].shape
    e = case.inputs["v"].shape[3]
    rows, columns = _smaller(queries, keys, 3)
    d, e = _smaller(d, e, 3)
    return resized(_nearer(case), min(b, 1), min(g, 2), min(h // max(g, 1), 2), rows, columns, d, e)


def _nearer(case: Case) -> Case:
    """Return the case with a window and an offset that still leave out some of few keys."""
    options = dict(case.options)
    if "window" in options:
        options["window"] = tuple(None if n is None else min(n, 2) for n in options["window"])
    if "offset" in options:
        options["offset"] = max(-2, min(options["offset"], 2))
    return replace(case, options=options)


def sizes_of(case: Case) -> dict[str, int]:
    """Return the size of each axis of a case whose inputs have axes, by letter."""
    return {a: n for x in case.inputs.values() for a, n in zip(x.axes, x.shape, strict=True) if a != "."}


def _shrunk_by_axes(case: Case) -> Case:
    sizes = sizes_of(case)
    heads = min(sizes[a] for a in "hfg" if a in sizes)  # neighbours share: all are multiples of the fewest
    both = {a: min(heads, 2) * min(sizes[a] // max(heads, 1), 2) for a in "hfg" if a in sizes}
    d, e = _smaller(sizes["d"], sizes["e"], 3)
    return resized_by(case, {**both, "b": min(sizes["b"], 1), "n": min(sizes["n"], 5), "d": d, "e": e})


def resized_by(case: Case, sizes: Mapping[str, int]) -> Case:
    """Return a case whose inputs have axes with other sizes by letter; sequences are packed in the same proportions."""
    tokens, options = sizes_of(case)["n"], dict(case.options)
    inputs = {
        name: replace(
            x,
            shape=tuple(sizes.get(a, n) for a, n in zip(x.axes, x.shape, strict=True)),
            numbers=_denser(x, sizes["n"]),
        )
        for name, x in case.inputs.items()
    }
    if "lengths" in options and tokens:
        ends = [sum(options["lengths"][:n]) * sizes["n"] // tokens for n in range(len(options["lengths"]) + 1)]
        options["lengths"] = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return replace(case, inputs=inputs, options=options)


def resized(case: Case, b: int, groups: int, shared: int, rows: int, columns: int, d: int, e: int) -> Case:
    """Return the case with other sizes: `shared` is how many query heads a key head serves."""
    plane = (b, groups * shared, rows, columns)
    shapes: dict[str, tuple[int, ...]] = {"q": (*plane[:3], d), "key_mask": (b, columns)}
    shapes |= {"k": (b, groups, columns, d), "v": (b, groups, columns, e)}
    shapes |= {"q_lengths": (b,), "k_lengths": (b,), "offset": (b,)}
    most = {"q_lengths": (rows, case.inputs["q"].shape[2]), "k_lengths": (columns, case.inputs["k"].shape[2])}
    inputs = {}
    for name, given in case.inputs.items():
        if name == "sink":  # as many as keys stay as many
            own: tuple[int, ...] = (plane[1], *(columns if n == most["k_lengths"][1] else n for n in given.shape[1:]))
        else:
            # What has no shape of its own belongs to the scores, and is broadcast to their shape from the right.
            sizes = plane[max(0, 4 - len(given.shape)) :]
            own = shapes.get(name) or tuple(1 if n == 1 else m for n, m in zip(given.shape, sizes, strict=True))
        numbers = _denser(given, columns)
        if name in most:
            now, before = most[name]
            numbers = {n: x * now // max(before, 1) for n, x in numbers.items()}
        inputs[name] = replace(given, shape=own, numbers=numbers)
    return replace(case, inputs=inputs)


def fitted(case: Case, sizes: Mapping[str, int], cuts: int = 1) -> Case | None:
    """Return a case whose axes are multiples of the sizes of a mesh, tokens of `cuts` parts for each of its devices.

    None where numbers were given that are right in their own size alone, or sequences are packed.
    """
    batch, heads, tokens = (sizes.get(axis, 1) for axis in AXES)
    tokens *= cuts

    def up(size: int, to: int) -> int:
        return -(-size // to) * to

    (b, h, queries, d), (_, g, keys, _) = case.inputs["q"].shape, case.inputs["k"].shape
    fits = not (b % batch or h % heads or g % heads or queries % tokens or keys % tokens)
    if case.inputs["q"].axes:
        known = sizes_of(case)
        fewest = min(known[a] for a in "hfg" if a in known)
        more = heads // math.gcd(fewest, heads)
        wanted = {a: known[a] * more for a in "hfg" if a in known}
        found = resized_by(case, {**known, **wanted, "b": up(known["b"], batch), "n": up(known["n"], tokens)})
    elif h == 1 < heads and len(case.inputs) > 3:  # whether another array has one head, or is for all, is not said
        return None
    else:
        groups = up(g, heads)
        e = case.inputs["v"].shape[3]
        found = resized(case, up(b, batch), groups, h // g, up(queries, tokens), up(keys, tokens), d, e)
    if "lengths" in case.options:  # packed sequences do not end where shards do
        return None
    return case if fits else None if case.exact or case.given else found


def _smaller(a: int, b: int, size: int) -> tuple[int, int]:
    """Bound two sizes: by `size + 1` where they are equal, otherwise by `size` and `size + 2`."""
    if a == b:
        return min(a, size + 1), min(b, size + 1)
    small, large = min(a, b, size), min(max(a, b), size + 2)
    return (small, large) if a < b else (large, small)


def _denser(given: Input, keys: int) -> Mapping[str, float]:
    """Keep so much of a mask that on average a row may attend one of its fewer keys."""
    if "keep" not in given.numbers or not keys:
        return given.numbers
    return {**given.numbers, "keep": max(given.numbers["keep"], 1.0 / keys)}
