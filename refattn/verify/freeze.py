"""Golden vectors: what a case computes, and what others may differ by, as arrays and facts to be stored; and back.

Inputs and upstream gradients are rounded to bfloat16, which the other types hold exactly, so that one truth serves a
kernel in any of them. A type that does not hold some input, such as float16 for 1e5, is left out.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import equations
from refattn.golden import tensors, vectors
from refattn.golden.inputs import make, upstream_input
from refattn.golden.storage_types import DTYPES, has_gradient, round_to
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.outcome import Truth
from refattn.verify.selfcheck.probe import first_beyond, host, used_share
from refattn.verify.selfcheck.samples import shrunk
from refattn.verify.tolerance.budget import finite, truth, wide
from refattn.verify.tolerance.compare import BIAS, ELEMENT, ROW, WHOLE, compare
from refattn.verify.traced import places

SIZES = ("small", "full")
"""Small cases have at most 2 x 2 heads, 5 tokens and width 5; full ones are as designed."""

Stored = dict[str, tuple[str, NDArray[Any]]]

CONVENTIONS = {
    "layout": "(batch, heads, tokens, width), C order, little endian",
    "mask": "True: may attend; broadcast from the right to (batch, heads, queries, keys)",
    "key_mask": "True: may be attended; (batch, keys)",
    "empty_row": "a query that may attend nothing gives 0, and gradients 0",
    "causal": "true or 'bottom_right': the last query sees every key; 'top_left': query i sees keys 0 to i",
    "scale": "applied to the scores; null is 1/sqrt(width)",
    "softcap": "before the mask",
    "lse": "natural logarithm",
    "grouped": "a key/value head serves consecutive query heads",
    "upstream": "d_out alone; the gradient with respect to every other output is 0",
}


def about(mechanisms: Iterable[Mechanism], size: str, version: str) -> dict[str, Any]:
    """Return what the manifest says of all cases, written by this version of refattn."""
    return {
        "size": size,
        "producer": {"refattn": version, "numpy": np.__version__, "python": platform.python_version()},
        "generator": "Philox4x32-10; docs/vectors.md",
        "inputs": "rounded to bfloat16, ties to even",
        "truth": "float64, the dense implementation",
        "limits": {"element": ELEMENT, "row": ROW, "whole": WHOLE, "bias": BIAS},
        "conventions": CONVENTIONS,
        "mechanisms": {
            m.name: {
                "title": m.title,
                "source": m.source,
                "defaults": dict(m.defaults),
                "outputs": ["out", *m.outputs],
                "equations": {
                    id: {"formula": place.formula, "axes": list(place.axes) if place.axes is not None else None}
                    for id, place in places(m).items()
                },
            }
            for m in mechanisms
        },
    }


def frozen_cases(mechanisms: Iterable[Mechanism], size: str) -> Iterator[tuple[Mechanism, Case]]:
    """Yield every designed case of the mechanisms that have a core, in this size."""
    for mechanism in mechanisms:
        if mechanism.core is not None:
            for case in mechanism.cases:
                yield mechanism, shrunk(case) if size == "small" else case


def freeze(mechanism: Mechanism, case: Case) -> tuple[dict[str, Any], bytes]:
    """Return the entry of a case for the manifest, and the bytes of its file."""
    truths = {dtype: truth(mechanism, case, dtype, grad=True, given="bfloat16") for dtype in held(mechanism, case)}
    exact = truths["float64"]
    assert exact.upstream is not None
    given: dict[str, NDArray[Any]] = {**exact.inputs, "d_out": exact.upstream}
    traced, noise, differs = _equations(mechanism, case, exact)
    arrays: Stored = {}
    for name, x in given.items():
        for dtype in truths if has_gradient(x) else ():
            arrays[f"{dtype}/{name}"] = (dtype, x)
        if not has_gradient(x):
            arrays[f"{x.dtype.name}/{name}"] = (x.dtype.name, x)
    for id, x in traced.items():
        arrays[f"equations/{id}"] = (x.dtype.name, x)
    for name, x in exact.values.items():
        arrays[f"results/{name}"] = ("float64", x)
    for dtype, each in truths.items():
        for name, variance in each.variance.items():
            arrays[f"granted/{dtype}/{name}"] = ("float32", np.sqrt(variance).astype(np.float32))
    entry = {
        "mechanism": mechanism.name,
        "case": case.name,
        "kind": case.kind,
        "purpose": case.purpose,
        "options": plain(case.options),
        "inputs": {
            name: {"shape": list(x.shape), "design": x.design, "numbers": dict(x.numbers)}
            | {"stream": f"{mechanism.name}.{case.name}.{name}", "seed": 0}
            for name, x in (*case.inputs.items(), ("d_out", upstream_input(case, exact.upstream.shape)))
        },
        "dtypes": list(truths),
        "equations": {id: {"noise": noise[id], "differs": differs[id]} for id in traced},
        "results": {
            name: {
                "noise": noise[name],
                "stored": {dtype: each.stored[name] for dtype, each in truths.items()},
                "bias": {dtype: each.bias[name] for dtype, each in truths.items()},
                "exact": [dtype for dtype, each in truths.items() if name in each.exact],
            }
            for name in exact.values
        },
    }
    return entry, tensors.encode(arrays)


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON has them: a tuple is a list."""
    return {name: list(x) if isinstance(x, tuple) else x for name, x in options.items()}


