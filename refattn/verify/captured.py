"""A file of the user's own arrays: what a call was given, and what the kernel returned if that is there too.

With an output in it the file is a dump, which is judged without the kernel. Files are .safetensors, .npz, or what
`torch.save` writes; their bytes say which. Nothing in a file is run, and a name that nobody knows is refused: an array
that was left out in silence would make a wrong verdict.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.args import check_json
from refattn.files import check_size, parse_json, read_users
from refattn.golden.storage_types import DTYPES, has_gradient, round_to
from refattn.golden.tensors import unpack
from refattn.mechanisms.record import Case, Mechanism
from refattn.messages import install, meant, shown
from refattn.verify import run
from refattn.verify.adapters.adapter import to_host
from refattn.verify.layouts import brought_back
from refattn.verify.names import meaning
from refattn.verify.outcome import Outcome, Report, share_text
from refattn.verify.user_cases import UserCaseError, designs, of_arrays, value_of

AXES = ("bhnd", "bnhd")
"""Orders of the axes of q, k, v and the output: batch, heads, tokens, width; or tokens before heads."""

_COUNTED_OTHERWISE = {
    "sliding_window": "libraries count it with the query's own key or without it: --options window=LEFT:RIGHT says it"
}
"""Names whose meaning is not the same in all libraries, and what to do."""

PART = 1 << 17
"""Scores of a part of a long dump that suspects are looked for in."""

CLEARLY = 0.5
"""Of two readings of axes that both disagree the second is taken if its error is so many times that of the first."""

ONE_CALL = (
    "judged from one stored call: conventions are not probed and no smaller case is looked for, which needs the kernel "
    "(--impl FILE.py:FUNCTION)"
)


@dataclass(frozen=True)
class Captured:
    """What a file holds.

    Attributes
    ----------
    case
        The call: its arrays, upstream gradients and options.
    dtype
        The storage type that it is judged in.
    results
        What the kernel returned, by name: "out", "lse", "d_q", ...; {} where the file has nothing of this sort.
    types
        The types that these are stored in.
    remarks
        What was guessed or set aside, in words.
    """

    case: Case
    dtype: str
    results: Mapping[str, NDArray[Any]]
    types: Mapping[str, str]
    remarks: tuple[str, ...] = ()


Arrays = dict[str, tuple[str, NDArray[Any]]]


# --- what is in a file


def read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays of a file by name, each with the type that it is stored in, and its other values.

    Raises
    ------
    ValueError
        If the file cannot be read, is damaged, or unpacks to more than `refattn.files.largest` bytes.
    """
    data = read_users(path)
    if _is_from_torch(data):
        return _from_torch(data)
    arrays, about = unpack(data)
    return arrays, dict(about)


def _is_from_torch(data: bytes) -> bool:
    """Tell whether bytes are an archive of `torch.save`; a damaged archive is none."""
    if data[:2] != b"PK":
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
    except Exception:  # what damage makes of it depends on where it is
        return False


def _from_torch(data: bytes) -> tuple[Arrays, dict[str, Any]]:
    """Return the tensors and plain values of a file of `torch.save`; nothing in it is run (``weights_only``)."""
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"is a file of torch.save, which needs torch{install(error)}") from error
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        check_size(sum(entry.file_size for entry in archive.infolist()), "unpacked ")
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever kind: damage, and classes that it does not load
        why = " ".join(str(error).split()).partition("Please file")[0].partition("(1)")[0]
        raise ValueError(f"torch.load(weights_only=True) refuses it: {shown(why, 300)}") from error
    arrays: Arrays = {}
    plain: dict[str, Any] = {}
    for name, x in _flat(found, ""):
        if isinstance(x, torch.Tensor):
            check_size(
                sum(a.nbytes for _, a in arrays.values()) + 4 * math.prod(x.shape), f"{name}: "
            )  # a view repeats
            arrays[name] = (str(x.dtype).removeprefix("torch."), to_host(name, x.detach()))
        elif isinstance(x, bool | int | float | str | tuple | list):
            plain[name] = x
        elif x is not None:
            raise ValueError(f"{name}: got {type(x).__name__}, needs tensors and plain values")
    return arrays, plain


