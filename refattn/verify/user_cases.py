"""Cases of the user's own: shapes as text, files of cases, arrays, and what an adapter can run.

A shape is ``b=2,h=32,g=8,nq=1024,nk=4096,d=128,causal``: sizes by their letters (n is both lengths, g is h, e is d and
b and h are 1 where they are not given), ``logits`` (the size of q), ``mask`` (the part of the pairs that may attend),
``k_lengths=37:12``, and options of the core, such as ``scale=0.3`` or ``window=100:0``. Arrays by their name alone,
such as ``sink`` or ``log_decay``, are designed as in the cases of the mechanism. Masks, biases and what dropout keeps
may have axes, ``mask=0.7:b,h,1,k``, and ``log_decay=channel`` is a decay of every channel.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.args import Real, Whole, check_json, refused
from refattn.files import check_size, parse_json, read_users
from refattn.golden.inputs import make
from refattn.golden.storage_types import DTYPES, has_gradient
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.messages import meant, shown
from refattn.verify.adapt import PLANES, SIZES
from refattn.verify.selfcheck.samples import resized, resized_by
from refattn.verify.selfcheck.samples import sizes_of as sizes_by_axes

_NEEDS: dict[str, Any] = {key: Whole(0 if key in ("n", "nq", "nk") else 1, 1 << 31) for key in SIZES}
_NEEDS |= {"logits": Real(), "mask": Real(0.0, 1.0)}

BY = {"head": 3, "channel": 4}
"""What numbers of each token may be for, and how many axes these have."""

_BROADCAST = re.compile(rf"\b(?:{'|'.join(PLANES)})=(?:[0-9.eE+-]+:)?[b1],[h1],[qi1],[kj1](?=,|$)")
"""An array of pairs with its axes: mask=0.7:b,h,1,k; 1 is an axis that is broadcast."""

_EQUAL = re.compile(r"\s*(b|h|g|nq|nk|d|e)\s*==?\s*(b|h|g|nq|nk|d|e)\s*")


class UserCaseError(ValueError):
    """A shape or a file is none; the message says what was given and what is needed, in a line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(shown(message, 900).split()))


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
    for part in _BROADCAST.sub(lambda found: found[0].replace(",", ""), text).split(","):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not name or name in given:
            raise UserCaseError(
                f"got {text[:80]!r}, needs a list such as b=2,h=8,nq=1024,nk=4096,d=128,causal, each name once"
            )
        given[name] = value_of(value) if equals else True
    return of_sizes(mechanism, given, ",".join(part.strip() for part in text.split(",")))