def held(mechanism: Mechanism, case: Case) -> list[str]:
    """Return the types that hold every input of a case, rounded to bfloat16, exactly."""
    inputs = [x.astype(np.float64) for x in make(mechanism.name, case, "bfloat16").values() if has_gradient(x)]
    return [dtype for dtype in DTYPES if all(np.array_equal(x, round_to(x, dtype), equal_nan=True) for x in inputs)]


def _equations(
    mechanism: Mechanism, case: Case, exact: Truth
) -> tuple[dict[str, NDArray[Any]], dict[str, float], dict[str, float]]:
    """Return the value of every equation, all noises, and what the two derivations differ by."""
    assert exact.upstream is not None
    core, upstream = host(mechanism), {"d_out": exact.upstream}
    inputs = wide(exact.inputs)
    with equations.trace() as traced:
        core(inputs, case.options, upstream)
    values = {id: np.asarray(x) for id, x in traced.items()}
    second = mechanism.loops.forward(**inputs, **case.options)
    second |= mechanism.loops.backward(**inputs, **upstream, **case.options)
    differs = {
        id: float(
            np.max(np.abs(finite(x.astype(np.float64)) - finite(np.asarray(second[id], np.float64))), initial=0.0)
        )
        for id, x in values.items()
    }
    return values, core.noise(inputs, case.options, upstream), differs


def thaw(entry: Mapping[str, Any], arrays: Stored, dtype: str) -> Truth:
    """Return the truth of a stored case for one of its types, as `refattn.verify.tolerance.compare` judges by it."""
    types = {name: [f"{kind}/{name}" for kind in (dtype, "bool", "int64")] for name in entry["inputs"]}
    inputs = {
        name: next(arrays[place][1] for place in places if place in arrays)
        for name, places in types.items()
        if name != "d_out"
    }
    results = entry["results"]
    return Truth(
        inputs,
        arrays[f"{dtype}/d_out"][1],
        {name: arrays[f"results/{name}"][1] for name in results},
        {name: arrays[f"granted/{dtype}/{name}"][1].astype(np.float64) ** 2 for name in results},
        {name: fact["bias"][dtype] for name, fact in results.items()},
        {name: fact["stored"][dtype] for name, fact in results.items()},
        frozenset(name for name, fact in results.items() if dtype in fact.get("exact", ())),
    )


def recompute(mechanism: Mechanism, golden: vectors.GoldenSet, entry: Mapping[str, Any]) -> tuple[float, str]:
    """Compare what a mechanism computes today with a stored case: every input's bits, equation and result.

    Returns
    -------
    tuple[float, str]
        The largest used share of the allowed error, and which array that was, the first where several are beyond it;
        or what is not the same.
    """
    case, arrays = mechanism.case(entry["case"]), golden.arrays(entry)
    if golden.manifest["size"] == "small":
        case = shrunk(case)
    if plain(case.options) != entry["options"]:
        return np.inf, f"options: {plain(case.options)} now, {entry['options']} in the set"
    exact = thaw(entry, arrays, "float64")
    for name, x in make(mechanism.name, case, "bfloat16").items():
        if name not in exact.inputs or not np.array_equal(x, exact.inputs[name], equal_nan=has_gradient(x)):
            return np.inf, f"{name}: the generator gives other numbers"
    assert exact.upstream is not None
    inputs = wide(exact.inputs)
    with equations.trace() as traced:
        values = host(mechanism)(inputs, case.options, {"d_out": exact.upstream})
    if differ := set(traced) ^ set(entry["equations"]):
        return np.inf, f"not in both: {', '.join(sorted(differ))}"
    shares = {}
    for id, value in traced.items():
        noise = {id: entry["equations"][id]["noise"]}
        shares[id] = used_share({id: np.asarray(value)}, {id: arrays[f"equations/{id}"][1]}, noise)
    for name, x in values.items():
        if name in exact.values:
            verdict = compare(name, x, x.dtype.name, exact)
            shares[f"{name} ({verdict.statistic})"] = verdict.share
    return first_beyond(shares)