def _flat(found: Any, before: str) -> Iterable[tuple[str, Any]]:
    """Yield what dicts hold by name, those of inner ones with the outer name and a point in front."""
    waiting = [(before, found)]  # no recursion: a file may have dicts in dicts in dicts
    while waiting:
        name, x = waiting.pop()
        if isinstance(x, dict):
            waiting += [(f"{name}.{key}" if name else str(key), each) for key, each in reversed(x.items())]
        else:
            yield name or "the file", x


# --- what its names mean


def options_of(text: str) -> dict[str, Any]:
    """Return what `--options` says: options as in a shape, such as causal,scale=0.3,window=31:0."""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (x.strip() for x in part.partition("="))
        found[name] = value_of(value) if equals else True
    return found


def readings(
    mechanism: Mechanism,
    path: Path,
    *,
    rename: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    axes: str = "",
    dtype: str = "",
) -> list[Captured]:
    """Return what a file of arrays may hold: more than one reading where shapes do not tell heads from tokens.

    Parameters
    ----------
    mechanism
        Whose arguments its arrays are.
    path
        The file: q, k and v, further arguments of the core, upstream gradients (d_out, d_lse), and what the kernel
        returned (out, lse, d_q, ...). Options are JSON under "options" in the metadata, or values by their own names.
    rename
        Names in the file -> names here, "-" for what is left out. Other names are guessed.
    options
        Options of the call that the file does not have, or has otherwise.
    axes
        "bhnd" or "bnhd"; "" where shapes say it.
    dtype
        The storage type that the call is judged in; "" is the one that q is stored in.

    Raises
    ------
    UserCaseError
        If it is no such file, or a name in it is not known.
    """
    try:
        try:
            arrays, plain = read(path)
            if "options" in plain:
                text = plain.pop("options")
                listed = text if isinstance(text, dict) else parse_json(str(text).encode(errors="surrogateescape"))
                check_json(listed, dict, "options")
                plain |= {name: x for name, x in listed.items()}
        except ValueError as error:
            needs = "" if "torch" in str(error) else "; needs arrays as .safetensors, .npz or of torch.save"
            raise UserCaseError(f"{str(error).removeprefix(f'{path}: ')}{needs}") from error
        found, values, remarks = _by_meaning(mechanism, arrays, plain, rename or {})
        return _read_as(mechanism, found, {**values, **(options or {})}, path, axes, dtype, remarks)
    except UserCaseError as error:
        raise UserCaseError(f"{path}: {error}") from error


