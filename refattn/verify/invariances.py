"""Checks without designed cases: a kernel in other memory, other calls around a call, and the same bits.

Each row calls a kernel and compares what comes back. `verify_memory` calls it on a few designed cases in one layout
(`refattn.verify.adapters.call_manners`), or among other calls, and judges the results by the error budget, as it is in
C order by itself. `verify_bitwise` asks whether it gives the same bits whatever else is in the batch, and however a
call is cut: both sides are computed by it and no budget is asked; where bits differ the row tells the first element
that does, by how many units in the last place, and how many do. `large` has properties of one large case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.args import checked
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import spacing
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.verify.adapters import call_manners
from refattn.verify.adapters.adapter import CallError, call
from refattn.verify.outcome import CheckReport, Decline, Result, Truth
from refattn.verify.selfcheck.sections import Found, NotRun, Task
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge
from refattn.verify.user_cases import qkv

Tasks = Sequence[tuple[str, Callable[[], Found]]]


def answered(kernel: Any, *given: Any, partly: bool = False, **more: Any) -> Result:
    """Call a kernel, as `call` does; NotRun if it declines, or without `partly` if it declines gradients alone."""
    found = call(kernel, *given, **more)
    reason = found.reason if isinstance(found, Decline) else found.declined
    if isinstance(found, Decline) or (reason and not partly):
        raise NotRun(f"declined: {reason}")
    return found


def report(
    mechanism: Mechanism, label: str, section: str, tasks: Tasks, progress: Callable[[Sequence[Any]], Iterable[Any]]
) -> CheckReport:
    """Run tasks, each of which is a row."""
    listed = [Task(section, name, partial(_ended, run)) for name, run in tasks]
    return CheckReport(mechanism.name, label, False, tuple(task.row() for task in progress(listed)), full=True)


def _ended(run: Callable[[], Found]) -> Found:
    """Run a task; what is wrong with a call is told as it is."""
    try:
        return run()
    except CallError as error:
        return math.inf, str(error)


# --- layouts, and what is called around

LARGE = 1e4
"""What stands in masked keys and values, where it must not matter."""

PATHS = (
    ("memory", "several tiles", 65, 97, 24),
    ("memory-decode", "parts of the keys", 4, 519, 64),
    ("memory-wide", "wide heads", 19, 70, 136),
)
"""What kernels have code of their own for: name, purpose, queries, keys, width."""

MEANING = {
    "transposed": "memory is (b, n, h, d)",
    "columns": "memory is (b, h, d, n)",
    "sliced": "a slice of a larger array, NaN around it",
    "strided": "every other element, NaN between them",
    "expanded": "one head of memory for all heads",
    "reversed": "negative strides",
    "guarded": "in C order, NaN before and behind it",
    "poisoned": "what empty() gives and what was freed holds NaN",
    "held": "looked at after another call",
    "interleaved": "another forward between a forward and its backward",
    "repeated": f"the same call {call_manners.TIMES} times",
}


def memory_cases(mechanism: Mechanism) -> list[Case]:
    """Return the cases that are called: a plain one, one that is causal if there is such, and one for each path of
    kernels that read memory in another way: several tiles, parts of the keys for a few queries, wide heads."""
    plain = [case for case in mechanism.cases if not case.exact and not case.slack and 0 not in case.inputs["q"].shape]
    chosen = [case for case in plain if case.kind == "plain" and case.inputs["q"].shape[0] > 1][:1] or plain[:1]
    chosen += [case for case in plain if {*case.options} == {"causal"} and len(case.inputs) == 3][:1]
    if mechanism.parts is not None:
        for name, purpose, n_q, n_k, d in PATHS:
            chosen.append(qkv(name, "memory", purpose, {"b": 2, "h": 4, "g": 2, "n_q": n_q, "n_k": n_k, "d": d}))
    return list({case.name: case for case in chosen}.values())


@checked(mechanism=Mechanism)
def verify_memory(
    mechanism: Mechanism,
    kernel: Any,
    *,
    label: str = "",
    dtype: str = "float32",
    grad: bool = False,
    seed: int = 0,
    cases: Sequence[Case] = (),
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> CheckReport:
    """Call a kernel in every manner; arguments as those of `refattn.verify.verify`.

    `cases` stand in place of `memory_cases`: strides are often wrong in one width alone.

    Returns
    -------
    CheckReport
        One row for each manner; what it declines, or fails without a manner, too, is "not run".

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.verify import verify_memory
    >>> def attend(q, k, v, **options):
    ...     q *= 1.0  # writes to what it was given
    ...     return ra.softmax.forward(q, k, v, **options)[0]
    >>> report = verify_memory(ra.mechanism("softmax"), attend)
    >>> report.exit_code, report.rows[0].status
    (1, 'disagrees')
    """
    known = [(case, truth(mechanism, case, dtype, grad=grad, seed=seed)) for case in cases or memory_cases(mechanism)]
    tasks: list[tuple[str, Callable[[], Found]]] = [
        (manner, partial(_manner, mechanism, kernel, known, manner, dtype, grad)) for manner in MEANING
    ]
    if "mask" in mechanism.defaults or "k_lengths" in mechanism.defaults:
        for name, number in (("masked, large", LARGE), ("masked, NaN", np.nan)):
            tasks.append((name, partial(_masked, mechanism, kernel, number, dtype, grad, seed)))
    return report(mechanism, label or repr(kernel), "memory", tasks, progress)


def _expanded(mechanism: Mechanism, case: Case, known: Truth, dtype: str, grad: bool) -> Truth:
    """Return the truth where all heads are the first one."""
    given = {
        name: np.broadcast_to(x[:, :1], x.shape).copy() if x.ndim == 4 and x.shape[1] else x
        for name, x in {**known.inputs, **({"d_out": known.upstream} if grad else {})}.items()
        if x is not None
    }
    return truth(mechanism, replace(case, given=given), dtype, grad=grad)


def _manner(
    mechanism: Mechanism, kernel: Any, known: Sequence[tuple[Case, Truth]], manner: str, dtype: str, grad: bool
) -> Found:
    found, reason = [], "nothing was run"
    if manner == "interleaved" and not grad:
        raise NotRun("needs gradients: --grad")
    for case, each in known:
        one = _expanded(mechanism, case, each, dtype, grad) if manner == "expanded" else each
        pull = None if manner in ("held", "repeated") else one.upstream
        try:
            found.append(_share(mechanism, kernel, case, one, dtype, pull, manner))
        except NotRun as why:
            reason = str(why)
        except CallError as error:
            raise CallError(f"{MEANING[manner]}: case {case.name}: {error}") from error
    if not found:
        raise NotRun(reason)
    share, said = max(found, key=lambda each: each[0])
    return share, f"{MEANING[manner]}{said and ': ' + said}"


def _share(mechanism: Mechanism, kernel: Any, case: Case, known: Truth, dtype: str, pull: Any, manner: str) -> Found:
    """Return the largest used share of a call in a manner, and what that was."""
    given = kernel, known.inputs, case.options, dtype, pull, ("out", *mechanism.outputs)
    further = {} if pull is None else known.further
    found = answered(*given, further=further, manner=manner, partly=True)  # held: its memory is not given again
    verdicts = judge(found, known)
    if not verdicts:
        raise NotRun("returned nothing that is judged")
    worst = max(verdicts, key=lambda verdict: verdict.share)
    if worst.agrees:
        return worst.share, ""
    if manner and any(not v.agrees for v in judge(answered(*given, further=further, partly=True), known)):
        raise NotRun(f"case {case.name} fails in C order, too")
    return worst.share, f"case {case.name}: {worst.place} is {worst.got}, needs {worst.expected}"


def _masked(mechanism: Mechanism, kernel: Any, number: float, dtype: str, grad: bool, seed: int) -> Found:
    """Put a large number, or NaN, where nothing may attend."""
    sizes = {"b": 2, "h": 4, "g": 2, "n_q": 19, "n_k": 70, "d": 16}
    case = qkv("masked", "memory", "keys that nothing attends", sizes)
    seen = np.arange(70) < np.asarray([41, 3]).reshape(2, 1, 1, 1)
    name = "mask" if "mask" in mechanism.defaults else "k_lengths"
    array = seen if name == "mask" else np.asarray([41, 3])
    design = Input(array.shape, "mask" if name == "mask" else "counts")
    case = replace(case, inputs={**case.inputs, name: design}, given={name: array})
    known = truth(mechanism, case, dtype, grad=grad, seed=seed)
    hidden = np.broadcast_to(~seen[:, :, 0, :, None], (2, 2, 70, 16))
    inputs = {n: np.where(hidden, x.dtype.type(number), x) if n in "kv" else x for n, x in known.inputs.items()}
    words = f"{number:g} in keys and values that nothing attends"
    try:
        share, said = _share(mechanism, kernel, case, replace(known, inputs=inputs), dtype, known.upstream, "")
    except CallError as error:
        share, said = math.inf, str(error)
    if share > 1.0 and math.isnan(number):  # 0 * NaN is NaN: no convention forbids it
        raise NotRun(f"{words}: it comes through, which no convention forbids")
    return share, f"{words}{said and ': ' + said}"


# --- the same bits

SIZES = {"b": 3, "h": 4, "g": 2, "n_q": 70, "n_k": 133, "d": 64}

PADDING = 59
"""Keys that nothing attends."""

THREADS = (2, 3, 4)
"""How many threads are compared with one."""

Arrays = Mapping[str, NDArray[Any]]
Pair = tuple[Arrays, Arrays]
Run = Callable[..., Arrays]  # of arrays, options, and perhaps a manner
Check = Callable[[Run, Arrays], Iterator[Pair]]


def checks_of(mechanism: Mechanism) -> dict[str, Check]:
    """Return what is compared, by name: each check yields pairs of results that have the same bits."""
    parts: dict[str, list[dict[str, slice]]] = {
        "batch size": [{"batch": np.s_[n : n + 1]} for n in range(SIZES["b"])],
        "position in the batch": [{"batch": np.s_[::-1]}],
    }
    if "independent" in mechanism.properties:
        parts["heads"] = [{"groups": np.s_[n : n + 1]} for n in range(SIZES["g"])]
    if "query_permutation" in mechanism.properties:
        parts["chunk of queries"] = [{"rows": np.s_[:17]}, {"rows": np.s_[17:]}]
    found: dict[str, Check] = {"repetition": _repetition, "threads": _threads}
    found |= {name: partial(_parts, cuts=cuts, options={}) for name, cuts in parts.items()}
    if "chunk of queries" in parts and "causal" in mechanism.defaults:
        last = [{"rows": np.s_[-1:]}, {"rows": np.s_[-5:]}]
        found["prefill and decode"] = partial(_parts, cuts=last, options={"causal": True})
    by = [name for name in ("mask", "k_lengths") if name in mechanism.defaults]
    return found | {f"padding by {name}": partial(_padding, by=name) for name in by}


def _repetition(run: Run, given: Arrays) -> Iterator[Pair]:
    yield run(given, {}), run(given, {})


def _threads(run: Run, given: Arrays) -> Iterator[Pair]:
    one = run(given, {}, f"{call_manners.THREADS}1")
    for count in THREADS:
        yield run(given, {}, f"{call_manners.THREADS}{count}"), one


def _parts(run: Run, given: Arrays, cuts: list[dict[str, slice]], options: Mapping[str, Any]) -> Iterator[Pair]:
    whole = run(given, options)
    for cut in cuts:
        yield run(_cut(given, **cut), options), _cut(whole, **cut)


def _cut(
    arrays: Arrays, batch: slice = np.s_[:], groups: slice = np.s_[:], rows: slice | None = None
) -> dict[str, Any]:
    """Return some sequences, key/value heads with their query heads, and queries, which have no d_k and d_v alone."""
    found = {}
    for name, x in arrays.items():
        shared = SIZES["h"] // SIZES["g"] if name not in ("k", "v", "d_k", "d_v") else 1
        heads = np.arange(x.shape[1]).reshape(-1, shared)[groups].reshape(-1)
        x = x[batch][:, heads]
        if rows is None or name not in ("d_k", "d_v"):
            found[name] = x[:, :, rows] if rows is not None and name in ("q", "d_out", "out", "lse", "d_q") else x
    return found


def _padding(run: Run, given: Arrays, by: str) -> Iterator[Pair]:
    keys = given["k"].shape[2]
    more = np.arange(keys + PADDING) % keys
    longer = {n: x[:, :, more] if n in ("k", "v") else x for n, x in given.items()}
    seen = np.broadcast_to(np.arange(keys + PADDING) < keys, (SIZES["b"], 1, 1, keys + PADDING))
    hidden = {"mask": seen.copy()} if by == "mask" else {"k_lengths": np.full(SIZES["b"], keys)}
    found = run({**longer, **hidden}, {})
    yield {n: x[:, :, :keys] if n in ("d_k", "d_v") else x for n, x in found.items()}, run(given, {})


@checked(mechanism=Mechanism)
def verify_bitwise(
    mechanism: Mechanism,
    kernel: Any,
    *,
    label: str = "",
    dtype: str = "float32",
    grad: bool = False,
    seed: int = 0,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> CheckReport:
    """Compare the bits of a kernel's results; arguments as those of `refattn.verify.verify`.

    >>> import refattn as ra
    >>> from refattn.verify import verify_bitwise
    >>> def attend(q, k, v, **options):
    ...     return ra.softmax.forward(q, k, v, **options)[0]
    >>> row = verify_bitwise(ra.mechanism("softmax"), attend).rows[0]
    >>> row.name, row.status
    ('repetition', 'agrees')
    """
    sizes = {**SIZES, "n_q": SIZES["n_k"]} if mechanism.one_sequence else SIZES
    case = qkv("bitwise", "bitwise", "", sizes)
    given = make(mechanism.name, case, dtype, seed=seed)
    if grad:
        shape = (*given["q"].shape[:3], given["v"].shape[3])
        given["d_out"] = make_upstream(mechanism.name, case, "out", shape, dtype, seed=seed)

    def run(arrays: Arrays, options: Mapping[str, Any], manner: str = "") -> Arrays:
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        d_out = arrays.pop("d_out", None)
        return answered(kernel, arrays, options, dtype, d_out, ("out", *mechanism.outputs), manner=manner).tensors

    tasks = [(name, partial(_same, check, run, given, dtype)) for name, check in checks_of(mechanism).items()]
    return report(mechanism, label or repr(kernel), "bitwise", tasks, progress)


def _same(check: Check, run: Run, given: Arrays, dtype: str) -> Found:
    for one, other in check(run, given):
        for tensor, a in one.items():
            if tensor in other and (told := differing(tensor, a, other[tensor], dtype)):
                raise CallError(told)
    return 0.0, "the same bits"


def differing(tensor: str, a: NDArray[Any], b: NDArray[Any], dtype: str) -> str:
    """Return where two arrays differ first, by how many units in the last place, and how often; "" for the same."""
    if a.shape != b.shape:
        return f"{tensor} has shape {a.shape}, and {b.shape}"
    if np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes():
        return ""
    other = ~((a == b) | ((a != a) & (b != b)))
    if not other.any():
        return f"{tensor}: zeros of other signs, or other NaN"
    at = tuple(int(n) for n in np.argwhere(other)[0])
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    stored = dtype if tensor != "lse" or dtype == "float64" else "float32"
    with np.errstate(invalid="ignore"):
        apart = np.where(other, np.abs(x - y), 0.0) / spacing(np.maximum(np.abs(x), np.abs(y)), stored)
    told = f"{tensor}{list(at)} is {a[at]:.9g} and {b[at]:.9g}, {apart[at]:.3g} units in the last place"
    return f"{told}; {int(other.sum())} of {a.size} differ, by {np.max(apart):.3g} at most"