def value_of(text: str) -> Any:
    """Return the value of an option as text: JSON, several numbers such as 31:0, or the text itself."""
    if ":" in text:
        return [None if not part else value_of(part) for part in text.split(":")]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def of_sizes(mechanism: Mechanism, given: Mapping[str, Any], name: str) -> Case:
    """Return the case of sizes by letter, and options by name."""
    given, axes = _without_axes(given)
    options = {key: x for key, x in given.items() if key not in (*SIZES, "logits", "mask")}
    try:
        check_json(
            {key: x for key, x in given.items() if key in _NEEDS}, {key: _NEEDS[key] for key in _NEEDS if key in given}
        )
    except ValueError as error:
        raise UserCaseError(str(error)) from error
    if unknown := [key for key in options if key not in mechanism.defaults]:
        known = (*SIZES, "logits", "mask", *mechanism.defaults)
        needs = ", ".join(dict.fromkeys(known))
        raise UserCaseError(f"got {unknown[0][:80]!r}{meant(unknown[0][:80], known)}, needs one of {needs}")
    keys = given.get("nk", given.get("n"))
    queries = given.get("nq", given.get("n", keys))
    keys = queries if keys is None else keys
    if queries is None:
        raise UserCaseError(f"got {name!r}, needs n, or nq and nk")
    if mechanism.one_sequence and queries != keys:
        raise UserCaseError(f"nq, nk: got {queries} and {keys}, needs equal ones: queries and keys are the same tokens")
    b, h, g = given.get("b", 1), given.get("h", given.get("g", 1)), given.get("g", given.get("h", 1))
    if h % g and (g % h or not mechanism.cases[0].inputs["q"].axes):
        raise UserCaseError(f"g: got {g}, needs a divisor of h, {h}")
    arrays: dict[str, Input] = {}
    for key, lengths in (("q_lengths", queries), ("k_lengths", keys)):
        if key in options:
            listed = options.pop(key)
            listed = listed if isinstance(listed, list) else [listed]
            if len(listed) != b or not all(type(n) is int and 0 <= n <= lengths for n in listed):
                raise UserCaseError(f"{key}: got {str(listed)[:80]}, needs {b} numbers up to {lengths}")
            arrays[key] = Input((b,), "counts", {str(at): n for at, n in enumerate(listed)})
    if "mask" in given:
        if "mask" not in mechanism.defaults:
            raise UserCaseError(f"mask: got {given['mask']!r}, needs a mechanism that takes one")
        arrays["mask"] = Input((1, 1, queries, keys), "mask", {"keep": float(given["mask"])})
    d = given.get("d", 64)
    sizes = {"b": b, "h": h, "g": g, "n_q": queries, "n_k": keys, "d": d, "e": given.get("e", d)}
    # What is designed as an array and has no value, or the part of a mask, is as in the nearest designed case.
    gates = {key for key, x in mechanism.sampled.items() if isinstance(x, Input)}
    named: dict[str, Any] = {} if gates & {*options} else dict.fromkeys(gates, True)
    for key in [key for key, x in options.items() if x is not None and designs(mechanism, key)]:
        value = options[key]
        if isinstance(value, list) and "counts" in designs(mechanism, key):
            if len(value) != b or not all(type(n) is int for n in value):
                raise UserCaseError(f"{key}: got {value}, needs {b} whole numbers")
            arrays[key] = Input((b,), "counts", {str(at): n for at, n in enumerate(value)})
        elif value is True or (type(value) in (int, float) and "mask" in designs(mechanism, key)):
            named[key] = value
        elif isinstance(value, str) and any(len(x.axes) == BY.get(value) for x in _designed(mechanism, key)):
            named[key] = value
        elif value is not False:
            continue
        del options[key]
    for key, value in options.items():
        if value is True and not isinstance(mechanism.defaults[key], bool):
            raise UserCaseError(f"{key}: got no value, needs one: {key}=...")
    logits = float(given.get("logits", 1.0))
    case = _case(mechanism, shown(name, 200), sizes, logits, options, arrays, named)
    for key, letters in axes.items():
        if key not in case.inputs:
            raise UserCaseError(f"{key}: got {given[key]} before its axes, needs {key} with axes alone")
        shape = tuple(1 if letter == "1" else n for letter, n in zip(letters, (b, h, queries, keys), strict=True))
        case = replace(case, inputs={**case.inputs, key: replace(case.inputs[key], shape=shape)})
    try:
        check_size(8 * max(math.prod(x.shape) for x in case.inputs.values()), "its largest array ")
    except ValueError as error:
        raise UserCaseError(str(error)) from error
    _check_options(mechanism, options, named, sizes)
    return case


def _case(
    mechanism: Mechanism,
    name: str,
    sizes: Mapping[str, int],
    logits: float,
    options: Mapping[str, Any],
    arrays: Mapping[str, Input],
    named: Mapping[str, Any],
) -> Case:
    """Return a case with what nearly all designed cases need, such as a jitter that depends on the type."""
    needed = Counter(key for one in mechanism.cases for key in one.options)
    usual = {key: x for one in mechanism.cases[::-1] for key, x in one.options.items()}
    options = {key: usual[key] for key, n in needed.items() if 10 * n > 9 * len(mechanism.cases)} | {**options}
    plain = {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}
    case = qkv(name, "own", "a shape of your own", sizes, logits, **plain, **arrays)
    lengths = plain.get("lengths")  # if they are something else, the core says so
    given = lengths if isinstance(lengths, tuple) else None
    return replace(case, inputs=_with_arrays(mechanism, case.inputs, named, sizes, given))