def _by_meaning(
    mechanism: Mechanism, arrays: Arrays, plain: Mapping[str, Any], rename: Mapping[str, str]
) -> tuple[Arrays, dict[str, Any], list[str]]:
    """Return arrays and options by the names here, and in words what was guessed."""
    core = ("q", "k", "v", *mechanism.defaults)
    known = (*core, "out", *mechanism.outputs)
    unread = [name for name in plain if name not in rename and not _of_core(meaning(name, known), core)]
    given: dict[str, Any] = {**arrays, **{name: x for name, x in plain.items() if name not in unread}}
    if absent := [name for name in rename if name not in given and name not in plain]:
        raise UserCaseError(
            f"--rename: got {absent[0]!r}{meant(absent[0], given)}, needs a name in the file: {_listed(arrays)}"
        )
    names: dict[str, str] = {}
    for name in given:
        ours = rename.get(name) or meaning(name, known)
        if ours not in ("", "-") and ours in names.values():
            other = next(theirs for theirs, one in names.items() if one == ours)
            needs = f"one of them: --rename {other}=- leaves it out"
            raise UserCaseError(f"{ours}: got {other} and {name}, which may both be {ours}, needs {needs}")
        names[name] = ours
    if unknown := [name for name, ours in names.items() if not ours]:
        raise UserCaseError(_unknown(unknown, arrays, known))
    if wrong := [ours for ours in rename.values() if ours != "-" and ours.removeprefix("d_") not in known]:
        raise UserCaseError(
            f"--rename: got {wrong[0]!r}{meant(wrong[0], known)}, needs one of {', '.join(known)}, or -"
        )
    guessed = [f"{theirs} as {ours}" for theirs, ours in names.items() if theirs != ours and theirs not in rename]
    remarks = [f"names were guessed: {', '.join(guessed)} (--rename THEIRS=OURS says otherwise)"] if guessed else []
    quiet = [name for name in unread if name != "format"]
    remarks += [f"values of the file that are not read: {', '.join(quiet)}"] if quiet else []
    found = {ours: arrays[theirs] for theirs, ours in names.items() if theirs in arrays and ours != "-"}
    values = {ours: _plain(theirs, plain[theirs]) for theirs, ours in names.items() if theirs in plain and ours != "-"}
    for name in [name for name, (_, x) in found.items() if name in mechanism.defaults]:
        kind, x = found[name]
        theirs = next(one for one, ours in names.items() if ours == name)
        if name == "mask" and has_gradient(x) and "bias" in mechanism.defaults and "bias" not in found:
            found["bias"] = found.pop(name)  # an additive mask
            remarks.append(f"{theirs} holds floating numbers, which are added to the scores: it is read as bias")
        elif designs(mechanism, name) == {"mask"} and x.dtype.kind in "iu" and np.isin(x, (0, 1)).all():
            found[name] = ("bool", x.astype(np.bool_))
        elif x.ndim == 0 or (x.ndim == 1 and not designs(mechanism, name)):
            values[name] = _plain(theirs, x.tolist())
            del found[name]
    return found, {name: x for name, x in values.items() if x is not None}, remarks


def _of_core(ours: str, core: Iterable[str]) -> bool:
    return ours in core


def _plain(theirs: str, value: Any) -> Any:
    """Return the value of an option as a file has it: text is read as in a shape, and lists of one number are it."""
    value = value_of(value) if isinstance(value, str) else value
    value = list(value) if isinstance(value, tuple | list) else value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if theirs.lower().endswith("window_size") and isinstance(value, list):
        value = [None if n == -1 else n for n in value]  # FlashAttention's word for no bound
        value = None if value == [None, None] else value
    return value


def _listed(arrays: Arrays) -> str:
    shapes = [f"{name} {x.shape}" for name, (_, x) in arrays.items()]
    return ", ".join(shapes[:12]) + (f" and {len(shapes) - 12} more" if shapes[12:] else "")


def _unknown(unknown: list[str], arrays: Arrays, known: Iterable[str]) -> str:
    """Return what is wrong with names that nobody knows, and what to do."""
    last = unknown[0].rpartition(".")[2]
    if last in _COUNTED_OTHERWISE:
        return f"got {unknown[0]}: {_COUNTED_OTHERWISE[last]}, and --rename {unknown[0]}=- leaves it out"
    return (
        f"got {', '.join(unknown)}{meant(last, (*known, 'd_out'))}, needs arguments of the core and results: "
        f"{', '.join((*known, 'd_out'))}; --rename {unknown[0]}=NAME says what it is, "
        f"{unknown[0]}=- leaves it out; the file has {_listed(arrays)}"
    )


# --- how its arrays lie


