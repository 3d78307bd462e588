"""Cases of the user's own: shapes as text, files of cases, files of captured arrays, and what an adapter can run.

A shape is ``b=2,h=32,g=8,nq=1024,nk=4096,d=128,causal``: sizes by their letters (n is both lengths, g is h, e is d and
b and h are 1 where they are not given), ``logits`` (the size of q), ``mask`` (the part of the pairs that may attend),
``k_lengths=37:12``, and options of the core, such as ``scale=0.3`` or ``window=100:0``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.files import parse_json, read_regular
from refattn.golden.storage import DTYPES, has_gradient
from refattn.golden.tensors import decode
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.near import meant
from refattn.verify.selfcheck.samples import resized

LARGEST = 1 << 33
"""Bytes of a file of arrays at most."""

SIZES = ("b", "h", "g", "n", "nq", "nk", "d", "e")


class UserCaseError(Exception):
    """A shape or a file is none; the message says what was given and what is needed."""


def qkv(name: str, kind: str, purpose: str, sizes: Mapping[str, int], logits: float = 1.0, **more: Any) -> Case:
    """Return a case of sizes b, h, g, n_q, n_k, d and e; of what is `more` designed arrays are inputs."""
    b, h, g, n_q, n_k, d = (sizes[key] for key in ("b", "h", "g", "n_q", "n_k", "d"))
    inputs = {
        "q": Input((b, h, n_q, d), "normal", {"scale": logits}),
        "k": Input((b, g, n_k, d)),
        "v": Input((b, g, n_k, sizes.get("e", d))),
    }
    inputs |= {key: x for key, x in more.items() if isinstance(x, Input)}
    return Case(name, kind, inputs, {key: x for key, x in more.items() if key not in inputs}, purpose)


def from_text(mechanism: Mechanism, text: str) -> Case:
    """Return the case of a shape; its name is the text, which its random numbers follow from, too."""
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not name or name in given:
            raise UserCaseError(
                f"got {text!r}, needs a list such as b=2,h=8,nq=1024,nk=4096,d=128,causal, each name once"
            )
        given[name] = _value(value) if equals else True
    return of_sizes(mechanism, given, ",".join(part.strip() for part in text.split(",")))


def _value(text: str) -> Any:
    if ":" in text:
        return [None if not part else _value(part) for part in text.split(":")]
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def of_sizes(mechanism: Mechanism, given: Mapping[str, Any], name: str) -> Case:
    """Return the case of sizes by letter, and options by name."""
    options = {key: x for key, x in given.items() if key not in (*SIZES, "logits", "mask")}
    for key in (key for key in SIZES if key in given):
        if type(given[key]) is not int or given[key] < (0 if key in ("n", "nq", "nk") else 1):
            raise UserCaseError(f"{key}: got {given[key]!r}, needs a whole number")
    if unknown := [key for key in options if key not in mechanism.defaults]:
        known = (*SIZES, "logits", "mask", *mechanism.defaults)
        raise UserCaseError(
            f"got {unknown[0]!r}{meant(unknown[0], known)}, needs one of {', '.join(dict.fromkeys(known))}"
        )
    keys = given.get("nk", given.get("n"))
    queries = given.get("nq", given.get("n", keys))
    keys = queries if keys is None else keys
    if queries is None:
        raise UserCaseError(f"got {name!r}, needs n, or nq and nk")
    if mechanism.one_sequence and queries != keys:
        raise UserCaseError(f"nq, nk: got {queries} and {keys}, needs equal ones: queries and keys are the same tokens")
    b, h, g = given.get("b", 1), given.get("h", given.get("g", 1)), given.get("g", given.get("h", 1))
    if h % g:
        raise UserCaseError(f"g: got {g}, needs a divisor of h, {h}")
    arrays: dict[str, Input] = {}
    for key, lengths in (("q_lengths", queries), ("k_lengths", keys)):
        if key in options:
            listed = options.pop(key)
            listed = listed if isinstance(listed, list) else [listed]
            if len(listed) != b or not all(type(n) is int and 0 <= n <= lengths for n in listed):
                raise UserCaseError(f"{key}: got {listed}, needs {b} numbers up to {lengths}")
            arrays[key] = Input((b,), "counts", {str(at): n for at, n in enumerate(listed)})
    if "mask" in given:
        if "mask" not in mechanism.defaults or type(given["mask"]) not in (int, float):
            raise UserCaseError(f"mask: got {given['mask']!r}, needs the part of the pairs that may attend")
        arrays["mask"] = Input((1, 1, queries, keys), "mask", {"keep": float(given["mask"])})
    options = {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}
    d = given.get("d", 64)
    sizes = {"b": b, "h": h, "g": g, "n_q": queries, "n_k": keys, "d": d, "e": given.get("e", d)}
    logits = float(given.get("logits", 1.0))
    more: dict[str, Any] = {**options, **arrays}
    case = qkv(name, "own", "a shape of your own", sizes, logits, **more)
    letters = {**sizes, "n": keys}
    sampled = {key: x for key, x in mechanism.sampled.items() if key not in options}
    further = {
        key: replace(x, shape=tuple(letters[a] for a in x.axes)) for key, x in sampled.items() if isinstance(x, Input)
    }
    if further:
        case = replace(
            case,
            inputs={
                **{key: replace(x, axes=axes) for (key, x), axes in zip(case.inputs.items(), _AXES, strict=False)},
                **further,
            },
        )
    plain = {key: x for key, x in sampled.items() if key not in further}
    return replace(case, options={**plain, **case.options})


_AXES = ("bhnd", "bgnd", "bgne")


def from_file(mechanism: Mechanism, path: Path) -> list[Case]:
    """Return the cases of a file: a list of shapes in JSON, or a JSON object in each line.

    A shape is a text, or an object with its sizes and options and perhaps a "name". An object with a "workload" is one
    of FlashInfer-Bench: sizes are read from its axes and from the name of its definition, all sequences equally long.
    """
    data = _bytes(path)
    try:
        found = parse_json(data)
        found = found.get("cases", [found]) if isinstance(found, dict) else found
    except ValueError:
        try:
            found = [parse_json(line) for line in data.splitlines() if line.strip()]
        except ValueError as error:
            raise UserCaseError(
                f"{path}: got no JSON ({error}), needs a list of shapes, or an object in each line"
            ) from error
    if not isinstance(found, list) or not found:
        raise UserCaseError(f"{path}: got no list of shapes, needs one")
    cases: dict[str, Case] = {}
    for number, one in enumerate(found):
        try:
            case = _from_entry(mechanism, one, number)
        except UserCaseError as error:
            raise UserCaseError(f"{path}: {number}: {error}") from error
        while case.name in cases:
            case = replace(case, name=f"{case.name}'")
        cases[case.name] = case
    return list(cases.values())


def _from_entry(mechanism: Mechanism, one: Any, number: int) -> Case:
    if isinstance(one, str):
        return from_text(mechanism, one)
    if not isinstance(one, dict):
        raise UserCaseError(f"got {one!r}, needs a text or an object")
    if "workload" in one:
        return _from_workload(mechanism, one, number)
    sizes = {key: x for key, x in one.items() if key != "name"}
    text = ",".join(key if x is True else f"{key}={x}" for key, x in sizes.items())
    return of_sizes(mechanism, sizes, str(one.get("name", text)))


_DEFINITION = re.compile(r"_(h|kv|d|qk|vo)(\d+)")


def _from_workload(mechanism: Mechanism, one: Mapping[str, Any], number: int) -> Case:
    definition, axes = str(one.get("definition", "")), one["workload"].get("axes", {})
    named = {letter: int(value) for letter, value in _DEFINITION.findall(definition)}
    if not isinstance(axes, dict) or "h" not in named or not {"d", "qk"} & {*named}:
        raise UserCaseError(f"got the definition {definition!r}, needs one such as gqa_paged_decode_h32_kv8_d128_ps1")
    b = int(axes.get("batch_size", axes.get("len_indptr", 2) - 1)) or 1
    tokens = next((axes[key] for key in ("num_kv_indices", "total_kv", "total_tokens", "seq_len") if key in axes), None)
    if tokens is None:
        raise UserCaseError(f"got the axes {', '.join(axes)}, needs num_kv_indices, total_kv or seq_len")
    queries = 1 if "decode" in definition else math.ceil(axes.get("total_q", axes.get("seq_len", tokens)) / b)
    d = named.get("d", named.get("qk", 1))
    sizes = {
        "b": b,
        "h": named["h"],
        "g": named.get("kv", named["h"]),
        "nq": queries,
        "nk": math.ceil(tokens / b),
        "d": d,
        "e": named.get("vo", d),
    }
    options = {"causal": True} if "causal" in definition else {}
    return of_sizes(mechanism, {**sizes, **options}, f"{definition}#{number}")


def captured(mechanism: Mechanism, path: Path) -> tuple[Case, str]:
    """Return the case of a file of arrays, .safetensors or .npz, and the type that its q is stored in.

    It has q, k and v, and may have further arguments of the core and upstream gradients (d_out, d_lse). Options are
    JSON under "options", in the metadata or as an array of one text, or arrays of one number.
    """
    try:
        arrays, types, options = _from_npz(path) if path.suffix == ".npz" else _from_safetensors(path)
    except (ValueError, OSError, EOFError) as error:
        raise UserCaseError(f"got {str(path)!r}, needs arrays as .safetensors or .npz ({error})") from error
    try:
        case = of_arrays(mechanism, arrays, options, path.stem)
    except UserCaseError as error:
        raise UserCaseError(f"{path}: {error}") from error
    return case, types.get("q", "float32") if types.get("q") in DTYPES else "float32"


def of_arrays(mechanism: Mechanism, given: Mapping[str, NDArray[Any]], plain: Mapping[str, Any], called: str) -> Case:
    """Return the case of arrays by name, upstream gradients (d_out, d_lse) among them, and of other arguments."""
    arrays, options = dict(given), dict(plain)
    pulls = {name: arrays.pop(name) for name in [*arrays] if name in ("d_out", *(f"d_{n}" for n in mechanism.pulled))}
    known = ("q", "k", "v", *mechanism.defaults)
    for name in [name for name, x in arrays.items() if x.ndim == 0 and name in known]:
        options[name] = arrays.pop(name).item()
    if unknown := [name for name in (*arrays, *options) if name not in known]:
        raise UserCaseError(
            f"got {', '.join(unknown)}{meant(unknown[0], known)}, needs arguments of the core: "
            f"{', '.join((*known, 'd_out'))}"
        )
    if missing := [name for name in "qkv" if name not in arrays or arrays[name].ndim != 4]:
        raise UserCaseError(f"{', '.join(missing)}: needs an array (batch, heads, tokens, width) each")
    (b, h, rows, d), (_, g, columns, _), v = (arrays[name].shape for name in "qkv")
    sizes = {"k": (b, max(g, 1), columns, d), "v": (b, max(g, 1), columns, v[3])}
    for name, shape in sizes.items():
        if arrays[name].shape != shape or h % max(g, 1):
            raise UserCaseError(f"{name}: got {arrays[name].shape}, needs {shape} beside q {(b, h, rows, d)}")
    if "d_out" in pulls and pulls["d_out"].shape != (b, h, rows, v[3]):
        raise UserCaseError(f"d_out: got {pulls['d_out'].shape}, needs {(b, h, rows, v[3])}")
    designs = {
        name: "normal" if has_gradient(x) else "mask" if x.dtype == np.bool_ else "counts" for name, x in arrays.items()
    }
    inputs = {name: Input(x.shape, designs[name]) for name, x in arrays.items()}
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    return Case(called, "own", inputs, options, "captured arrays", given={**arrays, **pulls})


def _from_npz(path: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    with np.load(path, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    options = json.loads(arrays.pop("options").item()) if "options" in arrays else {}
    return arrays, {name: x.dtype.name for name, x in arrays.items()}, dict(options)


def _from_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    data = _bytes(path)
    found = decode(data)
    about = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    options = json.loads(about["options"]) if "options" in about else {}
    return {name: x for name, (_, x) in found.items()}, {name: dtype for name, (dtype, _) in found.items()}, options


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path, LARGEST)
    except OSError as error:
        raise UserCaseError(f"got {str(path)!r}, needs a file that can be read ({error.strerror})") from error


# --- what an adapter can run

FEW = 2
"""Sequences and key/value heads that a fitted case has at most."""


def fitted(cases: Iterable[Case], supports: Mapping[str, Any]) -> list[Case]:
    """Return the designed cases in sizes that an adapter states it can run, without those that it cannot.

    `supports` has sizes by their letters: a number, several, or ``{"multiple_of": 128, "at_least": 128, "at_most":
    4096}``; n is both lengths. Under "options" it may name the arguments beside q, k and v that it takes.

    Raises
    ------
    UserCaseError
        Where that is something else.
    """
    letters = {key: x for key, x in supports.items() if key not in ("options", "dtypes")}
    if unknown := [key for key in letters if key not in SIZES]:
        raise UserCaseError(f"supports: got {unknown[0]!r}, needs some of {', '.join((*SIZES, 'options', 'dtypes'))}")
    allowed = {key: letters.get(key, letters.get("n") if key in ("nq", "nk") else None) for key in SIZES if key != "n"}
    taken = supports.get("options")
    found: dict[Any, Case] = {}
    for case in cases:
        if taken is not None and {*case.options, *case.inputs} - {*taken, *"qkv"}:
            continue
        if case.inputs["q"].axes:
            one: Case | None = case
        else:
            one = _fit(case, allowed)
        if one is not None:
            about = tuple((name, x.shape, x.design, *sorted(x.numbers.items())) for name, x in one.inputs.items())
            found.setdefault((about, repr(sorted(one.options.items()))), one)
    return list(found.values())


def _fit(case: Case, allowed: Mapping[str, Any]) -> Case | None:
    (b, h, rows, d), (_, g, columns, _) = case.inputs["q"].shape, case.inputs["k"].shape
    e = case.inputs["v"].shape[3]
    now = {"b": b, "h": h, "g": g, "nq": rows, "nk": columns, "d": d, "e": e}
    new = {key: _nearest(n, allowed.get(key)) for key, n in now.items()}
    if (rows < columns) != (new["nq"] < new["nk"]) or (rows > columns) != (new["nq"] > new["nk"]):
        longer = "nk" if rows < columns else "nq"
        other = new["nq" if longer == "nk" else "nk"]
        new[longer] = other if rows == columns else _nearest(2 * other, allowed.get(longer))
        if rows != columns and new[longer] == other:
            return None
        if rows == columns and _nearest(other, allowed.get(longer)) != other:
            return None
    new["e"] = new["e"] if allowed.get("e") is not None or e != d else new["d"]
    if new == now:
        return case
    if allowed.get("h") is None and allowed.get("g") is None:
        shared = h // max(g, 1)
        new |= {"g": min(g, FEW), "h": min(g, FEW) * shared}
    if allowed.get("b") is None and not {"q_lengths", "k_lengths"} & {*case.inputs}:
        new["b"] = min(b, FEW)
    if not new["g"] or new["h"] % new["g"]:
        return None
    sizes = (new["b"], new["g"], new["h"] // new["g"], new["nq"], new["nk"], new["d"], new["e"])
    try:
        return replace(resized(case, *sizes), exact={}, given={})
    except (ValueError, ZeroDivisionError):
        return None


def _nearest(size: int, allowed: Any) -> int:
    """Return the size that is allowed and comes nearest; the larger one of two."""
    if allowed is None:
        return size
    if isinstance(allowed, Mapping):
        if unknown := {*allowed} - {"multiple_of", "at_least", "at_most"}:
            raise UserCaseError(f"supports: got {sorted(unknown)[0]!r}, needs multiple_of, at_least or at_most")
        step = int(allowed.get("multiple_of", 1))
        least = -(-int(allowed.get("at_least", step)) // step) * step
        most = int(allowed["at_most"]) // step * step if "at_most" in allowed else None
        near = max(least, (2 * size + step) // (2 * step) * step)
        return near if most is None else min(near, most)
    options = [allowed] if isinstance(allowed, int) else list(allowed)
    if not options or not all(type(n) is int for n in options):
        raise UserCaseError(f"supports: got {allowed!r}, needs a number, several, or multiple_of, at_least, at_most")
    return int(min(options, key=lambda n: (abs(n - size), -n)))
