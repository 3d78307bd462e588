"""Layouts and memory: whether a kernel gives the same wherever its arrays lie and whatever is called around.

Each row calls it on a few designed cases in one layout (`refattn.verify.adapters.call_manners`) and judges what comes
back by the error budget, as it is in C order by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from refattn.args import checked
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.verify.adapters.adapter import CallError
from refattn.verify.adapters.call_manners import TIMES
from refattn.verify.invariances import answered, report
from refattn.verify.outcome import CheckReport, Truth
from refattn.verify.selfcheck.sections import Found, NotRun
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge
from refattn.verify.user_cases import qkv

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
    "repeated": f"the same call {TIMES} times",
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