def _read_as(
    mechanism: Mechanism,
    arrays: Arrays,
    options: Mapping[str, Any],
    path: Path,
    axes: str,
    dtype: str,
    remarks: list[str],
) -> list[Captured]:
    inputs = {"q", "k", "v", *mechanism.defaults}
    pulls = {f"d_{name}" for name in ("out", *mechanism.pulled)}
    results = {name: x for name, (_, x) in arrays.items() if name not in inputs | pulls}
    given = {name: x for name, (_, x) in arrays.items() if name not in results}
    types = {name: kind for name, (kind, _) in arrays.items()}
    kinds = [name for name in (dtype, types.get("q", "")) if name in DTYPES]
    stored = kinds[0] if kinds else "float32"
    if not dtype and (narrower := _narrower(given, results, stored)):
        told = f"q, k, v and out are stored as {stored} and hold {narrower} numbers: judged in {narrower}"
        remarks = [*remarks, f"{told}; --dtype {stored} does otherwise"]
        stored = narrower
    found: list[Captured] = []
    errors: list[UserCaseError] = []
    for order in (axes,) if axes else AXES:
        turned = {name: _turned(name, x, order, given) for name, x in given.items()}
        try:
            case = of_arrays(mechanism, turned, options, shown(path.stem, 200))
        except UserCaseError as error:
            errors.append(error)
            continue
        own = {name: _turned(name, x, order, given) for name, x in results.items()}
        b, h, n, _ = case.inputs["q"].shape
        if order == "bnhd" and "lse" in own and own["lse"].shape == (b, n, h) != (b, h, n):
            own["lse"] = np.swapaxes(own["lse"], 1, 2)
        guessed = "" if axes or order == AXES[0] else "arrays are read as (batch, tokens, heads, width)"
        read_as = [f"{guessed}; --axes bhnd does otherwise"] if guessed else []
        found.append(Captured(case, stored, own, {name: types[name] for name in own}, (*remarks, *read_as)))
    if not found:
        raise errors[0]
    by_lse = [one for one in found if one.results.get("lse", np.empty(0)).shape == one.case.inputs["q"].shape[:3]]
    return by_lse if len(by_lse) == 1 else sorted(found, key=_has_more_heads)


def _has_more_heads(one: Captured) -> bool:
    """Tell whether a reading has more heads than tokens, which is rare."""
    _, heads, tokens, _ = one.case.inputs["k"].shape
    return heads > tokens


MAIN = ("q", "k", "v", "out", "d_q", "d_k", "d_v", "d_out")
"""Arrays whose axes lie in one order; masks and biases are (b, h, i, j) in every order."""