def _check_options(
    mechanism: Mechanism, options: Mapping[str, Any], named: Mapping[str, Any], sizes: Mapping[str, int]
) -> None:
    """Raise UserCaseError if the core does not take options: it says so of a small call."""
    assert mechanism.core is not None
    few = {key: n if key[0] == "n" and "lengths" in options else min(n, 8) for key, n in sizes.items()}
    case = _case(mechanism, "small", {**few, "b": 1, "h": 1, "g": 1}, 1.0, options, {}, named)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            mechanism.core.forward(**make(mechanism.name, case, "float64"), **case.options)
    except Exception as error:  # of whatever kind, the options are what it is given
        raise UserCaseError(str(error) or f"got {dict(options)}, which {mechanism.name} does not take") from error


def _without_axes(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return what is given for arrays of pairs without their axes, and these: "bh1k" of mask=0.7:b,h,1,k."""
    plain: dict[str, Any] = dict(given)
    axes: dict[str, str] = {}
    for name in [name for name in PLANES if isinstance(given.get(name), str | list)]:
        text = given[name] if isinstance(given[name], str) else ":".join(map(str, given[name]))
        part, _, letters = text.replace(",", "").replace(" ", "").rpartition(":")
        if not re.fullmatch("[b1][h1][qi1][kj1]", letters):
            raise UserCaseError(f"{name}: got {text[:80]!r}, needs axes such as b,h,1,k, with 1 for what is broadcast")
        plain[name], axes[name] = (value_of(part) if part else True), letters
    return plain, axes


def designs(mechanism: Mechanism, name: str) -> set[str]:
    """Return the designs of an argument in the cases that have it as an array."""
    return {x.design for x in _designed(mechanism, name)}


def _designed(mechanism: Mechanism, name: str) -> list[Input]:
    return [case.inputs[name] for case in mechanism.cases if name in case.inputs]


def _with_arrays(
    mechanism: Mechanism,
    inputs: Mapping[str, Input],
    named: Mapping[str, Any],
    sizes: Mapping[str, int],
    lengths: tuple[int, ...] | None,
) -> dict[str, Input]:
    """Return inputs with arrays as the nearest designed cases have them: with what is asked for, and least else."""

    def distance(case: Case, arrays: set[str]) -> int:
        return 2 * len({*named} - arrays) + len(arrays - {*named}) + ("lengths" in case.options)

    def nearest(name: str) -> Mapping[str, Input]:
        has = [case for case in mechanism.cases if name in case.inputs]
        axes = {one: BY[value] for one, value in named.items() if isinstance(value, str)}
        has = [
            case
            for case in has
            if all(len(case.inputs[one].axes) == n for one, n in axes.items() if one in case.inputs)
        ]
        case = min(has, key=lambda one: distance(one, {*one.inputs} - {*"qkv"}))
        if not case.inputs["q"].axes:
            shared = (sizes["h"] // sizes["g"], sizes["n_q"], sizes["n_k"], sizes["d"], sizes["e"])
            return resized(case, sizes["b"], sizes["g"], *shared).inputs
        other = resized_by(case, {**sizes, "n": sizes["n_k"], "f": sizes["g"]}).inputs
        return {**other, "k": _as_long(other["k"], case.inputs["k"])}

    found = dict(inputs)
    if nearest("k")["k"].axes:  # arrays have letters, and keys the size that the state stays bounded with
        logits = found["q"].numbers
        found |= {name: nearest(name)[name] for name in "qkv"}
        found["q"] = replace(found["q"], design="normal", numbers=logits)
    for name, value in named.items():
        found[name] = nearest(name)[name]
        if value is not True and not isinstance(value, str):
            found[name] = replace(found[name], numbers={"keep": float(value)})
        if lengths is not None and found[name].axes.startswith("b") and name == "state":
            found[name] = replace(
                found[name], shape=(len(lengths), *found[name].shape[1:]), axes="." + found[name].axes[1:]
            )
    return found


def from_file(mechanism: Mechanism, path: Path) -> list[Case]:
    """Return the cases of a file: a list of shapes in JSON, or a JSON object in each line.

    A shape is a text, or an object with its sizes and options and perhaps a "name". An object with a "workload" is one
    of FlashInfer-Bench: sizes are read from its axes and from the name of its definition, all sequences equally long.
    """
    try:
        data = read_users(path)
    except ValueError as error:
        raise UserCaseError(str(error)) from error
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
    seen: Counter[str] = Counter()
    for number, one in enumerate(found):
        try:
            case = _from_entry(mechanism, one)
        except UserCaseError as error:
            raise UserCaseError(f"{path}: {number}: {error}") from error
        name = case.name
        while case.name in cases:
            seen[name] += 1
            case = replace(case, name=f"{name} ({seen[name] + 1})")
        cases[case.name] = case
    return list(cases.values())


def _from_entry(mechanism: Mechanism, one: Any) -> Case:
    if isinstance(one, str):
        return from_text(mechanism, one)
    if not isinstance(one, dict):
        raise UserCaseError(f"got {str(one)[:80]}, needs a text or an object")
    sizes = {key: x for key, x in one.items() if key != "name"}
    text = ",".join(key if x is True else f"{key}={x}" for key, x in sizes.items())
    name = one.get("name", text)
    if not isinstance(name, str) or not name:
        raise UserCaseError(str(refused("name", name, "a text")))
    return of_sizes(mechanism, sizes, name)


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
        got = ", ".join(str(arrays[name].shape) if name in arrays else "nothing" for name in missing)
        raise UserCaseError(f"{', '.join(missing)}: got {got}, needs an array (batch, heads, tokens, width) each")
    if wrong := [name for name in "qkv" if not has_gradient(arrays[name])]:
        raise UserCaseError(f"{wrong[0]}: got dtype {arrays[wrong[0]].dtype}, needs one of {', '.join(DTYPES)}")
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
    _check_options(mechanism, options, {}, {"n_q": rows, "n_k": columns, "d": d, "e": v[3]})
    return Case(called, "own", inputs, options, "captured arrays", given={**arrays, **pulls})


# --- what an adapter can run

FEW = 2
"""Sequences and key/value heads that a fitted case has at most."""


def fitted(cases: Iterable[Case], supports: Mapping[str, Any]) -> list[Case]:
    """Return the designed cases in sizes that an adapter states it can run, without those that it cannot.

    `supports` has sizes by their letters: a number, several, or ``{"multiple_of": 128, "at_least": 128, "at_most":
    4096}``; n is both lengths. Under "options" it may name the arguments beside q, k and v that it takes, under "where"
    sizes that are equal, such as ``["nq = nk", "h = g", "e = d"]``, and under "fixed" options that it always has:
    every case is run with these. Under "causal" it may say that True is "top_left", or that it needs as many queries as
    keys, "square": causal cases are run so.

    Raises
    ------
    UserCaseError
        Where that is something else.
    """
    others = ("options", "dtypes", "where", "fixed", "causal")
    letters = {key: x for key, x in supports.items() if key not in others}
    equal = _equal(supports.get("where", ()))
    if unknown := [key for key in letters if key not in SIZES]:
        raise UserCaseError(f"supports: got {unknown[0]!r}, needs some of {', '.join((*SIZES, *others))}")
    if (form := supports.get("causal")) not in (None, "top_left", "square"):
        raise UserCaseError(f"supports: got causal = {form!r}, needs top_left or square")
    allowed = {key: letters.get(key, letters.get("n") if key in ("nq", "nk") else None) for key in SIZES if key != "n"}
    taken = supports.get("options")
    fixed = {name: tuple(x) if isinstance(x, list) else x for name, x in (supports.get("fixed") or {}).items()}
    found: dict[Any, Case] = {}
    for case in (_with_fixed(case, fixed) for case in cases):
        if taken is not None and {*case.options, *case.inputs} - {*taken, *fixed, *"qkv"}:
            continue
        causal = bool(case.options.get("causal"))
        aligned = causal and form == "top_left" and "offset" not in {*case.options, *case.inputs}
        case = _with_fixed(case, {"causal": "top_left"} if aligned else {})
        own = [*equal, ("nq", "nk")] if causal and form == "square" else equal
        one = (_fit_by_axes if case.inputs["q"].axes else _fit)(case, allowed, own)
        if one is not None:
            about = tuple((name, x.shape, x.design, *sorted(x.numbers.items())) for name, x in one.inputs.items())
            found.setdefault((about, repr(sorted(one.options.items()))), one)
    return list(found.values())


def supported(
    record: Mechanism, stated: Any, dtypes: tuple[str, ...], *, given: bool
) -> tuple[Mechanism, tuple[str, ...]]:
    """Return the record with its cases as an adapter states that it can run them, and the types that it states.

    `stated` is its attribute `supports`, None if it has none. Types that are `given` stay.

    Raises
    ------
    UserCaseError
        If it is no dict of what `fitted` takes, or no case fits.
    """
    if stated is None:
        return record, dtypes
    if not isinstance(stated, dict):
        raise UserCaseError(f"supports: got {stated!r}, needs a dict of sizes by their letters")
    types = stated.get("dtypes", ())
    types = (types,) if isinstance(types, str) else tuple(types)
    if unknown := [name for name in types if name not in DTYPES]:
        raise UserCaseError(f"supports: got the dtype {unknown[0]!r}, needs some of {', '.join(DTYPES)}")
    try:
        check_fixed(record, stated)
        cases = fitted(record.cases, stated)
    except (UserCaseError, TypeError, ValueError) as error:
        raise UserCaseError(f"supports: {str(error).removeprefix('supports: ')}") from error
    if not cases:
        raise UserCaseError(f"supports: got {stated!r}, which no case can be made to fit")
    return record.changed(cases=tuple(cases)), dtypes if given else types or dtypes


def check_fixed(mechanism: Mechanism, supports: Mapping[str, Any]) -> None:
    """Raise UserCaseError where the options that an adapter always has are none of a mechanism."""
    fixed = supports.get("fixed") or {}
    if not isinstance(fixed, Mapping):
        raise UserCaseError(f"fixed: got {fixed!r}, needs a dict of options such as {{'causal': True}}")
    if wrong := [name for name in fixed if name not in mechanism.defaults]:
        raise UserCaseError(f"fixed: got {wrong[0]!r}, needs some of {', '.join(mechanism.defaults)}")
    plain = {name: tuple(x) if isinstance(x, list) else x for name, x in fixed.items()}
    _check_options(mechanism, plain, {}, {"n_q": 8, "n_k": 8, "d": 8, "e": 8})


def _with_fixed(case: Case, fixed: Mapping[str, Any]) -> Case:
    """Return a case with the options that a kernel always has; its exact results are others then."""
    options = {**case.options, **fixed}
    return case if options == case.options else replace(case, options=options, exact={})


def letters_of(case: Case) -> dict[str, int]:
    """Return the sizes of a case by the letters of `supports`."""
    if not case.inputs["q"].axes:
        return sizes_of(case)
    now = sizes_by_axes(case)
    return {key: now[key] for key in "bhgde"} | {"nq": now["n"], "nk": now["n"]}


def _equal(texts: Any) -> list[tuple[str, str]]:
    """Return the pairs of sizes that are equal."""
    found = [(text, _EQUAL.fullmatch(str(text))) for text in ([texts] if isinstance(texts, str) else texts)]
    if wrong := [text for text, one in found if one is None]:
        raise UserCaseError(f"supports: got {wrong[0]!r}, needs equal sizes such as nq = nk, h = g, e = d")
    return [(one[1], one[2]) for _, one in found if one is not None]


def sizes_of(case: Case) -> dict[str, int]:
    """Return the sizes of a case by their letters."""
    (b, h, rows, d), (_, g, columns, _) = case.inputs["q"].shape, case.inputs["k"].shape
    return {"b": b, "h": h, "g": g, "nq": rows, "nk": columns, "d": d, "e": case.inputs["v"].shape[3]}


def _fit(case: Case, allowed: Mapping[str, Any], equal: Sequence[tuple[str, str]] = ()) -> Case | None:
    now = sizes_of(case)
    b, h, g, rows, columns, d, e = now.values()
    new = {key: _nearest(n, allowed.get(key)) for key, n in now.items()}
    for left, right in equal:
        size = max(new[left], new[right])
        new[left] = new[right] = _nearest(_nearest(size, allowed.get(left)), allowed.get(right))
    one_length = {"nq", "nk"} in [{*pair} for pair in equal]
    if not one_length and np.sign(rows - columns) != np.sign(new["nq"] - new["nk"]):
        longer = "nk" if rows < columns else "nq"
        least = new["nq" if longer == "nk" else "nk"]
        new[longer] = least if rows == columns else _nearest(2 * least, allowed.get(longer))
        if rows != columns and new[longer] == least:
            return None
        if rows == columns and _nearest(least, allowed.get(longer)) != least:
            return None
    new["e"] = new["e"] if allowed.get("e") is not None or e != d else new["d"]
    if any(new[x] != new[y] or _nearest(new[x], allowed.get(x)) != new[x] for x, y in equal):
        return None
    if new == now:
        return case
    if allowed.get("h") is None and allowed.get("g") is None:
        shared = new["h"] // max(new["g"], 1)
        new |= {"g": min(new["g"], FEW), "h": min(new["g"], FEW) * shared}
    if allowed.get("b") is None and not {"q_lengths", "k_lengths"} & {*case.inputs}:
        new["b"] = min(b, FEW)
    if not new["g"] or new["h"] % new["g"]:
        return None
    sizes = (new["b"], new["g"], new["h"] // new["g"], new["nq"], new["nk"], new["d"], new["e"])
    try:
        return replace(resized(case, *sizes), exact={}, given={})
    except (ValueError, ZeroDivisionError):
        return None


def _fit_by_axes(case: Case, allowed: Mapping[str, Any], equal: Sequence[tuple[str, str]] = ()) -> Case | None:
    """Return a case whose inputs have axes in sizes that are allowed: g are the heads of values, and tokens are one."""
    now, old = sizes_by_axes(case), letters_of(case)
    new = {key: _nearest(n, allowed.get(key)) for key, n in old.items()}
    equal = [*equal, ("nq", "nk")]
    new |= {one: max(new[one], new[other]) for pair in equal for one, other in (pair, pair[::-1])}
    new["e"] = new["e"] if allowed.get("e") is not None or old["e"] != old["d"] else new["d"]
    asked = [key for key in new if allowed.get(key) is not None]
    if any(_nearest(new[key], allowed[key]) != new[key] for key in asked) or any(new[a] != new[b] for a, b in equal):
        return None
    # Neighbours share a head of keys: the others are multiples of as many.
    same = (new["h"], new["g"]) == (old["h"], old["g"]) and {"h", "g"} not in [{*pair} for pair in equal]
    found = {**{key: new[key] for key in "bhgde"}, "n": new["nq"], "f": now["f"] if same else min(new["h"], new["g"])}
    if found == now:
        return case
    if max(found["h"], found["g"]) % max(found["f"], 1) or ("lengths" in case.options and found["b"] != 1):
        return None
    other = resized_by(case, found)
    return replace(
        other, inputs={**other.inputs, "k": _as_long(other.inputs["k"], case.inputs["k"])}, exact={}, given={}
    )


def _as_long(k: Input, before: Input) -> Input:
    """Return keys of another width that are about as long as they were: with them a state stays bounded."""
    if k.design not in ("normal", "repeated"):
        return k
    times = 2.0 ** round(math.log2(max(before.shape[3], 1) / max(k.shape[3], 1)) / 2.0)
    return replace(k, numbers={**k.numbers, "scale": k.numbers.get("scale", 1.0) * times})


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