def _turned(name: str, x: NDArray[Any], order: str, given: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return an array as (b, h, n, ...); gates lie as q, k and v do."""
    rows = [y.shape[1:3] for y in (given.get(one) for one in "qkv") if y is not None and y.ndim == 4]
    gate = x.ndim in (3, 4) and x.shape[1:3] in rows and name not in ("mask", "bias", "keep", "lse")
    turns = order == "bnhd" and (x.ndim == 4 if name in MAIN else gate)
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)) if turns else x


def _narrower(given: Mapping[str, NDArray[Any]], results: Mapping[str, NDArray[Any]], stored: str) -> str:
    """Return the type of fewer digits that all of q, k, v and out fit, "" where there is none."""
    named = [x for name, x in {**given, **results}.items() if name in ("q", "k", "v", "out") and has_gradient(x)]
    if "out" not in results or not any(x.size for x in named):
        return ""
    for one in DTYPES[: DTYPES.index(stored) : -1]:
        if all(np.array_equal(round_to(x.astype(np.float64), one), x, equal_nan=True) for x in named):
            return one
    return ""


# --- judged without a kernel


class Returned:
    """A kernel that has run: it returns what it returned, whatever it is asked."""

    def __init__(self, outputs: Any, gradients: Any) -> None:
        self.outputs, self.gradients = outputs, gradients

    def forward(self, q: Any, k: Any, v: Any, *, dtype: str, **options: Any) -> Any:
        """Return its outputs."""
        return self.outputs

    def backward(self, d_out: Any, **others: Any) -> Any:
        """Return its gradients."""
        return self.gradients


def stored(one: Captured) -> Returned:
    """Return the kernel whose results a file has."""
    results = {name: _as_stored(name, x, one) for name, x in one.results.items()}
    gradients = {name: x for name, x in results.items() if name[:2] == "d_"}
    found = Returned({name: x for name, x in results.items() if name not in gradients}, gradients)
    for name in one.case.given:
        if name[:2] == "d_" and name != "d_out":
            setattr(found, name, True)  # the upstream gradients that its gradients come from
    return found


def _as_stored(name: str, x: NDArray[Any], one: Captured) -> NDArray[Any]:
    """Return a result in the type that it is judged in, if the file holds it in one of more digits."""
    kind = one.types[name]
    needed = one.dtype if name == "out" or name[:2] == "d_" else "float64" if one.dtype == "float64" else "float32"
    if kind == needed or kind not in DTYPES or DTYPES.index(kind) >= DTYPES.index(needed):
        return x
    held = "float32" if needed == "bfloat16" else needed
    return round_to(x.astype(np.float64), needed).astype(held)


def judged(
    mechanism: Mechanism, found: Iterable[Captured], label: str, rounding: Iterable[str] = ()
) -> tuple[Mechanism, Report, tuple[Mechanism, Report] | None]:
    """Return the record with the call of a dump as its case, the report on what the kernel had returned, and the same
    of a part where the call is too long for suspects.

    Of several readings of its axes the one that agrees is taken, or else the one that comes nearest.
    """
    tried = [*found]
    one, outcome = tried[0], _outcome(mechanism, tried[0], rounding)
    for other in tried[1:] if outcome.failed else ():
        try:
            of_other = _outcome(mechanism, other, rounding)
        except (TypeError, ValueError):  # its other arrays do not fit
            continue
        if not of_other.failed or _off(of_other) < CLEARLY * _off(outcome):
            one, outcome = other, of_other
    case, remarks = one.case, [*one.remarks]
    if len(tried) > 1 and outcome.failed and not any("are read as" in line for line in remarks):
        remarks.append("arrays are read as (batch, heads, tokens, width); --axes bnhd does otherwise")
    out, needed = one.results["out"], (*case.inputs["q"].shape[:3], case.inputs["v"].shape[3])
    if out.shape != needed and (lies := brought_back(out.shape, needed)):
        back = replace(one, results={**one.results, "out": np.ascontiguousarray(lies[1](out))})
        again = _outcome(mechanism, back, rounding)
        if again.failed:
            one, outcome = back, again
            remarks.append(f"out has another shape: {lies[0]}; what is said of it is said of it in the usual order")
        else:
            share = max(verdict.share for verdict in again.verdicts)
            remarks.append(f"out: {lies[0]}; in the usual order it agrees ({share_text(share)} of the allowed error)")
    if "d_out" not in case.given and (left := [name for name in one.results if name[:2] == "d_"]):
        remarks.append(f"not judged, because the file has no d_out: {', '.join(left)}")
    absent = [name for name in case.given if name[:2] == "d_"] and [
        f"d_{n}" for n in "qkv" if f"d_{n}" not in one.results
    ]
    remarks += [f"not in the file: {', '.join(absent)}"] if absent else []
    part = part_of_long(mechanism, one, outcome, label, rounding) if mechanism.parts is not None else None
    remarks += [f"suspects, and where, are of {part[0].cases[0].purpose}"] if part else []
    record = mechanism.changed(cases=(case,), kernel_sizes=())
    report = Report(
        mechanism.name, label, "d_out" in case.given, (outcome,), record=record, remarks=(*remarks, ONE_CALL)
    )
    return record, report, part


def _outcome(mechanism: Mechanism, one: Captured, rounding: Iterable[str]) -> Outcome:
    grad = "d_out" in one.case.given and any(name[:2] == "d_" for name in one.results)
    found = run.verify_case(mechanism, stored(one), one.case, one.dtype, grad=grad, rounding=tuple(rounding))
    if found.status == "raises" and found.verdicts:  # gradients that the file lacks, which is no error of the kernel
        agrees = all(verdict.agrees for verdict in found.verdicts)
        return replace(found, status="agrees" if agrees else "disagrees", detail="")
    return found


def _off(outcome: Outcome) -> float:
    """Return the root mean square error of the output of a dump, NaN where it is not known."""
    if outcome.seen is None:
        return math.nan
    truth, result = outcome.seen
    got, true = result.tensors["out"], truth.values["out"]
    off = np.sqrt(np.mean((got - true) ** 2)) if got.shape == true.shape and got.size else math.inf
    return float(off) if math.isfinite(off) else math.inf


# --- a part of a long one, for suspects


def part_of_long(
    mechanism: Mechanism, one: Captured, outcome: Outcome, label: str, rounding: Iterable[str] = ()
) -> tuple[Mechanism, Report] | None:
    """Return the record and the report of a part of a dump that disagrees and is too long to look for suspects in.

    The part is around the worst output: one sequence and the heads that share a key, the first queries with the first
    keys if the call is causal and square, otherwise the last queries with all keys. None where no part disagrees.
    """
    rows = [v for v in outcome.wrong if v.tensor in ("out", "lse", "d_q") and v.index]
    options = one.case.options
    if outcome.seen is not None or not rows or "q_lengths" in one.case.inputs or options.get("causal") == "top_left":
        return None
    batch, head = max(rows, key=lambda v: v.share).index[:2]
    arrays = {name: np.asarray(x) for name, x in one.case.given.items()} | dict(one.results)
    (_, h, n_q, _), (_, g, n_k, _) = arrays["q"].shape, arrays["k"].shape
    shared = h // g
    group = head // shared
    square = int(math.sqrt(PART / shared))
    last = max(1, min(n_q, PART // (shared * n_k)))
    cuts = [(slice(n_q - last, n_q), slice(0, n_k))]
    if options.get("causal") is True and n_q == n_k and not {"offset", "k_lengths"} & {*arrays, *options}:
        cuts.insert(0, (slice(0, square), slice(0, square)))
    for queries, keys in cuts:
        own = {**options, **({"offset": options["offset"] + queries.start} if "offset" in options else {})}
        cut = partial(_cut, batch=batch, group=group, shared=shared, queries=queries, keys=keys)
        given = {name: cut(name, x) for name, x in arrays.items() if name not in one.results}
        results = {name: cut(name, x) for name, x in one.results.items() if name in ("out", "lse", "d_q")}
        where = f"{shared} heads from {group * shared}, queries from {queries.start}, {given['k'].shape[2]} keys"
        case = of_arrays(mechanism, given, own, f"a part of {one.case.name}")
        case = replace(case, purpose=f"a part: batch {batch}, {where}")
        part = replace(one, case=case, results=results)
        again = _outcome(mechanism, part, rounding)
        if again.status == "disagrees":
            record = mechanism.changed(cases=(case,), kernel_sizes=())
            return record, Report(mechanism.name, label, "d_q" in results, (again,), record=record)
    return None


def _cut(name: str, x: NDArray[Any], batch: int, group: int, shared: int, queries: slice, keys: slice) -> NDArray[Any]:
    """Return the part of an array that one sequence, the heads of one key, and some queries and keys have."""
    heads = slice(group * shared, (group + 1) * shared)
    if name in ("k", "v"):
        return x[batch : batch + 1, group : group + 1, keys]
    if name in ("q", "out", "lse", "d_q", "d_out", "d_lse"):
        return x[batch : batch + 1, heads, queries]
    if name == "sink":
        return x[heads]
    if x.ndim == 1:  # lengths, and where queries stand: one for each sequence
        return x[batch : batch + 1] + (queries.start if name == "offset" else 0)
    places = (slice(batch, batch + 1), heads, queries, keys)[4 - x.ndim :]
    return x[tuple(part if size > 1 else slice(None) for part, size in zip(places, x.shape, strict=True))]
